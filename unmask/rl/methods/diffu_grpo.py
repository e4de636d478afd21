"""diffu-GRPO (Zhao et al. 2025, d1) and wd1 (Tang et al. 2025): one view that hides the whole completion and
a part of the prompt.

Each token's log-probability is conditioned on the prompt only; random prompt masks regularize repeated
updates.
"""

from __future__ import annotations

from dataclasses import replace

from unmask.diffusion.views import MaskRNG, Views, all_masked_views
from unmask.generation.rollout import Rollout
from unmask.rl.advantages import ScaleRewards
from unmask.rl.losses import LossType
from unmask.rl.methods.base import PolicyGradientMethod, TokenMethod, plan_setting, register


def completion_hidden(rollout: Rollout, draw: MaskRNG, prompt_mask_rate: float) -> Views:
    """The completion hidden, all of it targets; prompt tokens hidden with probability `prompt_mask_rate`."""
    views = all_masked_views(rollout.completion_BT, rollout.prompt_BT, draw, prompt_rate=prompt_mask_rate)
    return replace(views, hidden_BMT=views.hidden_BMT | rollout.beyond_BT[:, None])


@register
class DiffuGRPO(TokenMethod):
    """diffu-GRPO."""

    name = "diffu-grpo"
    partial = False
    prompt_mask_rate: float = plan_setting(0.15)

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        return completion_hidden(rollout, draw, self.prompt_mask_rate)


@register
class WD1(PolicyGradientMethod):
    """wd1: no ratio; a completion's weight is the group's softmax of its advantage, minus the softmax of its
    negative."""

    name = "wd1"
    partial = False
    scale_rewards: ScaleRewards = "softmax"
    loss_type: LossType | None = "sum"
    prompt_mask_rate: float = plan_setting(0.15)

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        return completion_hidden(rollout, draw, self.prompt_mask_rate)
