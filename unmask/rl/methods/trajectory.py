"""Methods that replay the sampler's steps: each token is scored in the state in which it was drawn, or in one shortly before.

With one step per view this is the exact policy gradient of the sampler's token choices. A token then counts in one view, so
that the views of a loss can be gone through one by one.

In a model by blocks every block has its clean past beside it: its steps are counted by themselves, and one view holds the
same step of every block.

Shapes: B completions, M views, T positions, S steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unmask.diffusion.rng import Stream
from unmask.diffusion.views import Draw, Views, columns
from unmask.rl.methods.base import GRADIENT, Loss, Method, Rollout, Scores, policy_gradient, token_loss


def steps_within(rollout: Rollout) -> Tensor:
    """The step [B, T] that revealed a token, counted from the first step of its group; -1 for what was never revealed."""
    revealed_BT = rollout.steps_BT >= 0
    index_BT = rollout.group_BT.clamp_min(0)
    late_BT = torch.where(revealed_BT, rollout.steps_BT, torch.iinfo(torch.long).max)
    first_BT = torch.zeros_like(late_BT).scatter_reduce(1, index_BT, late_BT, "amin", include_self=False)
    return torch.where(revealed_BT, rollout.steps_BT - first_BT.gather(1, index_BT), -1)


def replay(rollout: Rollout, order_BT: Tensor) -> Views:
    """View v hides what comes v-th or later, and scores the completion's tokens that come v-th.

    Args:
        order_BT: from 0; -1 for what is never revealed.
    """
    never_B1T = ((order_BT < 0) & rollout.beyond_BT)[:, None]
    last = torch.where(rollout.completion_BT, order_BT, 0).amax() if order_BT.numel() else 0
    view_1M1 = torch.arange(int(last) + 1, device=order_BT.device)[None, :, None]
    hidden_BMT = (order_BT[:, None] >= view_1M1) | never_B1T
    target_BMT = (order_BT[:, None] == view_1M1) & rollout.completion_BT[:, None]
    return Views(hidden_BMT, target_BMT, target_BMT.float())


def every_step(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """A view for every step."""
    return replay(rollout, steps_within(rollout))


def merged_steps(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """Each completion's steps in `config.segments` stretches as equal as possible: its views are the same in any batch."""
    step_BT = steps_within(rollout)
    steps_B1 = step_BT.amax(1, keepdim=True) + 1
    segment_BT = step_BT * steps_B1.clamp_max(config.segments) // steps_B1.clamp_min(1)
    return replay(rollout, torch.where(step_BT >= 0, segment_BT, -1))


def shrunk_steps(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """`config.shrink` steps in a view."""
    step_BT = steps_within(rollout)
    return replay(rollout, torch.where(step_BT >= 0, step_BT // config.shrink, -1))


def sampled_steps(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """K = `config.samples` of each completion's S steps, without replacement, of weight S/K."""
    views = every_step(rollout, draw, config)
    scoring_BM = views.target_BMT.any(2)
    chosen_BM = torch.where(scoring_BM, draw.per_sequence(views.count, Stream.ORDER), torch.inf).argsort(1)[:, : config.samples]
    chosen_BMT = chosen_BM[:, :, None].expand(-1, -1, rollout.ids_BT.shape[1])
    steps_B1 = scoring_BM.sum(1, keepdim=True)
    weight_B11 = (steps_B1 / steps_B1.clamp(1, config.samples))[:, :, None]
    hidden_BMT, target_BMT = (mask_BMT.gather(1, chosen_BMT) for mask_BMT in (views.hidden_BMT, views.target_BMT))
    return Views(hidden_BMT, target_BMT, target_BMT * weight_B11)


def left_to_right(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """A view for every token, which hides it and all that stands behind it (in a model by blocks: in its block)."""
    canvas_BT = rollout.completion_BT | rollout.beyond_BT
    as_steps = replace(rollout, steps_BT=torch.where(canvas_BT, columns(rollout.ids_BT), -1))
    return replay(as_steps, steps_within(as_steps))


def trace_loss(scores: Scores, config: Any) -> Loss:
    """The surrogate of tokens. With `aggregation: view` the divergence is summed over a view's tokens, where the surrogate is their mean,
    as TraceRL's code for LLaDA has it."""
    if config.aggregation != "view":
        return token_loss(scores, config)
    return token_loss(scores, config, torch.where(scores.share_BT > 0, 1 / scores.share_BT, 0))


REPLAY: dict[str, Any] = {"separable": True, "partial": False}
ON_POLICY: dict[str, Any] = {"loss": policy_gradient, "uses": GRADIENT, "on_policy": True, **REPLAY}
# CJ-GRPO (Zhou et al. 2025)
CJ_GRPO = Method("cj-grpo", every_step, defaults={"aggregation": "step"}, **REPLAY)
# d2 (Wang et al. 2025)
STEP_MERGE = Method("step-merge", merged_steps, plan_uses=("segments",), **REPLAY)
# TraceRL (Wang et al. 2025): as its code has it for LLaDA, and for SDAR.
TRACE_RL = Method(
    "trace-rl",
    shrunk_steps,
    loss=trace_loss,
    plan_uses=("shrink",),
    defaults={
        "epsilon": 0.2,
        "advantage": "population-z-score",
        "beta": 0.01,
        "kl_to": "old",
        "aggregation": None,
        "difficulty": [0.2, 0.8],
    },
    by_attention={
        "causal": {"aggregation": "view"},
        "bidirectional": {"aggregation": "view"},
        "block_causal": {"aggregation": "view-constant", "log_ratio_clamp": 10.0},
    },
    **REPLAY,
)
# DiPO (2512.22234)
DIPO = Method(
    "dipo",
    every_step,
    **REPLAY,
    defaults={"epsilon": 0.2, "epsilon_high": 0.28, "log_ratio_clamp": 10.0, "advantage": "z-score", "drop_equal_groups": True},
)
# AGRPO (2510.04019)
AGRPO = Method("agrpo", sampled_steps, plan_uses=("samples",), defaults={"samples": 8, "aggregation": "constant"}, **ON_POLICY)
# JustGRPO (2601.15165)
JUST_GRPO = Method(
    "just-grpo",
    left_to_right,
    defaults={"advantage": "z-score", "policy": "left_to_right", "aggregation": "constant", "drop_equal_groups": True},
    fixed=("policy", "steps"),
    **ON_POLICY,
)
