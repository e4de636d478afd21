"""Trackers see one run, for any trainer and number of stages; those that cannot work are refused at once."""

from __future__ import annotations

import contextlib
import importlib
import json
import sqlite3
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    MLflowCallback,
    TrackioCallback,
    WandbCallback,
)
from typer.testing import CliRunner

from tests.errors import raises
from tests.helpers import each_once, partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, TEXTS, make, settings
from unmask.artifacts import MetricsLog
from unmask.cli import app
from unmask.config.trackers import NEEDS
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.errors import ConfigError, UnmaskWarning
from unmask.supervised.sft import SFTConfig
from unmask.training.trackers import RUNS_NAME, TrackedRuns

THREE = [{"share": 2, "train": ["attention"]}, {"share": 4}, {"share": 3}]


def convert(folder: Path, **more: Any) -> ConvertTrainer:
    args = ConvertConfig(**settings(folder, max_steps=9, max_length=32, logging_steps=1, stages=THREE) | more)
    return ConvertTrainer(llama_lm("causal"), args, train_dataset=TEXTS, eval_dataset=TEXTS[:2])


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Steps and values of a scalar in a folder of TensorBoard's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


def event_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("events.out.tfevents.*"))


def test_tensorboard_sees_a_conversion_of_three_stages_as_one_run(tmp_path):
    convert(tmp_path / "run", report_to="tensorboard", logging_dir=str(tmp_path / "run" / "logs")).train()
    (file,) = event_files(tmp_path)
    assert file.parent == tmp_path / "run" / "logs"
    logged = MetricsLog(tmp_path / "run" / "training_logs.json").read()
    losses = [(line["step"], line["loss"]) for line in logged if "loss" in line]
    assert [step for step, _ in losses] == list(range(1, 10))
    assert points(file.parent, "train/loss") == [(step, pytest.approx(loss)) for step, loss in losses]
    assert [step for step, _ in points(file.parent, "eval/loss")] == [2, 6, 9]
    stages = points(file.parent, "train/stage")
    assert stages == sorted(stages) and set(stages) == {(line["step"], line["stage"]) for line in logged}


def test_a_resumed_conversion_goes_on_at_its_step(tmp_path):
    for resume in (None, True):
        kept = {"report_to": "tensorboard", "save_strategy": "steps", "save_steps": 1}
        convert(tmp_path / "run", **kept).train(resume_from_checkpoint=resume)
    (file,) = event_files(tmp_path)  # nothing was left to do
    assert file.parent.parent == tmp_path / "run" / "runs"
    assert [step for step, _ in points(file.parent, "train/loss")] == list(range(1, 10))


def test_wandb_sees_a_conversion_as_one_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    run, lines = wandb.init(project="test"), []  # binds wandb.log
    really = wandb.log
    monkeypatch.setattr(wandb, "log", lambda line: (lines.append(line), really(line)))
    convert(tmp_path / "run", report_to="wandb", run_name="run").train()
    assert wandb.run is run and {"train/loss", "train/stage", "eval/loss"} <= set(run.summary.keys())
    assert run.config["output_dir"] == str(tmp_path / "run")
    wandb.finish()
    wandb.teardown()  # else the next run of this process goes to the same folder
    losses = [line for line in lines if "train/loss" in line]
    assert [line["train/global_step"] for line in losses] == list(range(1, 10))
    assert [line["train/stage"] for line in losses] == [1] * 2 + [2] * 4 + [3] * 3
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1


def test_trackio_sees_a_conversion_as_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    place = importlib.import_module("trackio.utils").TRACKIO_DIR  # that of the first import
    convert(tmp_path / "run", report_to="trackio", run_name="three stages").train()
    with contextlib.closing(sqlite3.connect(place / "huggingface.db")) as database:
        lines = [
            json.loads(line)
            for (line,) in database.execute("SELECT metrics FROM metrics WHERE run_name = 'three stages'")
        ]
    losses = [line for line in lines if "train/loss" in line]
    assert [line["train/global_step"] for line in losses] == list(range(1, 10))


def test_logging_dir_is_where_tensorboard_writes_and_nothing_else_is_refused(tmp_path):
    make("sft", tmp_path / "run", report_to=["tensorboard"], logging_dir=str(tmp_path / "logs")).train()
    (file,) = event_files(tmp_path)
    assert file.parent == tmp_path / "logs"
    with raises(ConfigError, where="logging_dir"):
        SFTConfig(**settings(tmp_path) | {"logging_dir": "logs"})


class InterruptionError(Exception):
    """What ends a run after some steps."""


class InterruptAfter(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            raise InterruptionError


def interrupt(verb: str, folder: Path, **more: Any) -> None:
    """Begin a run of 6 steps with a checkpoint every 2, and end it amid the last two."""
    with pytest.raises(InterruptionError):
        trained(verb, folder, callbacks=[InterruptAfter(5 if verb == "sft" else 2)], **more).train()


def trained(verb: str, folder: Path, callbacks: list[TrainerCallback] | None = None, **more: Any) -> Any:
    """A conversion has its interruption in its second stage, of 4 steps."""
    more = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, **more}
    if verb == "sft":
        return make("sft", folder, callbacks=callbacks, **more)
    stages = [{"share": 2, "train": ["attention"]}, {"share": 4}]
    trainer = convert(folder, **more | {"stages": stages, "eval_strategy": "no"})
    trainer.callbacks = [*(callbacks or []), *trainer.callbacks]
    return trainer


BOTH = pytest.mark.parametrize("verb", ["sft", "convert"])
LOSSES = [1, 2, 3, 4, 5, 6]


@each_once("logging_dir, verb", [None, "logs"], ["sft", "convert"])
def test_a_resumed_run_goes_on_in_its_tensorboard_folder(verb, logging_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "transformers.integrations.integration_utils.default_logdir",
        iter(["runs/first", "runs/second"]).__next__,
    )
    kept = {"report_to": "tensorboard", "logging_dir": logging_dir}
    interrupt(verb, tmp_path / "run", **kept)
    # event files are read in the order of their names: by second, and within one by a counter that is
    # compared as text
    time.sleep(1)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    trained(verb, moved, **kept).train(resume_from_checkpoint=True)
    [folder] = {file.parent for file in event_files(tmp_path)}
    assert folder == (tmp_path / "logs" if logging_dir else moved / "runs" / "first")
    assert sorted(step for step, _ in points(folder, "train/loss")) == LOSSES


@BOTH
def test_a_new_run_in_the_folder_of_another_has_runs_of_its_own(verb, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "transformers.integrations.integration_utils.default_logdir",
        iter(["runs/first", "runs/second"]).__next__,
    )
    for more in ({"report_to": "tensorboard"}, {}, {"report_to": "tensorboard"}):
        trained(verb, tmp_path, **more, max_steps=2, save_strategy="no").train()
        assert (tmp_path / RUNS_NAME).exists() == bool(more)
    assert [file.parent.name for file in event_files(tmp_path)] == ["first", "second"]


@BOTH
def test_a_resumed_run_goes_on_in_its_wandb_run(verb, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    interrupt(verb, tmp_path / "run", report_to="wandb")
    first = wandb.run.id
    wandb.finish()
    trained(verb, tmp_path / "run", report_to="wandb").train(resume_from_checkpoint=True)
    assert wandb.run.id == first
    wandb.finish()
    wandb.teardown()


@BOTH
def test_a_resumed_run_goes_on_in_its_mlflow_run(verb, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    interrupt(verb, tmp_path / "run", report_to="mlflow")
    mlflow.end_run()
    trained(verb, tmp_path / "run", report_to="mlflow").train(resume_from_checkpoint=True)
    mlflow.flush_async_logging()
    [run] = mlflow.MlflowClient().search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert {metric.step for metric in mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")} == {
        *LOSSES
    }


@BOTH
def test_a_resumed_run_goes_on_in_its_trackio_run(verb, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    place, project = importlib.import_module("trackio.utils").TRACKIO_DIR, f"resumed-{verb}"
    interrupt(verb, tmp_path / "run", report_to="trackio", project=project)
    trackio.finish()
    trained(verb, tmp_path / "run", report_to="trackio", project=project).train(resume_from_checkpoint=True)
    with contextlib.closing(sqlite3.connect(place / f"{project}.db")) as database:
        lines = [
            (name, json.loads(line))
            for name, line in database.execute("SELECT run_name, metrics FROM metrics")
        ]
    assert len({name for name, _ in lines}) == 1
    assert {line["train/global_step"] for _, line in lines if "train/loss" in line} == {*LOSSES}


class Service(SimpleNamespace):
    """A tracker's module, in which a run can be opened."""

    run = None
    opened: dict[str, Any] | None = None

    def init(self, **run: Any) -> None:
        self.opened = run

    def active_run(self) -> None:
        return None

    def start_run(self, **run: Any) -> None:
        if run["run_id"] == "deleted":
            raise RuntimeError("no such run\nin this store")
        self.opened = run


def reopened(
    kind: type[TrainerCallback], run: dict[str, Any], folder: Path
) -> tuple[Service, SimpleNamespace]:
    """What a resumed run opens of one that is noted in its folder."""
    tracker, service, args = kind.__new__(kind), Service(), SimpleNamespace(run_name=None)
    tracker._wandb = tracker._ml_flow = service
    tracker._auto_end_run = False  # which its end reads
    (folder / RUNS_NAME).write_text(json.dumps({kind.__name__: run}))
    runs = TrackedRuns([tracker], folder)
    runs.resumed = True
    runs.on_train_begin(args, SimpleNamespace(is_world_process_zero=True, global_step=3), None)
    return service, args


def test_each_tracker_opens_the_run_that_is_noted(tmp_path, monkeypatch):
    """As seen by its module, which need not be installed."""
    of_wandb = {"project": "p", "entity": None, "id": "x"}
    assert reopened(WandbCallback, of_wandb, tmp_path)[0].opened == {**of_wandb, "resume": "allow"}
    assert reopened(MLflowCallback, {"run_id": "y"}, tmp_path)[0].opened == {"run_id": "y"}
    assert reopened(TrackioCallback, {"name": "z"}, tmp_path)[1].run_name == "z"
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setenv("MLFLOW_RUN_ID", "mine")
    assert reopened(WandbCallback, of_wandb, tmp_path)[0].opened is None
    assert reopened(MLflowCallback, {"run_id": "y"}, tmp_path)[0].opened is None


def test_a_run_that_a_tracker_does_not_have_any_more_is_told(tmp_path):
    with pytest.warns(
        UnmaskWarning, match=r"MLflow cannot go on in the run .*, and begins another: no such run$"
    ):
        assert reopened(MLflowCallback, {"run_id": "deleted"}, tmp_path)[0].opened is None


def test_every_tracker_of_transformers_is_known():
    assert NEEDS.keys() == INTEGRATION_TO_CALLBACK.keys()


@pytest.mark.parametrize("name", sorted(set(NEEDS) - {"kubeflow"}))
def test_an_absent_tracker_is_one_line_with_the_command(name, tmp_path, monkeypatch):
    for module in NEEDS[name]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as raised:
        SFTConfig(**settings(tmp_path) | {"report_to": [name]})
    assert str(raised.value).startswith(f"report_to: {name} needs ") and "\n" not in str(raised.value)
    assert str(raised.value).endswith(f"pip install {' '.join(NEEDS[name].values())}.")


@pytest.mark.parametrize("verb", ["pretrain", "convert", "sft", "dpo", "grpo"])
def test_the_command_line_refuses_it_before_anything_is_loaded(verb, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    arguments = [
        verb,
        "--model",
        "/no/such/model",
        "--data",
        "/no/such/data",
        "--output",
        str(tmp_path / "run"),
    ]
    result = CliRunner().invoke(app, [*arguments, "training.report_to=wandb"])
    assert result.exit_code != 0 and "pip install wandb" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_other_trackers_that_cannot_work_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    for wrong in ("tensorbord", "kubeflow", ["none", "tensorboard"]):
        with raises(ConfigError, where="report_to"):
            SFTConfig(**settings(tmp_path) | {"report_to": wrong})


@partly_slow("verb", ["pretrain", "sft", "dpo", "kto", "grpo"], 1, 4)
def test_samples_per_second_are_rows_of_all_micro_batches_since_the_last_line(verb, tmp_path, monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("unmask.training.metrics.time", SimpleNamespace(perf_counter=lambda: next(now)))
    more = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 2,
        "num_train_epochs": 9,
    }
    make(
        verb,
        tmp_path,
        rows=PAIRS * 3 if verb == "grpo" else None,
        save_strategy="steps",
        save_steps=2,
        **more,
    ).train()
    lines = [line for line in MetricsLog(tmp_path / "training_logs.json").read() if "loss" in line]
    assert [line["samples_per_second"] for line in lines] == [2 * 2 * 2 / 10] * 2
    assert all(line["tokens_per_second"] > line["samples_per_second"] for line in lines)
    (tmp_path / "checkpoint-4").rename(tmp_path / "later")
    make(verb, tmp_path, rows=PAIRS * 3 if verb == "grpo" else None, **more).train(
        resume_from_checkpoint=True
    )
    resumed = [line for line in MetricsLog(tmp_path / "training_logs.json").read() if "loss" in line]
    assert (
        resumed == [lines[0], resumed[1]]
        and resumed[1]["samples_per_second"] == lines[1]["samples_per_second"]
    )
    assert resumed[1]["tokens_per_second"] == lines[1]["tokens_per_second"]
