"""Several processes: those of a launcher all train together, or the run is refused. Work that differs between
them: forward passes of sharded weights, row numbers, errors of a single process."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, slice_tensors
from transformers import TrainingArguments

from unmask.errors import ConfigError, UnmaskError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.redaction import masked_words
from unmask.training.run.lock import sole_run, sole_writer

Found = TypeVar("Found")
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""The variables in which launchers (torchrun, MPI, srun) say how many processes they started."""
ACCELERATE_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "MASTER_PORT")
"""`accelerate launch` sets both for several processes, of which it starts only one on CPUs."""


@contextmanager
def lockstep(lm: DiffusionLM, device: torch.device) -> Iterator[None]:
    """A context in which processes may make different numbers of forward passes without gradients, each of
    which gathers sharded weights. A finished process makes empty passes until all are finished. No other
    collective may run inside. `device`: of the exchanged tensors."""

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
    """A context in which an UnmaskError of one process is raised on all, which would otherwise wait for it
    forever. No collective may run inside. `where`: the operation, which the error of the other processes
    names."""
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


def alone_in(folder: Path) -> AbstractContextManager[None]:
    """`sole_run` for all processes of a run: if the folder is another run's, the TrainingError is raised on
    all."""
    return _entered_together(sole_run(folder), "output_dir")


def alone_with(output: Path) -> AbstractContextManager[None]:
    """A context in which no other evaluation writes this result, or keeps items beside it. Raises
    TrainingError on all processes if one does."""
    return _entered_together(sole_writer(output, output.with_name(f"{output.name}.lock")), "--output")


@contextmanager
def _entered_together(lock: AbstractContextManager[None], where: str) -> Iterator[None]:
    with ExitStack() as stack:
        with failing_together(where):
            stack.enter_context(lock)
        yield


# Launchers.


def started_processes(environ: Mapping[str, str] = os.environ) -> int:
    """The number of processes that a launcher started; 1: none did."""
    return next((int(environ[name]) for name in SIZES if environ.get(name, "").isdecimal()), 1)


def connected_processes(*, cpu: bool) -> PartialState:
    """The processes of a launcher, connected until they exit.

    A process that exits without disconnecting may abort: threads of gloo are still running.
    """
    processes = PartialState(cpu=cpu)
    atexit.register(processes.destroy_process_group)
    return processes


def check_processes(training_together: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the launcher was given more processes than train together: each would be a run
    of its own."""
    started = started_processes(environ)
    alone = all(name in environ for name in ACCELERATE_VARIABLES) and not any(
        name in environ for name in SIZES
    )
    if not alone and started in (1, training_together):
        return
    number, program = "N" if alone else str(started), shlex.join(masked_words(sys.orig_argv[1:]))
    remedy = f"Start it with: torchrun --nproc-per-node {number} {program}"
    what = (
        "accelerate launch starts only one process on CPUs"
        if alone
        else f"{started} processes were started, and each would train alone"
    )
    raise ConfigError(what, where="launcher", remedy=f"{remedy} (N: how many processes)" if alone else remedy)
