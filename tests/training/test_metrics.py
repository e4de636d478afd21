"""A value that is not finite ends the run, with its cause."""

from __future__ import annotations

import pytest
import torch

from tests.errors import raises
from tests.training.tiny_runs import make
from unmask.errors import TrainingError
from unmask.training.metrics import check_finite


def test_weights_that_are_not_finite_are_told_from_a_rate_that_is_too_high(tmp_path):
    trainer = make("sft", tmp_path)
    with raises(TrainingError, where="step 0"):
        check_finite("loss", torch.tensor(torch.nan), trainer.lm.model, 0)
    with torch.no_grad():
        trainer.lm.model.model.norm.weight[0] = torch.nan
    with raises(TrainingError, where="step 0"):
        check_finite("loss", torch.tensor(torch.nan), trainer.lm.model, 0)


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_step_whose_numbers_are_not_finite_changes_no_weights(what, tmp_path):
    """Though they are read only after the backward passes of all its micro-batches."""
    trainer = make("sft", tmp_path, gradient_accumulation_steps=2)
    before = [weight.clone() for weight in trainer.lm.model.parameters()]
    if what == "loss":
        micro_loss, calls = trainer.micro_loss, iter([torch.nan, 1.0])
        trainer.micro_loss = lambda lm, batch: micro_loss(lm, batch) * next(calls)
    else:
        trainer.lm.model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    with raises(TrainingError, where="step 0"):
        trainer.train()
    assert all(
        torch.equal(weight, old) for weight, old in zip(trainer.lm.model.parameters(), before, strict=True)
    )
