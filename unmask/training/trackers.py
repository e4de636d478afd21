"""Trackers (TensorBoard, Weights & Biases, Trackio, ...): availability checks, and one tracker for runs of several stages."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from functools import partialmethod
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.integrations.integration_utils import TensorBoardCallback, get_reporting_integration_callbacks


def set_tensorboard_dir(callbacks: Iterable[TrainerCallback], logging_dir: str | None) -> None:
    """Set TensorBoard's folder (None: TENSORBOARD_LOGGING_DIR, else `runs` in the output directory)."""
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and logging_dir is not None:
            callback.logging_dir = os.path.expanduser(logging_dir)


class RunTrackers(TrainerCallback):
    """The trackers of a run of several stages: they see one run, at its steps, with the stage number as the metric `stage`.

    The stages' Trainers have this as a callback and an empty `report_to`. The trackers start with the first stage that trains, and end
    with `finish`. `args`: of the whole run.
    """

    def __init__(self, args: Any):
        self.args, self.first_step, self.stage = args, 0, 0
        self.trackers: list[TrainerCallback] = [kind() for kind in get_reporting_integration_callbacks(args.report_to)]
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

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **rest: Any) -> None:
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


for _event in (name for name in vars(TrainerCallback) if name.startswith("on_") and name not in vars(RunTrackers)):
    setattr(RunTrackers, _event, partialmethod(RunTrackers._forward, _event))
