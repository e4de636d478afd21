"""Rollouts: the canvases of completions as losses read them.

Shapes: B completions, M views, T positions of the canvas (prompt, completion and what is hidden after its
end), S denoising steps of a canvas of random tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from unmask.data.decoding import text_after
from unmask.data.rows import pad_rows
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.mixing import RandomTokens
from unmask.diffusion.views import CanvasSteps, Views, columns
from unmask.errors import GenerationError
from unmask.generation.output import Generation, Trace, end_of
from unmask.models.diffusion_lm import DiffusionLM
from unmask.tensor_checks import check_tensors


@dataclass(frozen=True)
class Rollout:
    """Completions as they were sampled.

    Attributes:
        ids_BT: the canvas: prompt, completion, and the mask token where nothing was revealed (in models
            without masks the padding token).
        document_BT: 1 on the canvas, 0 on padding.
        prompt_BT: True on the prompt.
        completion_BT: True on the completion, up to and including its first EOS.
        step_BT: the denoising step that revealed a position; -1 for the prompt, padding and what stayed
            hidden.
        group_BT: the tokens that are noised together: one canvas, or an attention block of it; -1 on the
            prompt and padding.
        block_BT: the decoding block, from 0; -1 on the prompt and padding.
        sampled_BT: the completion's log-probabilities under the server that sampled it; None: this process
            sampled it.
        one_document: whether it is known that there is no padding, so that attention can reuse a cached mask.
        random_tokens: the tokens of the model's noise, if that is uniform; else None.
        canvas_steps: likewise the steps of its canvases.
    """

    ids_BT: Tensor
    document_BT: Tensor
    prompt_BT: Tensor
    completion_BT: Tensor
    step_BT: Tensor
    group_BT: Tensor
    block_BT: Tensor
    sampled_BT: Tensor | None = None
    one_document: bool = False
    random_tokens: RandomTokens | None = None
    canvas_steps: CanvasSteps | None = None

    @property
    def beyond_BT(self) -> Tensor:
        """The canvas after the end of the completion."""
        return (self.document_BT > 0) & ~self.prompt_BT & ~self.completion_BT

    @property
    def revealed_BT(self) -> Tensor:
        """The canvas as far as it was denoised: the completion, and what was revealed after its end."""
        return self.completion_BT | (self.beyond_BT & (self.step_BT >= 0))

    def select(self, index: slice) -> Rollout:
        """Some of the completions."""
        tensors: dict[str, Any] = {
            name: part[index] for name, part in vars(self).items() if isinstance(part, Tensor)
        }
        if self.canvas_steps is not None:
            tensors["canvas_steps"] = self.canvas_steps.select(index)
        return replace(self, **tensors)

    def whole(self) -> Rollout:
        """The rollout whose completions include what was revealed after their ends."""
        return replace(self, completion_BT=self.revealed_BT)

    def hiding(self, target_BMT: Tensor, weight_BMT: Tensor) -> Views:
        """Views that hide their targets, and tokens after the end that are targets of none, as when the text
        was sampled.

        Raises:
            ConfigError: a shape does not fit.
        """
        check_tensors(ids_BT=self.ids_BT, target_BMT=target_BMT, weight_BMT=weight_BMT)
        rest_BT = self.beyond_BT & ~target_BMT.any(1)
        return Views(target_BMT | rest_BT[:, None], target_BMT, weight_BMT.float())

    @property
    def noised_groups_BT(self) -> Tensor:
        """The groups of the completion's tokens; -1 elsewhere."""
        return torch.where(self.completion_BT, self.group_BT, -1)


def make_rollout(
    lm: DiffusionLM,
    generation: Generation,
    at: slice = slice(None),
    block_size: int | None = None,
    *,
    sampled: bool = False,
) -> Rollout:
    """The canvases of a slice of a generation, padded on the right.

    Args:
        generation: sampled with `trace=True`.
        block_size: the decoding block of a bidirectional model; None: the whole completion.
        sampled: keep the server's log-probabilities of the drawn tokens.

    Raises:
        GenerationError: there is no trace, or it has no steps of canvases of random tokens, or the server did
            not return the log-probabilities.
    """
    if generation.trace is None:
        raise GenerationError(
            "has no canvases", where="generation", remedy="Sample with SamplerConfig(trace=True)"
        )
    traces, prompts = generation.trace[at], generation.prompts[at]
    if lm.noise == "uniform" and not all(trace.canvas_steps for trace in traces):
        what, remedy = (
            "has no steps of its canvases",
            "Sample it from this model, with SamplerConfig(trace=True)",
        )
        raise GenerationError(what, where="generation", remedy=remedy)
    if sampled and not all(trace.sampled_log_probs for trace in traces):
        raise GenerationError(
            "the server does not return the log-probabilities of its tokens",
            where="rollout",
            remedy="Start it with --logprobs-mode processed_logprobs, sample at temperature 1, or leave out "
            "vllm_importance_sampling_cap",
        )

    def padded(of_prompt: Any, of_canvas: Iterable[list[Any]], fill: Any) -> Tensor:
        """Rows with a value for each token of the prompt, and values of the canvas."""
        rows = [[of_prompt] * len(prompt) + canvas for prompt, canvas in zip(prompts, of_canvas, strict=True)]
        return pad_rows(rows, fill).to(lm.device, non_blocking=True)

    ids = [prompt + trace.canvas for prompt, trace in zip(prompts, traces, strict=True)]
    ids_BT = pad_rows(ids, lm.pad_token_id).to(lm.device, non_blocking=True)
    if lm.noise == "uniform":
        ids_BT = ids_BT.masked_fill(ids_BT == lm.mask_token_id, lm.pad_token_id)
    lengths = [[len(row) for row in rows] for rows in (prompts, generation.tokens[at], ids)]
    prompt_B1, tokens_B1, whole_B1 = torch.tensor(lengths)[:, :, None].to(lm.device, non_blocking=True)
    position_BT = columns(ids_BT)
    prompt_BT, document_BT = position_BT < prompt_B1, (position_BT < whole_B1).long()
    canvas_BT = (document_BT > 0) & ~prompt_BT
    group_BT = noise_groups(lm, canvas_BT, document_BT)
    return Rollout(
        ids_BT=ids_BT,
        document_BT=document_BT,
        prompt_BT=prompt_BT,
        completion_BT=canvas_BT & (position_BT < prompt_B1 + tokens_B1),
        step_BT=padded(-1, (trace.steps for trace in traces), -1),
        group_BT=group_BT,
        block_BT=decoding_blocks(lm, canvas_BT, group_BT, block_size),
        sampled_BT=padded(0.0, (trace.sampled_log_probs for trace in traces), 0.0) if sampled else None,
        one_document=len(set(map(len, ids))) == 1,
        random_tokens=RandomTokens.of(lm) if lm.noise == "uniform" else None,
        canvas_steps=stacked_canvas_steps(traces, prompts, ids_BT) if lm.noise == "uniform" else None,
    )


def stacked_canvas_steps(
    traces: Sequence[Trace], prompts: Sequence[list[int]], ids_BT: Tensor
) -> CanvasSteps:
    """The steps that traces recorded."""
    canvases = [
        [[*steps] for _, steps in groupby(trace.canvas_steps, lambda step: step.start)] for trace in traces
    ]
    most = max(len(steps) for row in canvases for steps in row)
    shape, clean_BT = (len(ids_BT), most, ids_BT.shape[1]), ids_BT.cpu()
    shown_BST = clean_BT[:, None].repeat(1, most, 1)
    kept_BST, temperature_BS = torch.full(shape, -1), torch.ones(shape[:2], dtype=torch.float64)
    count_BT = torch.zeros_like(clean_BT)
    for row, (prompt, of_row) in enumerate(zip(prompts, canvases, strict=True)):
        for steps in of_row:
            start = len(prompt) + steps[0].start
            at = slice(start, start + len(steps[0].shown))
            shown_BST[row, : len(steps), at] = torch.tensor([step.shown for step in steps])
            kept_BST[row, : len(steps), at] = torch.tensor([step.kept for step in steps])
            kept_BST[row, len(steps) - 1, at] = clean_BT[row, at]
            temperature_BS[row, : len(steps)] = torch.tensor([step.temperature for step in steps]).double()
            count_BT[row, at] = len(steps)
    parts = (shown_BST, kept_BST, temperature_BS, count_BT)
    return CanvasSteps(*(part.to(ids_BT.device, non_blocking=True) for part in parts))


def decoding_blocks(lm: DiffusionLM, canvas_BT: Tensor, group_BT: Tensor, block_size: int | None) -> Tensor:
    """The decoding block [B, T] of each position of a canvas, from 0; -1 elsewhere. In a block-causal model
    it is the attention block."""
    if lm.attention == "bidirectional":
        block_BT = (canvas_BT.long().cumsum(1) - 1) // (block_size or canvas_BT.shape[1])
    else:
        first_B1 = torch.where(canvas_BT, group_BT, torch.iinfo(torch.long).max).amin(1, keepdim=True)
        block_BT = group_BT - first_B1
    return torch.where(canvas_BT, block_BT, -1)


def cut_at_end(lm: DiffusionLM, generation: Generation) -> Generation:
    """Cut completions after their first end token where the whole canvas was sampled; traces keep the
    canvas."""
    ends = [end_of(tokens, lm.eos_token_ids) for tokens in generation.tokens]
    names = ("tokens", "log_probs", "steps")
    cut: Any = {
        name: [row[:end] for row, end in zip(getattr(generation, name), ends, strict=True)] for name in names
    }
    pairs = zip(generation.prompts, cut["tokens"], strict=True)
    texts = [text_after(lm.tokenizer, prompt, ids, lm.eos_token_ids) for prompt, ids in pairs]
    return replace(generation, texts=texts, **cut)
