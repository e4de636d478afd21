"""Methods that compare estimates of whole sequences' likelihoods: UniGRPO, ESPO, GDPO, BGPO.

Shapes: B completions, M views, T positions; L tokens of a group, k of them hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unmask.diffusion.rng import Stream, uniform
from unmask.diffusion.views import Draw, Views, exact_count_views, group_sizes, hide, pairs_of_counts
from unmask.rl.losses import LARGEST, divergence
from unmask.rl.methods.base import SURROGATE, Loss, Method, Rollout, Scores, of_elements, surrogate


def structured_time(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """One view, of ceil(t L) hidden tokens: t of the first inner iteration is random, the others lie evenly from there, round the end
    (UniGRPO, Yang et al. 2025, MMaDA). Hidden tokens weigh 1."""
    group_BT = rollout.groups_of(rollout.completion_BT)
    start_B = uniform(draw.seed, draw.key_B, stream=Stream.TIME)
    time_B11 = ((start_B + draw.iteration / config.num_iterations) % 1.0)[:, None, None]
    count_B1T = (time_B11 * group_sizes(group_BT)[:, None]).ceil().long().clamp_min(1)
    hidden_BMT = hide(group_BT, draw, count_B1T)
    return rollout.hiding(hidden_BMT, hidden_BMT)


def coupled_counts(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """`config.samples` complementary pairs (ESPO, Ou et al. 2025; as published over the whole canvas: `beyond_eos: learnt`)."""
    views = pairs_of_counts(rollout.groups_of(rollout.completion_BT), draw, pairs=config.samples)
    return rollout.hiding(views.target_BMT, views.weight_BMT)


def quadrature(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """At each of `config.samples` Gauss-Legendre nodes t a view of ceil(t L) hidden tokens, of the node's weight times L/k
    (GDPO, Rojas et al. 2025). Biased as the quadrature is, and no more: each count then has its own L-th part of the times. The published
    way hides floor(t L) tokens and weighs 1/t, which of short completions hides none at small t and counts too little."""
    node_M, weight_M = (torch.from_numpy(part) / 2 for part in np.polynomial.legendre.leggauss(config.samples))
    group_BT = rollout.groups_of(rollout.completion_BT)
    node_1M1, weight_1M1 = (part_M.to(group_BT.device)[None, :, None] for part_M in (node_M + 0.5, weight_M))
    size_B1T = group_sizes(group_BT)[:, None]
    count_BMT = (node_1M1 * size_B1T).ceil().long()
    hidden_BMT = hide(group_BT, draw, count_BMT)
    return rollout.hiding(hidden_BMT, hidden_BMT * weight_1M1 * size_B1T / count_BMT)


def low_discrepancy(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """`config.samples` views of k ~ U{1..L} hidden tokens, stratified, of weight L/k over their number (BGPO, Lin et al. 2025)."""
    views = exact_count_views(rollout.groups_of(rollout.completion_BT), draw, views=config.samples)
    return rollout.hiding(views.target_BMT, views.weight_BMT)


def mean_ratio(scores: Scores, config: Any) -> Loss:
    """The surrogate of exp((bound - old bound) / L), and the divergence of the bounds over L (ESPO, eq. 10 and its published code).

    Of the estimates of the divergence only k2 has a gradient that is neither zero in the mean nor of unbounded variance here.
    """
    policy_B1, length_B1 = scores.of_sequences(scores.policy_BMT), scores.length_B1
    gap_B1 = policy_B1 - scores.of_sequences(scores.old_BMT)
    made = surrogate(gap_B1 / length_B1, None, scores.advantage_B1, scores.share_B1, config)
    if scores.reference_BMT is None:
        return made
    reference_B1 = scores.of_sequences(scores.reference_BMT) - policy_B1
    if config.log_ratio_clamp is not None:
        reference_B1 = reference_B1.clamp(-config.log_ratio_clamp, config.log_ratio_clamp)
    kl_B1 = divergence(reference_B1, config.kl) / length_B1
    return made._replace(total=made.total + (scores.share_B1 * config.beta * kl_B1).sum(), kl=kl_B1[scores.share_B1 > 0].detach())


def bound_ratio(scores: Scores, config: Any) -> Loss:
    """The surrogate of a ratio of bounds (GDPO). `ratio: product` is exp(bound - old bound), whose loss is divided by the length, as on
    its authors' page and in eq. 9; `sequence` takes its root of the length, as ports of their code do. At the first update both have the
    same gradient."""
    policy_B1, length_B1 = scores.of_sequences(scores.policy_BMT), scores.length_B1
    gap_B1 = policy_B1 - scores.of_sequences(scores.old_BMT)
    reference_B1 = None if scores.reference_BMT is None else scores.of_sequences(scores.reference_BMT) - policy_B1
    if config.ratio == "product":
        return surrogate(gap_B1, reference_B1, scores.advantage_B1, scores.share_B1 / length_B1, config)
    reference_B1 = None if reference_B1 is None else reference_B1 / length_B1
    return surrogate(gap_B1 / length_B1, reference_B1, scores.advantage_B1, scores.share_B1, config)


def linear_bound(scores: Scores, config: Any) -> Loss:
    """A lower bound of the objective that is a mean over views: 1 + delta_v where the advantage is positive, exp(delta_v), at most
    `config.dual_clip`, where it is negative; delta_v is the change of the view's estimate per token (BGPO, eq. 7)."""
    views, count = scores.views, scores.views.count
    delta_BM = (views.weight_BMT * (scores.policy_BMT - scores.old_BMT)).sum(2) * count / scores.length_B1
    advantage_B1 = scores.advantage_B1
    most = torch.inf if config.dual_clip is None else config.dual_clip
    ratio_BM = delta_BM.clamp_max(LARGEST).exp()  # even where it is not taken, the gradient of an infinite one is none
    value_BM = torch.where(advantage_B1 > 0, 1 + delta_BM, ratio_BM.clamp_max(most))
    share_BM = (scores.share_B1 / count).expand_as(delta_BM)
    ratio_BM = ratio_BM.detach()
    return of_elements(-advantage_B1 * value_BM, share_BM, ratio_BM, (advantage_B1 < 0) & (ratio_BM > most))


UNI_GRPO = Method("uni-grpo", structured_time, defaults={"ratio": "sequence", "aggregation": "sequence", "advantage": "z-score"})
ESPO = Method(
    "espo",
    coupled_counts,
    loss=mean_ratio,
    weighs="bound",
    uses=(*SURROGATE, "beta"),
    plan_uses=("samples",),
    defaults={
        "epsilon": 0.2,
        "advantage": "leave-one-out",
        "kl": "k2",
        "beta": 1e-3,
        "aggregation": "sequence",
    },
)
# The product over a whole sequence passes the numbers of float32 at a difference of 88 nats.
GDPO = Method(
    "gdpo",
    quadrature,
    loss=bound_ratio,
    weighs="bound",
    uses=(*SURROGATE, "ratio", "beta", "kl_unbiased"),
    plan_uses=("samples",),
    defaults={"samples": 3, "ratio": "sequence", "aggregation": "sequence", "log_ratio_clamp": 20.0},
)
BGPO = Method(
    "bgpo",
    low_discrepancy,
    loss=linear_bound,
    weighs="bound",
    uses=("dual_clip",),
    plan_uses=("samples",),
    defaults={"samples": 16, "dual_clip": 3.0, "advantage": "z-score", "aggregation": "sequence"},
)
