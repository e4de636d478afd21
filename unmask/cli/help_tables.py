"""Help pages on narrow terminals: Typer's tables cut the names of options that have no room."""

from __future__ import annotations

from typing import Any

import typer.rich_utils
from rich.table import Table


class WholeNames(Table):
    """A table whose last column, of descriptions, is narrowed before any other one, and in which nothing is
    cut."""

    def add_row(self, *cells: Any, **more: Any) -> None:
        super().add_row(*cells, **more)
        for column in self.columns:
            column.overflow, column.no_wrap = "fold", column is not self.columns[-1]


def keep_names_whole() -> None:
    """Make Typer's help pages of such tables."""
    setattr(typer.rich_utils, "Table", WholeNames)  # noqa: B010 (mypy takes no other form)
