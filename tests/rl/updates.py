"""The ratios and divergences of the updates on a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.rl.methods.rollouts import held
from tests.training.tiny_runs import make, ranks
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.methods import METHODS, Loss, LossInputs
from unmask.rl.methods.base import PolicyGradientMethod
from unmask.rl.methods.spg import SPG
from unmask.rl.trainer import GRPOTrainer

RATIOS = [name for name, method in METHODS.items() if not issubclass(method, PolicyGradientMethod | SPG)]
"""The methods that compare the policy with the one that sampled."""


def watched(trainer: GRPOTrainer) -> list[tuple[float, float]]:
    """The largest deviation of a ratio from 1 and the largest KL, of every loss that the trainer computes."""
    calls: list[tuple[float, float]] = []
    trainer.per_view.separable = False  # every loss is then computed whole, once

    method_loss = trainer.method.loss

    def loss(inputs: LossInputs) -> Loss:
        found = method_loss(inputs)
        calls.append((float((found.ratio - 1).abs().max()), float(found.kl.abs().max())))
        return found

    object.__setattr__(trainer.method, "loss", loss)  # the dataclass is frozen
    return calls


def check_first_updates(method: str, folder: Path, lm: DiffusionLM, **more: Any) -> None:
    """Of two updates on a rollout the first has a ratio of exactly 1 and a divergence of 0, the second not."""
    more |= {"num_iterations": 2, **held(method), "difficulty": [-99.0, 99.0]}
    more |= ({"kl_to": "reference"} if "beta" in more else {}) | (
        {"epsilon": None} if method == "bgpo" else {}
    )
    trainer = make("grpo", folder, lm, reward=ranks, method=method, **more)
    calls = watched(trainer)
    trainer.model.train()
    rows = [trainer.train_dataset[index] for index in range(4)]
    buffer = trainer.collect_updates([rows[:2], rows[2:]])
    for iteration in range(2):
        for updates in buffer:
            trainer.training_step(trainer.model, updates[iteration], trainer.count_items(updates[iteration]))
        torch.optim.SGD(trainer.model.parameters(), lr=0.1).step()
    ratios, kls = zip(*calls, strict=True)
    assert len(calls) == 4 and ratios[:2] == (0, 0) and min(ratios[2:]) > 0
    if method != "bgpo":  # whose loss has no reference
        assert kls[:2] == (0, 0) and min(kls[2:]) > 0
