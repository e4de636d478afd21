"""How often a judge prefers the policy's completions to the chosen responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unmask.config.run import SamplerConfig
from unmask.data.decoding import text_after
from unmask.data.report import Rows
from unmask.data.rows import Row
from unmask.errors import GenerationError, TrainingError
from unmask.generation.output import end_of
from unmask.generation.requests import make_requests
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import evaluating
from unmask.rewards.answers import describe_error

Judge = Callable[[list[str], list[str], list[str]], Sequence[float]]
"""Called with prompts, completions and the chosen responses; returns for each completion 1 if it wins, 0.5
for a draw, 0 if it loses."""


def check_prompts(lm: DiffusionLM, pairs: Rows[Row], sampler: SamplerConfig) -> None:
    """Check that completions of all prompts can be generated.

    Raises:
        GenerationError: a prompt leaves no room for a completion, or the settings do not fit the model.
    """
    for number, pair in zip(pairs.report.numbers, pairs, strict=True):
        try:
            make_requests(lm, [split_row(pair)[0]], sampler)
        except GenerationError as error:
            where = (error.where or "").replace("prompt 0", f"eval_dataset, row {number}")
            raise GenerationError(
                error.what, where=where, remedy=f"{error.remedy} (sampler), or leave out the judge"
            ) from error


def wins(judge: Judge, lm: DiffusionLM, pairs: Sequence[Row], sampler: SamplerConfig) -> list[float]:
    """The judge's values, from 0 to 1, of one completion per pair against the chosen response. Texts are
    without special tokens.

    Raises:
        TrainingError: the judge raised, or did not return a number from 0 to 1 for each pair.
    """
    if not pairs:
        return []
    split = [split_row(pair) for pair in pairs]
    with evaluating(lm):
        completions = generate(lm, [prompt for prompt, _ in split], sampler).texts
    prompts: list[str] = lm.tokenizer.batch_decode([prompt for prompt, _ in split], skip_special_tokens=True)
    ends = lm.eos_token_ids
    chosen = [text_after(lm.tokenizer, prompt, ids[: end_of(ids, ends)], ends) for prompt, ids in split]
    try:
        values: Any = judge(prompts, completions, chosen)
        values = [float(value) for value in values]
    except (Exception, SystemExit) as error:  # user code
        raise TrainingError(
            f"raised {describe_error(error)}", where="judge", remedy="Fix it, or leave it out"
        ) from error
    if len(values) != len(completions) or not all(0 <= value <= 1 for value in values):
        raise TrainingError(
            f"returned {values!r:.80} for {len(completions)} completions",
            where="judge",
            remedy="Return 1, 0.5 or 0 for each completion",
        )
    return values


def split_row(row: Row) -> tuple[list[int], list[int]]:
    """The token ids of the prompt and of the first response."""
    start, end = row["maskable"].index(True), row["documents"].count(1)
    return row["input_ids"][:start], row["input_ids"][start:end]
