"""Likelihoods, losses and weights that the authors' own code gave for the same model, rows and masks
(data/published.json names it).

Shapes: B rows, M views, T positions, D hidden width, K vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.published import HEAD_DK, LENGTH, scored
from unmask.diffusion.log_probs import weighted_cross_entropy
from unmask.diffusion.rng import RngStream
from unmask.diffusion.schedules import Noise, get_schedule
from unmask.diffusion.views import Views, cart_weights, exact_count_views, group_sizes, random_views

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published.json").read_text())
IDS_BT, PROMPT = torch.tensor(PUBLISHED["ids"]), PUBLISHED["prompt"]
NOISE = Noise(get_schedule("linear"))


class Injected:
    """A MaskRNG with which a plan hides the tokens that the published code hid, at the same times."""

    rows_before_B = None

    def __init__(self, hidden_BMT: Tensor, time_BM: Tensor):
        self.hidden_BMT, self.time_BM, self.key_B = hidden_BMT, time_BM, torch.arange(len(hidden_BMT))

    def uniform(self, position_BT: Tensor, views: int, stream: RngStream) -> Tensor:
        if stream == RngStream.TIME:
            return self.time_BM[:, :, None].expand(-1, -1, position_BT.shape[1])
        return torch.where(self.hidden_BMT, 0.0, 1 - 2.0**-53).double()


def at_times(record: dict[str, Any]) -> tuple[Views, Tensor]:
    """Views with the recorded masks and times, and their groups [B, T], which are whole rows."""
    group_BT = torch.tensor(record["maskable"]) - 1
    time_BM = (torch.tensor(record["time"], dtype=torch.float64)[:, None] - NOISE.low) / (
        NOISE.high - NOISE.low
    )
    draw: Any = Injected(torch.tensor(record["hidden"]).bool()[:, None], time_BM)
    return random_views(group_BT, draw, NOISE), group_BT


def test_the_likelihood_is_lladas_given_its_masks():
    """Each of its draws is a view of an exact count; its estimate is the mean over them."""
    record = PUBLISHED["of"]["likelihood"]
    hidden_BMT = torch.tensor(record["hidden"]).bool()[None]
    views, size = hidden_BMT.shape[1], LENGTH - PROMPT
    group_BT = torch.where(torch.arange(LENGTH) >= PROMPT, 0, -1)[None]
    time_BM = (hidden_BMT.sum(2) - 0.5) / size * views - torch.arange(views)  # undoes the strata
    draw: Any = Injected(hidden_BMT, time_BM)
    plan = exact_count_views(group_BT, draw, num_views=views)
    assert torch.equal(plan.hidden_BMT, hidden_BMT)
    bound = (plan.weight_BMT * scored(IDS_BT[:1], HEAD_DK, plan)).sum()
    assert bound.item() == pytest.approx(record["loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["mdlm, token", "mdlm, sequence", "sft of d1"])
def test_losses_are_the_published_ones_given_their_masks_and_times(name):
    record = PUBLISHED["of"][name]
    views, group_BT = at_times(record)
    assert torch.equal(views.hidden_BMT[:, 0], torch.tensor(record["hidden"]).bool())
    if name == "mdlm, sequence":
        items, weight_BMT = len(IDS_BT), views.weight_BMT / group_sizes(group_BT)[:, None]
    else:
        items, weight_BMT = int((group_BT >= 0).sum()), views.weight_BMT
    head_DK = HEAD_DK.clone().requires_grad_()
    shared = Views(views.hidden_BMT, views.target_BMT, weight_BMT)
    loss = weighted_cross_entropy(scored(IDS_BT, head_DK, shared), shared) / items
    loss.backward()
    assert loss.item() == pytest.approx(record["loss"], rel=1e-6)
    torch.testing.assert_close(
        head_DK.grad, torch.tensor(record["gradient"], dtype=torch.float64), rtol=2e-6, atol=2e-7
    )


def test_the_loss_of_diffullama_is_divided_by_the_hidden_tokens_of_a_micro_batch():
    record = PUBLISHED["of"]["diffullama"]
    views, group_BT = at_times(record)
    head_DK = HEAD_DK.clone().requires_grad_()
    loss = weighted_cross_entropy(scored(IDS_BT, head_DK, views), views) / (group_BT >= 0).sum()  # ours
    loss = loss * (group_BT >= 0).sum() / views.hidden_BMT.sum()
    loss.backward()
    assert loss.item() == pytest.approx(record["loss"], rel=1e-6)
    torch.testing.assert_close(
        head_DK.grad, torch.tensor(record["gradient"], dtype=torch.float64), rtol=2e-6, atol=2e-7
    )


def test_the_cosine_schedule_of_mdlm_has_a_name():
    record, schedule = PUBLISHED["of"]["mdlm, cosine"], get_schedule("mdlm-cosine")
    time_N, rate_N, weight_N = (
        torch.tensor(record[name], dtype=torch.float64) for name in ("time", "rate", "weight")
    )
    # it leaves 0.001 of the tokens visible at t = 1
    torch.testing.assert_close(0.999 * schedule.mask_rate(time_N), rate_N)
    torch.testing.assert_close(schedule.weight(time_N), weight_N)
    assert ((get_schedule("cosine").mask_rate(time_N) - rate_N).abs() > 0.05).any()  # ours is another one
    block = PUBLISHED["of"]["bd3lm, cosine"]  # hides 0.001 more, and adds as much to a divisor
    torch.testing.assert_close(torch.tensor(block["rate"], dtype=torch.float64), rate_N + 0.001)
    ratio_N = torch.tensor(block["weight"], dtype=torch.float64) / weight_N
    torch.testing.assert_close(ratio_N, rate_N / (rate_N + 0.002))


def test_cart_weights_are_dreams_given_the_masks():
    record = PUBLISHED["of"]["cart"]
    hidden_BMT = torch.tensor(record["hidden"]).bool()[:, None]
    rows_BT = torch.ones_like(IDS_BT)
    views = cart_weights(Views(hidden_BMT, hidden_BMT, hidden_BMT.float()), rows_BT, rows_BT, p=record["p"])
    torch.testing.assert_close(views.weight_BMT[:, 0], torch.tensor(record["weight"]), rtol=1e-5, atol=1e-6)
