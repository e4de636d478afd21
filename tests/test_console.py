"""Progress with its time left, on a terminal and without one."""

from __future__ import annotations

import io
import re
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unmask.console import BAR_WIDTH, MAX_WIDTH, Progress, format_duration, format_number, show_table, tracked


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(pace=st.floats(0.1, 10), seconds=st.lists(st.floats(1, 500), min_size=1, max_size=6))
def test_time_left_follows_the_observed_pace(pace, seconds):
    """In a run `pace` times slower than expected, the estimate moves from the expected time to the true
    one."""
    clock, phases = Clock(), [(f"phase {i}", weight) for i, weight in enumerate(seconds)]
    with Progress(phases, stream=io.StringIO(), clock=clock) as progress:
        assert progress.fraction == 0
        assert progress.seconds_left == (pytest.approx(sum(seconds)) if len(seconds) > 1 else None)
        true_left, last = pace * sum(seconds), 0.0
        for name, weight in phases:
            with progress.phase(name) as phase:
                for step in range(1, 21):
                    clock.now += pace * weight / 20
                    true_left -= pace * weight / 20
                    phase.update(step / 20)
                    assert last <= progress.fraction <= 1 + 1e-9
                    last = progress.fraction
                    expected_left = true_left / pace
                    assert (
                        min(true_left, expected_left) - 1e-6
                        <= progress.seconds_left
                        <= max(true_left, expected_left) + 1e-6
                    )
            if true_left > 1 and progress.fraction > 0.5:
                assert progress.seconds_left == pytest.approx(true_left, rel=max(0.1 / pace, 0.1))
        assert progress.fraction == pytest.approx(1) and progress.seconds_left == pytest.approx(0, abs=1e-6)


def test_a_single_phase_needs_no_estimate_of_its_time():
    clock = Clock()
    with (
        Progress([("sft", 1.0)], stream=io.StringIO(), clock=clock) as progress,
        progress.phase("sft") as phase,
    ):
        clock.now += 30
        phase.update(0.25)
        assert progress.seconds_left == pytest.approx(90)


def test_skipped_phases_count_as_not_needed_and_names_may_come_again():
    clock = Clock()
    with Progress(
        [("train", 10.0), ("evaluate", 5.0), ("train", 10.0), ("evaluate", 5.0)],
        stream=io.StringIO(),
        clock=clock,
    ) as progress:
        with progress.phase("evaluate"):
            clock.now += 5
        assert progress.fraction == pytest.approx(5 / 20) and progress.seconds_left == pytest.approx(15)
        with progress.phase("evaluate"):
            assert progress.seconds_left == pytest.approx(5)
        with pytest.raises(AssertionError, match="no phase 'train' is left"), progress.phase("train"):
            pass


def test_without_a_terminal_lines_are_plain_and_rare(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    clock, stream = Clock(), io.StringIO()
    with Progress([("pretrain", 75.0), ("grpo", 25.0)], stream=stream, clock=clock) as progress:
        with progress.phase("pretrain") as phase:
            for step in range(75):
                clock.now += 1
                phase.update((step + 1) / 75, loss=2.0 - step / 100)
        with progress.phase("grpo") as phase:
            phase.update(0.5, loss=0.1, reward=0.875)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[ 10%] pretrain 13% · loss 1.91 · 0:10 elapsed, 1:30 left"
    assert lines[-2] == "[ 75%] pretrain done in 1:15 · loss 1.26 · 1:15 elapsed, 0:25 left"
    assert lines[-1].startswith("[100%] grpo done in 0:00 · loss 0.1 · reward 0.875 · ")
    assert len(lines) == 7 + 2  # one every ten seconds of 75, and two ends
    assert stream.getvalue().replace("\n", "").isprintable()


def test_a_failing_phase_says_so_and_the_error_goes_on():
    clock, stream = Clock(), io.StringIO()
    with (
        pytest.raises(KeyError),
        Progress([("sft", 10.0), ("dpo", 10.0)], stream=stream, clock=clock) as progress,
        progress.phase("sft") as phase,
    ):
        clock.now += 4
        phase.update(0.5)
        raise KeyError("label")
    assert stream.getvalue().startswith("[ 25%] sft stopped after 0:04 · ")


def test_an_error_before_any_work_is_not_announced_by_a_line_of_progress():
    stream = io.StringIO()
    with pytest.raises(KeyError), Progress([("sft", 10.0)], stream=stream) as progress, progress.phase("sft"):
        raise KeyError("label")
    assert stream.getvalue() == ""


def test_a_metric_is_removed_by_none():
    with Progress([("dpo", 1.0)], stream=io.StringIO()) as progress, progress.phase("dpo") as phase:
        phase.update(0.1, scored=1.0, loss=2.0)
        phase.update(0.2, scored=None)
        assert phase.metrics == {"loss": 2.0}


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_terminal_the_display_is_live_and_leaves_the_terminal_clean(fails, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()

    def run():
        with (
            Progress([("convert [1]", 10.0), ("sft", 10.0)], stream=stream) as progress,
            progress.phase("convert [1]") as phase,
        ):
            phase.update(0.5, loss=1.5)
            if fails:
                raise RuntimeError("broken")

    if fails:
        with pytest.raises(RuntimeError, match="broken"):
            run()
    else:
        run()
    shown = stream.getvalue()
    assert "whole run" in shown and "left" in shown and "loss 1.5" in shown
    assert ("convert [1] stopped after" if fails else "convert [1] done in") in shown
    # the cursor is back
    assert shown.count("\x1b[?25l") == 1 and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    # the prompt of the shell comes below both bars
    assert shown[shown.rindex("whole run") :].count("\n") >= 2


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_the_bars_keep_their_names_and_width_beside_any_number_of_metrics(columns, monkeypatch):
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with (
        Progress([("grpo: evaluate", 10.0)], stream=stream) as progress,
        progress.phase("grpo: evaluate") as phase,
    ):
        phase.update(0.5, loss=1.5, **{f"a_long_metric_{i}": 1234.5 for i in range(9)})
    lines = re.sub(r"\x1b\[[\d;?]*\w", "", stream.getvalue()).splitlines()
    bars = [line for line in lines if line.startswith(("whole run ", "grpo: evaluate "))]
    assert len(bars) >= 2 and all(sum(line.count(mark) for mark in "━╸╺") == BAR_WIDTH for line in bars)
    assert any("loss 1.5" in line for line in bars) and "…" not in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress([("sft", 1.0)], stream=stream) as progress, progress.phase("sft"):
        pass
    assert stream.getvalue() == "[100%] sft done in 0:00 · 0:00 elapsed, 0:00 left\n"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (3725, "1:02:05")]
)
def test_durations_read_as_clock_time(seconds, shown):
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0123456, "0.01235"), (999.96, "1000"), (1000, "1,000"), (29990.4, "29,990"), (1e12, "1e+12")],
)
def test_numbers_have_four_digits(value, shown):
    assert format_number(value) == shown


def test_where_no_color_is_set_a_terminal_gets_plain_lines_and_tables(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    with Progress([("sft", 1.0)], stream=stream) as progress, progress.phase("sft") as phase:
        phase.update(0.5, loss=1.5)
    show_table([["loss", "1.5"]], "sft: finished", head=["", "value"])
    assert stream.getvalue().startswith("[100%] sft done in 0:00 · loss 1.5 · 0:00 elapsed, 0:00 left\n")
    assert "\x1b" not in stream.getvalue()


@given(
    names=st.lists(st.text("abcdefgh_", min_size=1, max_size=40), max_size=9, unique=True),
    name=st.text("abc ", max_size=120),
)
def test_a_plain_line_has_the_first_metrics_that_fit(names, name):
    stream = io.StringIO()
    with Progress([(name, 1.0)], stream=stream) as progress, progress.phase(name) as phase:
        phase.update(0.5, **dict.fromkeys(names, 123.4))
    line = stream.getvalue().rstrip("\n")
    assert len(line) <= MAX_WIDTH
    fitting = sum(f" {each} 123.4 ·" in line for each in names)
    assert all(f"· {each} 123.4 ·" in line for each in names[:fitting])
    if len(name) < 40 and fitting < len(names):
        assert len(line) + len(f" · {names[fitting]} 123.4") > MAX_WIDTH


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("terminal", [False, True])
def test_tables_fit_the_terminal_and_are_never_wider_than_a_page(columns, terminal, monkeypatch):
    stream = Terminal() if terminal else io.StringIO()
    for name, value in {"COLUMNS": columns, "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", stream)
    show_table([["long " * 60, "x"]], "a title " * 9)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) == (min(int(columns), MAX_WIDTH) if terminal else MAX_WIDTH)
    stream.truncate(0)
    show_table([["a", "b"]], "a title of four words")
    # although the cells are narrower
    assert stream.getvalue().strip("\0").splitlines()[0].strip() == "a title of four words"


def test_a_table_narrows_its_texts_before_it_breaks_a_word(capsys):
    words = ["a40-48gb-x3-ddp", "activation_checkpointing", "rewards/overlap_with_the_reference", "5.83"]
    show_table(
        [words, ["a text of many words, which has room on several lines " * 2] * 4],
        "what fits",
        head=["hardware", "with", "name", "ms"],
    )
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)
    assert max(map(len, shown.splitlines())) <= MAX_WIDTH


@given(
    st.lists(
        st.lists(st.text("abc_ ", max_size=60).map(str.strip), min_size=3, max_size=3), min_size=1, max_size=4
    ),
    st.booleans(),
)
@example(
    [
        [
            "task: rewards/overlap_with_the_reference",
            "training.activation_checkpointing",
            "sampler.max_new_tokens" * 2,
        ]
    ],
    True,
)
def test_no_word_that_fits_on_a_line_is_broken(rows, headed):
    shown = io.StringIO()
    with mock.patch("sys.stdout", shown):
        show_table(rows, "title", head=["first", "second", "third"] if headed else [])
    lines = shown.getvalue().splitlines()
    found = [word for line in lines for word in line.replace("│", " ").split()]
    assert all(word in found for row in rows for cell in row for word in cell.split())
    assert max(map(len, lines)) <= MAX_WIDTH


def test_a_long_path_is_folded_before_short_texts_are(capsys):
    show_table([["/" + "folder/" * 15, "interrupted", "3 of 6", "loss 3.345"]], "1 run")
    assert "│ interrupted │ 3 of 6 │ loss 3.345 │" in capsys.readouterr().out


def test_tracked_items_count_when_they_are_done():
    with Progress([("evaluate", 1.0)], stream=io.StringIO()) as progress, progress.phase("evaluate") as phase:
        seen = []
        for item in tracked("abcd", 4, phase):
            seen.append((item, phase.fraction))
        assert seen == [("a", 0.0), ("b", 0.25), ("c", 0.5), ("d", 0.75)] and phase.fraction == 1
    assert list(tracked("ab", 2, None)) == ["a", "b"]
