"""The model that stands in for the user's own in a folder of `unmask new`, so that its commands work at once, without a hub."""

from __future__ import annotations

import string
from pathlib import Path

from unmask.data.characters import character_model
from unmask.models.chat_template import TEMPLATES

TINY_MODEL = "tiny-model"


def write_tiny_model(folder: Path, kind: str) -> None:
    """Write a model with random weights to `folder/tiny-model`: 80,000 parameters, whose tokens are the characters of ASCII.

    It is causal for `kind` conversion, else bidirectional with a chat template.
    """
    lm = character_model(
        string.printable, hidden=64, layers=2, context=512, seed=0, attention="causal" if kind == "conversion" else "bidirectional"
    )
    lm.tokenizer.chat_template = TEMPLATES["simple"]
    lm.save(folder / TINY_MODEL)
