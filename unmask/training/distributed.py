"""Work that processes do apart from one another, and what must not differ between them in it.

Of weights that are shared out each forward pass gathers all, so that all processes must make as many; and of processes that wait for one
another all must fail where one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather, gather_object, slice_tensors
from transformers import TrainingArguments

from unmask.errors import UnmaskError
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
    with lm.calling_all_modules():
        try:
            yield
        finally:  # also where this process has failed: the others go on
            announcing.remove()
            any_11 = torch.full((1, 1), lm.mask_token_id, device=lm.device)
            while passing(False).any():
                with torch.no_grad():
                    lm.logits(any_11, hidden_BT=torch.zeros_like(any_11, dtype=torch.bool))


def visits(batch: Mapping[str, Any], micro_batch: int, args: TrainingArguments) -> torch.Tensor:
    """How many rows training has visited before each of a micro-batch, the same however a step is cut into micro-batches.

    Args:
        batch: of this process.
        micro_batch: its number in the run.
    """
    first = (micro_batch * args.world_size + args.process_index) * args.train_batch_size
    return first + torch.arange(len(batch["sample_id"]), device=batch["sample_id"].device)


def without_repeats(batch: dict[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """A batch of this process without the rows that accelerate fills the last batches up with, so that all processes have as many."""
    state, size = accelerator.gradient_state, len(batch["sample_id"])
    if not state.end_of_dataloader or state.remainder <= 0:
        return batch
    own = min(max(state.remainder - accelerator.process_index * size, 0), size)
    return slice_tensors(batch, slice(own))


@contextmanager
def failing_together(where: str) -> Iterator[None]:
    """What fails in here on one process fails on all, which would else wait for it for ever. Nothing in here may wait for another one.

    Args:
        where: what the others are told has failed.

    Raises:
        UnmaskError: of one kind on all processes.
    """
    error: UnmaskError | None = None
    try:
        yield
    except UnmaskError as raised:
        error = raised
    failures = gather_object([] if error is None else [(type(error), str(error))])
    if failures:
        kind, what = failures[0]
        if error is not None and type(error) is kind:
            raise error
        raise kind(f"another process has failed ({what})", where=where, remedy="See there") from error
