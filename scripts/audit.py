"""Look up known vulnerabilities of the versions in constraints.txt, with pip-audit.

python scripts/audit.py

Exits with 1 if there are any, and with 2 if a version could not be looked up: an audit that checked nothing
has not passed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

VERSIONS = Path(__file__).resolve().parent.parent / "constraints.txt"
COMMAND = [
    sys.executable,
    "-m",
    "pip_audit",
    "-r",
    str(VERSIONS),
    "--no-deps",
    "--disable-pip",
    "--progress-spinner=off",
    "--format=json",
]


def report(output: str) -> tuple[int, str]:
    """The exit code and text for the output of pip-audit, which is empty if it failed."""
    found = json.loads(output)["dependencies"] if output.strip() else []
    unknown = [package["name"] for package in found if "skip_reason" in package]
    if len(unknown) == len(found):
        return 2, "nothing was checked: the advisory service cannot be reached from here"
    lines = [
        f"{each['name']} {each['version']}: {flaw['id']}" for each in found for flaw in each.get("vulns", [])
    ]
    if unknown:
        lines.append(f"not checked: {', '.join(unknown)}")
    return 1 if len(lines) > bool(unknown) else 2 if unknown else 0, "\n".join(
        lines
    ) or f"{len(found)} packages, no known vulnerability"


if __name__ == "__main__":
    code, text = report(
        subprocess.run(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    )
    print(text)
    sys.exit(code)
