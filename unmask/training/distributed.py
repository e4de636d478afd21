"""Work that differs between processes: forward passes of sharded weights, row numbers, errors of a single
process, and loading rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, slice_tensors
from transformers import TrainingArguments

from unmask.errors import UnmaskError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.resume.lock import sole_run, sole_writer

Found = TypeVar("Found")


@contextmanager
def lockstep(lm: DiffusionLM, device: torch.device) -> Iterator[None]:
    """Inside, processes may make different numbers of forward passes without gradients, each of which gathers
    sharded weights. A finished process makes empty passes until all are finished. No other collective may run
    inside. `device`: of the exchanged tensors."""

    def passing(working: bool) -> torch.Tensor:
        """Gather which processes make a real pass now."""
        return gather(torch.tensor([working], device=device, dtype=torch.long))

    def announce(*_: Any) -> None:
        passing(True)

    # It runs before the hooks that gather the weights: otherwise processes would wait in two different
    # collectives.
    announcing = lm.model.register_forward_pre_hook(announce, prepend=True)
    with lm.calling_all_modules():
        try:
            yield
        finally:  # also if this process failed, because the others continue
            announcing.remove()
            any_11 = torch.full((1, 1), lm.mask_token_id, device=lm.device)
            while passing(False).any():
                with torch.no_grad():
                    lm.logits(any_11, hidden_BT=torch.zeros_like(any_11, dtype=torch.bool))


def rows_before(batch: Mapping[str, Any], micro_batch: int, args: TrainingArguments) -> torch.Tensor:
    """The number of rows that the run trained on before each row [B] of this process's batch, which is
    micro-batch number `micro_batch` of the run. It does not depend on how a step is split into
    micro-batches."""
    first = (micro_batch * args.world_size + args.process_index) * args.train_batch_size
    return first + torch.arange(len(batch["sample_id"]), device=batch["sample_id"].device)


def without_repeats(batch: dict[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """This process's batch without the repeated rows with which accelerate pads the last batches to equal
    size."""
    state, size = accelerator.gradient_state, len(batch["sample_id"])
    if not state.end_of_dataloader or state.remainder <= 0:
        return batch
    num_rows = min(max(state.remainder - accelerator.process_index * size, 0), size)
    return slice_tensors(batch, slice(num_rows))


@contextmanager
def failing_together(where: str) -> Iterator[None]:
    """Inside, an UnmaskError of one process is raised on all, which would otherwise wait for it forever. No
    collective may run inside. `where`: the operation, which the error of the other processes names."""
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
        raise kind(f"another process has failed ({what})", where=where, remedy="See its error") from error


def from_first(find: Callable[[], Found]) -> Found:
    """What the first process finds, on all; an UnmaskError that it raises there is raised on all. A
    collective."""
    answer: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            answer[0] = find()
        except UnmaskError as error:
            answer[1] = error
    if PartialState().num_processes > 1:
        broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """`sole_run` for all processes of a run: if the folder is another run's, the TrainingError is raised on
    all."""
    with _entered_together(sole_run(folder), "output_dir"):
        yield


@contextmanager
def alone_with(output: Path) -> Iterator[None]:
    """Inside, no other evaluation writes this result, or keeps items beside it. Raises TrainingError on all
    processes if one does."""
    with _entered_together(sole_writer(output, output.with_name(f"{output.name}.lock")), "--output"):
        yield


@contextmanager
def _entered_together(lock: AbstractContextManager[None], where: str) -> Iterator[None]:
    with ExitStack() as stack:
        with failing_together(where):
            stack.enter_context(lock)
        yield


@contextmanager
def ending_workers(trainer: Any) -> Iterator[None]:
    """End the workers that load training rows with the training. Persistent ones live as long as their
    loader, which nothing then holds."""
    yield
    trainer.callback_handler.train_dataloader = None
    trainer.accelerator._dataloaders.clear()
