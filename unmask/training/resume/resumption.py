"""How a trainer resumes a run: it compares its run with the one that it continues, and lets changed settings
act."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from unmask.config.base import OnResume
from unmask.errors import ConfigError
from unmask.training.checkpoints import checked_checkpoint, steps_done
from unmask.training.distributed import from_first
from unmask.training.model_history import result_fields
from unmask.training.resume.fingerprints import rows_fingerprint
from unmask.training.resume.optimizer import OF_GROUPS, apply_to_groups, apply_to_schedule, hyperparameters
from unmask.training.resume.record import SECTION, RunRecord, expect_visited
from unmask.training.run_files import refuse_nothing
from unmask.training.run_log import read_sums

OF_BEST_METRIC = {"training.metric_for_best_model", "training.greater_is_better"}


class Resumption:
    """Compares the run of a trainer with the one that it continues; the trainer's overrides of
    transformers.Trainer call it.

    Attributes:
        changed: the earlier values of the settings that were changed when the run was resumed, by dotted
            name.
        first_groups: the hyperparameters of the optimizer as the trainer made it; None: it is the user's.
        found: the checkpoint to resume, by what names it, until training begins: it is hashed once.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.changed: Mapping[str, Any] = {}
        self.first_groups: list[dict[str, Any]] | None = None
        self.found: dict[Any, Path | None] = {}

    @cached_property
    def record(self) -> RunRecord:
        """The settings and inputs of the run. It must be made before training changes the weights."""
        trainer = self.trainer
        return RunRecord(
            trainer.args, trainer.inputs(), {"eval_dataset": rows_fingerprint(trainer.eval_dataset)}
        )

    def checkpoint(self, named: str | Path | Literal[True]) -> Path | None:
        """The checkpoint that `train(resume_from_checkpoint=named)` continues; None: the run ended before its
        first one. Writes nothing.

        Raises:
            TrainingError: there is no run, or the checkpoint is incomplete.
            ConfigError: a setting or an input was changed that makes another run.
        """
        folder = self.trainer.args.output_folder
        if named is True or Path(named).resolve() == folder.resolve():
            named = True
            refuse_nothing(folder)
        in_shards = self.trainer.uses_fsdp_or_deepspeed
        if named not in self.found:
            self.found = {named: from_first(lambda: checked_checkpoint(folder, named, in_shards=in_shards))}
        checkpoint = self.found[named]
        if checkpoint is not None:
            self.compare(checkpoint, steps_done(checkpoint) or 0)
        return checkpoint

    def compare(self, checkpoint: Path, step: int) -> None:
        """Compare with the run of a checkpoint after `step` steps. Raises ConfigError for another run."""
        if 0 < (steps := self.trainer.args.max_steps) < step:
            what, remedy = (
                f"is {steps}, but {checkpoint} is after {step} steps",
                "Give more, or resume an earlier checkpoint",
            )
            raise ConfigError(what, where=self.record.named(f"{SECTION}max_steps"), remedy=remedy)
        self.changed = self.record.resume(checkpoint, step)
        expect_visited(self.trainer.train_dataset, checkpoint)

    def show_changes(self, max_steps: int) -> None:
        """Print where the run goes on, and what was changed. `max_steps`: of the whole run."""
        if self.trainer.args.should_save:
            self.record.show(self.changed, self.trainer.state.global_step, max_steps)

    def changes_in_card(self) -> list[dict[str, Any]]:
        """The changes of settings that affect the result: step, setting and earlier value."""
        names = {SECTION + each.name for each in result_fields(self.trainer.args)}
        acting = [each for each in self.record.changes if each["setting"] in names]
        acting = [each for each in acting if self.record.kinds[each["setting"]] is OnResume.ACTS]
        return [
            {"step": each["step"], "setting": each["setting"].removeprefix(SECTION), "old": each["old"]}
            for each in acting
        ]

    def begin(self, max_steps: int) -> None:
        """After the trainer's state was restored: let the changed intervals and metrics act."""
        self.found.clear()
        state = self.trainer.state
        # a restored state has the intervals of the checkpoint
        state.compute_steps(self.trainer.args, max_steps)
        if OF_BEST_METRIC & self.changed.keys():
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        if state.global_step:
            self.show_changes(max_steps)

    @contextlib.contextmanager
    def loading(self, checkpoint: Path) -> Iterator[None]:
        """Inside, transformers loads the optimizer and schedule of a checkpoint. Afterwards the changed rates
        act, and the sums of metrics are restored."""
        trainer = self.trainer
        first_schedule = (
            copy.deepcopy(trainer.lr_scheduler.state_dict()) if trainer.lr_scheduler is not None else {}
        )
        yield
        # the saved sums cover all processes
        trainer.means.load(read_sums(checkpoint) if trainer.is_world_process_zero() else {})
        if self.first_groups is None:
            return
        if OF_GROUPS & self.changed.keys():
            apply_to_groups(trainer.optimizer, self.first_groups)
        if trainer._created_lr_scheduler:
            apply_to_schedule(
                trainer.lr_scheduler,
                first_schedule,
                self.first_groups,
                trainer.state.global_step,
                self.changed,
            )

    def optimizer_made(self) -> None:
        """The trainer has made its optimizer, not the user."""
        self.first_groups = hyperparameters(self.trainer.optimizer)
