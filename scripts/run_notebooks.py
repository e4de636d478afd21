"""Run the notebooks of docs/notebooks and store what their cells print. What training logs is left out.

python scripts/run_notebooks.py
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"


def run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The notebook with its outputs, and the variables that its cells leave. Files go to the current
    folder."""
    notebook, names = json.loads(path.read_text(encoding="utf-8")), {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
            lines = [] if ".train()" in source else printed.getvalue().splitlines(keepends=True)
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
    return notebook, names


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            notebook, _ = run(path)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{os.path.relpath(path)}: done")
