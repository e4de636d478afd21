"""How a stage of a conversion is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from unmask.training.resume.record import read_record
from unmask.training.resume.resumption import Resumption
from unmask.training.run_files import checkpoints


class StageResumption(Resumption):
    """The resumption of one stage. `ConvertTrainer` has compared the whole runs."""

    def checkpoint(self, named: str | Path | Literal[True]) -> Path | None:
        """As in the base; a stage that did not begin starts from the beginning."""
        return (
            None
            if named is True and not checkpoints(self.trainer.args.output_folder)
            else super().checkpoint(named)
        )

    def compare(self, checkpoint: Path, step: int) -> None:
        """Find what to change in this stage."""
        recorded = read_record(checkpoint)
        self.changed = self.record.changed_since(recorded) if recorded else {}

    def show_changes(self, max_steps: int) -> None:
        """`ConvertTrainer` prints them."""

    def changes_in_card(self) -> list[dict[str, Any]]:
        """The changes within this stage, with its learning rates."""
        first, rate = self.trainer.steps_before, self.trainer.stage.rate
        changes = [
            each
            for each in super().changes_in_card()
            if first < each["step"] < first + self.trainer.args.max_steps
        ]
        return [
            each | {"old": each["old"] * rate} if each["setting"] == "learning_rate" else each
            for each in changes
        ]
