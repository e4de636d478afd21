"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable


def show_table(rows: Iterable[Iterable[str]], title: str, head: Iterable[str] = ()) -> None:
    """Print a table, above a progress display (of rich or of tqdm) where there is one."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text
    from tqdm import tqdm

    columns = [Column(Text(name), overflow="fold") for name in head]
    table = Table(*columns, title=Text(title, "table.title"), show_header=bool(columns))
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    with console.capture() as captured:
        console.print(table)
    tqdm.write(captured.get(), end="")
