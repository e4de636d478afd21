"""Sandboxes for tests, which say what is missing where there are none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from unmask.sandbox.isolation import Limits, probe
from unmask.sandbox.pool import Pool


def require(*layers: str) -> None:
    """Skip a test where a layer of isolation is missing."""
    if missing := {name: why for name, why in probe().missing.items() if name in (layers or probe().missing)}:
        pytest.skip(f"programs are not isolated here: {missing}")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Sandboxes with little time."""
    require()
    pool = Pool(limits=Limits(seconds=3.0))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ocaml(pool: Pool) -> Pool:
    if not shutil.which("ocamlfind"):
        pytest.skip("needs OCaml: apt-get install ocaml-nox ocaml-findlib libbase-ocaml-dev libounit-ocaml-dev")
    return pool


def of_sandboxes(pool: Pool) -> list[str]:
    """The command lines of all processes that run as one of a pool's users."""
    users = {uid for slot in pool._slots for uid in slot.uids}
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid in users:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    found.append(file.read().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended since
            continue
    return found
