"""Losses and gradients recorded from the authors' code for the same model, completions and masks
(data/published.json names it).

The model is that of tests/published.py. The old policy has H + 0.2 cos, the reference H + 0.2 sin.

Shapes: B completions, M views, T positions, D hidden width, K vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.published import HEAD_DK, OLD_DK, REFERENCE_DK, scored
from tests.rl.methods.rollouts import config
from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import Views
from unmask.rl.advantages import advantages
from unmask.rl.losses import count_items, token_weights
from unmask.rl.methods import LossInputs, Rollout
from unmask.rl.methods.base import averaging_units
from unmask.rl.updates import learnable, plan_views

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published.json").read_text())
IDS_BT, REWARD_B = torch.tensor(PUBLISHED["ids"]), torch.tensor(PUBLISHED["reward"])
BATCH, LENGTH = IDS_BT.shape
PROMPT = PUBLISHED["prompt"]
CASES: dict[str, dict[str, Any]] = {
    "diffu-grpo": {"prompt_mask_rate": 0.5},
    "wd1": {"prompt_mask_rate": 0.5},
    "coupled-grpo": {"after_eos": "noise"},
    "spg": {},
    "espo": {"after_eos": "train", "samples": 2},
    "cj-grpo": {"after_eos": "train"},
    "just-grpo": {"after_eos": "train"},
    "agrpo": {"after_eos": "train", "loss_type": "step", "samples": 2},
    "step-merge": {"prompt_mask_rate": 0.5, "segments": 3},
    "bgpo": {"after_eos": "train", "samples": 4},
    "gdpo": {"after_eos": "train", "scale_rewards": "group", "method_settings": {"exact_counts": False}},
    "trace-rl, llada": {"after_eos": "train", "loss_type": "view"},
    "trace-rl, sdar": {"after_eos": "train", "loss_type": "view-constant", "log_ratio_clamp": 10.0},
}
"""With what gives the published method, beside the settings that it was run with."""


def made(record: dict[str, Any]) -> Rollout:
    """The completions, up to and including their first EOS, in decoding blocks of two."""
    place_BT = torch.arange(LENGTH).expand(BATCH, -1) - PROMPT
    canvas_BT, end_BT = place_BT >= 0, torch.eq(IDS_BT, PUBLISHED["eos"])
    ended_BT = (end_BT & canvas_BT).cumsum(1)
    completion_BT = canvas_BT & ((ended_BT == 0) | ((ended_BT == 1) & end_BT))
    step_BT = torch.full_like(IDS_BT, -1)
    step_BT[:, PROMPT:] = torch.tensor(record.get("steps", [[0] * (LENGTH - PROMPT)] * BATCH))
    blocks_BT, group_BT = torch.where(canvas_BT, place_BT // 2, -1), torch.where(canvas_BT, 0, -1)
    return Rollout(IDS_BT, torch.ones_like(IDS_BT), ~canvas_BT, completion_BT, step_BT, group_BT, blocks_BT)


class Injected:
    """A MaskRNG by which a plan hides what the published code hid."""

    rows_before_B = None

    def __init__(self, name: str, record: dict[str, Any], hidden_BMT: Tensor, samples: int):
        self.name, self.hidden_BMT, self.samples, self.key_B = name, hidden_BMT, samples, torch.arange(BATCH)
        self.rate, self.drawn = record.get("rate", 0.5), record.get("drawn")

    def per_sequence(self, views: int, stream: RngStream) -> Tensor:
        if stream == RngStream.ORDER:  # of AGRPO's steps
            return torch.tensor(
                [[([*drawn, step]).index(step) for step in range(views)] for drawn in self.drawn],
                dtype=torch.float64,
            )
        assert stream == RngStream.TIME
        # coupled-GRPO's fraction
        return torch.full((BATCH, views), (self.rate - 0.2) / 0.6, dtype=torch.float64)

    def uniform(self, position_BT: Tensor, views: int, stream: RngStream) -> Tensor:
        if (
            stream == RngStream.TIME
        ):  # counts, each in the middle of its stratum: ESPO's from 0, BGPO's from 1
            size, first = (LENGTH - PROMPT + 1, 0) if self.name == "espo" else (LENGTH - PROMPT, 1)
            count_BM = self.hidden_BMT[:, : self.samples, PROMPT:].sum(2)
            time_BM = (count_BM - first + 0.5) / size * self.samples - torch.arange(self.samples)
            return time_BM[:, :, None].expand(-1, -1, LENGTH).double()
        partial_BMT = self.hidden_BMT[:, 1:2] if self.name == "coupled-grpo" else self.hidden_BMT[:, :views]
        return torch.where(partial_BMT, 0.1, 0.9).double()


def views_of(name: str, rollout: Rollout, hidden_BMT: Tensor, args: Any, record: dict[str, Any]) -> Views:
    """The method's own plan; of SPG, which draws blocks by permutations, the published masks as they are."""
    if name == "spg":
        target_BMT = hidden_BMT & rollout.completion_BT[:, None]
        return Views(hidden_BMT, target_BMT, target_BMT / target_BMT.sum(2, keepdim=True))
    draw: Any = Injected(name, record, hidden_BMT, args.samples)
    return plan_views(lambda rollout: args.build_method().plan(rollout, draw), rollout, args.after_eos)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_the_published_code(case):
    record, name = PUBLISHED["of"][case], case.split(",")[0]
    settings = {key: value for key, value in record["settings"].items() if key != "num_iterations"}
    if name == "wd1":
        settings = {}
    args = config(name, **settings | CASES[case])
    args.max_completion_length = LENGTH - PROMPT
    rollout, hidden_BMT = made(record), torch.tensor(record["hidden"]).bool().transpose(0, 1)
    rollout = rollout.whole() if args.after_eos == "train" else rollout
    views = views_of(name, rollout, hidden_BMT, args, record)
    assert torch.equal(views.hidden_BMT, hidden_BMT)  # the published masks, by our plan

    advantage_B = advantages(REWARD_B, torch.zeros(BATCH, dtype=torch.long), args.scale_rewards)
    if name != "wd1":  # whose published advantage is weighted_views in its loss
        torch.testing.assert_close(advantage_B, torch.tensor(record["advantage"]))
    head_DK = HEAD_DK.clone().requires_grad_()
    old_BMT = scored(IDS_BT, OLD_DK, views)
    reference_BMT = (
        (old_BMT if args.kl_to == "old" else scored(IDS_BT, REFERENCE_DK, views)) if args.beta else None
    )
    loss_mask_BT, unit_BT = learnable(rollout, views), averaging_units(rollout, views, args.loss_type)
    token_weight_BT = token_weights(loss_mask_BT, args.loss_type, unit_BT, args.max_completion_length)
    scores = LossInputs(
        scored(IDS_BT, head_DK, views),
        old_BMT,
        reference_BMT,
        rollout,
        views,
        advantage_B[:, None].double(),
        token_weight_BT.double(),
    )
    loss = args.build_method().loss(scores).total / count_items(loss_mask_BT, args.loss_type, unit_BT)
    # Published as a sum over the group; as a sum over the two tokens of a step.
    loss = loss * {"wd1": BATCH, "agrpo": 2}.get(name, 1)
    loss.backward()
    torch.testing.assert_close(
        head_DK.grad, torch.tensor(record["gradient"], dtype=torch.float64), rtol=2e-6, atol=2e-7
    )
    if record["loss"] is not None:  # those of just-grpo and agrpo return none
        assert loss.item() == pytest.approx(record["loss"], rel=2e-6, abs=1e-7)
