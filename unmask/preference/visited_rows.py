"""Which rows of a preference dataset a run trains on, in each epoch."""

from __future__ import annotations

from itertools import islice
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import gather_object
from torch.utils.data import SequentialSampler

from unmask.training.config import steps_per_epoch, total_steps


def visited_rows(trainer: Any) -> list[list[int]]:
    """The indices of the training rows of each epoch, of all processes, sorted. All rows of an epoch, unless
    the run ends within it and the order of its rows is known in advance. A collective."""
    args, rows = trainer.args, trainer.train_dataset
    steps, each = total_steps(args, rows), steps_per_epoch(args, rows)
    epochs = [[*range(len(rows))] for _ in range(-(-steps // each))]
    if (left := steps % each) == 0 or args.ignore_data_skip:
        return epochs
    loader = trainer.get_train_dataloader()
    batches: Any = getattr(loader, "batch_sampler", None)
    # of one process's part of the batches
    sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
    if isinstance(sampler, (SeedableRandomSampler, SequentialSampler)):
        loader.set_epoch(len(epochs) - 1)
        mine = [row for batch in islice(batches, left * args.gradient_accumulation_steps) for row in batch]
        epochs[-1] = sorted({*gather_object(mine)})
    return epochs
