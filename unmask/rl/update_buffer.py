"""The updates of a rollout: what they hold, and how a checkpoint stores those that are left.

Shapes: B completions, M views, T positions.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from unmask.diffusion.views import Views
from unmask.errors import TrainingError, first_line
from unmask.rl.config import GRPOConfig
from unmask.rl.rollout import Rollout

BUFFER_FILE = "rollouts-{rank}.pt"
FIXED_WITHIN_ROLLOUT = ("method", "num_iterations", "log_prob_temperature", "needs_reference")
"""The settings that cannot change between the updates of a rollout, whose log-probabilities are taken
beforehand."""


@dataclass
class Update:
    """A micro-batch of completions with the views and log-probabilities of one inner iteration.

    Attributes:
        rollout: the completions.
        views: the views of this iteration.
        advantage_BT: the advantage of each completion [B, 1] or of each token [B, T] (`token_advantages`).
        learnt_BT: the tokens that are learnt from.
        old_BMT: log-probabilities under the policy that sampled; None: the weights have not changed since.
        reference_BMT: log-probabilities under the reference; None: there is none.
    """

    rollout: Rollout
    views: Views
    advantage_BT: Tensor
    learnt_BT: Tensor
    old_BMT: Tensor | None
    reference_BMT: Tensor | None

    def select_rows(self, rows: slice) -> Update:
        """These completions, with their views."""
        old_BMT, reference_BMT = (
            None if each is None else each[rows] for each in (self.old_BMT, self.reference_BMT)
        )
        views = self.views.select(rows, slice(None))
        return Update(
            self.rollout.select(rows),
            views,
            self.advantage_BT[rows],
            self.learnt_BT[rows],
            old_BMT,
            reference_BMT,
        )


STORED: list[Any] = [Update, (Update, "unmask.training.grpo.Update"), Rollout, Views]
STORED += [(Rollout, "unmask.methods.base.Rollout"), (Rollout, "unmask.rl.methods.base.Rollout")]
"""The classes that a checkpoint may hold, also under their names in earlier versions."""


def save_updates(folder: Path, updates: Sequence[Sequence[Update]], args: GRPOConfig) -> None:
    """Store the updates of this process in a checkpoint."""
    settings = {name: getattr(args, name) for name in FIXED_WITHIN_ROLLOUT}
    torch.save(settings | {"updates": updates}, folder / BUFFER_FILE.format(rank=args.process_index))


def load_updates(folder: Path, args: GRPOConfig, device: torch.device) -> list[list[Update]]:
    """The updates of this process in a checkpoint.

    Raises:
        OSError, ValueError: the file is missing, truncated, or of other settings.
    """
    if (folder / BUFFER_FILE.format(rank=args.world_size)).exists():
        raise ValueError(f"it was saved by more than {args.world_size} processes")
    path = folder / BUFFER_FILE.format(rank=args.process_index)
    if not zipfile.is_zipfile(path):
        raise OSError(f"{path.name} is missing or truncated")
    with torch.serialization.safe_globals(STORED):
        stored: dict[str, Any] = torch.load(path, map_location=device)
    if "scored_at" in stored:
        stored["log_prob_temperature"] = stored.pop("scored_at")
    for updates in stored["updates"]:
        for update in updates:
            for record in (update, update.views, update.rollout):
                _rename_fields(record)
    for name in FIXED_WITHIN_ROLLOUT:
        if stored.get(name, now := getattr(args, name)) != now:
            raise ValueError(f"{path.name} was made with {name} {stored[name]}, not {now}")
    wanted = [args.train_batch_size] * args.gradient_accumulation_steps
    for iteration in range(args.num_iterations):
        held = [
            len(updates[iteration].learnt_BT) for updates in stored["updates"] if iteration < len(updates)
        ]
        if held != wanted:
            what = (
                f"{path.name} holds micro-batches of {held} completions for update {iteration + 1} of a "
                f"rollout, not of {wanted}"
            )
            raise ValueError(what)
    return stored["updates"]


def _rename_fields(record: Update | Views | Rollout) -> None:
    """Give the fields of a record from an earlier version the names that they have now."""
    renamed = {
        name: name.replace("scored", "target").replace("V", "M") for name in vars(record) if "V" in name
    }
    renamed |= {"documents_BT": "document_BT", "steps_BT": "step_BT"}
    for old in renamed.keys() & vars(record).keys():
        vars(record)[renamed[old]] = vars(record).pop(old)


@contextmanager
def reading_checkpoint(folder: Path) -> Iterator[None]:
    """Inside, an error about a checkpoint's files says what to do."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
        what = f"cannot be resumed from: {first_line(error)}"
        raise TrainingError(
            what, where=str(folder), remedy="Delete this checkpoint, or use the settings it was made with"
        ) from error
