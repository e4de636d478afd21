"""How often a judge prefers what the policy writes to the chosen responses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from unmask.config.run import SamplerConfig
from unmask.data.report import Rows
from unmask.data.rows import Row
from unmask.errors import GenerationError, TrainingError
from unmask.generation.output import end_of, text_of
from unmask.generation.requests import make_requests
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import evaluating
from unmask.rewards.workers import load_function, told

Judge = Callable[[list[str], list[str], list[str]], Sequence[float]]
"""Given prompts, completions and the chosen responses: 1 for each completion that wins, 0.5 for a draw, 0 for one that loses."""


def find_judge(named: Judge | str | None) -> Judge | None:
    """A judge as it is, or the function that `path.py:function` or `package.module:function` names."""
    return load_function(named) if isinstance(named, str) else named


def check_prompts(lm: DiffusionLM, pairs: Rows[Row], sampler: SamplerConfig) -> None:
    """Raise now the GenerationError that `wins` would: a prompt that leaves no room to write, settings that do not fit the model."""
    try:
        make_requests(lm, [split_row(pair)[0] for pair in pairs], sampler)
    except GenerationError as error:
        where = re.sub(r"prompt (\d+)", lambda found: f"eval_dataset, row {pairs.report.numbers[int(found[1])]}", error.where or "")
        raise GenerationError(error.what, where=where, remedy=f"{error.remedy} (sampler), or leave out the judge") from error


def wins(judge: Judge, lm: DiffusionLM, pairs: Sequence[Row], sampler: SamplerConfig) -> list[float]:
    """What a judge says of a completion of every pair's prompt against the chosen response; special tokens are left out of all texts.

    Raises:
        TrainingError: the judge raised, or did not give a number from 0 to 1 for each.
    """
    if not pairs:
        return []
    split = [split_row(pair) for pair in pairs]
    with evaluating(lm):
        completions = generate(lm, [prompt for prompt, _ in split], sampler).texts
    prompts: list[str] = lm.tokenizer.batch_decode([prompt for prompt, _ in split], skip_special_tokens=True)
    chosen = [text_of(lm.tokenizer, ids[: end_of(ids, lm.eos_token_ids)], lm.eos_token_ids) for _, ids in split]
    try:
        values: Any = judge(prompts, completions, chosen)
        values = [float(value) for value in values]
    except (Exception, SystemExit) as error:  # user code
        raise TrainingError(f"raised {told(error)}", where="judge", remedy="Mend it, or leave it out") from error
    if len(values) != len(completions) or not all(0 <= value <= 1 for value in values):
        what = f"gave {values!r:.80} for {len(completions)} completions"
        raise TrainingError(what, where="judge", remedy="Return 1, 0.5 or 0 for each completion")
    return values


def split_row(row: Row) -> tuple[list[int], list[int]]:
    """The ids of its prompt and of its first response."""
    start, end = row["maskable"].index(True), row["documents"].count(1)
    return row["input_ids"][:start], row["input_ids"][start:end]
