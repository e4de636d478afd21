"""How a trainer writes its checkpoints and its model: whole, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from unmask.artifacts import share
from unmask.errors import TrainingError
from unmask.models.adapters import has_adapters, merged, without_tables
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.end_tokens import accept_generation_config
from unmask.models.model_card import write_card
from unmask.training.checkpoints import checkpoints, drop_pickled_settings
from unmask.training.durable.checkpoint_files import bytes_of, check_free_space, fault, naming_write_errors, written_whole
from unmask.training.run_log import Means, read_sums, write_sums

Base: Any = Trainer if TYPE_CHECKING else object


class CheckpointSaving(Base):
    """The part of the base trainer that saves: a mixin over transformers.Trainer, whose checkpoints are then whole or absent."""

    lm: DiffusionLM
    means: Means
    _unfinished: Path | None = None  # where a checkpoint is being written

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._unfinished is None else str(self._unfinished.parent)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in transformers, but the checkpoint appears when all its files are on the disk, with a list of them. Raises TrainingError if
        it cannot be written; earlier checkpoints are intact then."""
        folder = Path(self._get_output_dir(trial))
        checkpoint, earlier = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}", checkpoints(folder)
        kept = f"{earlier[0].name} is intact: " if earlier else ""
        remedy = f"Make room and permit writing. {kept}--resume continues from {'it' if earlier else 'the beginning'}"
        writes = self.args.should_save
        with naming_write_errors(checkpoint, remedy):
            if writes:
                check_free_space(folder, bytes_of(earlier[0]) if earlier else self._expected_bytes(), remedy)
            with written_whole(checkpoint, writes=writes, listed=True) as self._unfinished:
                try:
                    super()._save_checkpoint(model, trial)
                    self._name_best(self._unfinished, checkpoint)
                finally:
                    self._unfinished = None
            if writes:
                best = self.state.best_model_checkpoint
                rotate_checkpoints(str(folder), save_total_limit=self.args.save_total_limit, best_model_checkpoint=best, use_mtime=True)

    def _name_best(self, unfinished: Path, checkpoint: Path) -> None:
        """Record the best checkpoint under the name that it will have."""
        best = checkpoint.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
        if self.state.best_global_step and self.args.save_strategy != "no" and (best == checkpoint or best.exists()):
            self.state.best_model_checkpoint = str(best)
            if self.args.should_save:
                self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))

    def _expected_bytes(self) -> int:
        """The size of a first checkpoint: what is trained, and the optimizer's state."""
        trained = [weight for weight in self.lm.model.parameters() if weight.requires_grad or not has_adapters(self.lm)]
        state = [] if self.args.save_only_model or self.optimizer is None else [*self.optimizer.state.values()]
        moments = [value for each in state if isinstance(each, dict) for value in each.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in [*trained, *moments])

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if (found := fault(best)) is not None:
            raise TrainingError(found, where=str(best), remedy="Use the last checkpoint (load_best_model_at_end=false)")
        super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.means.load(read_sums(Path(checkpoint)) if self.is_world_process_zero() else {})  # the saved sums cover all processes

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model with adapters merged; a checkpoint (`_internal_call`): trained weights, config and metric sums."""
        accept_generation_config(self.lm.model.generation_config)
        if _internal_call:
            sums = self.means.state_everywhere()
            if self.args.should_save:
                write_sums(Path(str(output_dir)), sums)
                self.run_record.write(Path(str(output_dir)), self.reported_settings())
                self.lm.config.save_pretrained(str(output_dir))  # it holds the history, which is not saved with adapters
            without_tables(self.lm)
        if _internal_call or not has_adapters(self.lm):
            super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                drop_pickled_settings(output_dir or str(self.args.output_dir))
            if not _internal_call and self.args.should_save:
                share(output_dir or str(self.args.output_dir))
                write_card(self.lm, output_dir or str(self.args.output_dir))
        elif self.args.should_save:
            merged(self.lm).save(output_dir or self.args.output_dir)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Called by transformers when it pushes to the hub."""
        if self.args.should_save:
            write_card(self.lm, str(self.args.output_dir))
