"""If one of several processes is killed, the others end with one error, and the command that it names
continues the run bit for bit."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers import REPOSITORY, partly_slow
from tests.training.run.runs import command, ends
from tests.training.tiny_runs import unmask
from unmask.errors import TrainingError
from unmask.training.run.lost_process import lost_process

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
PROGRAMS = {
    "ddp": ["-m", "unmask"],
    "fsdp": [str(REPOSITORY / "tests" / "training" / "run" / "as_gpus.py")],
}
SHARDED = [
    "training.fsdp=true",
    'training.fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}',
]
SAVING = [
    "training.save_strategy=steps",
    "training.save_steps=1",
    "training.save_total_limit=3",
    "training.max_steps=24",
]
ENDS_WITHIN = 60.0
REPORT = re.compile(
    (
        r"^error: launcher: .*another process of this run.*(?:Resume|Start again) with: torchrun "
        r"--nproc-per-node 2 -m unmask (.*?)\.?$"
    ),
    re.M,
)


WAITING = """
import sys, time
from pathlib import Path
from unmask.training.run import lost_process
lost_process.PATIENCE = float(sys.argv[1])
sys.orig_argv = ["python", "-m", "unmask", *sys.argv[1:]]
with lost_process.ending_with_others(Path("run")):
    print("waiting", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """Starts three processes of a run, which wait."""
    started: list[subprocess.Popen[str]] = []

    def start(patience: float) -> list[subprocess.Popen[str]]:
        common = {
            "PYTHONPATH": str(REPOSITORY),
            "MASTER_PORT": str(os.getpid()),
            "LOCAL_WORLD_SIZE": "3",
            "WORLD_SIZE": "3",
        }
        for rank in ("0", "1", "2"):
            environment = (
                os.environ
                | common
                | {"RANK": rank, "TORCHELASTIC_ERROR_FILE": str(tmp_path / rank / "error.json")}
            )
            run = [sys.executable, "-c", WAITING, str(patience), "sft"]
            started.append(
                subprocess.Popen(
                    run,
                    env=environment,
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        assert all(each.stdout and each.stdout.readline() == "waiting\n" for each in started)
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


@partly_slow("ended_by_launcher", [False, True], 1)
@pytest.mark.parametrize("begun", [False, True])
def test_processes_that_wait_end_with_one_error_when_one_is_killed(
    begun, ended_by_launcher, waiting, tmp_path
):
    if begun:
        (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    lost, *others = waiting(60.0 if ended_by_launcher else 0.0)
    lost.kill()
    lost.wait()
    if ended_by_launcher:
        for process in others:
            process.terminate()
    errors = "".join(process.communicate(timeout=30)[1] for process in others)
    assert [process.returncode for process in others] == [2, 2]
    patience = "60.0" if ended_by_launcher else "0.0"
    line = f"torchrun --nproc-per-node 3 -m unmask {patience} sft"
    go_on = f"Resume with: {line} --resume" if begun else f"Start again with: {line}"
    assert errors == f"error: launcher: another process of this run has ended. {go_on}.\n"


def test_sigterm_alone_ends_a_process_as_ever(waiting):
    one, *_ = waiting(60.0)
    one.terminate()
    assert one.wait(30) == -signal.SIGTERM


def test_the_command_line_reports_a_lost_process_once(monkeypatch, model, tmp_path):
    def lose(*_: object) -> None:
        raise lost_process(tmp_path)

    monkeypatch.setattr("unmask.cli.run.run_verb", lose)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    ended = [unmask(*command("sft", model, tmp_path / "run")) for _ in range(2)]
    assert [each.exit_code for each in ended] == [2, 2]
    assert [
        each.output.count("error: launcher: another process of this run has ended.") for each in ended
    ] == [1, 0]


def test_an_error_that_all_processes_raise_is_shown_once_and_others_each(monkeypatch, model, tmp_path):
    errors = iter(["damaged", "damaged", "another", "damaged"])

    def fail(*_: object) -> None:
        raise TrainingError(next(errors))

    monkeypatch.setattr("unmask.cli.run.run_verb", fail)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    shown = [unmask(*command("sft", model, tmp_path / "run")).output for _ in range(4)]
    assert shown == ["error: damaged\n", "", "error: another\n", ""]


def start(mode: str, run: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*LAUNCH, *PROGRAMS[mode], *run],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(mode: str, run: list[str]) -> None:
    with start(mode, run) as launcher:
        _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, errors


class Watched:
    """A run of two processes until one is killed.

    Args:
        output: its folder.
        rank: of the process that will be killed.
    """

    def __init__(self, launcher: subprocess.Popen[str], output: Path, rank: int):
        self.launcher, self.log, self.unfinished = (
            launcher,
            output / "training_logs.json",
            output / ".unfinished",
        )
        self.begun, self.before = time.time(), self.lines()
        self.wait(lambda: len(self.workers()) == 2)
        self.victim, self.other = self.workers()[rank], self.workers()[1 - rank]

    def workers(self) -> list[psutil.Process]:
        return [each for each in psutil.Process(self.launcher.pid).children() if each.environ().get("RANK")]

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            assert self.launcher.poll() is None and time.time() - self.begun < 300
            time.sleep(0.001)

    def lines(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    # The moments.

    def importing(self) -> None:
        self.wait(
            lambda: all(
                "libtorch" in Path(f"/proc/{each.pid}/maps").read_text() for each in (self.victim, self.other)
            )
        )

    def joining(self) -> None:
        """The other waits for this one: it uses almost no more time of the processor, as threads that look
        from time to time do."""
        self.importing()
        self.victim.suspend()
        used = -1.0
        while used + 0.1 < (used := sum(self.other.cpu_times()[:2])):
            time.sleep(3)

    def amid_a_step(self) -> None:
        self.wait(lambda: self.lines() > self.before + 2)

    def amid_a_save(self) -> None:
        self.amid_a_step()
        self.wait(lambda: self.unfinished.exists())


MOMENTS = [Watched.joining, Watched.amid_a_step, Watched.amid_a_save]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "first", "moments"),
    [
        ("ddp", 0, [Watched.joining, Watched.amid_a_save]),
        pytest.param("ddp", 1, [Watched.importing, *MOMENTS], marks=pytest.mark.nightly),
        # as_gpus.py imports all before the command begins
        pytest.param("fsdp", 1, MOMENTS, marks=pytest.mark.nightly),
    ],
)
def test_if_a_process_is_killed_the_other_ends_and_the_run_is_resumed(mode, first, moments, model, tmp_path):
    output, settings = tmp_path / "killed", [*SAVING, *(SHARDED if mode == "fsdp" else [])]
    finish(mode, command("sft", model, tmp_path / "straight", *settings))
    run = command("sft", model, output, *settings)
    for number, moment in enumerate(moments):
        with start(mode, run) as launcher:
            watched = Watched(launcher, output, (first + number) % 2)
            moment(watched)
            watched.victim.kill()
            killed = time.monotonic()
            watched.other.wait(ENDS_WITHIN)
            _, errors = launcher.communicate(timeout=ENDS_WITHIN)
        assert launcher.returncode != 0 and time.monotonic() - killed < ENDS_WITHIN
        reports = list(filter(None, map(REPORT.match, errors.splitlines())))
        assert len(reports) == 1 and errors.count("error: ") == 1, errors
        assert errors.count("Traceback (most recent call last)") == 1, errors  # torchrun's own
        run = shlex.split(reports[0][1])
    finish(mode, run)
    assert ends(output) == ends(tmp_path / "straight")


@pytest.mark.nightly
def test_a_flipped_bit_in_a_part_of_a_sharded_checkpoint_is_one_error_and_the_one_before_is_used(
    model, tmp_path
):
    run = command("sft", model, tmp_path / "run", *SAVING, *SHARDED, "training.max_steps=3")
    finish("fsdp", run)
    straight = ends(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoint-3")
    part = tmp_path / "run/checkpoint-2/optimizer.bin"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with start("fsdp", [*run, "--resume", str(tmp_path / "run/checkpoint-2")]) as launcher:
        _, errors = launcher.communicate(timeout=300)
    assert (
        launcher.returncode != 0
        and errors.count("error: ") == 1
        and "optimizer.bin is damaged. Use --resume without" in errors
    ), errors
    with start("fsdp", [*run, "--resume"]) as launcher:
        _, errors = launcher.communicate(timeout=300)
    assert (
        launcher.returncode == 0
        and errors.count("checkpoint-2 (optimizer.bin is damaged): resuming from checkpoint-1") == 1
    ), errors
    assert ends(tmp_path / "run") == straight
