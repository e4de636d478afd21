"""What can be measured together, and which settings count for it."""

from __future__ import annotations

import pytest

from tests.errors import raises
from unmask.config.evaluation import EvaluationConfig
from unmask.config.run import RunConfig
from unmask.errors import ConfigError


def test_without_other_words_tasks_of_lm_eval_are_measured():
    assert EvaluationConfig(against="a").harness_tasks == ["wikitext", "hellaswag", "arc_easy", "piqa"]
    assert not EvaluationConfig(against="a", task=["sudoku"]).harness_tasks


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({}, "evaluate"),
        ({"task": ["sudoku"], "samples": 3}, "samples"),
        ({"likelihood": "a.txt", "shots": 2}, "shots"),
        ({"likelihood": "a.txt", "protocol": "d1"}, "protocol"),
        ({"likelihood": "a.txt", "curve": "steps=1,2"}, "curve"),
        ({"task": ["gsm8k"], "lm_eval": ["gsm8k"]}, "evaluate"),
        ({"against": "a", "task": ["sudoku"], "protocol": "d1"}, "--protocol"),
        ({"against": "a", "task": ["sudoku"], "curve": "steps=1,2"}, "--curve"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, where):
    with raises(ConfigError, where=where):
        EvaluationConfig(**settings)


def test_a_list_of_one_may_be_one_word():
    config = EvaluationConfig(task="sudoku,copy", data="a.csv", attempts=4, pass_at=2)
    assert (config.tasks, config.data, config.ks) == (["sudoku", "copy"], ["a.csv"], [2])


@pytest.mark.parametrize("value", [True, 3, "sudoku", ["sudoku"]])
def test_what_is_no_mapping_is_refused(value):
    with raises(ConfigError, where="retention"):
        RunConfig(retention=value)
