"""The log-probabilities of a prompt's own tokens, from left to right.

Shapes: B rows of a pass, T tokens, N targets, V vocabulary, K most probable tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from unmask.errors import GenerationError
from unmask.generation.gap_lengths import TOKENS_PER_PASS
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.hooks.head import Reduction
from unmask.models.kernels.log_softmax import at_least_float32
from unmask.models.model_state import evaluating

ScoredTokens = list[tuple[float, list[tuple[int, float]]]]
ScoringRun = Callable[[Callable[[], ScoredTokens]], ScoredTokens]


@dataclass(frozen=True)
class PromptLogProbs:
    """The tokens of a prompt, in nats.

    Attributes:
        log_probs: of each token given those before it; None: the first token, which nothing predicts.
        top: the most probable tokens in its place with their log-probabilities, the most probable first; None
            likewise.
    """

    tokens: list[int]
    log_probs: list[float | None]
    top: list[list[tuple[int, float]] | None]


def prompt_log_probs(lm: DiffusionLM, ids: Sequence[int], top: int, run: ScoringRun) -> PromptLogProbs:
    """The log-probability of each token, as when the model writes the prompt after its first token from left
    to right, one token a step.

    A causal model is asked in one pass. Any other one reads a row for each token, in which this and all later
    tokens are hidden: their sum is the log-probability with which `remasking: left_to_right` at temperature 1
    writes these tokens into a canvas of their length. A model of uniform noise hides nothing behind masks: if
    it reads finished text from left to right, as DiffusionGemma's encoder does, it is asked as the causal
    model that it is there (`DiffusionLM.as_causal`).

    Args:
        top: the number of most probable tokens.
        run: makes a forward pass, when and where the model is free.

    Raises:
        GenerationError: a model of uniform noise that does not read finished text from left to right.
    """
    if lm.noise == "uniform":
        if not lm.causal_context:
            what = "need masks in place of later tokens, and this model's noise is uniform"
            remedy = "Leave out echo or logprobs, or use a model with a causal context"
            raise GenerationError(what, where="prompt log-probabilities", remedy=remedy)
        lm = lm.as_causal()
    size = len(ids) if lm.autoregressive else max(1, TOKENS_PER_PASS // max(1, len(ids)))
    found: ScoredTokens = []
    for start in range(1, len(ids), size):
        found += run(partial(_log_probs, lm, ids, range(start, min(start + size, len(ids))), top))
    first = [None] * bool(ids)
    return PromptLogProbs(
        list(ids), [*first, *(value for value, _ in found)], [*first, *(most for _, most in found)]
    )


@torch.no_grad()
def _log_probs(lm: DiffusionLM, ids: Sequence[int], targets: range, top: int) -> ScoredTokens:
    ids_BT, place_N = (
        torch.tensor([list(ids)], device=lm.device),
        torch.arange(targets.start, targets.stop, device=lm.device),
    )
    target_N, index_N, hidden_BT = ids_BT[0, place_N], place_N, torch.zeros_like(ids_BT, dtype=torch.bool)
    if not lm.autoregressive:
        block = {"bidirectional": len(ids), "causal": 1}.get(lm.attention, lm.block_size or 1)
        length = min(len(ids), -(-targets.stop // block) * block)  # what comes after is not seen
        hidden_BT = torch.arange(length, device=lm.device) >= place_N[:, None]
        ids_BT = torch.where(hidden_BT, lm.mask_token_id, ids_BT[:, :length])
        index_N = torch.arange(len(targets), device=lm.device) * length + place_N
    with evaluating(lm):
        inputs = lm.noised_inputs(ids_BT, None, index_N, hidden_BT)
        log_prob_N, top_NK, id_NK = lm.reduced(inputs, Reduction(_at_target_and_top, (target_N,), top))
    most = [list(zip(*each, strict=True)) for each in zip(id_NK.tolist(), top_NK.tolist(), strict=True)]
    return list(zip(log_prob_N.tolist(), most, strict=True))


def _at_target_and_top(logits_NV: Tensor, target_N: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    log_prob_NV = at_least_float32(logits_NV).log_softmax(-1)
    top_NK = log_prob_NV.topk(min(top, logits_NV.shape[1]), dim=-1)
    return log_prob_NV.gather(1, target_N[:, None]).squeeze(1), top_NK.values, top_NK.indices
