"""What `make` installs is pinned by version and hash, and an audit that checked nothing does not pass."""

from __future__ import annotations

import json
import re
import runpy
import tomllib

import pytest

from tests.helpers import REPOSITORY

LOCKS = ["requirements.lock", "build.lock", "vllm.lock"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(path: str) -> dict[str, str]:
    """The versions that a file pins, by name."""
    return {
        normal(name): version
        for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", (REPOSITORY / path).read_text(), re.M)
    }


@pytest.mark.parametrize("path", LOCKS)
def test_every_version_in_a_lock_has_a_hash_and_no_address(path):
    text = (REPOSITORY / path).read_text()
    entries = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text, flags=re.M)).split("\n")
    assert all(
        re.fullmatch(r"[\w.-]+==\S+(\s+--hash=sha256:[0-9a-f]{64})+\s*", entry)
        for entry in entries
        if entry.strip()
    )
    assert versions(path) and "://" not in text and "/opt" not in text


def test_the_lock_has_the_versions_of_the_constraints():
    """torch is in no lock: machines differ in its build, and the builds in what they depend on."""
    constraints = versions("constraints.txt")
    assert "torch" in constraints and versions("requirements.lock") == {
        name: v for name, v in constraints.items() if name != "torch"
    }
    shared = versions("build.lock").keys() & constraints.keys()
    assert {name: versions("build.lock")[name] for name in shared} == {
        name: constraints[name] for name in shared
    }


def test_the_build_back_end_is_pinned():
    required = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    pinned = versions("build.lock")
    assert required == [f"hatchling=={pinned['hatchling']}"]


def test_whatever_make_installs_is_hashed_or_torch_or_ours():
    """Without hashes: torch, what is newer than the locks, and what vLLM depends on, whose own wheel has
    one."""
    installs = [line for line in (REPOSITORY / "Makefile").read_text().splitlines() if "pip install" in line]
    hashed = [line for line in installs if "--require-hashes --no-deps" in line]
    assert {name for line in hashed for name in LOCKS if line.endswith(f"-r {name}")} == set(LOCKS)
    allowed = (
        r"grep '\^torch==' constraints\.txt|--no-deps --no-build-isolation -e \.$|cut -d' ' -f1 vllm\.lock"
    )
    assert all(re.search(allowed, line) for line in installs if line not in hashed)
    script = (REPOSITORY / ".ci/run").read_text()
    assert "make check" in script and "pip install" not in script


def test_what_the_playground_is_built_with_is_pinned_and_hashed():
    """The lock names no registry: npm takes the one that it is configured with, and compares hashes."""
    asked = json.loads((REPOSITORY / "playground/package.json").read_text())
    lock = json.loads((REPOSITORY / "playground/package-lock.json").read_text())
    root, *packages = lock["packages"].values()
    assert {**asked["dependencies"], **asked["devDependencies"]} == {
        **root["dependencies"],
        **root["devDependencies"],
    }
    assert all(
        re.fullmatch(r"[\d.]+", version)
        for version in {**root["dependencies"], **root["devDependencies"]}.values()
    )
    assert packages and all(
        package["integrity"].startswith("sha512-") and "resolved" not in package for package in packages
    )


def outcome(*packages: dict) -> tuple[int, str]:
    return runpy.run_path(str(REPOSITORY / "scripts" / "audit.py"))["report"](
        json.dumps({"dependencies": packages})
    )


def test_an_audit_that_checked_nothing_does_not_pass():
    fine = {"name": "a", "version": "1", "vulns": []}
    skipped, flawed = (
        {"name": "b", "skip_reason": "not found"},
        {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1"}]},
    )
    assert outcome(fine) == (0, "1 packages, no known vulnerability")
    assert outcome(fine, flawed) == (1, "c 2: PYSEC-1")
    assert outcome(fine, skipped) == (2, "not checked: b")
    assert outcome(fine, skipped, flawed) == (1, "c 2: PYSEC-1\nnot checked: b")
    unreachable = (2, "nothing was checked: the advisory service cannot be reached from here")
    assert outcome(skipped) == unreachable
    assert runpy.run_path(str(REPOSITORY / "scripts" / "audit.py"))["report"]("") == unreachable
