"""Forward passes of weights that are shared out over processes: each pass gathers them, so that all processes must make as many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather

from unmask.models.diffusion_lm import DiffusionLM


@contextmanager
def lockstep(lm: DiffusionLM, device: torch.device) -> Iterator[None]:
    """Inside, every process may make as many passes without gradients as it has to: one that is through makes empty passes along with the
    others, until all are. Nothing else in here may wait for other processes.

    Args:
        lm: its weights are shared out.
        device: of what processes tell one another.
    """

    def passing(working: bool) -> torch.Tensor:
        """Which of the processes make a pass of their own now."""
        return gather(torch.tensor([working], device=device, dtype=torch.long))

    def announce(*_: Any) -> None:
        passing(True)

    # It comes before the hooks that gather the weights: in between, processes would wait for one another at two places.
    announcing = lm.model.register_forward_pre_hook(announce, prepend=True)
    try:
        yield
    finally:  # also where this process has failed: the others go on
        announcing.remove()
        any_11 = torch.full((1, 1), lm.mask_token_id, device=lm.device)
        while passing(False).any():
            with torch.no_grad():
                lm.logits(any_11, hidden_BT=torch.zeros_like(any_11, dtype=torch.bool))
