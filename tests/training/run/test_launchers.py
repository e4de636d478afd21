"""Several processes train together, or not at all."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.errors import raises
from tests.helpers import REPOSITORY
from unmask.errors import ConfigError
from unmask.training.distributed import check_processes, started_processes

ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "together", "alone"),
    [
        ({}, 1, False),
        ({"WORLD_SIZE": "2", "RANK": "0"}, 2, False),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 1, False),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, 1, False),
        (ACCELERATE | {"WORLD_SIZE": "2", "RANK": "1"}, 2, False),
        ({"WORLD_SIZE": "2", "RANK": "0"}, 1, True),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 1, True),
        ({"SLURM_STEP_NUM_TASKS": "3"}, 1, True),
        (ACCELERATE, 1, True),
    ],
)
def test_processes_that_would_train_alone_are_refused(environ, together, alone, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "unmask", "sft", "m"])
    if not alone:
        check_processes(together, environ)
    else:
        with raises(ConfigError, where="launcher"):
            check_processes(together, environ)
    assert started_processes({}) == 1


MULTI_CPU = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nnum_machines: "
    "1\nuse_cpu: true\n"
)
PAGES = [
    REPOSITORY / "README.md",
    *(REPOSITORY / "docs").glob("*.md"),
    *(REPOSITORY / "unmask" / "recipes").rglob("*.yaml"),
]
DOCUMENTED = {
    re.sub(r"\s*\\\n\s*", " ", found)
    for page in PAGES
    for found in re.findall(
        r"(?:accelerate launch|torchrun)(?: |\\\n)(?:[^\n`]|\\\n)*?-m (?=unmask)",
        page.read_text(encoding="utf-8"),
    )
}
MORE = {"accelerate launch --cpu --num_processes 2 -m ", "accelerate launch --config_file multi-cpu.yaml -m "}
ALONE = {"accelerate launch -m "}  # of itself accelerate starts a process for each GPU, or one


def with_two_processes(launch: str) -> list[str]:
    """The command that starts a launcher, with two processes on this machine."""
    launch = re.sub(
        r"(--nnodes) \d+", r"\1 1", re.sub(r"(--nproc[_-]per[_-]node|--num_processes) \d+", r"\1 2", launch)
    )
    launch = re.sub(r"[^\s\"]+:29500", "localhost:0", launch.replace("scripts/", f"{REPOSITORY}/scripts/"))
    program, *options = shlex.split(launch.replace("$SLURM_NNODES", "1").replace("$SLURM_JOB_ID", "7"))
    if "accelerate-a40" in launch and "--num_processes" not in options:
        options[1:1] = ["--num_processes", "2"]
    module = {"torchrun": ["torch.distributed.run"], "accelerate": ["accelerate.commands.accelerate_cli"]}[
        program
    ]
    return [sys.executable, "-m", *module, *options, "unmask"]


WITH_TWO_PROCESSES = {frozenset(with_two_processes(launch)): launch for launch in sorted(DOCUMENTED | MORE)}
"""One of those that are the same command with two processes."""
OFTEN = {"torchrun --nproc-per-node 2 -m ", "accelerate launch --cpu --num_processes 2 -m ", *ALONE}
"""Those that `make test-slow` starts."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(launch, marks=[] if launch in OFTEN else pytest.mark.nightly)
        for launch in WITH_TWO_PROCESSES.values()
    ],
)
def test_every_launcher_that_the_docs_name_trains_with_its_processes_or_refuses(launch, model, tmp_path):
    (tmp_path / "multi-cpu.yaml").write_text(MULTI_CPU)
    settings = [
        "training.max_steps=2",
        "training.per_device_train_batch_size=2",
        "training.save_steps=2",
        "data.max_rows=16",
    ]
    run = ["sft", "--model", str(model), "--task", "sudoku", "--output", "run", "data.eval_rows=4", *settings]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path),
    }
    environment |= {"HF_HUB_OFFLINE": "1"}
    called = subprocess.run(
        [*with_two_processes(launch), *run],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    states = {path.name for path in (tmp_path / "run").glob("checkpoint-2/rng_state*")}
    # without GPUs it starts one
    if launch.startswith("accelerate") and launch not in ALONE and "a40" not in launch:
        assert (
            called.returncode != 0
            and "launcher: accelerate launch starts only one process on CPUs" in called.stderr
        ), called.stderr
        assert not (tmp_path / "run").exists()
    else:
        assert called.returncode == 0, called.stderr
        assert states == ({"rng_state.pth"} if launch in ALONE else {"rng_state_0.pth", "rng_state_1.pth"})


SCRIPT = """
import sys
from unmask import SFTConfig, SFTTrainer

rows = [{"prompt": "1", "completion": "2"}] * 4
args = SFTConfig(output_dir=sys.argv[2], max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to="none")
SFTTrainer(sys.argv[1], args=args, train_dataset=rows).train()
"""


NOTEBOOK = """
import runpy, socket
from accelerate import notebook_launcher

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]


def train():
    runpy.run_path("train.py")


notebook_launcher(train, num_processes=2, use_port=str(port))
"""


@pytest.mark.slow
def test_a_script_is_refused_with_the_line_that_starts_it(model, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path)}

    def start(line: str) -> subprocess.CompletedProcess[str]:
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
        program, *words = shlex.split(line)
        return subprocess.run([Path(sys.executable).with_name(program), *words], timeout=300, **options)

    refused = start(f"accelerate launch --cpu --num_processes 2 train.py {model} 'a run'")
    [line] = re.findall(r"Start it with: (torchrun .*) \(N: how many processes\)", refused.stderr)
    assert line == f"torchrun --nproc-per-node N train.py {model} 'a run'"
    for started, run in (
        (line.replace(" N ", " 2 "), "a run"),
        (f"python notebook.py {model} other", "other"),
    ):
        done = start(started)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / run / "checkpoint-1/rng_state_1.pth").exists()


def test_the_launchers_of_the_docs_are_found():
    assert "accelerate launch --num_processes 2 -m " in DOCUMENTED
    assert any(each.startswith("torchrun") for each in DOCUMENTED)
    assert Path(REPOSITORY / "scripts" / "accelerate-a40-x3.yaml").is_file()
