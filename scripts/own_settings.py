"""Write the settings that `unmask VERB --help` shows: it could not read them from the configs without importing torch.

python scripts/own_settings.py
"""

from __future__ import annotations

import json
import re

from unmask.cli.settings import OWN_SETTINGS
from unmask.commands.settings.listing import grouped
from unmask.commands.verbs import VERBS


def as_json() -> str:
    """One setting a line."""
    text = json.dumps({verb: grouped(verb) for verb in VERBS}, indent=1, ensure_ascii=False)
    return re.sub(r"\[\n\s+(.*)\n\s+(.*)\n\s+\]", r"[\1 \2]", text) + "\n"


if __name__ == "__main__":
    OWN_SETTINGS.write_text(as_json(), encoding="utf-8")
