"""Traces on the wire."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from unmask.generation.output import CanvasStep, Trace
from unmask.generation.remote.backends import read_trace
from unmask.serving.openai.answers import to_json


def test_a_trace_comes_back_as_it_was_with_all_that_json_has_no_number_for() -> None:
    nested = [[-0.5, -math.inf], [], [-math.inf]]
    trace = Trace(
        [4, 5, 6],
        [0, -1, 1],
        [-0.5, 0.0, -math.inf],
        [0.0, 0.0, -math.inf],
        [0.1, 0.0, 0.2],
        [[4, 9], [], [8]],
        nested,
    )
    trace.forbidden_ids, trace.forbidden_log_probs = [[7], [], []], [[-math.inf], [], []]
    trace.canvas_steps = [CanvasStep(0, [4, 5, 6], [7, -1, 9], [-0.5, 0.0, -1.0], 0.8)]
    written = to_json(asdict(trace))
    assert "Infinity" not in written and read_trace(json.loads(written)) == trace
