"""The processes of an evaluation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from unmask.evaluation.item_log import ItemLog
from unmask.training.durable.launchers import check_processes, connected_processes


@dataclass(frozen=True)
class Processes:
    """The processes of a launcher, of which the first writes."""

    rank: int = 0
    count: int = 1

    @classmethod
    def of_launcher(cls, device: str) -> Processes:
        """Those of torchrun or `accelerate launch`, connected. Unless `device` is the CPU, each has a GPU of
        its own as its current one."""
        found = cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
        check_processes(connected_processes(cpu=device == "cpu").num_processes if found.count > 1 else 1)
        return found

    def wait(self) -> None:
        if self.count > 1:
            PartialState().wait_for_everyone()

    def log(self, output: Path, identity: Mapping[str, Any]) -> ItemLog:
        """The items that they share, beside the output."""
        return ItemLog(output, identity, rank=self.rank, processes=self.count, wait=self.wait)


ALONE = Processes()
