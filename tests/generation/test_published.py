"""Tokens of published samplers, recorded with the model of `recorded.py`, equal Unmask's, given the same
random numbers.

Each file of `data/` names the repository, file, function and commit; each case has the published arguments
and Unmask's settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.generation.recorded import recorded_model
from tests.helpers import partly_slow
from unmask.config.sampler import SamplerConfig
from unmask.generation import naive, sampler

CASES = [
    pytest.param(case, id=f"{path.stem}-{number}")
    for path in sorted((Path(__file__).parent / "data").glob("*.json"))
    for number, case in enumerate(json.loads(path.read_text())["cases"])
]


@partly_slow("case", CASES, *range(0, len(CASES), 4))
def test_a_published_sampler_gives_these_tokens(case):
    lm = recorded_model(**case["model"])
    config = SamplerConfig(**case["settings"], stop_at_eos=False)
    assert sampler.generate(lm, case["prompts"], config, case["keys"]).tokens == case["tokens"]
    if config.lossy is None:
        assert naive.generate(lm, case["prompts"][:1], config, case["keys"][:1]).tokens == case["tokens"][:1]


def test_every_sampler_is_recorded():
    settings = [case.values[0]["settings"] for case in CASES]
    assert len(settings) > 40
    for name in (
        "steps",
        "threshold",
        "cfg_scale",
        "schedule",
        "filtered_confidence",
        "order_temperature",
        "top_p",
        "top_k",
        "cache",
    ):
        assert any(name in given for given in settings), name
