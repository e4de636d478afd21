"""Several processes: those that a launcher started all train together, or the run is refused."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import PartialState

from unmask.errors import ConfigError, first_line
from unmask.redaction import masked_words
from unmask.training.durable.lost_process import lost_process

SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""The variables in which launchers (torchrun, MPI, srun) say how many processes they started."""
OF_ACCELERATE = ("ACCELERATE_MIXED_PRECISION", "MASTER_PORT")
"""`accelerate launch` sets both for several processes, of which it starts only one on CPUs."""


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
    """Raise ConfigError if the launcher was told of more processes than train together: each would be a run
    of its own."""
    started = started_processes(environ)
    alone = all(name in environ for name in OF_ACCELERATE) and not any(name in environ for name in SIZES)
    if not alone and started in (1, training_together):
        return
    number = "N" if alone else str(started)
    remedy = (
        f"Start it with: torchrun --nproc-per-node {number} -m unmask "
        f"{shlex.join(masked_words(sys.argv[1:]))}"
    )
    what = (
        "accelerate launch starts only one process on CPUs"
        if alone
        else f"{started} processes were started, and each would train alone"
    )
    raise ConfigError(what, where="launcher", remedy=f"{remedy} (N: how many processes)" if alone else remedy)


@contextmanager
def naming_lost_process(output: Path) -> Iterator[None]:
    """Inside, a lost connection to another process of the run is raised as LostProcessError. `output`: the
    folder of the run."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        # gloo adds advice
        what = f"lost the connection to another process of this run ({first_line(error).split('. ')[0]})"
        raise lost_process(output, what) from error
