"""The part of the base trainer that resumes runs: it compares a run with the one it continues, and lets changed settings act."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import Trainer

from unmask.config.base import OnResume
from unmask.errors import ConfigError
from unmask.models.adapters import has_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.checkpoints import checked_checkpoint, refuse_nothing, steps_done
from unmask.training.config import TrainingConfig
from unmask.training.distributed import from_first
from unmask.training.model_history import result_fields
from unmask.training.resume.fingerprints import model_inputs, rows_fingerprint
from unmask.training.resume.optimizer import OF_GROUPS, OF_SCHEDULE, apply_to_groups, apply_to_schedule, hyperparameters
from unmask.training.resume.record import SECTION, RunRecord

OF_BEST_METRIC = {"training.metric_for_best_model", "training.greater_is_better"}


Base: Any = Trainer if TYPE_CHECKING else object


class RunResuming(Base):
    """A mixin over transformers.Trainer, whose resumed runs are then the runs that they continue, with the settings that they have now."""

    args: TrainingConfig
    lm: DiffusionLM
    changed: Mapping[str, Any] = {}
    """The earlier values of the settings that were changed when the run was resumed, by dotted name."""
    first_groups: list[dict[str, Any]] | None = None
    """The hyperparameters of the optimizer as the trainer made it; None: it is the user's."""

    @cached_property
    def run_record(self) -> RunRecord:
        """The settings and inputs of the run. It must be made before training changes the weights."""
        return RunRecord(self.args, self.inputs(), {"eval_dataset": rows_fingerprint(self.eval_dataset)})

    @property
    def first_weights_matter(self) -> bool:
        """Whether training reads the weights that the model had before training."""
        args: Any = self.args
        return getattr(args, "needs_reference", False) and args.reference_model is None

    def inputs(self) -> dict[str, Any]:
        """What the run reads, besides settings and held-out rows: fingerprints of JSON types, by name."""
        return {"train_dataset": rows_fingerprint(self.train_dataset)} | model_inputs(self.lm, weights_matter=self.first_weights_matter)

    def checkpoint_to_resume(self, named: str | Path | Literal[True]) -> Path | None:
        """The checkpoint that `train(resume_from_checkpoint=named)` continues; None: the run ended before its first one. Writes nothing.

        Raises:
            TrainingError: there is no run, or the checkpoint is incomplete.
            ConfigError: a setting or an input was changed that makes another run.
        """
        folder = self.args.output_folder
        if named is True or Path(named).resolve() == folder.resolve():
            named = True
            refuse_nothing(folder)
        in_shards = self.is_fsdp_enabled or self.is_deepspeed_enabled
        adapters = has_adapters(self.lm)
        checkpoint = from_first(lambda: checked_checkpoint(folder, named, in_shards=in_shards, adapters=adapters))
        if checkpoint is not None:
            self.compare(checkpoint, steps_done(checkpoint) or 0)
        return checkpoint

    def compare(self, checkpoint: Path, step: int) -> None:
        """Compare with the run of a checkpoint after `step` steps. Raises ConfigError for another run."""
        if 0 < self.args.max_steps < step:
            what, remedy = f"is {self.args.max_steps}, but {checkpoint} is after {step} steps", "Give more, or resume an earlier checkpoint"
            raise ConfigError(what, where=self.run_record.named(f"{SECTION}max_steps"), remedy=remedy)
        self.changed = self.run_record.resume(checkpoint, step)

    def show_changes(self) -> None:
        """Print what was changed."""
        if self.args.should_save:
            self.run_record.show(self.changed, self.state.global_step)

    def changes_in_card(self) -> list[dict[str, Any]]:
        """The changes of settings that affect the result: step, setting and earlier value."""
        names = {SECTION + each.name for each in result_fields(self.args)}
        acting = [each for each in self.run_record.changes if each["setting"] in names]
        acting = [each for each in acting if self.run_record.kinds[each["setting"]] is OnResume.ACTS]
        return [{"step": each["step"], "setting": each["setting"].removeprefix(SECTION), "old": each["old"]} for each in acting]

    # Overridden methods of transformers.Trainer.

    def create_optimizer(self, *arguments: Any) -> Any:
        new = self.optimizer is None
        super().create_optimizer(*arguments)
        if new and self.optimizer is not None:
            self.first_groups = hyperparameters(self.optimizer)
        return self.optimizer

    def _init_training_state(self, max_steps: int, *arguments: Any) -> Any:
        _ = self.run_record  # of a new run; a resumed one has made it before it loaded weights
        started = super()._init_training_state(max_steps, *arguments)
        self.state.compute_steps(self.args, max_steps)  # a restored state has the intervals of the checkpoint
        if OF_BEST_METRIC & self.changed.keys():
            self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
        if self.changed:
            self.show_changes()
        return started

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        first_schedule = copy.deepcopy(self.lr_scheduler.state_dict()) if self.lr_scheduler is not None else {}
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.first_groups is None:
            return
        if OF_GROUPS & self.changed.keys():
            apply_to_groups(self.optimizer, self.first_groups)
        if OF_SCHEDULE & self.changed.keys() and self._created_lr_scheduler:
            step, rate = self.state.global_step, self.run_record.values[f"{SECTION}learning_rate"]
            apply_to_schedule(self.lr_scheduler, first_schedule, self.first_groups, step, self.changed, rate)
