"""JSON of answers, which has no number for what is not finite."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any) -> str:
    """JSON; null stands for NaN and infinity, which JSON readers refuse."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
