"""`unmask new`: a folder to begin with, from the files in `templates`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from unmask.config.run import check_output_folder
from unmask.console import for_stdout
from unmask.errors import ConfigError
from unmask.redaction import shell_line

TEMPLATES = Path(__file__).with_name("templates")
PARTS = {
    "sft": ["chat", "sft"],
    "preferences": ["chat", "preferences"],
    "rewards": ["chat", "rewards"],
    "conversion": ["conversion"],
}
"""The folders of `templates` that each kind consists of. A file that several have is joined from their
parts."""
MODEL_PATH = re.compile(r"^  path: .*$", re.MULTILINE)
TINY_MODEL = "tiny-model"


def new(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to write.")],
    kind: Annotated[
        Literal["sft", "preferences", "rewards", "conversion"],
        typer.Option(
            metavar="KIND",
            help="sft (chats), preferences (DPO), rewards (GRPO with a reward of your own) or conversion.",
        ),
    ] = "sft",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_ID",
            help="The model to train, for config.yaml; unset: a tiny one that stands in for yours.",
        ),
    ] = None,
) -> None:
    """Write a folder to begin with: a commented config, sample data, a Makefile and a README."""
    if model is not None and not model.strip():
        remedy = "Give a folder or the name of a model on the hub, or leave it out"
        raise ConfigError("is empty", where="--model", remedy=remedy)
    check_output_folder(name)
    write_templates(name, kind, model)
    if model is None:
        write_tiny_model(name / TINY_MODEL, causal=kind == "conversion")
    for path in sorted(name.iterdir()):
        typer.echo(for_stdout(f"{path}{'/' * path.is_dir()}"))
    typer.echo(for_stdout(f"next: cd {shell_line([str(name)])} && make train  (README.md has the rest)"))


def write_templates(folder: Path, kind: str, model: str | None) -> None:
    """Write the files of a kind, one of `PARTS`, with a folder or a hub name for `model.path` in config.yaml;
    None: the stand-in stays."""
    files: dict[str, str] = {}
    for template in (path for part in PARTS[kind] for path in (TEMPLATES / part).iterdir() if path.is_file()):
        before = f"{files[template.name]}\n" if template.name in files else ""
        files[template.name] = before + template.read_text(encoding="utf-8")
    if model is not None:
        files["config.yaml"] = MODEL_PATH.sub(lambda _: f"  path: {quoted_path(model)}", files["config.yaml"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def quoted_path(model: str) -> str:
    """The model for YAML and for a shell, absolute if it is a folder: the commands run in another one."""
    path = str(Path(model).resolve()) if Path(model).exists() else model
    if "'" in path:
        return json.dumps(path, ensure_ascii=False)
    return path if shlex.quote(path) == path else f"'{path}'"


def write_tiny_model(folder: Path, *, causal: bool) -> None:
    """Write a model with random weights: 80,000 parameters, whose tokens are the characters of ASCII. It is
    causal, or bidirectional with a chat template.

    It is what `character_model` makes, but for the random numbers: torch takes seconds to import.
    """
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    files = {path.name: path.read_text(encoding="utf-8") for path in (TEMPLATES / TINY_MODEL).iterdir()}
    config, shapes = json.loads(files["config.json"]), json.loads(files.pop("shapes.json"))
    if causal:
        config["unmask"] |= {"attention": "causal", "logit_shift": True}
        files["config.json"] = json.dumps(config, indent=2) + "\n"
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    rng, spread = np.random.default_rng(0), config["initializer_range"]
    weights = {
        name: rng.normal(0, spread, shape).astype(np.float32) if shape[1:] else np.ones(shape, np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
