"""Write the list of the settings under `training`, which the command line could not read from the configs
without importing torch.

python scripts/list_settings.py
"""

from __future__ import annotations

import json

from unmask.cli.declared import listed_settings
from unmask.training.settings.listing import SETTINGS


def as_json() -> str:
    """One setting a line."""
    version, *lists = listed_settings().items()
    parts = [json.dumps(dict([version]))[1:-1]]
    for name, rows in lists:
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    SETTINGS.write_text(as_json(), encoding="utf-8")
