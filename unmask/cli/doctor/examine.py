"""`unmask doctor`: all probes, by group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from unmask.cli.doctor import machine, packages, surroundings
from unmask.cli.doctor.findings import Finding, Probe, findings_of, without_names

TORCH = "unmask.cli.doctor.torch_build"
TORCH_SECONDS = 180.0


def of_torch() -> Iterator[Finding]:
    """The findings of `torch_build`, and how its process ended if it did so early."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", TORCH]
    ended = ""
    try:
        done = subprocess.run(
            command, capture_output=True, env=environment, stdin=subprocess.DEVNULL, timeout=TORCH_SECONDS
        )
        out, status = done.stdout, done.returncode
        if status:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            ended = (
                f"ended by {signal.Signals(-status).name}"
                if status < 0
                else lines[-1]
                if lines
                else f"exit status {status}"
            )
    except subprocess.TimeoutExpired as late:
        out, ended = late.stdout or b"", f"not finished after {TORCH_SECONDS:g} seconds"
    found = [
        Finding(**json.loads(line))
        for line in out.decode(errors="replace").splitlines()
        if line.startswith('{"name": ')
    ]
    yield from found
    if ended and not found:
        yield Finding(
            "torch",
            f"cannot be imported: {ended}",
            "Unmask computes with it:\npip install --force-reinstall torch",
            broken=True,
        )
    elif ended:
        yield Finding("torch", f"the probes {ended}", f"the last one that worked: {found[-1].name}")


GROUPS: dict[str, list[Probe]] = {
    "Unmask": [packages.installation, packages.requirements, packages.playground],
    "machine": [
        machine.python,
        machine.system,
        machine.processors,
        machine.memory,
        machine.disks,
        machine.hub_cache,
    ],
    "torch, GPUs and kernels": [of_torch],
    "extras": [packages.extras],
    "sandbox": [surroundings.sandbox],
    "surroundings": [surroundings.variables, surroundings.offline],
}


def examine(*, network: bool = False) -> dict[str, list[Finding]]:
    """The findings of all probes by group. A probe that fails is a finding.

    Args:
        network: whether to ask the hub.
    """
    groups = GROUPS | ({"network": [surroundings.reach_hub]} if network else {})
    return {
        title: [without_names(finding) for probe in probes for finding in findings_of(probe.__name__, probe)]
        for title, probes in groups.items()
    }
