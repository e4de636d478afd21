"""How a trainer writes its checkpoints and its model: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from unmask.artifacts import share
from unmask.data.token_cache import StreamedRows
from unmask.errors import TrainingError
from unmask.models.adapters import has_adapters, merged, without_tables
from unmask.models.end_tokens import accept_generation_config
from unmask.models.model_card import write_card
from unmask.training.checkpoints import remove_old
from unmask.training.config import rows_per_step
from unmask.training.durable.checkpoint_files import (
    MAKE_ROOM,
    bytes_of,
    check_free_space,
    fault,
    naming_write_errors,
    written_whole,
)
from unmask.training.run_files import checkpoints
from unmask.training.run_log import write_sums


@contextlib.contextmanager
def without_pickled_settings() -> Iterator[None]:
    """Let transformers write its pickle of all settings, tokens included, to nowhere: it would also be
    uploaded, and nothing reads it."""
    name = transformers.trainer.TRAINING_ARGS_NAME
    transformers.trainer.TRAINING_ARGS_NAME = os.devnull
    try:
        yield
    finally:
        transformers.trainer.TRAINING_ARGS_NAME = name


class Saver:
    """What is done before and after transformers.Trainer writes checkpoints and the model of a trainer."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.unfinished: Path | None = None  # where a checkpoint is being written

    @contextlib.contextmanager
    def whole_checkpoint(self, folder: Path) -> Iterator[None]:
        """Inside, a checkpoint is written. It appears in the folder when all its files are on the disk, with
        a list of them, and is then uploaded if that is set. Raises TrainingError if it cannot be written;
        earlier checkpoints are intact then."""
        args, state = self.trainer.args, self.trainer.state
        checkpoint, earlier = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", checkpoints(folder)
        kept = f"{earlier[0].name} is intact: " if earlier else ""
        remedy = f"{MAKE_ROOM}. {kept}--resume continues from {'it' if earlier else 'the beginning'}"
        with naming_write_errors(checkpoint, remedy):
            if args.should_save:
                check_free_space(folder, bytes_of(earlier[0]) if earlier else self._expected_bytes(), remedy)
            with written_whole(checkpoint, writes=args.should_save, listed=True) as self.unfinished:
                uploads, args.push_to_hub = args.push_to_hub, False  # not before it is in its place
                try:
                    yield
                    self._name_best(self.unfinished, checkpoint)
                finally:
                    self.unfinished, args.push_to_hub = None, uploads
            if uploads:
                with without_pickled_settings():
                    self.trainer._push_from_checkpoint(str(checkpoint))
            if args.should_save:
                remove_old(checkpoint, args.save_total_limit, state.best_model_checkpoint)

    def _name_best(self, unfinished: Path, checkpoint: Path) -> None:
        """Record the best checkpoint under the name that it will have."""
        args, state = self.trainer.args, self.trainer.state
        best = checkpoint.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if state.best_global_step and args.save_strategy != "no" and (best == checkpoint or best.exists()):
            state.best_model_checkpoint = str(best)
            if args.should_save:
                state.save_to_json(str(unfinished / TRAINER_STATE_NAME))

    def _expected_bytes(self) -> int:
        """The size of a first checkpoint: what is trained, and the optimizer's state."""
        lm, optimizer = self.trainer.lm, self.trainer.optimizer
        trained = [weight for weight in lm.model.parameters() if weight.requires_grad or not has_adapters(lm)]
        state = [] if self.trainer.args.save_only_model or optimizer is None else [*optimizer.state.values()]
        moments = [
            value
            for each in state
            if isinstance(each, dict)
            for value in each.values()
            if isinstance(value, torch.Tensor)
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in [*trained, *moments])

    def check_best(self) -> None:
        """Raise TrainingError if the best checkpoint, which is loaded at the end, is incomplete."""
        best = Path(str(self.trainer.state.best_model_checkpoint))
        if (found := fault(best)) is not None:
            raise TrainingError(
                found, where=str(best), remedy="Use the last checkpoint (load_best_model_at_end=false)"
            )

    def _visited(self) -> dict[str, int] | None:
        """What the run has read of a stream."""
        rows, steps = self.trainer.train_dataset, self.trainer.state.global_step
        return (
            rows.visited(steps * rows_per_step(self.trainer.args)) if isinstance(rows, StreamedRows) else None
        )

    def save_merged(self, folder: str | Path) -> None:
        """Save the whole model with its adapters merged."""
        accept_generation_config(self.trainer.lm.model.generation_config)
        if self.trainer.args.should_save:
            merged(self.trainer.lm).save(folder)

    @contextlib.contextmanager
    def whole_model(self, folder: Path) -> Iterator[None]:
        """Inside, the whole model is written."""
        lm = self.trainer.lm
        accept_generation_config(lm.model.generation_config)
        with without_pickled_settings():
            yield
        if self.trainer.args.should_save:
            share(folder)
            write_card(lm, folder)

    @contextlib.contextmanager
    def trained_part(self, folder: Path) -> Iterator[None]:
        """Inside, the trained weights of a checkpoint are written. Its config, metric sums and the record of
        the run are added."""
        lm, writes = self.trainer.lm, self.trainer.args.should_save
        accept_generation_config(lm.model.generation_config)
        self.trainer.numbers.read()
        sums = self.trainer.means.state_everywhere()
        if writes:
            write_sums(folder, sums)
            self.trainer.run_record.write(folder, self.trainer.reported_settings(), self._visited())
            lm.config.save_pretrained(str(folder))  # it holds the history, which is not saved with adapters
        without_tables(lm)
        with without_pickled_settings():
            yield
