"""What `unmask evaluate --against` and the training verbs show of two models."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from unmask.console import show_table

if TYPE_CHECKING:
    from unmask.cli.retention import Retention


def import_harness() -> ModuleType:
    """Import lm-eval, which is optional."""
    import unmask.evaluation.harness as harness

    return harness


def show_retention(found: Retention, title: str) -> None:
    """Print the differences between two models, and the settings in which their evaluations differ."""
    from unmask.cli.compare_tables import difference_rows, setting_rows
    from unmask.cli.retention import AFTER, BEFORE, speed_rows

    rows = [*difference_rows(found.comparison, several=False), *speed_rows(found)]
    show_table(rows, title=title, head=["", BEFORE, AFTER, "difference", "p (Holm)", ""])
    if settings := setting_rows(found.comparison, several=False):
        show_table(settings, title="settings that differ", head=["task", "setting", BEFORE, AFTER])
