"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable


def show_table(rows: Iterable[Iterable[str]], title: str, head: Iterable[str] = ()) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    columns = [Column(name, overflow="fold") for name in head]
    table = Table(*columns, title=escape(title), show_header=bool(columns))
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
