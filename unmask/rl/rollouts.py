"""From prompts to completions that can be learnt from: the order of prompts, and what is kept of a generation.

Shapes: B completions, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from unmask.data.chat import encode_prompt
from unmask.data.rows import column, naming, pad_rows
from unmask.diffusion.log_probs import noise_groups
from unmask.errors import DataError, GenerationError
from unmask.generation.output import Generation, end_of, text_of
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.config import GRPOConfig
from unmask.rl.methods import Rollout
from unmask.training.config import row_length


def make_rollout(lm: DiffusionLM, generation: Generation, at: slice, block_size: int | None = None, *, sampled: bool = False) -> Rollout:
    """The canvases of a slice of a generation, padded on the right.

    Args:
        block_size: the decoding block of a bidirectional model; None: the whole completion.
        sampled: keep the log-probabilities under which tokens were drawn elsewhere.

    Raises:
        GenerationError: these are not known.
    """
    assert generation.trace is not None
    traces, tokens, prompts = generation.trace[at], generation.tokens[at], generation.prompts[at]

    def padded(rows: list[list[Any]], fill: Any) -> Tensor:
        return pad_rows(rows, fill).to(lm.device)

    completion = [[0] * len(p) + [1] * len(c) + [0] * (len(t.canvas) - len(c)) for p, c, t in zip(prompts, tokens, traces, strict=True)]
    canvas_BT = padded([[0] * len(p) + [1] * len(t.canvas) for p, t in zip(prompts, traces, strict=True)], 0).bool()
    documents_BT = padded([[1] * (len(p) + len(t.canvas)) for p, t in zip(prompts, traces, strict=True)], 0)
    group_BT = noise_groups(lm, canvas_BT, documents_BT)
    if sampled and not all(trace.sampled_log_probs for trace in traces):
        remedy = "Start it with --logprobs-mode processed_logprobs, sample at temperature 1, or leave out importance_cap"
        raise GenerationError("the server does not tell how likely it drew its tokens", where="rollout", remedy=remedy)
    drawn = [[0.0] * len(p) + t.sampled_log_probs for p, t in zip(prompts, traces, strict=True)] if sampled else None
    return Rollout(
        ids_BT=padded([p + t.canvas for p, t in zip(prompts, traces, strict=True)], lm.pad_token_id),
        documents_BT=documents_BT,
        prompt_BT=(documents_BT > 0) & ~canvas_BT,
        completion_BT=padded(completion, 0).bool(),
        steps_BT=padded([[-1] * len(p) + t.steps for p, t in zip(prompts, traces, strict=True)], -1),
        group_BT=group_BT,
        block_BT=decoding_blocks(lm, canvas_BT, group_BT, block_size),
        sampled_BT=None if drawn is None else padded(drawn, 0.0),
        one_document=len({len(p) + len(t.canvas) for p, t in zip(prompts, traces, strict=True)}) == 1,
    )


def decoding_blocks(lm: DiffusionLM, canvas_BT: Tensor, group_BT: Tensor, block_size: int | None) -> Tensor:
    """The decoding block [B, T] of each position of a canvas, from 0; -1 elsewhere. In a model by blocks those of its attention."""
    if lm.attention == "bidirectional":
        block_BT = (canvas_BT.long().cumsum(1) - 1) // (block_size or canvas_BT.shape[1])
    else:
        first_B1 = torch.where(canvas_BT, group_BT, torch.iinfo(torch.long).max).amin(1, keepdim=True)
        block_BT = group_BT - first_B1
    return torch.where(canvas_BT, block_BT, -1)


def cut_at_end(lm: DiffusionLM, generation: Generation) -> Generation:
    """Completions that end with their first end token, where the whole canvas was sampled; traces stay as they are."""
    ends = [end_of(tokens, lm.eos_token_ids) for tokens in generation.tokens]
    cut = {name: [row[:end] for row, end in zip(getattr(generation, name), ends, strict=True)] for name in ("tokens", "log_probs", "steps")}
    texts = [text_of(lm.tokenizer, ids, lm.eos_token_ids) for ids in cut["tokens"]]
    return replace(generation, texts=texts, tokens=cut["tokens"], log_probs=cut["log_probs"], steps=cut["steps"])


class PromptRow(NamedTuple):
    """A prompt of the data set, to be answered once.

    Attributes:
        columns: of the data set, the prompt among them.
        sample_id: its place in the data set.
        repeat: its place in its group.
    """

    columns: Mapping[str, Any]
    sample_id: int
    repeat: int

    @property
    def prompt(self) -> Any:
        """As text, messages or ids."""
        return self.columns["prompt"]


class PromptRows(Dataset):
    """Prompts, each repeated for its group: item i is prompt i // group, repeat i % group. All have the columns of all, None where a row
    has no such column."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], group: int):
        self.rows, self.group = rows, group
        self.columns = dict.fromkeys(name for row in rows for name in row)

    def __len__(self) -> int:
        return len(self.rows) * self.group

    def __getitem__(self, index: int) -> PromptRow:
        sample_id, repeat = divmod(index, self.group)
        return PromptRow({**self.columns, **self.rows[sample_id]}, sample_id, repeat)


def prompt_rows(lm: DiffusionLM, args: GRPOConfig, dataset: Sequence[Mapping[str, Any]], where: str) -> PromptRows:
    """Prompts that fit into a row with a completion.

    Raises:
        DataError: one does not, or is no prompt.
    """
    for index, prompt in enumerate(column(dataset, "prompt", where)):
        with naming(f"{where}, row {index}"):
            tokens = len(encode_prompt(lm.tokenizer, prompt)) + args.max_completion_length
        if tokens > (limit := row_length(lm, args)):
            bound, more = ("the model's context", "") if limit == lm.context_length else ("max_length", ", raise max_length")
            what = f"{tokens} tokens with the completion, but {bound} is {limit}"
            raise DataError(what, where=f"{where}, row {index}", remedy=f"Lower max_completion_length{more} or drop the row")
    return PromptRows(dataset, args.num_generations)


class GroupSampler(Sampler[int]):
    """Shuffled prompts, cut into steps; each prompt comes with its whole group, each step as often as it is updated on."""

    def __init__(self, count: int, *, prompts: int, group: int, repeats: int, seed: int):
        self.count, self.prompts, self.group, self.repeats, self.seed, self.epoch = count, prompts, group, repeats, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count // self.prompts * self.prompts * self.group * self.repeats

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        for start in range(0, self.count - self.prompts + 1, self.prompts):
            for _ in range(self.repeats):
                for sample_id in order[start : start + self.prompts]:
                    yield from range(sample_id * self.group, (sample_id + 1) * self.group)
