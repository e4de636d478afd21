"""Noise that replaces tokens by random ones, alone or beside masks, and the bound that goes with it.

At noise level s = 1 - alpha(t) a token x is kept with probability 1 - s. Else the model sees the mask token,
with probability m(s), or a token drawn uniformly from U tokens, with probability s - m(s):

    q_s(z | x) = (1 - s) [z = x] + m(s) [z = mask] + (s - m(s)) / U.

m = s is masked noise, m = 0 uniform noise (UDLM, Schiff et al. 2024; Duo, Sahoo et al. 2025), and what lies
between is hybrid noise (GIDD, von Rütte et al. 2025). With the prediction p of the clean token, and the mean
q_s(z | p) over p, a bound on the log-likelihood is the integral over s of

    -w_s(z, x) (KL(q_s(. | x) || q_s(. | p)) + r - log r - 1),   r = q_s(z | x) / q_s(z | p),

in expectation over z (GIDD, theorem 3.1, with alpha = 1 - s). w_s(z, x) is the rate of jumps to z, divided by
q_s(z | x). For masked noise this is the usual bound, log p(x) / s at hidden tokens.

Shapes: B batch, M views, T tokens, N targets, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.config.run import NoiseName
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.kernels.log_softmax import at_least_float32

P_UNIFORM = 0.1
"""The default probability of random tokens in hybrid noise; GIDD published models with 0, 0.1 and 0.2."""


class Masking(NamedTuple):
    """The masks of noise at some levels."""

    share: Tensor  # m(s), the probability of the mask token
    rate: Tensor  # of jumps to it: m'(s) + m(s) / (1 - s)


@dataclass(frozen=True)
class Mixing:
    """How much of the noise is masks.

    Attributes:
        name: masked, uniform or hybrid.
        p_uniform: of hybrid noise, the greatest probability of a random token, as in GIDD.
    """

    name: NoiseName
    p_uniform: float | None = None

    @classmethod
    def of(cls, lm: DiffusionLM) -> Mixing:
        """The noise of a model."""
        return cls(lm.noise, lm.p_uniform)

    def masking(self, level: Tensor) -> Masking:
        """The masks at levels s, float64, between 0 and 1."""
        kept = 1 - level
        if self.name == "masked":
            return Masking(level, 1 / kept)
        if self.name == "uniform" or self.p_uniform is None:
            return Masking(torch.zeros_like(level), torch.zeros_like(level))
        # GIDD has 1 - s = (1 - r) / (1 + c), m = r / (1 + c), c = B sqrt(r (1 - r)), and draws r
        b = 2 * self.p_uniform / (1 - self.p_uniform)
        root = kept * b * (kept * (kept * b * b + 4 * level)).sqrt()
        r = 2 * level**2 / (2 * level + (kept * b) ** 2 + root)
        slope_of_c = b * (1 - 2 * r) / (2 * (r * (1 - r)).sqrt())
        slope_of_r = (1 - r) / kept / (1 + kept * slope_of_c)
        return Masking(kept * r / (1 - r), kept * slope_of_r / (1 - r) ** 2)


class RandomTokens(NamedTuple):
    """The tokens of uniform noise: all that a model predicts."""

    rows: int  # of the logits
    never: tuple[int, ...]  # tokens that are never predicted, the mask token among them
    mask_token_id: int

    @classmethod
    def of(cls, lm: DiffusionLM) -> RandomTokens:
        """The tokens that a model predicts."""
        return cls(lm.vocab_size, lm.never_predicted, lm.mask_token_id)

    @property
    def size(self) -> int:
        return self.rows - len(self.never)

    def drawn(self, uniform: Tensor) -> Tensor:
        """The tokens of uniform numbers in [0, 1)."""
        token = (uniform * self.size).long()
        for excluded in sorted(self.never):
            token += token >= excluded
        return token


class Replaced(NamedTuple):
    """What the model sees in place of the clean tokens, and how likely that was."""

    ids_BMT: Tensor
    ratio_BMT: Tensor
    """(1 - s) U / (s - m(s)), by how much keeping a token is likelier than drawing it; float64."""
    share_BMT: Tensor
    """(s - m(s)) / U, the probability of drawing it; float64."""


def replaced(
    clean_BT: Tensor,
    hidden_BMT: Tensor,
    level_BMT: Tensor,
    kind_BMT: Tensor,
    token_BMT: Tensor,
    mixing: Mixing,
    tokens: RandomTokens,
) -> tuple[Replaced, Tensor]:
    """What the model sees where tokens are hidden, and the weight w_s of each token [B, M, T] in the bound.

    Args:
        level_BMT: the noise level s of each token's group, float64.
        kind_BMT, token_BMT: uniform numbers in [0, 1), which decide between the mask token and a random one,
            and which.
    """
    share, rate = mixing.masking(level_BMT)
    is_mask_BMT = hidden_BMT & (kind_BMT * level_BMT < share)
    drawn_BMT = torch.where(hidden_BMT, tokens.drawn(token_BMT), clean_BT[:, None])
    ids_BMT = torch.where(is_mask_BMT, tokens.mask_token_id, drawn_BMT)
    kept_BMT, each_BMT = 1 - level_BMT, (level_BMT - share) / tokens.size
    jumps_BMT = torch.where(is_mask_BMT, rate, (1 / kept_BMT - rate) / tokens.size)
    same_BMT = ids_BMT == clean_BT[:, None]
    likely_BMT = torch.where(is_mask_BMT, share, each_BMT + kept_BMT * same_BMT)
    return Replaced(ids_BMT, kept_BMT / each_BMT, each_BMT), jumps_BMT / likely_BMT


def negative_divergence(
    logits_NV: Tensor,
    target_N: Tensor,
    seen_N: Tensor,
    ratio_N: Tensor,
    share_N: Tensor,
    setting: tuple[float, int],
) -> tuple[Tensor]:
    """-(KL + r - log r - 1) [N] of the module's docstring, in nats, for a `Reduction`. `seen_N`: the token
    that the model sees, z; `setting`: the temperature, and the mask token."""
    temperature, mask_token_id = setting
    p_NV = (at_least_float32(logits_NV) / temperature).softmax(-1)
    ratio_N, share_N = ratio_N.to(p_NV.dtype), share_N.to(p_NV.dtype)
    # log(q(v | p) / share) of each token, and of the target under q(. | x)
    gain_NV, clean_gain_N = torch.log1p(ratio_N[:, None] * p_NV), torch.log1p(ratio_N)
    target_gain_N, seen_gain_N = (
        gain_NV.gather(1, token_N[:, None]).squeeze(1) for token_N in (target_N, seen_N)
    )
    likely_N = share_N * (1 + ratio_N)
    kl_N = likely_N * (clean_gain_N - target_gain_N) - share_N * (gain_NV.sum(1) - target_gain_N)
    log_r_N = torch.where(seen_N == target_N, clean_gain_N, 0) - seen_gain_N
    return (-kl_N - torch.where(seen_N == mask_token_id, 0, torch.expm1(log_r_N) - log_r_N),)
