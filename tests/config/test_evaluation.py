"""What can be measured together, and which settings count for it."""

from __future__ import annotations

import pytest

from unmask.config.evaluation import EvaluationConfig
from unmask.config.run import RunConfig
from unmask.errors import ConfigError


def test_without_other_words_tasks_of_lm_eval_are_measured():
    assert EvaluationConfig(against="a").harness_tasks == ["wikitext", "hellaswag", "arc_easy", "piqa"]
    assert not EvaluationConfig(against="a", task=["sudoku"]).harness_tasks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "nothing to measure. Give --task, --lm-eval or --likelihood"),
        ({"task": ["sudoku"], "samples": 3}, "samples: is read by --likelihood or --lm-eval only"),
        ({"likelihood": "a.txt", "shots": 2}, "shots: is read by --task or --lm-eval only"),
        ({"likelihood": "a.txt", "protocol": "d1"}, "protocol: is read by --task or --lm-eval only"),
        ({"likelihood": "a.txt", "curve": "steps=1,2"}, "curve: is read by --task only"),
        ({"task": ["gsm8k"], "lm_eval": ["gsm8k"]}, "gsm8k is a task of Unmask and of lm-eval"),
        ({"against": "a", "task": ["sudoku"], "protocol": "d1"}, "--protocol: is of one model"),
        ({"against": "a", "task": ["sudoku"], "curve": "steps=1,2"}, "--curve: is of one model"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EvaluationConfig(**settings)


def test_a_list_of_one_may_be_one_word():
    config = EvaluationConfig(task="sudoku,copy", data="a.csv", attempts=4, pass_at=2)
    assert (config.tasks, config.data, config.ks) == (["sudoku", "copy"], ["a.csv"], [2])


@pytest.mark.parametrize("value", [True, 3, "sudoku", ["sudoku"]])
def test_what_is_no_mapping_is_refused(value):
    with pytest.raises(
        ConfigError,
        match=r"retention: is a section of settings, not the value .*\. Set its keys, retention\.NAME",
    ):
        RunConfig(retention=value)
