"""Methods that compare estimates of whole sequences' likelihoods: UniGRPO, ESPO, GDPO, BGPO.

Shapes: B completions, M views, T positions; L tokens of a group, k of them hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unmask.diffusion.mixing import Mixing, Replaced
from unmask.diffusion.rng import RngStream, uniform
from unmask.diffusion.schedules import Noise
from unmask.diffusion.views import (
    MaskRNG,
    Views,
    columns,
    exact_count_views,
    group_sizes,
    hide,
    mixed_views,
    pairs_of_counts,
)
from unmask.generation.rollout import Rollout
from unmask.rl.advantages import ScaleRewards
from unmask.rl.losses import MAX_EXPONENT, Divergence, LossType, kl_divergence
from unmask.rl.methods.base import (
    ClippedMethod,
    Loss,
    LossInputs,
    Method,
    TokenMethod,
    plan_setting,
    register,
    weighted_sum,
)


def random_token_views(
    rollout: Rollout,
    draw: MaskRNG,
    num_views: int,
    noise: Noise | None = None,
    *,
    complementary: bool = False,
) -> Views:
    """Views of random tokens with the weights of the bound on the completion (`mixed_views`), at the times of
    `noise`; None: of exact counts. Tokens after its end are random, and so say nothing."""
    assert rollout.random_tokens is not None
    views = mixed_views(
        *(rollout.ids_BT, rollout.noised_groups_BT, draw, noise or Noise()),
        *(Mixing("uniform"), rollout.random_tokens),
        num_views=num_views,
        complementary=complementary,
        exact_count=noise is None,
    )
    assert isinstance(views.replaced, Replaced)
    rest_B1T = rollout.beyond_BT[:, None]
    random_BMT = rollout.random_tokens.drawn(
        draw.uniform(columns(rollout.ids_BT), num_views, RngStream.NOISE)
    )
    ids_BMT = torch.where(rest_B1T, random_BMT, views.replaced.ids_BMT)
    return replace(
        views, hidden_BMT=views.hidden_BMT | rest_B1T, replaced=views.replaced._replace(ids_BMT=ids_BMT)
    )


@dataclass(frozen=True)
class AtNodes(Noise):
    """Linear noise whose times in the m-th of equal stretches are the m-th node."""

    nodes: tuple[float, ...] = ()

    def time(self, uniform: Tensor) -> Tensor:
        node_M = torch.tensor(self.nodes, dtype=torch.float64, device=uniform.device)
        return node_M[(uniform * len(self.nodes)).long()]


@register
class UniGRPO(TokenMethod):
    """UniGRPO (Yang et al. 2025, MMaDA): a ratio of whole sequences, with times evenly spaced over the inner
    iterations."""

    name = "uni-grpo"
    importance_sampling_level: str = "sequence"
    loss_type: LossType | None = "grpo"
    scale_rewards: ScaleRewards = "group"

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        """One view of ceil(t L) hidden tokens, with weight 1: t is random in the first inner iteration, the
        others follow at equal distances, modulo 1."""
        group_BT = rollout.noised_groups_BT
        start_B = uniform(draw.seed, draw.key_B, stream=RngStream.TIME)
        time_B11 = ((start_B + draw.iteration / self.num_iterations) % 1.0)[:, None, None]
        count_B1T = (time_B11 * group_sizes(group_BT)[:, None]).ceil().long().clamp_min(1)
        hidden_BMT = hide(group_BT, draw, count_B1T)
        return rollout.hiding(hidden_BMT, hidden_BMT)


@register
class ESPO(ClippedMethod):
    """ESPO (Ou et al. 2025): the ratio of ELBOs per token. As published over the whole canvas: `after_eos:
    train`."""

    name = "espo"
    estimator = "bound"
    random_tokens = True
    epsilon: float = 0.2
    scale_rewards: ScaleRewards = "leave-one-out"
    kl: Divergence = "k2"
    beta: float = 1e-3
    loss_type: LossType | None = "grpo"
    samples: int = plan_setting(1)

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        if rollout.random_tokens is not None:
            return random_token_views(rollout, draw, 2 * self.samples, complementary=True)
        views = pairs_of_counts(rollout.noised_groups_BT, draw, pairs=self.samples)
        return rollout.hiding(views.target_BMT, views.weight_BMT)

    def loss(self, inputs: LossInputs) -> Loss:
        """The surrogate of exp((bound - old bound) / L), and the divergence of the bounds over L (eq. 10 and
        the published code).

        Among the estimates of the divergence, only k2 has a gradient here that is not zero in the mean and
        has a bounded variance.
        """
        policy_B1, length_B1 = inputs.of_sequences(inputs.policy_BMT), inputs.length_B1
        log_ratio_B1 = (policy_B1 - inputs.of_sequences(inputs.old_BMT)) / length_B1
        loss = self.surrogate(log_ratio_B1, None, inputs.advantage_B1, inputs.weight_B1)
        if inputs.reference_BMT is None:
            return loss
        reference_B1 = self.clamped(inputs.of_sequences(inputs.reference_BMT) - policy_B1)
        kl_B1 = kl_divergence(reference_B1, self.kl) / length_B1
        total = loss.total + (inputs.weight_B1 * self.beta * kl_B1).sum()
        return loss._replace(total=total, kl=kl_B1[inputs.weight_B1 > 0].detach())


@register
class GDPO(ClippedMethod):
    """GDPO (Rojas et al. 2025): the ratio of bounds that are computed by quadrature.

    Attributes:
        importance_sampling_level: "product": exp(bound - old bound), whose loss is divided by the length, as
            on the authors' page and in eq. 9; it overflows float32 at a difference of 88 nats. "sequence":
            normalized by length in the exponent, as in ports of their code. At the first update both have the
            same gradient.
        exact_counts: False: views as in published code (`plan`).
    """

    name = "gdpo"
    estimator = "bound"
    random_tokens = True
    importance_sampling_level: str = "sequence"
    loss_type: LossType | None = "grpo"
    log_ratio_clamp: float | None = 20.0
    use_bias_correction_kl: bool = False
    samples: int = plan_setting(3)
    exact_counts: bool = plan_setting(True)

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        """At each of `samples` Gauss-Legendre nodes t a view of k = ceil(t L) hidden tokens, with the node's
        weight times L/k.

        Its only bias is the quadrature's: each count stands for its own L-th of the times. Without
        `exact_counts` k is floor(t L) and the factor 1/t, as in published code; for short completions this
        hides nothing at small t and underestimates. With random tokens each token is hidden with probability
        t.
        """
        node_M, weight_M = (
            torch.from_numpy(values) / 2 for values in np.polynomial.legendre.leggauss(self.samples)
        )
        if rollout.random_tokens is not None:
            noise = AtNodes(nodes=tuple((node_M + 0.5).tolist()))
            views = random_token_views(rollout, draw, self.samples, noise)
            scale_1M1 = (self.samples * weight_M).float().to(views.weight_BMT.device)[None, :, None]
            return replace(views, weight_BMT=views.weight_BMT * scale_1M1)
        group_BT = rollout.noised_groups_BT
        node_1M1, weight_1M1 = (
            values_M.to(group_BT.device)[None, :, None] for values_M in (node_M + 0.5, weight_M)
        )
        size_B1T = group_sizes(group_BT)[:, None]
        expected_BMT = node_1M1 * size_B1T
        count_BMT = (expected_BMT.ceil() if self.exact_counts else expected_BMT.floor()).long()
        hidden_BMT = hide(group_BT, draw, count_BMT)
        return rollout.hiding(
            hidden_BMT,
            hidden_BMT * weight_1M1 * (size_B1T / count_BMT if self.exact_counts else 1 / node_1M1),
        )

    def loss(self, inputs: LossInputs) -> Loss:
        policy_B1, length_B1 = inputs.of_sequences(inputs.policy_BMT), inputs.length_B1
        log_ratio_B1 = policy_B1 - inputs.of_sequences(inputs.old_BMT)
        reference_B1 = (
            None if inputs.reference_BMT is None else inputs.of_sequences(inputs.reference_BMT) - policy_B1
        )
        weight_B1 = inputs.weight_B1
        if self.importance_sampling_level == "product":
            weight_B1 = weight_B1 / length_B1
        else:
            log_ratio_B1 = log_ratio_B1 / length_B1
            reference_B1 = None if reference_B1 is None else reference_B1 / length_B1
        return self.surrogate(
            log_ratio_B1,
            reference_B1,
            inputs.advantage_B1,
            weight_B1,
            use_bias_correction_kl=self.use_bias_correction_kl,
        )


@register
class BGPO(Method):
    """BGPO (Lin et al. 2025): a lower bound of the objective that is a mean over views.

    Attributes:
        epsilon, epsilon_high: PPO's clip range of each view's value, as in published code; None: it is not
            clipped.
    """

    name = "bgpo"
    estimator = "bound"
    random_tokens = True
    has_ratio = True
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = 3.0
    scale_rewards: ScaleRewards = "group"
    loss_type: LossType | None = "grpo"
    samples: int = plan_setting(16)

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        """Views of k ~ U{1..L} hidden tokens, stratified, with weight L / (k M); of random tokens, k ~
        U{0..L}."""
        if rollout.random_tokens is not None:
            return random_token_views(rollout, draw, self.samples)
        views = exact_count_views(rollout.noised_groups_BT, draw, num_views=self.samples)
        return rollout.hiding(views.target_BMT, views.weight_BMT)

    def loss(self, inputs: LossInputs) -> Loss:
        """1 + delta_v where the advantage is positive, exp(delta_v), at most `delta`, where it is
        negative; delta_v is the change of the view's estimate per token (eq. 7)."""
        views, count = inputs.views, inputs.views.count
        delta_BM = (views.weight_BMT * (inputs.policy_BMT - inputs.old_BMT)).sum(2) * count / inputs.length_B1
        advantage_B1 = inputs.advantage_B1
        # an infinite value would have no valid gradient, even where it is not selected
        ratio_BM = delta_BM.clamp_max(MAX_EXPONENT).exp()
        plain_BM = torch.where(advantage_B1 > 0, 1 + delta_BM, ratio_BM)
        low = torch.inf if self.epsilon is None else self.epsilon
        high = low if self.epsilon_high is None else self.epsilon_high
        bound = torch.inf if self.delta is None else self.delta
        value_BM = torch.where(
            advantage_B1 > 0, (1 + delta_BM).clamp_max(1 + high), ratio_BM.clamp(1 - low, bound)
        )
        weight_BM = (inputs.weight_B1 / count).expand_as(delta_BM)
        return weighted_sum(
            -advantage_B1 * value_BM,
            weight_BM,
            ratio_BM.detach(),
            (advantage_B1 != 0) & (value_BM != plain_BM),
        )
