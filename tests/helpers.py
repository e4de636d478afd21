"""Helpers of several test folders."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import timeit
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis
import psutil
import pytest
import torch
from _pytest.mark import ParameterSet

from unmask.data.sources import read_problems
from unmask.models.attention import Layout
from unmask.sandbox.isolation import probe
from unmask.tasks import Row, Task

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
GPU = str(torch.accelerator.current_accelerator() or "cuda")
"""Torch's name of the GPU, or of the device that stands in for it (`tests/other_device.py`)."""
STOOD_IN = GPU != "cuda"
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the kernels of a GPU")


def shared_path(*parts: str) -> pathlib.Path:
    """A file of the shared data beside the checkout (or under $UNMASK_SHARED); skips the test where it is
    absent."""
    root = pathlib.Path(os.environ.get("UNMASK_SHARED", REPOSITORY.parent / "shared"))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(
            f"needs the shared test data, and {'/'.join(parts)} is not there (set UNMASK_SHARED to its "
            "folder)"
        )
    return path


def chi_square_is_likely(drawn_V: torch.Tensor, prob_V: torch.Tensor) -> bool:
    """Whether counts are within 5 standard deviations, and impossible tokens were not drawn."""
    possible_V, count = prob_V > 0, drawn_V.sum()
    chi_square = (((drawn_V - count * prob_V) ** 2) / (count * prob_V))[possible_V].sum()
    freedom = int(possible_V.sum()) - 1
    return not drawn_V[~possible_V].any() and bool(abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom))


def examples(thorough: int) -> hypothesis.settings:
    """Of a property that takes long: the number of examples with the profile `thorough`; with `fast`,
    fewer."""
    settings = hypothesis.settings
    return settings(
        max_examples=math.ceil(
            thorough * settings.default.max_examples / settings.get_profile("thorough").max_examples
        )
    )


def partly_slow(names: str, values: Iterable[Any], *fast: int, **options: Any) -> pytest.MarkDecorator:
    """Parameters of which only those at some indices are fast: they cover the code of the others, which `make
    test-slow` runs too."""
    given = [
        value if isinstance(value, ParameterSet) else pytest.param(*(value if "," in names else (value,)))
        for value in values
    ]
    slow = [pytest.param(*each.values, marks=[*each.marks, pytest.mark.slow], id=each.id) for each in given]
    return pytest.mark.parametrize(
        names, [each if index in fast else slow[index] for index, each in enumerate(given)], **options
    )


def each_once(names: str, *axes: Iterable[Any]) -> pytest.MarkDecorator:
    """All combinations of several parameters. Those are fast that show every value once, beside a value of
    each other parameter: as many as the longest has values."""
    values = [[each if isinstance(each, tuple) else (each,) for each in axis] for axis in axes]
    numbers = list(itertools.product(*(range(len(axis)) for axis in values)))
    shown = {tuple(turn % len(axis) for axis in values) for turn in range(max(map(len, values)))}
    return partly_slow(
        names,
        [
            tuple(itertools.chain(*(axis[number] for axis, number in zip(values, each, strict=True))))
            for each in numbers
        ],
        *(index for index, each in enumerate(numbers) if each in shown),
    )


def partly_nightly(names: str, values: Iterable[Any], every: int, **options: Any) -> pytest.MarkDecorator:
    """Parameters that cover the same code: all but one of so many are left to `make test-nightly`."""
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *(value if "," in names else (value,)), marks=[pytest.mark.nightly] * (index % every > 0)
            )
            for index, value in enumerate(values)
        ],
        **options,
    )


def cost(function: Callable[..., Any], *arguments: Any) -> float:
    """The time of a call, as a multiple of `work_unit`: the best of three."""
    return min(timeit.repeat(functools.partial(function, *arguments), number=1, repeat=3)) / work_unit()


@functools.cache
def work_unit() -> float:
    """The seconds that a fixed piece of work takes on this machine, about 0.01: the unit of time limits."""
    return min(timeit.repeat(lambda: json.dumps(list(range(100_000))), number=1, repeat=3))


def resident_memory(process: int | None = None) -> int:
    """The bytes of memory of a process that are in use; unset: of this one."""
    gc.collect()
    return psutil.Process(process).memory_info().rss


def run_all(
    command: list[Any], *, timeout: float, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a program that starts others, such as a launcher: none of them outlives the
    call."""
    process = subprocess.Popen([str(word) for word in command], start_new_session=True, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


TWO_PROCESSES = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": [
        *(
            "-m",
            "accelerate.commands.launch",
            "--num_processes",
            "2",
            "--multi_gpu",
            "--main_process_port",
            "0",
        ),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    ],
}
"""Words after `python` that start two processes on the CPU. `accelerate launch --cpu` would start one."""


def read_task(task: Task, path: str | pathlib.Path) -> list[Row]:
    """All rows of a task's file."""
    return read_problems(task, str(path), None, split="test")


def require_bfloat16() -> None:
    """Skip the test if torch's attention fails in bfloat16, as where `ATEN_CPU_CAPABILITY` hides a part of
    the CPU's instructions."""
    query = torch.zeros(1, 1, 64, 16, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    except RuntimeError as error:
        pytest.skip(f"torch's attention fails in bfloat16 here: {error}")


def require_sandbox() -> None:
    """Skip the test if nothing on this machine isolates programs completely. Sharing the processors is not
    part of that."""
    if missing := {name: why for name, why in probe().missing.items() if name != "cpu"}:
        pytest.skip(f"programs are not, or not wholly, isolated here: {missing}")


def require_ocaml() -> None:
    """Skip the test if OCaml is not installed."""
    require_sandbox()
    if not shutil.which("ocamlfind"):
        pytest.skip(
            "needs OCaml: apt-get install ocaml-nox ocaml-findlib libbase-ocaml-dev libounit-ocaml-dev"
        )


def last_tokens(layout: Layout, count: int) -> Layout:
    """The layout of the last `count` tokens (the queries of a pass with a key-value cache)."""
    return Layout(layout.document_BT[:, -count:], layout.position_BT[:, -count:], layout.copy_BT[:, -count:])
