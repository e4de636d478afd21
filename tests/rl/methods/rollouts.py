"""Rollouts of tiny models with random log-probabilities, for the tests of methods.

Shapes: B completions, M views, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn import functional as F

from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.views import MaskRNG, Views
from unmask.generation import sampler
from unmask.generation.rollout import cut_at_end, make_rollout
from unmask.rl.config import GRPOConfig
from unmask.rl.losses import count_items, token_weights
from unmask.rl.methods import LossInputs, Rollout, get_method
from unmask.rl.methods.base import averaging_units, settings_of
from unmask.rl.updates import learnable, plan_views

PROMPTS = [[4, 5, 6], [7], [4, 5, 6], [9, 8, 7, 6, 5], [7, 4], [6, 6]]
LENGTH = 8


def stopping(attention="causal", block_size=None, logit_shift=None):
    """A model that often ends early, so that a part of its canvases is never denoised."""
    return float64_lm("phi", attention, block_size, logit_shift, eos_bias=1.0)


@cache
def rollout_of(lm, **settings):
    """A generation at temperature 1 with these sampler settings, and its rollout."""
    defaults = {"max_new_tokens": LENGTH, "temperature": 1.0, "trace": True}
    generation = cut_at_end(lm, sampler.generate(lm, PROMPTS, SamplerConfig(**(defaults | settings))))
    return generation, make_rollout(lm, generation, slice(None), settings.get("block_size"))


def usual(attention, block_size=None, /, **settings):
    """A model with a pattern, and a rollout of it; bidirectional models decode in blocks of two tokens."""
    lm = stopping(attention, block_size)
    if attention == "bidirectional":
        settings = {"block_size": 2} | settings
    return lm, rollout_of(lm, **settings)[1]


def tensors(rollout: Rollout) -> dict[str, torch.Tensor]:
    return {name: part for name, part in vars(rollout).items() if isinstance(part, torch.Tensor)}


def one(rollout: Rollout, row: int) -> Rollout:
    """One row of a rollout, without its padding."""
    own_T = rollout.document_BT[row] > 0
    return replace(
        rollout,
        **{name: part_BT[row][None, own_T] for name, part_BT in tensors(rollout).items()},
        one_document=True,
    )


def whole(group_BT: torch.Tensor) -> Rollout:
    """Completions whose tokens are all maskable; their ids do not matter."""
    completion_BT = group_BT >= 0
    ones_BT = torch.ones_like(group_BT)
    blocks_BT = torch.where(completion_BT, 0, -1)
    return Rollout(ones_BT, ones_BT, ~completion_BT, completion_BT, blocks_BT, group_BT, blocks_BT)


def padded(lm, rollout: Rollout, views: Views, count: int = 3) -> tuple[Rollout, Views]:
    """The same with padding on the left."""
    fills = {"step_BT": -1, "block_BT": -1}
    moved = {
        name: F.pad(part_BT, (count, 0), value=fills.get(name, 0))
        for name, part_BT in tensors(rollout).items()
    }
    moved = replace(rollout, **moved, one_document=False)
    group_BT = noise_groups(lm, moved.completion_BT | moved.beyond_BT, moved.document_BT)
    return replace(moved, group_BT=group_BT), Views(
        *(F.pad(part_BMT, (count, 0)) for part_BMT in masks(views))
    )


def keys(rollout: Rollout) -> torch.Tensor:
    """A key for each completion, by its place in the batch."""
    return torch.arange(len(rollout.ids_BT))


def held(name: str) -> dict[str, float]:
    """A KL term, for methods whose loss has one."""
    return {"beta": 0.1} if "beta" in settings_of(get_method(name)) else {}


def config(name, **more):
    """The settings of a method, with its defaults as users get them."""
    return GRPOConfig(output_dir="unused", method=name, use_cpu=True, max_completion_length=LENGTH, **more)


def plan(name, rollout, key_B=None, seed=0, iteration=0, end="mask", **more) -> Views:
    """A method's views, with tokens after the end treated as `after_eos` says."""
    draw, args = MaskRNG(seed, keys(rollout) if key_B is None else key_B, iteration), config(name, **more)
    return plan_views(lambda rollout: args.build_method().plan(rollout, draw), rollout, end)


def masks(views: Views) -> tuple[torch.Tensor, ...]:
    return views.hidden_BMT, views.target_BMT, views.weight_BMT


def states(views: Views, row: int, own_T: torch.Tensor) -> list[tuple[list, ...]]:
    """What the views of a row hide, score and weight, without views that score nothing."""
    parts = [part_BMT[row][:, own_T] for part_BMT in masks(views)]
    return [tuple(part_T.tolist() for part_T in view) for view in zip(*parts, strict=True) if view[1].any()]


def made_up(
    rollout: Rollout, views: Views, args: GRPOConfig, seed: int = 0, spread: float = 0.7
) -> tuple[LossInputs, torch.Tensor]:
    """Random LossInputs, and the number of items by which their loss is divided. The third completion does
    not count."""
    random = torch.Generator().manual_seed(seed)

    def around(center, width):
        chance_BMT = 2 * torch.rand(views.target_BMT.shape, generator=random, dtype=torch.float64) - 1
        return torch.where(views.target_BMT, center + width * chance_BMT, 0)

    policy_BMT = around(-2.0, 1.0)
    old_BMT, reference_BMT = (around(policy_BMT, spread) for _ in range(2))
    kept_B1 = (keys(rollout) != 2)[:, None]
    advantage_B1 = torch.tensor([1.5, -1.0, 3.0, 0.5, -2.0, -0.5], dtype=torch.float64)[: len(kept_B1), None]
    loss_mask_BT = learnable(rollout, views) & kept_B1
    loss_type = args.build_method().loss_type
    unit_BT = averaging_units(rollout, views, loss_type)
    token_weight_BT = token_weights(loss_mask_BT, loss_type, unit_BT, args.max_completion_length)
    held_to = (old_BMT if args.kl_to == "old" else reference_BMT) if args.beta else None
    scores = LossInputs(
        policy_BMT.requires_grad_(), old_BMT, held_to, rollout, views, advantage_B1, token_weight_BT
    )
    return scores, count_items(loss_mask_BT, loss_type, unit_BT)


@dataclass(frozen=True)
class Completion:
    """One completion of a batch, for slow code: log-probabilities by view and position, and lists of
    positions."""

    policy: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor | None
    weight: torch.Tensor
    hidden: list[list[int]]
    """The scored positions of each view."""
    tokens: list[int]
    steps: list[int]
    groups: list[int]
    advantage: float
    views: int

    def value(self, log_prob_MT, token):
        """The weighted log-probability of a token."""
        return sum(self.weight[view, token] * log_prob_MT[view, token] for view in range(self.views))


def completions(scores: LossInputs) -> list[Completion]:
    """The completions that count."""
    made = []
    for row in keys(scores.rollout).tolist():
        if row == 2:
            continue
        made.append(
            Completion(
                scores.policy_BMT[row],
                scores.old_BMT[row],
                None if scores.reference_BMT is None else scores.reference_BMT[row],
                scores.views.weight_BMT[row].double(),
                [view_T.nonzero().flatten().tolist() for view_T in scores.views.target_BMT[row]],
                scores.rollout.completion_BT[row].nonzero().flatten().tolist(),
                scores.rollout.step_BT[row].tolist(),
                scores.rollout.group_BT[row].tolist(),
                scores.advantage_BT[row].item(),
                scores.views.count,
            )
        )
    return made


def clipped(ratio, advantage, low, high):
    bounded = min(max(ratio, torch.tensor(1 - low)), torch.tensor(1 + high))
    return -min(ratio * advantage, bounded * advantage)


def k3(reference, policy):
    return (reference - policy).exp() - (reference - policy) - 1


def assert_loss(name, by_hand, spread=0.7, **settings):
    """Check that the value and the gradients of a method's loss equal those of slow code, `by_hand` of all
    completions."""
    args = config(name, **settings)
    for attention, block_size in (("bidirectional", None), ("block_causal", 3)):
        _, rollout = usual(attention, block_size, stop_at_eos=args.stop_at_eos)
        views = plan(name, rollout, **settings)
        for seed in range(2):
            scores, items = made_up(rollout, views, args, seed, spread)
            loss = args.build_method().loss(scores).total / items
            expected = by_hand(completions(scores), args)
            gradients = [torch.autograd.grad(value, scores.policy_BMT)[0] for value in (loss, expected)]
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
            assert (gradients[0] != 0).any()
