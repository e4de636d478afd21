"""`unmask generate` with a model."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from unmask.cli import app

SETTINGS = ["--max-new-tokens", "6", "--temperature", "1", "--no-stop-at-eos", "--deterministic", "--json"]


def test_showing_steps_does_not_change_what_is_printed(model: Path) -> None:
    arguments = ["generate", str(model), "--prompt", "12", "--prompt", "12", *SETTINGS]
    plain, steps = (CliRunner().invoke(app, [*arguments, *more]) for more in ([], ["--show-steps"]))
    assert plain.exit_code == steps.exit_code == 0, steps.output
    assert steps.stdout == plain.stdout and len(plain.stdout.splitlines()) == 2
    lines = [line.split(":")[0] for line in steps.stderr.splitlines()]
    shown = [line for line in lines if line.startswith(("step", "prompt"))]
    assert shown == [*(f"step {step}" for step in range(7)), "prompt 0", *(f"step {step}" for step in range(7)), "prompt 1"]
