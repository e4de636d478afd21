"""Settings of rollouts: what each backend needs, and what has no effect on it."""

from __future__ import annotations

from typing import Any

import pytest

from unmask.config.rollout import RolloutConfig
from unmask.errors import ConfigError

URL = "http://localhost:8000"


@pytest.mark.parametrize(
    "values, where",
    [
        ({"url": URL}, "url"),
        ({"sync_steps": 2}, "sync_steps"),
        ({"api_key": "k"}, "api_key"),
        ({"backend": "server"}, "url"),
        ({"backend": "vllm"}, "url"),
        ({"backend": "server", "url": "localhost:8000"}, "url"),
        ({"backend": "server", "url": "http://"}, "url"),
        ({"backend": "server", "url": URL, "sync": "lora"}, "sync"),
        ({"backend": "server", "url": URL, "sync_steps": 2}, "sync_steps"),
        ({"backend": "vllm", "url": URL, "sync": "nccl", "folder": "w"}, "folder"),
        ({"backend": "vllm", "url": URL, "sync_steps": 0}, "sync_steps"),
        ({"backend": "vllm", "url": URL, "timeout": 0.0}, "timeout"),
    ],
)
def test_settings_that_do_not_fit_the_backend_are_refused_by_their_name(
    values: dict[str, Any], where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(**values)
    assert caught.value.where == where and caught.value.remedy


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"backend": "server", "url": URL, "folder": "w", "patience": 0.0},
        {
            "backend": "vllm",
            "url": "https://host",
            "model": "m",
            "sync": "lora",
            "sync_steps": 4,
            "api_key": "k",
        },
    ],
)
def test_settings_that_fit_are_kept(values: dict[str, Any]) -> None:
    assert {name: getattr(RolloutConfig(**values), name) for name in values} == values
