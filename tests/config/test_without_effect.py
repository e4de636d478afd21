"""A setting that the others leave without effect is refused if it is given, and left out of records, which
are accepted again."""

from __future__ import annotations

import pytest

from unmask.config.base import Config, flat_values
from unmask.config.constraint import ConstraintConfig
from unmask.config.evaluation import EvaluationConfig
from unmask.config.revise import ReviseConfig
from unmask.config.rollout import RolloutConfig
from unmask.config.run import DataConfig, RunConfig, to_yaml
from unmask.config.sampler import SamplerConfig
from unmask.config.yaml import parse_yaml
from unmask.errors import ConfigError

URL = "http://localhost:8000"
CONFIGS = [
    *(
        SamplerConfig(),
        SamplerConfig(mode="self-speculative"),
        SamplerConfig(threshold=0.5),
        SamplerConfig(remasking="random"),
    ),
    *(
        SamplerConfig(entropy_bound=1.0, remasking="entropy"),
        SamplerConfig(cache="prefix"),
        SamplerConfig(constraint={"json": True}),
    ),
    *(
        ReviseConfig(),
        ReviseConfig(schedule="loop"),
        ConstraintConfig(regex="a"),
        ConstraintConfig(json=True),
        RolloutConfig(),
    ),
    *(
        RolloutConfig(backend="server", url=URL),
        RolloutConfig(backend="vllm", url=URL),
        EvaluationConfig(task=["sudoku"]),
    ),
    *(EvaluationConfig(likelihood="a.txt"), EvaluationConfig(lm_eval=["piqa"])),
    *(DataConfig(train="a.jsonl"), DataConfig(task="sudoku")),
    RunConfig(
        model={"path": "m"},
        output_dir="o",
        sampler={"mode": "self-speculative"},
        retention={"likelihood": "a.txt"},
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_a_record_of_every_value_is_accepted_again(config: Config) -> None:
    again = type(config)(**parse_yaml(to_yaml(config), "record"))
    assert again == config and flat_values(again) == flat_values(config)


CASES = [
    (config, error) for config in CONFIGS for error in config.without_effect() if getattr(config, error.where)
]


@pytest.mark.parametrize("config, error", CASES, ids=[f"{config!r}-{error.where}" for config, error in CASES])
def test_the_value_of_a_default_is_refused_if_it_is_given(config: Config, error: ConfigError) -> None:
    given = {name: getattr(config, name) for name in config.model_fields_set}
    with pytest.raises(ConfigError) as caught:
        type(config)(**given, **{error.where: getattr(config, error.where)})
    assert str(caught.value) == str(error) and caught.value.where == error.where


def test_what_asks_for_nothing_is_accepted() -> None:
    SamplerConfig(
        threshold=0.5, order_temperature=0.0, filtered_confidence=False, top_forbidden=0, agreement_prompts=0
    )
