"""Processes with sharded weights make equally many passes, for any work of each. test_sharding.py runs two
real ones."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.errors import raises
from tests.tiny import KINDS, toy_lm
from unmask.errors import GenerationError, TrainingError
from unmask.generation.remote.http import RemoteError
from unmask.training import distributed

MODELS: dict[str, dict[str, Any]] = {name: {"kind": name} for name in KINDS} | {
    "causal": {"attention": ("causal", None, True)},
    "causal context": {"attention": ("block_causal", 3, True), "causal_context": True},
    "time embedding": {"time_embedding": True},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (2, 2), (1, 4), (3, 1), (0, 3)])
def test_a_process_that_is_through_goes_along_with_the_others(mine, theirs, fails, model, monkeypatch):
    lm = toy_lm(**MODELS[model])
    said: list[bool] = []

    def gather(passing: torch.Tensor) -> torch.Tensor:
        said.append(bool(passing))
        # the other process: this many passes, then none
        return torch.tensor([passing.item(), len(said) <= theirs])

    passes: list[bool] = []
    monkeypatch.setattr(distributed, "gather", gather)
    lm.model.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    before: Any = dict(lm.model._forward_pre_hooks)
    with suppress(GenerationError), distributed.lockstep(lm, lm.device):
        for _ in range(mine):
            lm.logits(torch.tensor([[4, 5]]))
        if fails:
            raise GenerationError("NaN")
    assert len(passes) == max(mine, theirs)
    # before each pass, and at the end
    assert said == [True] * mine + [False] * (max(mine, theirs) - mine + 1)
    assert passes == [True] * mine + [False] * (len(passes) - mine) and lm.model._forward_pre_hooks == before


def test_what_fails_on_one_process_fails_on_all(monkeypatch):
    """Seen from one process; the others are simulated."""
    told: list[Any] = []

    def gather(own: list[Any]) -> list[Any]:
        told[:] = own
        return [*others, *own]

    monkeypatch.setattr(distributed, "gather_object", gather)
    others: list[Any] = []
    with distributed.failing_together("rollout"):
        pass
    assert told == []
    others = [(RemoteError, "h: it is gone")]
    with raises(RemoteError, where="rollout"), distributed.failing_together("rollout"):
        pass
    with raises(RemoteError, where="rollout"), distributed.failing_together("rollout"):
        # all raise the same: some errors leave a checkpoint, which takes every process
        raise GenerationError("NaN")
    with raises(RemoteError, where=None), distributed.failing_together("rollout"):
        raise RemoteError("mine")
    others = []
    with raises(TrainingError, where=None), distributed.failing_together("rollout"):
        raise TrainingError("mine")
    assert told == [(TrainingError, "mine")]
