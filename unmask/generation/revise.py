"""Repair: how many revealed tokens each step hides again, and which (ReMDM, Wang et al. 2025, arXiv
2503.00307).

On the way from time t to s, ReMDM hides each visible token with probability sigma_t: at most sigma_max =
min(1, (1 - alpha_s) / alpha_t), where alpha is the fraction of visible tokens, so that alpha_s can still be
reached. Here a step hides the expected number, alpha_t sigma_t times the block's tokens, and reveals as many
more: the number of steps stays fixed.

Shapes: N visible positions, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unmask.config.revise import ReviseConfig
from unmask.diffusion.rng import RngStream, uniform
from unmask.generation.policies import normalizer


def plan_revisions(counts: list[int], revise: ReviseConfig) -> tuple[list[int], list[int]]:
    """The number of tokens that each step of a block reveals, and how many of those visible before it are
    hidden again at most. Steps that do neither are left out."""
    hide, carried, visible = [], 0.0, 0
    total, in_loop = sum(counts), revise.schedule == "loop"
    for count in counts:
        left = total - visible - count
        if visible and (count == 0 or not in_loop):
            carried += _expected(visible, left, revise)
        again = min(math.floor(carried + 1e-9), left, visible)
        carried -= again
        hide.append(again)
        visible += count
    kept = [step for step, count in enumerate(counts) if count or hide[step]]
    return [counts[step] for step in kept], [hide[step] for step in kept]


def loop_counts(size: int, steps: int, revise: ReviseConfig) -> list[int]:
    """The number of tokens that each step reveals beyond those that it hides, for schedule loop: 0 in the
    steps between t_on and t_off."""
    last = max(1, round(steps * revise.t_off))
    first = max(1, round(steps * (1 - revise.t_on)))
    if size < 2 or first + last > steps:
        return even_counts(size, min(size, steps))
    early = min(size - 1, max(1, round(revise.alpha_on * size)))
    head, tail = even_counts(early, min(early, first)), even_counts(size - early, min(size - early, last))
    return [*head, *[0] * (steps - len(head) - len(tail)), *tail]


def present_log_probs(logits_NV: Tensor, token_N: Tensor) -> Tensor:
    """Log-probabilities [N] of visible tokens, from the aligned logits at their positions."""
    return logits_NV.gather(1, token_N[:, None]).squeeze(1) - normalizer(logits_NV)


def doubts(
    log_prob_N: Tensor, revise: ReviseConfig, seed: int, key_N: Tensor, step_N: Tensor, position_N: Tensor
) -> Tensor:
    """The priority [N] with which visible tokens are hidden again, in float32; -inf: not at all.

    Args:
        log_prob_N: the logs of their values (`ReviseConfig.by`) in the present pass.
        key_N, step_N, position_N: the sequence's key and denoising steps so far, and the position in it.
    """
    priority_N = -log_prob_N
    if revise.temperature > 0:
        # never 0
        noise_N = uniform(seed, key_N, step=step_N, position=position_N, stream=RngStream.REVISION) + 2.0**-54
        priority_N = -log_prob_N.exp() / revise.temperature - (-noise_N.log()).log()
    priority_N = priority_N.float().clamp(torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)
    return (
        priority_N
        if revise.below is None
        else priority_N.masked_fill(log_prob_N.exp() >= revise.below, -torch.inf)
    )


def _expected(visible: int, left: int, revise: ReviseConfig) -> float:
    """The number of tokens that a step hides, if it leaves `left` tokens hidden besides."""
    match revise.schedule:
        case "rescale":
            return revise.eta * min(visible, left)
        case "conf":
            return revise.eta * min(1.0, left / visible)
        case _:
            return min(revise.eta * visible, left)


def even_counts(size: int, steps: int) -> list[int]:
    """Shares that are as even as possible, the larger ones first."""
    return [size // steps + (i < size % steps) for i in range(steps)]
