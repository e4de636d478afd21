"""Rollouts from servers that let fewer sequences wait than a batch has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unmask
from tests.serving.servers import served
from tests.tiny import float64_lm
from unmask.config.rollout import RolloutConfig
from unmask.config.sampler import SamplerConfig
from unmask.generation.remote.backends import make_backend
from unmask.serving.app import AppSettings
from unmask.serving.limits import RequestLimits


@pytest.mark.parametrize(
    "settings", [{}, {"top_log_probs": 20}, {"constraint": {"regex": "[abc]+"}, "top_forbidden": 3}]
)
def test_a_rollout_asks_for_no_more_than_the_server_lets_wait(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    lm, prompts = float64_lm(), [[4, 5, 6], [7], [9, 8, 7, 6]] * 5
    config = SamplerConfig(max_new_tokens=6, temperature=1.0, seed=5, trace=True, **settings)
    with served(lm, AppSettings(RequestLimits(sequences=4)), batch_size=2, queue_size=4) as url:
        server = make_backend(RolloutConfig(backend="server", url=url), lm, tmp_path)
        found = server.generate(prompts, config, range(15))
        server.close()
    expected = unmask.generate(lm, prompts, config, range(15))
    assert found.tokens == expected.tokens and found.steps == expected.steps
    for mine, theirs in zip(found.trace or [], expected.trace or [], strict=True):
        assert (mine.top_ids, mine.forbidden_ids) == (theirs.top_ids, theirs.forbidden_ids)
        # of the mask token -inf, which JSON has no number for
        for name in ("top_log_probs", "forbidden_log_probs"):
            pairs = zip(getattr(mine, name), getattr(theirs, name), strict=True)
            assert all(one == pytest.approx(other) for one, other in pairs)
