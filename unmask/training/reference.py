"""The model that a policy is held to: the base under its adapters, or a frozen copy, which may follow the policy slowly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from unmask.models.diffusion_lm import DiffusionLM

FILE = "reference.safetensors"


class Reference:
    """The policy as it was given.

    Args:
        lm: the policy, not trained yet. Where it has adapters that start at zero the reference is the base itself, with the adapters
            off: no second model is held.
        moves: whether it will be moved, which takes a copy of what is trained.
    """

    def __init__(self, lm: DiffusionLM, *, moves: bool = False):
        self.policy = lm
        self.base = hasattr(lm.model, "disable_adapter") and not moves
        self.lm = lm if self.base else lm.frozen_copy()

    @contextmanager
    def scoring(self) -> Iterator[DiffusionLM]:
        """Inside, what is given is the reference."""
        with self.policy.model.disable_adapter() if self.base else nullcontext():
            yield self.lm

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Take this share of the way to the policy's weights (TR-DPO, Gorbatovski et al. 2024, eq. 3)."""
        for mine, theirs in zip(self.lm.model.parameters(), self.policy.model.parameters(), strict=True):
            if theirs.requires_grad:
                mine.lerp_(theirs.to(mine.dtype), share)

    def save(self, folder: Path) -> None:
        """Write the weights of a reference that has moved."""
        save_file({name: weight.contiguous() for name, weight in self._moving().items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Read them back."""
        stored = load_file(folder / FILE)
        with torch.no_grad():
            for name, weight in self._moving().items():
                weight.copy_(stored[name])

    def _moving(self) -> dict[str, torch.Tensor]:
        trained = {name for name, weight in self.policy.model.named_parameters() if weight.requires_grad}
        return {name: weight for name, weight in self.lm.model.named_parameters() if name in trained}
