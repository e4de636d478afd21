"""Completion, tried in the shells themselves."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest

UNMASK = os.path.join(os.path.dirname(sys.executable), "unmask")
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "--private", "-i"],
}
BEFORE = {"bash": "", "zsh": "autoload -Uz compinit; compinit -D; ", "fish": ""}
READY = "echo rea''dy\n"  # which shows the word only when it runs


def typed(shell: str, environment: dict[str, str], *parts: str, awaited: str, seconds: float = 60.0) -> str:
    """What a shell on a terminal shows after these keys, until it shows `awaited`."""
    leader, follower = pty.openpty()
    command = ["setsid", "--ctty", *SHELLS[shell]]  # fish ends without a terminal of its own
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    seen = ""
    try:
        for part, wanted in zip(parts, [*["ready"] * (len(parts) - 1), awaited], strict=True):
            os.write(leader, part.encode())
            end = time.monotonic() + seconds
            while wanted not in seen and time.monotonic() < end:
                if select.select([leader], [], [], 0.2)[0]:
                    seen += os.read(leader, 4096).decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_verbs_and_options(shell, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "TERM": "xterm",
        "PATH": f"{os.path.dirname(UNMASK)}:{os.environ['PATH']}",
    }
    asked = {**environment, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = subprocess.run(
        [UNMASK, "--show-completion", shell], env=asked, capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "completion").write_text(script)
    load = f"{BEFORE[shell]}source {tmp_path}/completion; {READY}"
    for line, word in (("unmask pretr", "pretrain"), ("unmask pretrain --over", "--overwrite")):
        assert word in typed(shell, environment, load, f"{line}\t", awaited=word)
