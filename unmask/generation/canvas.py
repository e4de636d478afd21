"""Denoising a canvas of random tokens, for models of uniform noise.

Every step predicts all positions of the block. Each draws a token; those of lowest entropy are accepted, as
long as their entropies without the largest stay within `entropy_bound` (Ben-Hamu et al. 2025), and the others
become new random tokens. The block ends, with the most probable token of each position, when these have not
changed for `stability_threshold` steps and the mean entropy is below `confidence_threshold`, or after the
last step. It is the sampler of DiffusionGemma. Log-probabilities are those of its tokens in the block's last
pass.

With a constraint the tokens of a step are drawn together, given that their text is accepted. So whichever are
kept, some text that is accepted has them. Entropies and mean embeddings are given the constraint, too, and
the block ends with the most probable text that is accepted.

Shapes: N positions, B sequences, M the most positions of one, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.config.sampler import CANVAS_FIELDS, SamplerConfig
from unmask.diffusion.mixing import RandomTokens
from unmask.diffusion.rng import RngStream, uniform
from unmask.errors import GenerationError
from unmask.generation.constraints.decide import Window, texts_given
from unmask.generation.policies import (
    CPU_LOGITS_AT_ONCE,
    GPU_LOGITS_AT_ONCE,
    Decision,
    best,
    draw,
    keep_likely,
    most_probable,
    normalizer,
    penalize_and_ban,
    weights,
)
from unmask.models.diffusion_lm import DiffusionLM

EVERY_TOKEN = "Leave it out: every step may change every token"
BY_ENTROPY = "Use entropy_bound"
ORDER = "Leave it out: tokens are kept by their entropies"
OF_MASKS = {
    **dict.fromkeys(("remask_fraction", "revise"), EVERY_TOKEN),
    **dict.fromkeys(("threshold", "factor", "schedule", "order_temperature"), BY_ENTROPY),
    **dict.fromkeys(("remasking", "filtered_confidence", "entropy_rule"), ORDER),
    **dict.fromkeys(("steps", "tokens_per_step"), "Use max_denoising_steps"),
    "temperature": "Use t_min and t_max",
    "early_commit": "Use confidence_threshold",
    "reveal_last": "Use forbidden_tokens",
    **dict.fromkeys(("block_size", "sub_block_size"), "Leave it out: a canvas is denoised as a whole"),
    **dict.fromkeys(("cache", "refresh_interval"), "Leave it out: what can be kept is kept"),
    **dict.fromkeys(
        ("mode", "num_speculative_tokens", "num_branches", "cfg_scale"),
        "Leave it out, or use a model of masked noise",
    ),
    "top_forbidden": "Leave it out",
}
"""Settings that need masks, and what to do on a canvas of random tokens."""
GRAIN = 2.0**-24
"""The nats to which entropies given a constraint are rounded, so that equal ones are equal."""


class CanvasSettings(NamedTuple):
    """The settings of a canvas; the defaults are those of the released DiffusionGemma."""

    max_denoising_steps: int = 48
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005

    @classmethod
    def of(cls, lm: DiffusionLM, config: SamplerConfig) -> CanvasSettings:
        """The settings of a config; where they are not given, those of the model's generation_config.json, or
        else the defaults."""
        given: dict[str, Any] = {name: getattr(config, name) for name in cls._fields}
        given = {name: value for name, value in given.items() if value is not None}
        return cls()._replace(**lm.canvas_settings | given)

    def temperature(self, step: int) -> float:
        """The temperature of a step of a block, from 0 on, in float32 as in transformers."""
        return _temperature(self.max_denoising_steps, self.t_min, self.t_max, step)


@lru_cache
def _temperature(steps: int, t_min: float, t_max: float, step: int) -> float:
    left = torch.tensor(steps - step, dtype=torch.int32, device="cpu") / steps
    return float(t_min + (t_max - t_min) * left)


class Proposal(NamedTuple):
    """What the predictions of a step propose for each position."""

    decision: Decision  # of the most probable token
    drawn_N: Tensor
    entropy_N: Tensor  # float64, of the distribution that tokens are drawn from, in nats
    drawn_log_prob_N: Tensor | None  # float64, of the drawn tokens under that distribution; with a trace
    soft_ND: Tensor | None  # its mean embeddings, of models that read them


def check_canvas(lm: DiffusionLM, config: SamplerConfig) -> None:
    """Raise GenerationError for settings that the noise of the model does not have."""
    given = {*config.of_texts, *(config.model_fields_set & {"temperature"})}  # 0 asks for something
    if lm.noise != "uniform":
        for name in CANVAS_FIELDS:
            if name in given:
                what = f"belongs to canvases of random tokens, and this model's noise is {lm.noise}"
                raise GenerationError(what, where=name, remedy="Leave it out for this model")
        if config.entropy_bound is not None and config.remasking != "entropy":
            what = f"cannot be combined with remasking {config.remasking!r}"
            raise GenerationError(what, where="entropy_bound", remedy="Use remasking 'entropy'")
        return
    for name, meant in OF_MASKS.items():
        if name in given:
            what = "needs masks, and this model's canvas has random tokens"
            raise GenerationError(what, where=name, remedy=meant)
    settings = CanvasSettings.of(lm, config)
    if not settings.t_min < settings.t_max:
        what = f"{settings.t_min} is not below t_max, {settings.t_max}"
        raise GenerationError(what, where="t_min", remedy="Lower it, or raise t_max")


def random_tokens(lm: DiffusionLM, seed: int, key_N: Tensor, step_N: Tensor, position_N: Tensor) -> Tensor:
    """The random tokens that a step shows."""
    numbers_N = uniform(seed, key_N, step=step_N, position=position_N, stream=RngStream.NOISE)
    return RandomTokens.of(lm).drawn(numbers_N)


def propose(
    lm: DiffusionLM,
    logits_NV: Tensor,
    config: SamplerConfig,
    temperature_N: Tensor,
    key_N: Tensor,
    step_N: Tensor,
    position_N: Tensor,
    present_NV: Tensor | None = None,
    windows: Sequence[Window] = (),
) -> Proposal:
    """What a step proposes. All randomness is keyed by (seed, key, step, position).

    Args:
        logits_NV: aligned logits of all positions of a canvas.
        temperature_N: in the logits' type.
        key_N, step_N, position_N: the sequence's key and denoising steps so far, and the position in it.
        present_NV: the tokens that are known in each row's sequence, for a repetition penalty.
        windows: the positions whose texts a constraint has to accept.

    Raises:
        GenerationError: no text that a constraint accepts has a probability.
    """
    uniform_N = uniform(config.seed, key_N, step=step_N, position=position_N, stream=RngStream.TOKEN)

    def part(rows: slice | Tensor, window: Window | None = None) -> tuple[Any, ...]:
        present = None if present_NV is None else present_NV[rows]
        return _proposed(lm, logits_NV[rows], temperature_N[rows], uniform_N[rows], present, window, config)

    if windows:
        inside_J = torch.cat([window.row_N for window in windows])
        row_N = torch.arange(len(position_N), device=position_N.device)
        outside_J = row_N[~torch.isin(row_N, inside_J)]
        parts = [part(window.row_N, window) for window in windows]
        parts += [part(outside_J)] if len(outside_J) else []
        order_N = torch.cat([inside_J, outside_J]).argsort()
    else:
        at_once = CPU_LOGITS_AT_ONCE if logits_NV.device.type == "cpu" else GPU_LOGITS_AT_ONCE
        count = max(1, at_once // logits_NV.shape[1])
        parts = [part(slice(first, first + count)) for first in range(0, len(position_N), count)]
    joined: list[Any] = [
        None if values[0] is None else torch.cat(values) for values in zip(*parts, strict=True)
    ]
    if windows:
        joined = [None if values is None else values[order_N] for values in joined]
    *decided, drawn_N, entropy_N, drawn_log_prob_N, soft_ND = joined
    return Proposal(Decision(*decided), drawn_N, entropy_N, drawn_log_prob_N, soft_ND)


def _proposed(
    lm: DiffusionLM,
    logits_NV: Tensor,
    temperature_N: Tensor,
    uniform_N: Tensor,
    present_NV: Tensor | None,
    window: Window | None,
    config: SamplerConfig,
) -> tuple[Any, ...]:
    """The fields of the decision, and of the proposal after it, at the positions of a window or at some
    others."""
    own_NV, texts = penalize_and_ban(logits_NV / temperature_N[:, None], config, present_NV), None
    if window is not None and not own_NV.isnan().any():  # else the caller refuses it
        texts = texts_given(window, own_NV, uniform_N, config)
    given_NV = own_NV if texts is None else texts.logits_NV
    weight_NV = weights(given_NV, given_NV.amax(-1, keepdim=True))
    weight_NV = keep_likely(weight_NV, config.top_k, config.top_p, config.min_p)
    prob_NV = weight_NV / weight_NV.sum(-1, keepdim=True)
    entropy_N = torch.special.entr(prob_NV).sum(-1).double()
    if texts is None:
        token_N, drawn_N = best(own_NV), draw(weight_NV, uniform_N)
    else:
        token_N, drawn_N, _ = texts
        entropy_N = (entropy_N / GRAIN).round() * GRAIN
    normalizer_N = normalizer(logits_NV)
    at_token = (logits_NV.gather(1, token_N[:, None]).squeeze(1) - normalizer_N).double()
    sampled_N = prob_NV.gather(1, token_N[:, None]).squeeze(1).log() if config.trace else None
    top = most_probable(logits_NV, normalizer_N[:, None]) if config.top_log_probs else (None, None)
    decision = Decision(token_N, at_token, -entropy_N.float(), sampled_N, entropy_N, *top)
    drawn_log_prob_N = None
    if config.trace:
        drawn_log_prob_N = prob_NV.gather(1, drawn_N[:, None]).squeeze(1).log().double()
    soft_ND = lm.mean_embeddings(prob_NV) if lm.canvas else None
    return (*decision, drawn_N, entropy_N, drawn_log_prob_N, soft_ND)


def accept(entropy_BM: Tensor, bound: float) -> Tensor:
    """The positions [B, M] whose drawn tokens are kept; padding has infinite entropy."""
    sorted_BM, order_BM = entropy_BM.sort(dim=-1, stable=True)
    kept_BM = sorted_BM.cumsum(-1) - sorted_BM <= bound
    return torch.zeros_like(kept_BM).scatter(1, order_BM, kept_BM)


def is_confident(entropy_BM: Tensor, count_B: Tensor, threshold: float) -> Tensor:
    """Whether the mean entropy of each sequence is below the threshold [B]."""
    sum_B = entropy_BM.cumsum(-1).gather(1, count_B[:, None] - 1).squeeze(1)
    return sum_B / count_B < threshold
