"""What the probes of `unmask doctor` return, and how it is shown: without secrets, and without the names of
people."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unmask.errors import first_line
from unmask.redaction import shown

WIDTH = 100
"""Columns of the text."""
COLUMNS = (18, 36, 42)
LOGIN_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    found: str
    meaning: str = ""
    """What follows from it, and how to mend it if something is missing."""
    broken: bool = False
    """Whether Unmask cannot work like this."""


Probe = Callable[[], Iterable[Finding]]
Groups = Mapping[str, list[Finding]]


def findings_of(name: str, probe: Probe) -> list[Finding]:
    """What a probe finds. If it fails, the last line says so, under this name."""
    found = []
    try:
        for finding in probe():
            found.append(finding)
    except Exception as error:  # user code: a damaged installation raises anything
        found.append(
            Finding(
                name,
                f"the probe failed: {type(error).__name__}: {first_line(error)}",
                "nothing is known of it here",
            )
        )
    return found


def without_names(finding: Finding, environ: Mapping[str, str] = os.environ) -> Finding:
    """The finding without secrets and control characters, with `~` for the home folder and `USER` for the
    user in other paths."""
    home = os.path.expanduser("~")
    people = {environ.get(name, "") for name in LOGIN_NAMES} | {os.path.basename(home)}

    def clean(text: str) -> str:
        for folder in sorted({home, os.path.realpath(home)} - {os.sep}, key=len, reverse=True):
            text = re.sub(rf"{re.escape(folder)}(?![\w.-])", "~", text)
        for person in sorted(people - {"", "~", os.sep}):
            text = re.sub(rf"(?<=[/\\]){re.escape(person)}(?![\w.-])", "USER", text)
        return shown(text)

    texts: dict[str, Any] = {
        name: clean(text) for name, text in vars(finding).items() if isinstance(text, str)
    }
    return replace(finding, **texts)


def as_dict(groups: Groups) -> dict[str, Any]:
    """The groups as JSON types, and whether any finding is broken."""
    return {
        "broken": is_broken(groups),
        "groups": {title: list(map(vars, findings)) for title, findings in groups.items()},
    }


def is_broken(groups: Groups) -> bool:
    """Whether something is broken that Unmask cannot do without."""
    return any(finding.broken for findings in groups.values() for finding in findings)


def as_text(groups: Groups) -> str:
    """The groups one below the other, in lines of at most `WIDTH` columns: what it is, what was found, what
    it means."""
    console = Console(width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        for title, findings in groups.items():
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), width=WIDTH)
            for width in COLUMNS:
                table.add_column(width=width, overflow="fold")
            for finding in findings:
                table.add_row(
                    Text(finding.name),
                    Text(finding.found),
                    Text("BROKEN. " * finding.broken + finding.meaning),
                )
            console.print(Text(f"{title}\n{'-' * len(title)}"), table, Text(""))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).rstrip()
