"""`unmask generate` with a model."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from unmask.cli import app
from unmask.models.load import load

SETTINGS = ["--max-new-tokens", "6", "--temperature", "1", "--no-stop-at-eos", "--deterministic", "--json"]


def test_showing_steps_does_not_change_what_is_printed(model: Path) -> None:
    arguments = ["generate", str(model), "--prompt", "12", "--prompt", "12", *SETTINGS]
    plain, steps = (CliRunner().invoke(app, [*arguments, *more]) for more in ([], ["--show-steps"]))
    assert plain.exit_code == steps.exit_code == 0, steps.output
    assert steps.stdout == plain.stdout and len(plain.stdout.splitlines()) == 2
    lines = [line.split(":")[0] for line in steps.stderr.splitlines()]
    shown = [line for line in lines if line.startswith(("step", "prompt"))]
    assert shown == [
        *(f"step {step}" for step in range(7)),
        "prompt 0",
        *(f"step {step}" for step in range(7)),
        "prompt 1",
    ]


def test_a_prompt_is_a_message_if_the_model_has_a_chat_template(model: Path, tmp_path: Path) -> None:
    arguments = ["--prompt", "12", "--chat", *SETTINGS]
    refused = CliRunner().invoke(app, ["generate", str(model), *arguments])
    assert refused.exit_code == 2, refused.output
    assert "has no chat template" in refused.stderr and "data.chat_template=simple" in refused.stderr
    lm = load(model)
    lm.set_chat_template("{% for message in messages %}3{{ message.content }}={% endfor %}", ends=False)
    lm.save(tmp_path)
    as_message = CliRunner().invoke(app, ["generate", str(tmp_path), *arguments])
    as_text = CliRunner().invoke(app, ["generate", str(model), "--prompt", "312=", *SETTINGS])
    assert as_message.exit_code == as_text.exit_code == 0, as_message.output
    found, expected = json.loads(as_message.stdout), json.loads(as_text.stdout)
    assert found["prompt"] == "12" and len(found["tokens"]) == len(expected["tokens"]) == 6
