"""The files that `unmask new` writes: templates, which are folders of this package."""

from __future__ import annotations

import json
import re
import shlex
from importlib import resources
from pathlib import Path

TEMPLATES = {
    "sft": ["chat", "sft"],
    "preferences": ["chat", "preferences"],
    "rewards": ["chat", "rewards"],
    "conversion": ["conversion"],
}
"""The folders of `templates` that each kind consists of. A file that several have is joined from their
parts."""
MODEL_PATH = re.compile(r"^  path: .*$", re.MULTILINE)


def write_templates(folder: Path, kind: str, model: str | None) -> None:
    """Write the files of a kind.

    Args:
        folder: is created; files of the same names are replaced.
        kind: one of `TEMPLATES`.
        model: a folder or a hub name for `model.path` in config.yaml; None: the stand-in stays.
    """
    files: dict[str, str] = {}
    for part in TEMPLATES[kind]:
        for template in (resources.files("unmask.cli.new") / "templates" / part).iterdir():
            if template.is_file():
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
