"""Rollouts from servers that let fewer sequences wait than a batch has."""

from __future__ import annotations

from pathlib import Path

import pytest

import unmask
from tests.generation.tiny_models import tiny
from tests.serving.servers import served
from unmask.config.run import RolloutConfig, SamplerConfig
from unmask.generation.remote.backends import make_backend
from unmask.serving.app import AppSettings
from unmask.serving.limits import Limits


@pytest.mark.parametrize("top_log_probs", [0, 2])
def test_a_rollout_asks_for_no_more_than_the_server_lets_wait(top_log_probs: int, tmp_path: Path) -> None:
    lm, prompts = tiny(), [[4, 5, 6], [7], [9, 8, 7, 6]] * 5
    config = SamplerConfig(max_new_tokens=6, temperature=1.0, seed=5, trace=True, top_log_probs=top_log_probs)
    with served(lm, AppSettings(Limits(sequences=4)), batch_size=2, queue_size=4) as url:
        server = make_backend(RolloutConfig(backend="server", url=url), lm, tmp_path)
        found = server.generate(prompts, config, range(15))
        server.close()
    expected = unmask.generate(lm, prompts, config, range(15))
    assert found.tokens == expected.tokens and found.steps == expected.steps
    assert [trace.top_ids for trace in found.trace or []] == [trace.top_ids for trace in expected.trace or []]
