"""What is recorded of the environment."""

from __future__ import annotations

from unmask.artifacts import started_by
from unmask.variables import NOT_SETTINGS


def test_the_variables_that_are_no_settings_are_not_recorded() -> None:
    others = {name: "value" for name in NOT_SETTINGS | {"HOME", "HF_TOKEN"}}
    settings = {name: "value" for name in ("DIFFU_BATCH_SIZE", "UNMASK_TRAINING__SEED", "VLLM_SERVER_HOST")}
    words = started_by(settings | others)
    assert words[:3] == [f"{name}=value" for name in settings] and not any(
        "=value" in word for word in words[3:]
    )
