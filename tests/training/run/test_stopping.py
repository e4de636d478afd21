"""Signals end a run with a checkpoint, from which it is resumed bit for bit."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers import REPOSITORY, partly_slow
from tests.training.run.runs import command, ends, logged
from tests.training.tiny_runs import equal, unmask
from unmask.convert.trainer import StageTrainer
from unmask.preference.reference_log_probs import ReferenceTable
from unmask.rl.trainer import GRPOTrainer
from unmask.training.run.lost_process import resume_command
from unmask.training.trainer import DiffusionTrainer


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sends a signal to this process amid a call of a method in this step."""

    def arrange(owner: type, method: str, step: int, *numbers: signal.Signals) -> None:
        whole, left = getattr(owner, method), list(numbers)

        def interrupted(trainer: Any, *arguments: Any, **named: Any) -> Any:
            while left and trainer.state.global_step == step:
                os.kill(os.getpid(), left.pop(0))
            return whole(trainer, *arguments, **named)

        monkeypatch.setattr(owner, method, interrupted)

    return arrange


MOMENTS = {
    "amid a step": ("sft", DiffusionTrainer, "training_step", 2, "checkpoint-3"),
    "amid a rollout": ("grpo", GRPOTrainer, "collect_updates", 2, "checkpoint-3"),
    "between the updates of a rollout": ("grpo", DiffusionTrainer, "training_step", 1, "checkpoint-2"),
    "amid an evaluation": ("sft", DiffusionTrainer, "prediction_step", 4, "checkpoint-4"),
    "amid the last step": ("sft", DiffusionTrainer, "training_step", 5, "checkpoint-6"),
    "amid a stage": ("convert", StageTrainer, "training_step", 1, "stage-1/checkpoint-2"),
    "between a stage and its evaluation": ("convert", StageTrainer, "evaluate", 3, "stage-1/checkpoint-3"),
}


@partly_slow(
    "moment, number, code",
    [
        *[(moment, signal.SIGTERM, 75) for moment in MOMENTS],
        ("amid a step", signal.SIGUSR1, 75),
        ("amid a rollout", signal.SIGINT, 130),
    ],
    *(1, 3, 5, 7),
)
def test_a_run_that_a_signal_ends_is_resumed_as_if_it_had_not(
    moment, number, code, model, text, tmp_path, interrupt, monkeypatch
):
    verb, owner, method, step, checkpoint = MOMENTS[moment]
    more = ["training.eval_strategy=steps", "training.eval_steps=2"] if method == "prediction_step" else []
    more += (
        ["--data", str(text), f"data.eval={text}", 'training.stages=[{"share": 1}, {"share": 1}]']
        if verb == "convert"
        else []
    )
    straight = unmask(*command(verb, model, tmp_path / "straight", *more))
    assert straight.exit_code == 0, straight.output
    with monkeypatch.context():
        interrupt(owner, method, step, number)
        stopped = unmask(*command(verb, model, tmp_path / "run", *more))
    assert stopped.exit_code == code, stopped.output
    assert "Resume with: " in stopped.output and "Traceback" not in stopped.output
    assert (" (in stage-1), checkpoint saved" in stopped.output) == (moment == "amid a stage")
    assert (tmp_path / "run" / checkpoint / "optimizer.pt").is_file() and not (
        tmp_path / "run" / "model"
    ).exists()
    resumed = unmask(*command(verb, model, tmp_path / "run", *more), "--resume")
    assert resumed.exit_code == 0, resumed.output
    ends = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "run")]
    assert equal(*ends) and logged(tmp_path / "run") == logged(tmp_path / "straight")


def test_a_second_ctrl_c_ends_at_once(model, tmp_path, interrupt):
    interrupt(DiffusionTrainer, "training_step", 2, signal.SIGINT, signal.SIGINT)
    stopped = unmask(
        *command("sft", model, tmp_path / "run", "training.save_strategy=steps", "training.save_steps=2")
    )
    assert stopped.exit_code == 130
    assert "stopped by SIGINT at once. Resume with: " in stopped.output
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_repeated_sigterm_changes_nothing(model, tmp_path, interrupt):
    interrupt(DiffusionTrainer, "training_step", 2, signal.SIGTERM, signal.SIGTERM)
    assert unmask(*command("sft", model, tmp_path / "run", "training.logging_steps=2")).exit_code == 75
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    assert "1 run " in (listed := unmask("runs", tmp_path / "run").output) and "3 of 6" in listed


def test_before_the_first_step_a_signal_ends_at_once(model, tmp_path, interrupt):
    interrupt(DiffusionTrainer, "get_train_dataloader", 0, signal.SIGTERM)
    run = command("sft", model, tmp_path / "run")
    stopped = unmask(*run)
    assert stopped.exit_code == 128 + signal.SIGTERM
    assert (
        f"There is no checkpoint yet. Start again with: python -m unmask {shlex.join(run)}\n"
        in stopped.output
    )


def test_a_checkpoint_that_is_being_written_is_none(model, tmp_path, interrupt, monkeypatch):
    run = command("sft", model, tmp_path / "run")
    with monkeypatch.context():
        interrupt(DiffusionTrainer, "save_model", 6, signal.SIGINT, signal.SIGINT)
        stopped = unmask(*run)
    assert stopped.exit_code == 130
    assert (
        f"There is no checkpoint yet. Resume with: python -m unmask {shlex.join(run)} --resume\n"
        in stopped.output
    )
    assert unmask(*run, "--resume").exit_code == 0


def test_checkpoints_of_a_run_that_is_overwritten_are_not_its_own(model, tmp_path, monkeypatch):
    run = command("sft", model, tmp_path / "run")
    assert unmask(*run).exit_code == 0 and (tmp_path / "run" / "checkpoint-6").is_dir()
    monkeypatch.setattr("unmask.cli.run.begin", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    stopped = unmask(*run, "--overwrite")
    assert stopped.exit_code == 128 + signal.SIGTERM
    assert (
        f"There is no checkpoint yet. Start again with: python -m unmask {shlex.join(run)} --overwrite\n"
        in stopped.output
    )


def test_a_run_that_a_signal_ends_amid_the_references_scores_is_resumed(model, tmp_path, monkeypatch):
    write = ReferenceTable.write

    def stopped_after(table: ReferenceTable, *arguments: Any) -> None:
        write(table, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceTable, "write", stopped_after)
        assert unmask(*command("dpo", model, tmp_path / "run")).exit_code == 128 + signal.SIGTERM
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["train_reference_scores.safetensors"]
    for run, more in (("run", ["--resume"]), ("straight", [])):
        ended = unmask(*command("dpo", model, tmp_path / run), *more)
        assert ended.exit_code == 0, ended.output
    assert ends(tmp_path / "run") == ends(tmp_path / "straight")


def test_an_ignored_ctrl_c_stays_ignored(model, tmp_path, interrupt):
    interrupt(DiffusionTrainer, "training_step", 2, signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    try:
        assert unmask(*command("sft", model, tmp_path / "run")).exit_code == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_command_to_go_on_is_that_of_the_run():
    same = "sft --model 'a b' --output out 'training.hub_token=********' training.max_steps=3 --resume"
    for more in (
        [],
        ["--resume"],
        ["--resume", "x/checkpoint-3"],
        ["--resume=x"],
        ["--overwrite"],
        ["training.resume_from_checkpoint=x"],
    ):
        arguments = [
            "sft",
            "--model",
            "a b",
            "--output",
            "out",
            *more,
            "training.hub_token=hf_x",
            "training.max_steps=3",
        ]
        assert resume_command(["/bin/python3", "/bin/unmask", *arguments]) == f"unmask {same}"
        assert (
            resume_command(["/unmask/bin/python3", "-u", "-m", "unmask", *arguments])
            == f"python -m unmask {same}"
        )
        assert (
            resume_command(["/bin/python3", "-m", "unmask", *arguments], 2)
            == f"torchrun --nproc-per-node 2 -m unmask {same}"
        )


def test_the_command_to_go_on_has_the_settings_of_the_environment(model, tmp_path, interrupt, monkeypatch):
    run = command("sft", model, tmp_path / "run")
    interrupt(DiffusionTrainer, "training_step", 2, signal.SIGTERM)
    with monkeypatch.context() as patch:
        for name, value in {
            "TRAINING__SEED": "5",
            "TRAINING__RUN_NAME": "a b/unmask",
            "TRAINING__HUB_TOKEN": "hf_x",
            "API_KEY": "k",
            "ADMIN_KEY": "k",
        }.items():
            patch.setenv(f"UNMASK_{name}", value)
        stopped = unmask(*run)
    words = f"python -m unmask {shlex.join(run)} --resume"
    variables = (
        "UNMASK_TRAINING__HUB_TOKEN='********' UNMASK_TRAINING__RUN_NAME='a b/unmask' UNMASK_TRAINING__SEED=5"
    )
    assert f"Resume with: {variables} {words}\n" in stopped.output
    assert f"{variables} {words}" in unmask("runs", tmp_path).output
    assert unmask(*run, "--resume").exit_code == 2  # another seed
    monkeypatch.setenv("UNMASK_TRAINING__SEED", "5")
    assert unmask(*run, "--resume").exit_code == 0


LAUNCH = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node",
    "2",
    "-m",
    "unmask",
]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_two_processes_stop_after_the_same_step(number, model, tmp_path):
    output = tmp_path / "run"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    settings = [*command("sft", model, output), "training.max_steps=100000"]
    with subprocess.Popen(
        [*LAUNCH, *settings], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for_line(output, process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert re.search(r"Resume with: torchrun --nproc-per-node 2 -m unmask sft .* --resume\n", errors), errors
    (checkpoint,) = output.glob("checkpoint-*")
    assert {path.name for path in checkpoint.glob("rng_state_*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def wait_for_line(output: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a run has logged three steps."""
    log = output / "training_logs.json"
    deadline = time.monotonic() + 300
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
