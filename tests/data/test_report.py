"""The report counts each row once, and its statistics match the lengths."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from unmask.data.characters import character_tokenizer
from unmask.data.report import DataReport, histogram, marked_text, print_report, quantiles
from unmask.errors import DataError, UnmaskWarning

lengths = st.lists(st.integers(0, 5000), min_size=1, max_size=30)


@given(lengths)
def test_quantiles_are_lengths_in_order(found):
    summary = quantiles(Counter(found))
    assert [*summary] == ["shortest", "median", "90%", "99%", "longest"]
    assert [*summary.values()] == sorted(summary.values()) and {*summary.values()} <= {*found}
    assert (summary["shortest"], summary["longest"]) == (min(found), max(found))
    for half in (
        sum(length <= summary["median"] for length in found),
        sum(length >= summary["median"] for length in found),
    ):
        assert half >= len(found) / 2


@given(lengths)
def test_a_histogram_holds_every_length_once_between_its_bounds(found):
    summary = histogram(Counter(found))
    assert sum(summary.values()) == len(found)
    bounds = [(int(name.split("-")[0]), int(name.split("-")[-1])) for name in summary]
    for (first, last), count in zip(bounds, summary.values(), strict=True):
        assert sum(first <= length <= last for length in found) == count
    assert all(last + 1 == first for (_, last), (first, _) in pairwise(bounds))
    assert all(first <= last < max(2 * first, 1) for first, last in bounds)
    assert bounds[0][1] >= min(found) and bounds[-1][1] >= max(found)


@given(st.lists(st.sampled_from([None, "too long", "empty"]), min_size=1, max_size=20))
def test_every_row_is_kept_or_counted_by_its_reason(reasons):
    report, made = DataReport("train_dataset", skip=True), []
    for index, reason in enumerate(reasons):
        with report.row(index):
            if reason:
                raise DataError("no good", reason=reason)
            made.append(index)
    assert report.read == len(reasons) and report.numbers == made and report.kept == len(made)
    summary = report.to_dict()
    for reason in {*reasons} - {None}:
        places = [index for index, other in enumerate(reasons) if other == reason]
        assert summary["dropped"][reason] == {"count": len(places), "rows": places[:10]}
    assert summary["dropped"].keys() == {*reasons} - {None}
    other = DataReport("train_dataset", skip=True)
    with nullcontext() if made else raises(DataError, where="train_dataset"):
        report.check()
        other.restore(json.loads(json.dumps(report.state())))
        assert other.to_dict() == summary and other.state() == report.state()


@pytest.mark.parametrize(("skip", "reason"), [(False, "too long"), (True, None), (False, None)])
def test_errors_name_the_row_unless_it_is_skipped(skip, reason):
    report = DataReport("eval_dataset", skip=skip)
    with raises(DataError, where="eval_dataset, row 7, text"), report.row(7):
        raise DataError("no good", where="text", remedy="Mend it.", reason=reason)


def example() -> DataReport:
    report = DataReport("train_dataset", skip=True)
    for index in range(30):
        with report.row(index):
            report.record_lengths(prompt=index, chosen=2 * index, rejected=3)
            report.record_cuts(prompt=index % 10 == 0, completion=False)
            if index >= 18:
                raise DataError("no good", reason="too long")
    return report


def test_the_tables_have_every_figure(capsys):
    report = example()
    report.packed = 5
    report.show()
    shown = capsys.readouterr().out
    for words in (
        "train_dataset: rows",
        "read",
        "30",
        "too long",
        "12 (row 18, 19,",
        "...)",
        "chosen equals rejected",
        "prompt cut",
    ):
        assert words in shown
    lines = [line.replace("│", " ").split() for line in shown.splitlines()]
    assert ["kept", "18"] in lines and ["packed", "into", "5"] in lines
    assert ["median", "15", "30", "3"] in lines and ["rows", "of", "16-31", "14", "8", "0"] in lines


def test_the_report_is_json_and_is_pickled_with_the_rows():
    report = example()
    summary = report.to_dict()
    assert json.loads(json.dumps(summary)) == summary
    assert (
        summary["truncated"] == {"prompt": 3}
        and summary["chosen_equals_rejected"] == 0
        and "packed" not in summary
    )
    assert summary["tokens"]["rejected"]["histogram"] == {"2-3": 30}
    assert pickle.loads(pickle.dumps(report)).to_dict() == summary  # as a data loader sends it to its workers


@given(st.lists(st.tuples(st.text("ab c", min_size=1, max_size=6), st.booleans()), min_size=1, max_size=6))
def test_what_is_learnt_is_marked(parts):
    tokenizer = character_tokenizer("ab c")
    ids = [token for text, _ in parts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    learnt = [is_trained for text, is_trained in parts for _ in text]
    text = marked_text(tokenizer, ids, learnt)
    assert text.replace("⟦", "").replace("⟧", "") == tokenizer.decode(ids)
    inside, found = False, []
    for character in text:
        if character in "⟦⟧":
            inside = character == "⟦"
        else:
            found.append(inside)
    assert found == learnt and "⟧⟦" not in text


def test_a_warning_says_that_few_rows_are_kept(capsys):
    for good, read in ((6, 60), (19, 60), (20, 60)):
        report = DataReport("train_dataset", skip=True)
        for index in range(read):
            with report.row(index):
                report.record_lengths(prompt=1)
                if index >= good:
                    raise DataError("no good", reason="too long")
        rows = SimpleNamespace(report=report)
        if good < 20:
            with pytest.warns(
                UnmaskWarning,
                match=rf"train_dataset: only {good} of 60 rows are kept \({60 - good} too long\)",
            ):
                print_report(rows, wanted=True)
        print_report(rows, wanted=True)  # once
    assert "train_dataset: rows" in capsys.readouterr().out
