"""Methods that replay the sampler's steps: each token is predicted in the state in which it was drawn, or in
one shortly before.

With one step per view this is the gradient of the log-probability of the sampler's choices, if the order does
not depend on the drawn tokens (`remasking` random, left_to_right, margin or entropy) and tokens after the end
are trained on (from left to right they need not be). `confidence` keeps the tokens that were likely, which
are not distributed as the model draws them (figures in docs/rl.md). Each token is a target in one view, so
that the loss is a sum over views.

On a canvas of random tokens a view shows what a step saw, and its targets are the drawn tokens that the step
kept. Which are kept depends on entropies, not on draws. A position may be kept in many steps; each draw has
a loss of its own. The last step keeps the most probable tokens, which count as its draws. This would be the
gradient of the expected reward if they were, and if the weights did not change which tokens are kept
(tests/rl/methods/test_canvases.py measures the bias). In a canvas model each step is conditioned on the last
prediction, which has no gradient here.

In a block-causal model every block attends to its clean past: its steps are counted from its first, and one
view holds the same step of every block.

Shapes: B completions, M views, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import CanvasSteps, Drawn, MaskRNG, Views, columns
from unmask.generation.rollout import Rollout
from unmask.rl.advantages import ScaleRewards
from unmask.rl.losses import LossType
from unmask.rl.methods.base import (
    Loss,
    LossInputs,
    PolicyGradientMethod,
    TokenMethod,
    fixed,
    plan_setting,
    register,
)
from unmask.rl.methods.diffu_grpo import completion_hidden


def steps_within(rollout: Rollout) -> Tensor:
    """The step [B, T] that revealed a token, counted from the first step of its group; -1 for tokens that
    were never revealed."""
    revealed_BT = rollout.step_BT >= 0
    index_BT = rollout.group_BT.clamp_min(0)
    late_BT = torch.where(revealed_BT, rollout.step_BT, torch.iinfo(torch.long).max)
    first_BT = torch.zeros_like(late_BT).scatter_reduce(1, index_BT, late_BT, "amin", include_self=False)
    return torch.where(revealed_BT, rollout.step_BT - first_BT.gather(1, index_BT), -1)


def replay(rollout: Rollout, order_BT: Tensor) -> Views:
    """View v hides the tokens of order v and later; its targets are the completion's tokens of order v.

    Args:
        order_BT: numbers from 0; -1 for tokens that are never revealed.
    """
    never_B1T = ((order_BT < 0) & rollout.beyond_BT)[:, None]
    last = torch.where(rollout.completion_BT, order_BT, 0).amax() if order_BT.numel() else 0
    view_1M1 = torch.arange(int(last) + 1, device=order_BT.device)[None, :, None]
    hidden_BMT = (order_BT[:, None] >= view_1M1) | never_B1T
    target_BMT = (order_BT[:, None] == view_1M1) & rollout.completion_BT[:, None]
    return Views(hidden_BMT, target_BMT, target_BMT.float())


def replay_canvases(rollout: Rollout, canvases: CanvasSteps, begin_BM: Tensor, stop_BM: Tensor) -> Views:
    """View v shows the canvases of step `begin`; its targets are the drawn tokens that the last step before
    `stop` kept, which is the canvas's last one if that comes before."""
    shown_BST, kept_BST, temperature_BS, count_BT = canvases
    last_BMT = torch.minimum(stop_BM[:, :, None], count_BT[:, None]) - 1
    begin_BMT, most = begin_BM[:, :, None].expand_as(last_BMT), shown_BST.shape[1] - 1
    at_BMT = last_BMT.clamp(0, most)
    token_BMT = kept_BST.gather(1, at_BMT)
    target_BMT = (begin_BMT <= last_BMT) & (token_BMT >= 0) & rollout.completion_BT[:, None]
    hidden_BMT = (rollout.completion_BT | rollout.beyond_BT)[:, None].expand_as(target_BMT)
    drawn = Drawn(
        shown_BST.gather(1, begin_BMT.clamp_max(most)),
        token_BMT.clamp_min(0),
        temperature_BS[:, :, None].expand_as(kept_BST).gather(1, at_BMT),
        begin_BMT,
    )
    return Views(hidden_BMT, target_BMT, target_BMT.float(), replaced=drawn, canvas_steps=canvases)


def replay_stretches(rollout: Rollout, length: int = 1) -> Views:
    """A view for every `length` steps."""
    if (canvases := rollout.canvas_steps) is None:
        step_BT = steps_within(rollout)
        return replay(rollout, torch.where(step_BT >= 0, step_BT // length, -1))
    begin_M = torch.arange(0, canvases.shown_BST.shape[1], length, device=rollout.ids_BT.device)
    begin_BM = begin_M.expand(len(rollout.ids_BT), -1)
    return replay_canvases(rollout, canvases, begin_BM, begin_BM + length)


def replay_segments(rollout: Rollout, segments: int) -> Views:
    """A view for each of N stretches of a completion's S steps, N being `segments` or S if that is less;
    stretch i begins at step floor(i S / N)."""
    if (canvases := rollout.canvas_steps) is None:
        step_BT = steps_within(rollout)
        num_steps_B1 = step_BT.amax(1, keepdim=True) + 1
        number_B1 = num_steps_B1.clamp_max(segments)
        segment_BT = ((step_BT + 1) * number_B1 - 1) // num_steps_B1.clamp_min(1)
        return replay(rollout, torch.where(step_BT >= 0, segment_BT, -1))
    num_steps_B1 = canvases.count_BT.amax(1, keepdim=True)
    number_B1 = num_steps_B1.clamp(1, segments)
    place_M = torch.arange(min(segments, canvases.shown_BST.shape[1]) + 1, device=rollout.ids_BT.device)
    edge_BM = place_M * num_steps_B1 // number_B1
    return replay_canvases(rollout, canvases, edge_BM[:, :-1], edge_BM[:, 1:])


def sampled_steps(rollout: Rollout, draw: MaskRNG, samples: int) -> Views:
    """K = `samples` of each completion's S steps, without replacement, with weight S/K."""
    views = replay_stretches(rollout)
    has_targets_BM = views.target_BMT.any(2)
    chosen_BM = torch.where(
        has_targets_BM, draw.per_sequence(views.count, RngStream.ORDER), torch.inf
    ).argsort(1)[:, :samples]
    chosen_BMT = chosen_BM[:, :, None].expand(-1, -1, rollout.ids_BT.shape[1])
    num_steps_B1 = has_targets_BM.sum(1, keepdim=True)
    weight_B11 = (num_steps_B1 / num_steps_B1.clamp(1, samples))[:, :, None]
    some = views.of_planes(lambda plane_BMT: plane_BMT.gather(1, chosen_BMT))
    return replace(some, weight_BMT=some.target_BMT * weight_B11)


@dataclass(frozen=True, kw_only=True)
class ReplayMethod(TokenMethod):
    """The surrogate of tokens in the states in which they were drawn: a view for every step."""

    separable = True
    partial = False
    random_tokens = True

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        return replay_stretches(rollout)


@dataclass(frozen=True, kw_only=True)
class OnPolicyReplayMethod(PolicyGradientMethod):
    """The gradient of the kept tokens' log-probabilities. It has no ratio for a second update on the same
    rollout."""

    separable = True
    partial = False
    num_iterations: int = fixed(1)

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        return replay_stretches(rollout)


@register
class CJGRPO(ReplayMethod):
    """CJ-GRPO (Zhou et al. 2025)."""

    name = "cj-grpo"
    loss_type: LossType | None = "step"


@register
class StepMerge(ReplayMethod):
    """d2's step merging (Wang et al. 2025): views of stretches of a completion's steps, as equal as possible,
    and the same in any batch. As published with `prompt_mask_rate: 0.15`."""

    name = "step-merge"
    segments: int = plan_setting(4)
    prompt_mask_rate: float = plan_setting(0.0)

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        views = replay_segments(rollout, self.segments)
        prompt_B1T = (
            completion_hidden(rollout, draw, self.prompt_mask_rate).hidden_BMT & rollout.prompt_BT[:, None]
        )
        return replace(views, hidden_BMT=views.hidden_BMT | prompt_B1T)


@register
class TraceRL(ReplayMethod):
    """TraceRL (Wang et al. 2025), as in its code for LLaDA, or in block-causal models for SDAR: `shrink`
    steps per view."""

    name = "trace-rl"
    epsilon: float = 0.2
    scale_rewards: ScaleRewards = "population"
    beta: float = 0.01
    kl_to: str = "old"
    loss_type: LossType | None = None
    difficulty: list[float] | None = field(default_factory=lambda: [0.2, 0.8])
    shrink: int = plan_setting(1)

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        return replay_stretches(rollout, self.shrink)

    def loss(self, inputs: LossInputs) -> Loss:
        """The surrogate of tokens. With `loss_type: view` the divergence is summed over a view's tokens,
        where the surrogate is their mean, as in the code for LLaDA."""
        weight_BT = inputs.token_weight_BT
        return self.token_loss(
            inputs, torch.where(weight_BT > 0, 1 / weight_BT, 0) if self.loss_type == "view" else 1.0
        )

    def for_attention(self, attention: str) -> Self:
        if attention != "block_causal":
            return replace(self, loss_type=self.loss_type or "view")
        return replace(
            self,
            loss_type=self.loss_type or "view-constant",
            log_ratio_clamp=self.log_ratio_clamp or 10.0,
        )


@register
class DiPO(ReplayMethod):
    """DiPO (2512.22234)."""

    name = "dipo"
    epsilon: float = 0.2
    epsilon_high: float | None = 0.28
    log_ratio_clamp: float | None = 10.0
    scale_rewards: ScaleRewards = "group"
    filter_zero_std_groups: bool = True


@register
class AGRPO(OnPolicyReplayMethod):
    """AGRPO (2510.04019): `samples` random steps of each completion. The published code means over them:
    `loss_type: step`."""

    name = "agrpo"
    random_tokens = True
    loss_type: LossType | None = "dr_grpo"
    samples: int = plan_setting(8)

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        return sampled_steps(rollout, draw, self.samples)


@register
class ExactGradient(OnPolicyReplayMethod):
    """The gradient of the expected reward, without bias: every token that was drawn, after the end too, where
    it was drawn.

    The order is random, and so does not depend on the drawn tokens. All tokens, completions and groups have
    the same weight.
    """

    name = "exact-gradient"
    biased_by = ("logprob_temperature", "mask_truncated_completions", "constraint")
    scale_rewards: ScaleRewards = fixed("leave-one-out")
    loss_type: LossType | None = fixed("dr_grpo")
    difficulty: list[float] | None = fixed(None)
    filter_zero_std_groups: bool = fixed(False)
    remasking: str = fixed("random")
    after_eos: str = fixed("train")


@register
class JustGRPO(OnPolicyReplayMethod):
    """JustGRPO (2601.15165): sampled and predicted from left to right, one token at a time."""

    name = "just-grpo"
    scale_rewards: ScaleRewards = "group"
    loss_type: LossType | None = "dr_grpo"
    filter_zero_std_groups: bool = True
    remasking: str = fixed("left_to_right")
    steps: int | None = fixed(None)

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        """A view for every token, which hides it and all that comes after it (in a block-causal model: within
        its block)."""
        canvas_BT = rollout.completion_BT | rollout.beyond_BT
        as_steps = replace(rollout, step_BT=torch.where(canvas_BT, columns(rollout.ids_BT), -1))
        return super().plan(as_steps, draw)
