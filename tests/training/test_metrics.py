"""A value that is not finite ends the run, with its cause."""

from __future__ import annotations

import pytest
import torch

from tests.training.tiny_runs import make
from unmask.errors import TrainingError
from unmask.training.metrics import finite


def test_weights_that_are_not_finite_are_told_from_a_rate_that_is_too_high(tmp_path):
    trainer = make("sft", tmp_path)
    with pytest.raises(TrainingError, match=r"the loss is nan, although all weights are finite\. Lower the learning rate"):
        finite(trainer, "loss", torch.tensor(torch.nan))
    with torch.no_grad():
        trainer.lm.model.model.norm.weight[0] = torch.nan
    with pytest.raises(TrainingError, match=r"the loss is nan, because weights are not finite \(.*norm.weight\). Resume from a checkpoint"):
        finite(trainer, "loss", torch.tensor(torch.nan))
