"""The host reads few values of a training step from the device, and dispatches few operations: each read
waits for all that came before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dispatch_counts import Counts
from tests.tiny import build_lm
from tests.training.tiny_runs import settings
from unmask.models.diffusion_lm import DiffusionLM
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.supervised.sft import SFTConfig, SFTTrainer
from unmask.training.trainer import DiffusionTrainer

STEPS = 4
ALPHABET = "abcdefghij"


def qwen3_lm() -> DiffusionLM:
    """A bidirectional Qwen3 of four layers."""
    sizes = {"width": 64, "intermediate_size": 128, "layers": 4, "context": None}
    heads = {"heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return build_lm("qwen3", ALPHABET, ids=["eos_token_id"], **sizes, **heads)


def text(count: int) -> str:
    return "".join(ALPHABET[int(index)] for index in torch.randint(len(ALPHABET), (count,)))


def run(folder: Path) -> dict[str, Any]:
    return settings(folder, max_steps=STEPS, per_device_train_batch_size=8, logging_steps=1000)


def per_step(trainer: DiffusionTrainer) -> tuple[float, float]:
    """Reads and operations per step of training."""
    with Counts() as counts:
        trainer.train()
    return counts.reads / STEPS, counts.operations / STEPS


def test_steps_of_fine_tuning(tmp_path):
    rows = [{"prompt": text(12), "completion": text(12)} for _ in range(64)]
    reads, operations = per_step(SFTTrainer(qwen3_lm(), SFTConfig(**run(tmp_path)), train_dataset=rows))
    assert reads <= 2 and operations <= 1600


@pytest.mark.slow
def test_steps_of_preference_optimization(tmp_path):
    """Eight views, which share passes where they are short; also against a reference that is not stored."""
    rows = [{"prompt": text(12), "chosen": text(10), "rejected": text(6)} for _ in range(32)]
    for number, more in enumerate(({}, {"reference": "frozen"})):
        reads, operations = per_step(
            DPOTrainer(qwen3_lm(), args=DPOConfig(**run(tmp_path / str(number)), **more), train_dataset=rows)
        )
        assert reads <= 4 and operations <= 9000


def test_steps_of_reinforcement_learning_without_the_sampler(tmp_path, monkeypatch):
    """Those of the sampler are counted in its own tests; here its completions are given."""
    trainer = GRPOTrainer(
        qwen3_lm(),
        lambda completions, **_: [float(len(set(completion))) for completion in completions],
        GRPOConfig(**run(tmp_path), max_completion_length=16, steps=8),
        [{"prompt": text(12)} for _ in range(64)],
    )
    sampled = trainer.sample([trainer.train_dataset[index] for index in range(8)], temperature=1.0, step=0)
    monkeypatch.setattr(trainer, "sample", lambda *_, **__: sampled)
    reads, operations = per_step(trainer)
    assert reads <= 6 and operations <= 1700
