"""What a report says of runs and results: the figures are those of the logs and result files."""

from __future__ import annotations

import math

import pytest

from tests.evaluation.report.examples import convert_run, example, result, rl_run
from unmask.evaluation.report import scores, traces, training
from unmask.evaluation.report.content import Charts, Table
from unmask.evaluation.report.scores import Figures
from unmask.evaluation.report.training import Run
from unmask.evaluation.result_file import Metric
from unmask.evaluation.statistics import paired_difference


def texts(table: Table, group: int = 0) -> list[list[str]]:
    return [
        [cell.text or cell.detail for cell in row if cell.text or cell.detail]
        for row in table.groups[group][1]
    ]


def test_the_overview_has_each_runs_state_time_and_last_value():
    (table,) = training.overview([convert_run("a", 0, 1), rl_run("b", 1, 2)]).blocks
    assert table.header == [
        "Run",
        "Verb",
        "State",
        "Steps",
        "Time",
        "Peak memory",
        "Tokens per second",
        "Last value",
    ]
    last = convert_run("a", 0, 1).values("cross_entropy")[-1]
    assert (
        texts(table)[0][:6] == ["a", "convert", "finished", "600", "5:31", "1.40 GB"]
        and texts(table)[0][-1] == f"{last:.4g}"
    )
    assert texts(table)[1][:5] == ["b", "grpo", "running", "80 of 200", "\N{EM DASH}"]
    assert [cell.text for cell in table.total] == ["all runs", "", "", "", "5:31", "", "", ""]


def test_curves_of_one_verb_are_over_one_another_with_their_held_out_values_and_stages():
    runs = [convert_run("a", 0, 1), convert_run("b", 1, 2), rl_run("c", 2, 3)]
    (charts,) = training.curves(runs).blocks
    titles = [chart.title for chart in charts.charts]
    assert isinstance(charts, Charts) and titles[0] == "convert: cross entropy"
    chart = charts.charts[0]
    assert [series.name for series in chart.series] == [
        "a",
        "b",
        "a, held out",
        "b, held out",
    ] and chart.series[2].dashed
    assert chart.series[0].points == runs[0].points("cross_entropy") and len(chart.series[2].points) == 6
    assert chart.marks == [(210, "stage 2")] and (chart.x_label, chart.y_label) == (
        "optimizer step",
        "nats per token",
    )
    assert titles[1:] == ["grpo: reward", "grpo: rewards/correct", "grpo: rewards/format", "grpo: kl"]
    (alone,) = training.curves(runs[:1]).blocks
    assert [chart.title for chart in alone.charts] == ["cross entropy"]
    assert [chart.title for chart in alone.more] == [
        "loss",
        "learning rate",
        "grad norm",
        "memory gb",
        "tokens per second",
    ]


def test_values_that_are_no_numbers_are_left_out():
    lines = [
        {"step": 1, "loss": None},
        {"step": 2, "loss": 3.0},
        {"step": 3, "loss": math.nan},
        {"loss": 1.0},
        {"step": 4, "loss": True},
    ]
    assert Run(name="r", verb="sft", color=0, lines=lines).points("loss") == [(2, 3.0)]


def test_times_and_memory_by_phase():
    (table,) = training.phases([rl_run("a", 0, 1), rl_run("b", 1, 2)]).blocks
    assert [name for name, _ in table.groups] == ["a: 8.05 s per step", "b: 8.86 s per step"]
    assert (
        texts(table)[0] == ["generation", "4.20", "52%", "1.84 GB"]
        and [row[0] for row in texts(table)][-1] == "reward"
    )
    lengths = [row[2].length for _, rows in table.groups for row in rows]
    assert max(lengths) == 1 and lengths[0] == pytest.approx(1 / 1.1)
    assert not training.phases([convert_run("a", 0, 1)]).blocks


def test_scores_are_those_of_the_result_files():
    results = [result("a", 0, 0.4), result("b", 1, 0.9)]
    table = next(block for block in scores.tables(results).blocks if block.caption == "stories")
    assert [name.split(" · ")[0] for name, _ in table.groups] == ["solved", "perplexity", "distinct-2"]
    metric = results[1].content.tasks[0].metrics["solved"]
    assert texts(table)[1] == [
        "b",
        f"{metric.mean:.1%}",
        f"[{100 * metric.low:.1f}, {100 * metric.high:.1f}]",
    ]
    assert texts(table, 1)[0] == ["a", "12.6", "[11.4, 14.0]"] and texts(table, 2)[0] == ["a", "61.0%"]
    assert table.note == "60 problems (58 ok, 2 timeout)."
    low, mean, high = table.groups[0][1][1][3].span
    assert 0 <= low < mean < high <= 1


def test_differences_are_paired():
    before, after = result("a", 0, 0.4), result("b", 1, 0.9)
    fast = result("b", 1, 0.1, 2)
    assert (
        "b, steps unset against a" in scores.tables([before, fast, after]).blocks[2].groups[0][1][0][0].text
    )
    table = next(block for block in scores.tables([before, after]).blocks if "difference" in block.caption)
    first, second = (
        [item.scores["solved"] for item in each.content.tasks[0].items] for each in (before, after)
    )
    expected = paired_difference(first, second, [item.group for item in after.content.tasks[0].items])
    bounds = f"[{100 * expected.low:+.1f}, {100 * expected.high:+.1f}]"
    assert texts(table) == [["b against a", f"{100 * expected.mean:+.1f}", bounds, "better"]]
    assert not [block for block in scores.tables([before]).blocks if "difference" in block.caption]


def test_the_stages_of_a_pipeline_in_words():
    stages = [result("a", 0, 0.4), result("b", 1, 0.9), result("c", 2, 0.9)]
    entries = scores.entries_by_task(stages)["stories"]
    before, after = (entry.scores.metrics["solved"] for entry in entries[:2])
    first, better, same = scores.in_words(entries)
    assert first == (
        f"{before.mean:.1%} of the problems solved, 95% interval [{100 * before.low:.1f}, "
        f"{100 * before.high:.1f}]"
    )
    table = next(block for block in scores.tables(stages[:2]).blocks if "difference" in block.caption)
    _, change, interval, _ = texts(table)[0]
    solved = f"{before.mean:.1%} → {after.mean:.1%} of the problems solved"
    assert better == f"{solved}, {change} points; 95% interval of the change {interval}"
    assert same.startswith(
        f"still {after.mean:.1%} of the problems solved; 95% interval of the change [\N{MINUS SIGN}"
    )
    _, unclear = scores.in_words(
        scores.entries_by_task([result("a", 0, 0.5), result("b", 1, 0.52)])["stories"]
    )
    assert "points, which may be chance;" in unclear


def test_a_lower_perplexity_is_better():
    old, new = result("a", 0, 0.4), result("b", 1, 0.9)
    entries = scores.entries_by_task([old, new])["stories"]
    swapped = []
    for entry, shift in zip(entries, (2.0, 1.0), strict=True):
        items = [
            item.model_copy(update={"scores": {"perplexity": shift + 0.1 * number}})
            for number, item in enumerate(entry.scores.items)
        ]
        swapped.append(entry._replace(scores=entry.scores.model_copy(update={"items": items})))
    [[_, *cells]] = texts(scores.difference_table("stories", swapped))
    assert cells == ["\N{MINUS SIGN}1.0", "unclear"]  # all differ alike: there is no interval
    for number, item in enumerate(swapped[1].scores.items):
        item.scores["perplexity"] += 0.001 * number**2 % 0.01
    [[_, mean, interval, verdict]] = texts(scores.difference_table("stories", swapped))
    assert (
        mean == "\N{MINUS SIGN}1.0"
        and interval == "[\N{MINUS SIGN}1.0, \N{MINUS SIGN}1.0]"
        and verdict == "better"
    )


def test_speed_against_quality_needs_several_settings_of_one_model():
    results = [result("a", 0, 0.9, 9), result("a", 0, 0.9, 2), result("b", 1, 0.5)]
    (charts,) = scores.speed(results).blocks
    (chart,) = charts.charts
    assert (chart.x_label, chart.y_label, chart.percent) == ("forward passes per answer", "solved", True)
    (series,) = chart.series
    means = [each.content.tasks[0].metrics["solved"].mean for each in (results[1], results[0])]
    assert series.points == [(2.0, means[0]), (9.0, means[1])] and len(series.bounds) == 2
    assert not scores.speed(results[1:]).blocks
    names = [entry.name for entry in scores.entries_by_task(results)["stories"]]
    assert names == ["a, steps 9", "a, steps 2", "b, steps unset"]


def test_the_order_of_decoding_and_the_answers():
    results = [result("a", 0, 0.4, 2), result("b", 1, 0.9)]
    first, second = traces.decoding_order(results).blocks
    steps = results[1].content.tasks[0].items[0].traces[0].steps
    assert (
        second.rows[0] == [step / max(steps) for step in steps] and len(second.rows) == traces.ANSWERS_IN_MAP
    )
    assert set(first.rows[0]) == {0.0, 1.0} and second.note.endswith("40 of 60 answers are drawn.")
    problems = traces.answers(results).blocks
    assert len(problems) == traces.PROBLEMS_SHOWN and [answer.name for answer in problems[0].answers] == [
        "a, steps 2",
        "b, steps unset",
    ]
    assert problems[0].answers[1].steps == steps and "20 passes" in problems[0].answers[1].facts


def test_prompts_are_texts_or_messages():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    assert [traces.text_of_prompt(prompt) for prompt in ("a", messages, None)] == [
        "a",
        "user: Hi\nassistant: Yes?",
        "",
    ]


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("acc", [0.5, 0.25], "25.0%"),
        ("nll", [0.5, 0.25], "0.250"),
        ("nll", [3.25, 100.0], "100"),
        ("nll", [-1.5], "\N{MINUS SIGN}1.50"),
    ],
)
def test_the_values_of_a_metric_have_equal_decimals(name, values, shown):
    assert Figures(name, [Metric(mean=value) for value in values]).text(values[-1]) == shown


def test_every_entry_of_a_report_has_a_color_of_its_own():
    report = example()
    found = {
        (series.name.split(",")[0], series.color) for chart in report.charts() for series in chart.series
    }
    assert found == set(zip(report.entries, range(4), strict=True))
