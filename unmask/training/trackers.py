"""Trackers (TensorBoard, Weights & Biases, Trackio, ...): one run for a training that is resumed, and one for
several stages."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.integrations.integration_utils import (
    MLflowCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    get_reporting_integration_callbacks,
)

from unmask.artifacts import write_atomic
from unmask.errors import UnmaskWarning, first_line

RUNS_NAME = "trackers.json"
"""The file in a run's folder that names its runs in the trackers."""


def set_tensorboard_dir(callbacks: Iterable[TrainerCallback], logging_dir: str | None) -> None:
    """Set TensorBoard's folder (None: TENSORBOARD_LOGGING_DIR, else `runs` in the output directory)."""
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and logging_dir is not None:
            callback.logging_dir = os.path.expanduser(logging_dir)


class TrackedRuns(TrainerCallback):
    """The runs of Weights & Biases, MLflow, Trackio and TensorBoard: a training that is resumed continues in
    them.

    It comes before the trackers. What they report of steps that are made again is there twice, but in
    TensorBoard.

    Args:
        trackers: the callbacks of the trainer, among which the trackers are.

    Attributes:
        resumed: whether the training is.
    """

    def __init__(self, trackers: Sequence[TrainerCallback], folder: Path):
        self.trackers, self.path, self.resumed = trackers, folder / RUNS_NAME, False

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Open the earlier runs, or forget them."""
        if not state.is_world_process_zero:
            return
        if not self.resumed:
            self.path.unlink(missing_ok=True)
        for kind, run in self._earlier().items():
            for tracker in self.trackers:
                if type(tracker).__name__ == kind:
                    try:
                        _reopen(tracker, run, args, state.global_step, self.path.parent)
                    except Exception as error:  # of the tracker, such as for a run that was deleted there
                        what = (
                            f"{kind.removesuffix('Callback')} cannot go on in the run {run}, and begins "
                            f"another: {first_line(error)}"
                        )
                        warnings.warn(UnmaskWarning(what), stacklevel=2)

    def _earlier(self) -> dict[str, Any]:
        """The runs that trackers had when the checkpoint was written."""
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Note the runs that the trackers have begun."""
        if not state.is_world_process_zero:
            return
        runs = {
            type(each).__name__: run for each in self.trackers if (run := _run_of(each, self.path.parent))
        }
        if runs:
            write_atomic(self.path, json.dumps(runs, indent=1) + "\n")


def _run_of(tracker: TrainerCallback, folder: Path) -> dict[str, str | None] | None:
    """What finds the run of a tracker again; None: it has none, or is another tracker."""
    if isinstance(tracker, WandbCallback) and (run := tracker._wandb.run) is not None:
        return {"project": run.project, "entity": run.entity or None, "id": run.id}
    if isinstance(tracker, MLflowCallback) and (run := tracker._ml_flow.active_run()) is not None:
        return {"run_id": run.info.run_id}
    if (
        isinstance(tracker, TrackioCallback)
        and (run := tracker._trackio.context_vars.current_run.get()) is not None
    ):
        return {"name": run.name}
    if isinstance(tracker, TensorBoardCallback) and tracker.logging_dir is not None:
        return {"logging_dir": os.path.relpath(tracker.logging_dir, folder)}
    return None


def _reopen(tracker: TrainerCallback, run: Mapping[str, Any], args: Any, step: int, folder: Path) -> None:
    """Have a tracker go on in a run after a step, unless a run is open already, or variables name one."""
    if isinstance(tracker, WandbCallback) and tracker._wandb.run is None and "WANDB_RUN_ID" not in os.environ:
        tracker._wandb.init(**run, resume="allow")
    elif (
        isinstance(tracker, MLflowCallback)
        and tracker._ml_flow.active_run() is None
        and "MLFLOW_RUN_ID" not in os.environ
    ):
        tracker._ml_flow.start_run(**run)
        tracker._auto_end_run = True
    elif isinstance(tracker, TrackioCallback):
        args.run_name = args.run_name or run["name"]
    elif isinstance(tracker, TensorBoardCallback):
        tracker.logging_dir = tracker.logging_dir or os.path.normpath(folder / run["logging_dir"])
        tracker._SummaryWriter = partial(tracker._SummaryWriter, purge_step=step + 1)


class RunTrackers(TrainerCallback):
    """The trackers of a run of several stages: they see one run, at its steps, with the stage number as the
    metric `stage`.

    The stages' Trainers have this as a callback and an empty `report_to`. The trackers start with the first
    stage that trains, and end with `finish`. `args`: of the whole run.
    """

    def __init__(self, args: Any):
        self.args, self.first_step, self.stage = args, 0, 0
        self.trackers: list[TrainerCallback] = [
            kind() for kind in get_reporting_integration_callbacks(args.report_to)
        ]
        self.runs = TrackedRuns(self.trackers, args.output_folder)
        self.trackers.insert(0, self.runs)
        set_tensorboard_dir(self.trackers, args.logging_dir)
        self._began = False
        self._end: tuple[TrainerState, Any, dict[str, Any]] | None = None

    def part(self, first_step: int, stage: int) -> RunTrackers:
        """This callback, set to the stage that begins after `first_step` steps."""
        self.first_step, self.stage = first_step, stage
        if self._end is not None:  # frees the model and the optimizer of the stage before
            self._end = *self._end[:2], {}
        return self

    def finish(self) -> None:
        """End the trackers, if any stage was trained."""
        if self._end is not None:
            state, control, rest = self._end
            self._notify("on_train_end", state, control, rest)
            self._end = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        if not self._began:
            self._forward("on_train_begin", args, state, control, **rest)
        self._began = True

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        self._end = self._of_run(state), control, rest

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **rest: Any
    ) -> None:
        self._forward("on_log", args, state, control, **rest, logs={**(logs or {}), "stage": self.stage})

    def _forward(self, event: str, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        self._notify(event, self._of_run(state), control, rest)

    def _of_run(self, state: TrainerState) -> TrainerState:
        """A copy of a stage's state, with the step of the whole run."""
        whole = copy.copy(state)
        whole.global_step += self.first_step
        return whole

    def _notify(self, event: str, state: TrainerState, control: Any, rest: dict[str, Any]) -> None:
        for tracker in self.trackers:
            getattr(tracker, event)(self.args, state, control, **rest)


for _event in (
    name for name in vars(TrainerCallback) if name.startswith("on_") and name not in vars(RunTrackers)
):
    setattr(RunTrackers, _event, partialmethod(RunTrackers._forward, _event))
