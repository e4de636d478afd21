"""diffu-GRPO (Zhao et al. 2025, d1) and wd1 (Tang et al. 2025): one view, the completion hidden whole, the prompt in part.

Each token's log-probability is taken given the prompt alone; random prompt masks regularise repeated updates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unmask.diffusion.views import Draw, Views, all_masked_views
from unmask.rl.methods.base import GRADIENT, Method, Rollout, policy_gradient


def plan(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """The completion hidden and scored; prompt tokens hidden with probability `config.prompt_mask_rate`."""
    views = all_masked_views(rollout.completion_BT, rollout.prompt_BT, draw, prompt_rate=config.prompt_mask_rate)
    return replace(views, hidden_BMT=views.hidden_BMT | rollout.beyond_BT[:, None])


DIFFU_GRPO = Method("diffu-grpo", plan, plan_uses=("prompt_mask_rate",), partial=False)
# No ratio: each completion is weighed by the group's softmax of its advantage, against that of its negative.
WD1 = Method(
    "wd1",
    plan,
    loss=policy_gradient,
    uses=GRADIENT,
    plan_uses=("prompt_mask_rate",),
    partial=False,
    defaults={"advantage": "softmax", "aggregation": "sum"},
)
