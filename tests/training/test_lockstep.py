"""Processes that share the weights out make equally many passes, whatever each has to do. Two that really do: see test_sharding.py."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.toy import KINDS, toy
from unmask.errors import GenerationError
from unmask.training import lockstep

MODELS: dict[str, dict[str, Any]] = {name: {"kind": name} for name in KINDS} | {
    "causal": {"attention": ("causal", None, True)},
    "causal context": {"attention": ("block_causal", 3, True), "causal_context": True},
    "time embedding": {"time_embedding": True},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (2, 2), (1, 4), (3, 1), (0, 3)])
def test_a_process_that_is_through_goes_along_with_the_others(mine, theirs, fails, model, monkeypatch):
    lm = toy(**MODELS[model])
    said: list[bool] = []

    def gather(passing: torch.Tensor) -> torch.Tensor:
        said.append(bool(passing))
        return torch.tensor([passing.item(), len(said) <= theirs])  # of the other process: so many passes, then none

    passes: list[bool] = []
    monkeypatch.setattr(lockstep, "gather", gather)
    lm.model.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    before: Any = dict(lm.model._forward_pre_hooks)
    with suppress(GenerationError), lockstep.lockstep(lm, lm.device):
        for _ in range(mine):
            lm.logits(torch.tensor([[4, 5]]))
        if fails:
            raise GenerationError("NaN")
    assert len(passes) == max(mine, theirs)
    assert said == [True] * mine + [False] * (max(mine, theirs) - mine + 1)  # once before each pass, and when all are through
    assert passes == [True] * mine + [False] * (len(passes) - mine) and lm.model._forward_pre_hooks == before
