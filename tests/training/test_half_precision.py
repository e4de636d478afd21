"""float16 with scaled losses, on a CPU: torch can, and accelerate is made to. (bfloat16 is tested in
`test_hardware_checks.py`.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.tiny_runs import equal, low_ids, make, weights
from unmask.training import config
from unmask.training.trainer import DiffusionTrainer

VERBS: dict[str, dict[str, Any]] = {"pretrain": {}, "sft": {}, "dpo": {}, "grpo": {"reward": low_ids}}


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "amp_supported", lambda bf16: True)


def in_float16(verb: str, folder: Path, scale: float, **more: Any) -> DiffusionTrainer:
    trainer = make(verb, folder, fp16=True, **VERBS[verb] | more)
    assert trainer.args.fp16
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return trainer


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("verb", VERBS)
def test_it_learns_as_in_float32(verb, tmp_path):
    plain, half = make(verb, tmp_path / "plain", **VERBS[verb]), in_float16(verb, tmp_path / "half", 2.0**8)
    seen: list[torch.dtype] = []
    half.lm.model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, args, out: seen.append(out.dtype)
    )
    start = weights(half.lm)
    for trainer in (plain, half):
        trainer.train()
    assert torch.float16 in seen and {weight.dtype for weight in half.lm.model.parameters()} == {
        torch.float32
    }
    assert not equal(weights(half.lm), start)
    found, expected = (
        [line["loss"] for line in trainer.state.log_history if "loss" in line] for trainer in (half, plain)
    )
    assert len(found) == 2 and found == pytest.approx(expected, rel=0.05, abs=0.05)


@pytest.mark.usefixtures("scaled")
def test_a_step_that_overflows_is_left_out_and_the_scale_halved(tmp_path):
    trainer = in_float16("sft", tmp_path, 2.0**40, max_steps=1)
    start = weights(trainer.lm)
    trainer.train()
    assert equal(weights(trainer.lm), start) and trainer.accelerator.scaler.get_scale() == 2.0**39
