"""Unmask itself, the packages that it needs, and its extras."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from unmask.artifacts import git_state, package_version
from unmask.cli.doctor.findings import Finding

PURPOSES = {
    "train": "the training verbs and the demo",
    "rewards": "answers in mathematics, and the seccomp layer of the sandbox",
    "eval": "lm-evaluation-harness, ROUGE and BLEU",
    "serve": "unmask serve",
    "cuda": "weights in 4 and 8 bits, 8-bit optimizers",
    "torchao": "optimizers of torchao, stochastic rounding",
    "constraints": "text held to a pattern, a schema or a grammar",
    "deepspeed": "ZeRO",
    "dev": "the tests and checks of Unmask itself",
    "docs": "this documentation as a site",
    "peers": "the tests that compare with TRL",
}
"""What each extra is for."""
FOLDER = Path(__file__).parents[2]
"""The package."""


def installation() -> Iterator[Finding]:
    version, checkout = package_version("unmask"), FOLDER.parent
    if not (checkout / "pyproject.toml").is_file():
        yield Finding("Unmask", f"{version}, a wheel", str(FOLDER))
        return
    git = git_state(checkout)
    commit = f" at {git['commit'][:10]}{', with changes' if git['changed'] else ''}" if git else ""
    remedy = "" if version else ". To install it and to know its version:\npip install -e ."
    yield Finding("Unmask", f"{version or 'not installed'}, a checkout{commit}", f"{checkout}{remedy}")


def playground() -> Iterator[Finding]:
    built = (FOLDER / "serving" / "static" / "index.html").is_file()
    meaning = (
        "unmask serve shows it"
        if built
        else "unmask serve answers requests but has no page. In a checkout, with Node 20.19:\nmake playground"
    )
    yield Finding("playground page", "built" if built else "not built", meaning)


def requirements() -> Iterator[Finding]:
    """One line if the needed packages are there, else a line for each problem."""
    needed = _requirements("")
    wrong = {each.name: problem for each in needed if (problem := _problem(each))}
    for name, problem in wrong.items():
        yield Finding(name, problem, "Unmask needs it:\npip install --upgrade unmask", broken=True)
    if not wrong:
        yield Finding(
            "needed packages",
            f"all {len(needed)} are there",
            ", ".join(f"{each.name} {package_version(each.name)}" for each in needed),
        )


def extras() -> Iterator[Finding]:
    names = importlib.metadata.metadata("unmask").get_all("Provides-Extra") or []
    for extra in sorted(
        names, key=lambda name: list(PURPOSES).index(name) if name in PURPOSES else len(PURPOSES)
    ):
        packages = _requirements(extra)
        lacking = [f"{each.name} {problem}" for each in packages if (problem := _problem(each))]
        there = [f"{each.name} {package_version(each.name)}" for each in packages if not _problem(each)]
        meaning = f"for {PURPOSES.get(extra, 'this version does not say what')}"
        if lacking:
            meaning += f". To add it:\npip install 'unmask[{extra}]'"
        yield Finding(
            f"extra {extra}", ", ".join([*lacking, *there]) or "needs nothing on this platform", meaning
        )


def _requirements(extra: str) -> Sequence[Requirement]:
    """What Unmask (or an extra) needs on this platform."""
    found = map(Requirement, importlib.metadata.requires("unmask") or [])
    wanted = [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]
    return [each for each in wanted if bool(extra) == ("extra" in str(each.marker))]


def _problem(requirement: Requirement) -> str:
    """Why an installed package does not meet a requirement; "" if it does."""
    version = package_version(requirement.name)
    if version is None:
        return "missing"
    return (
        ""
        if requirement.specifier.contains(version, prereleases=True)
        else f"{version}, needed: {requirement.specifier}"
    )
