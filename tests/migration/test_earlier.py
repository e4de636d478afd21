"""Configs of Unmask with the names that its settings had before."""

from __future__ import annotations

import dataclasses

import pytest

from unmask.config.sampler import SamplerConfig
from unmask.config.yaml import dump_yaml
from unmask.errors import did_you_mean
from unmask.migration.migrate import migrate
from unmask.names import EARLIER_NAMES
from unmask.rl.config import GRPOConfig
from unmask.supervised.sft import SFTConfig

TODAY = {field.name for kind in (GRPOConfig, SFTConfig) for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(("old", "new"), EARLIER_NAMES.items())
def test_an_earlier_name_is_answered_with_that_of_today(old, new):
    assert {old, new} & {*TODAY, *SamplerConfig.model_fields} == {new}
    known = TODAY if new in TODAY else SamplerConfig.model_fields
    assert did_you_mean(old, known) == f"Did you mean {new!r}?"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {
                "training": {
                    **{"aggregation": "sequence", "advantage": "z-score", "beyond_eos": "learnt"},
                    **{"policy": "confidence", "dual_clip": 3.0, "learning_rate": 1e-5},
                    "rollout": {"url": "http://x", "backend": "server"},
                },
                "sampler": {"policy": "margin", "guidance": 0.5, "remask": 0.25, "steps": 8},
                "data": {"task": "sort"},
            },
            {
                "training": {
                    **{"loss_type": "grpo", "scale_rewards": "group", "after_eos": "train"},
                    **{"remasking": "low_confidence", "delta": 3.0, "learning_rate": 1e-5},
                    "rollout": {"url": "http://x", "backend": "server"},
                },
                "sampler": {"remasking": "margin", "cfg_scale": 0.5, "remask_fraction": 0.25, "steps": 8},
                "data": {"task": "sort"},
            },
        ),
        (
            {"training": {"aggregation": "sequence", "quality_head": "off"}},
            {"training": {"loss_type": "sequence_nll", "quality_head": "off"}},
        ),
    ],
)
def test_a_config_with_earlier_names_is_converted(old, new, tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text(dump_yaml(old))
    assert migrate([file]).config == new
