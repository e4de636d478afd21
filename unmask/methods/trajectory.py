"""Trajectory replay (CJ-GRPO, Zhou et al. 2025): one view per denoising step, each token scored in the state it was drawn in.

With one step per view this is the exact policy gradient of the sampler's token choices. `config.segments` merges steps into
that many views (d2's StepMerge, Wang et al. 2025): fewer passes, a token then sees what was revealed before its segment.
"""

from __future__ import annotations

from typing import Any

import torch

from unmask.diffusion.views import Draw, Views
from unmask.methods.base import Method, Rollout


def plan(rollout: Rollout, draw: Draw, config: Any) -> Views:
    """View v hides what was revealed in segment v or later, and scores what was revealed in it."""
    steps_B1 = rollout.steps_BT.amax(1, keepdim=True) + 1  # of each completion by itself: its views are the same in any batch
    segments_B1 = steps_B1.clamp_max(config.segments) if config.segments else steps_B1
    segment_BT = torch.where(rollout.steps_BT >= 0, rollout.steps_BT * segments_B1 // steps_B1, -1)
    never_BT = (rollout.steps_BT < 0) & rollout.beyond_BT
    view_1V1 = torch.arange(int(segments_B1.max()), device=segment_BT.device)[None, :, None]
    hidden_BVT = (segment_BT[:, None] >= view_1V1) | never_BT[:, None]
    scored_BVT = (segment_BT[:, None] == view_1V1) & rollout.completion_BT[:, None]
    return Views(hidden_BVT, scored_BVT, scored_BVT.float())


CJ_GRPO = Method("cj-grpo", plan)
