"""Result files are read as they were written; anything else is one clear error."""

import json
import math

import pytest

from tests.errors import raises
from unmask.errors import DataError
from unmask.evaluation.result_file import EvaluationResult, Item, ItemTrace, Metric, TaskScores, read_result

ITEM = Item(
    id="a",
    group="g",
    scores={"solved": 1.0},
    prompt="2+2=",
    completions=["4"],
    traces=[ItemTrace(tokens=["4"], steps=[0])],
)
METRIC = Metric(mean=1.0, low=0.2)
RESULT = EvaluationResult(
    model={"path": "m"},
    arguments={"task": ["t"]},
    tasks=[TaskScores(task="t", protocol={}, metrics={"solved": METRIC}, items=[ITEM])],
)


def test_a_result_is_read_as_it_was_written(tmp_path):
    RESULT.write(tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == RESULT


def test_infinite_numbers_are_read_as_they_were_written(tmp_path):
    """The perplexity of a text that is impossible is infinite."""
    item = ITEM.model_copy(
        update={"scores": {"perplexity": math.inf}, "details": {"log_likelihood": "-Infinity"}}
    )
    metrics = {
        "perplexity": Metric(mean=math.inf),
        "lowest": Metric(mean=-math.inf),
        "mcc": Metric(mean=math.nan),
    }
    written = RESULT.model_copy(
        update={"tasks": [TaskScores(task="t", protocol={}, metrics=metrics, items=[item])]}
    )
    written.write(tmp_path / "result.json")
    json.loads(
        (tmp_path / "result.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON")
    )
    (read,) = read_result(tmp_path / "result.json").tasks
    assert (
        read.items == [item] and read.metrics["perplexity"].mean == -read.metrics["lowest"].mean == math.inf
    )
    assert math.isnan(read.metrics["mcc"].mean)


@pytest.mark.parametrize(
    "text",
    [
        RESULT.model_dump_json()[:-20],
        "[]",
        '{"format": 2}',
        '{"format": "1"}',
        '{"format": 1, "model": {}, "arguments": {}, "tasks": [{"task": "t"}]}',
        RESULT.model_dump_json().replace('"steps":[0]', '"steps":[0,1]'),
        RESULT.model_dump_json().replace('"passes":0', '"passes":-1'),
        RESULT.model_dump_json().replace('"tokens":0', f'"tokens":{10**400}'),
    ],
)
def test_other_files_are_one_error(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    with raises(DataError, where=str(path)):
        read_result(path)


@pytest.mark.parametrize(
    ("name", "metric", "shown"),
    [
        ("solved", Metric(mean=0.934, low=0.912, high=0.951), "93.4% [91.2%, 95.1%]"),
        ("distinct-2", Metric(mean=0.5), "50.0%"),
        ("rouge", Metric(mean=31.44, low=20.0, high=40.0), "31.44 [20, 40]"),
        ("gain", Metric(mean=-1.5), "-1.5"),
        ("entropy", Metric(mean=0.5, low=0.25, high=0.75), "0.5 [0.25, 0.75]"),
        ("nats per token", Metric(mean=0.5, higher_is_better=False), "0.5"),
        ("word_perplexity, strict", Metric(mean=1.0), "1"),
        ("passes", Metric(mean=1.0, low=0.5, high=1.0), "1 [0.5, 1]"),
    ],
)
def test_fractions_are_shown_in_percent_and_what_has_a_unit_is_not(name, metric, shown):
    assert metric.shown(name) == shown


def test_a_missing_file_is_one_error(tmp_path):
    with raises(DataError, where=str(tmp_path / "missing.json")):
        read_result(tmp_path / "missing.json")
