"""A profile: a trace that Perfetto opens, tables that add up, and nothing else written."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.training.tiny_runs import QUICK, unmask
from unmask.cli.profile import by_operator, profile_run
from unmask.config.run import DataConfig, RunConfig, StartConfig

GRPO = ["training.num_generations=2", "training.max_completion_length=4"]


def check_trace(read: dict[str, Any], ranges: dict[str, int]) -> None:
    """The trace has what Perfetto's importer of Chrome traces needs, and this many ranges of each name."""
    events = read["traceEvents"]
    assert all(isinstance(event["ph"], str) and {"ts", "pid", "tid"} <= event.keys() for event in events)
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 and event["name"] for event in complete)
    counts = Counter(event["name"] for event in complete if event["cat"] == "user_annotation")
    assert {name: counts[name] for name in ranges} == ranges
    inside = [event for event in complete if event["name"] == "aten::mm"]
    assert inside and min(event["ts"] for event in inside) >= min(
        event["ts"] for event in complete if event["cat"] == "user_annotation"
    )


def test_a_profile_from_the_command_line(model, tmp_path):
    output = tmp_path / "run"
    arguments = [
        "profile",
        "sft",
        "--model",
        model,
        "--task",
        "sudoku",
        "--output",
        output,
        *QUICK,
        "--steps",
        "2",
    ]
    result = unmask(*arguments)
    assert result.exit_code == 0, result.output
    assert [path.name for path in output.iterdir()] == ["trace.json"]
    check_trace(json.loads((output / "trace.json").read_text()), {"forward": 2, "backward": 2})
    shares = dict(re.findall(r"^\W*(forward|backward|other) .*? ([\d.]+)%", result.output, re.M))
    assert sum(map(float, shares.values())) == pytest.approx(100, abs=0.2) and all(
        float(share) > 0 for share in shares.values()
    )
    assert "aten::" in result.output and "ui.perfetto.dev" in result.output

    before = (output / "trace.json").read_bytes()
    result = unmask(*arguments)
    assert result.exit_code == 2 and "trace.json: the file exists" in result.output
    assert (output / "trace.json").read_bytes() == before
    result = unmask(*arguments, "--overwrite")
    assert result.exit_code == 0 and (output / "trace.json").read_bytes() != before


def test_of_grpo_whole_rollouts_are_recorded(model, tmp_path):
    trace = tmp_path / "elsewhere" / "grpo.json.gz"
    result = unmask(
        *(
            "profile",
            "--steps",
            "1",
            "--trace",
            trace,
            "grpo",
            "--model",
            model,
            "--task",
            "sudoku",
            "--output",
            tmp_path / "run",
        ),
        *(*QUICK, *GRPO, "training.num_iterations=3"),
    )
    assert result.exit_code == 0, result.output
    check_trace(json.loads(gzip.decompress(trace.read_bytes())), {"forward": 3, "backward": 3})
    assert not (tmp_path / "run").exists()


def test_of_a_conversion_every_stage_is_recorded_and_no_tracker_hears_of_it(
    model, text, tmp_path, monkeypatch
):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    training = {
        "use_cpu": True,
        "max_length": 32,
        "stages": [{"share": 1, "train": ["attention"]}, {"share": 5}],
        "report_to": "tensorboard",
    }
    config = RunConfig(
        model=StartConfig(path=str(model)),
        data=DataConfig(train=str(text)),
        output_dir=str(tmp_path / "run"),
        training=training,
    )
    tables = profile_run("convert", config, tmp_path / "trace.json", 1)
    check_trace(json.loads((tmp_path / "trace.json").read_text()), {"forward": 3, "backward": 3})
    assert {line["phase"] for line in tables["phases"]} == {"forward", "backward", "other"}
    calls = {line["name"]: line["calls a step"] for line in tables["operators on the CPU"]}
    assert len(calls) == 15 and float(calls["aten::mm"]) > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "trace.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "generate is not a training verb"),
        (["sft", "--no-such-option"], "is no setting or option"),
        (["sft", "--resume"], "a profile makes a short run of its own"),
        (["sft", "--steps", "0"], "Invalid value for '--steps'"),
        (["sft", "training.learning_rat=1"], "learning_rate"),
    ],
)
def test_what_cannot_be_profiled_is_refused(arguments, message, model, tmp_path):
    rest = ["--model", model, "--task", "sudoku", "--output", tmp_path / "run"]
    result = unmask("profile", *arguments, *(rest if arguments[0] == "sft" else []))
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "run").exists()


def test_the_table_of_operators_is_that_of_torch():
    """torch's own table takes minutes for the events of a long rollout."""
    weight_VV = torch.randn(64, 64, requires_grad=True)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorder,
        torch.profiler.record_function("reward"),
    ):
        for _ in range(4):
            torch.nn.functional.layer_norm(weight_VV @ weight_VV, (64,)).softmax(-1).sum().backward()
    lines = by_operator(recorder, 2)["operators on the CPU"]
    theirs = {event.key: event for event in recorder.key_averages() if not event.is_user_annotation}
    shown = [theirs[line["name"]] for line in lines]
    times = [event.self_cpu_time_total for event in shown]  # microseconds, which may tie or be rounded
    rest = [event.self_cpu_time_total for event in theirs.values() if event not in shown]
    assert len(lines) == 15 and all(after <= before + 2.0 for before, after in pairwise(times))
    assert max(rest) <= times[-1] + 2.0
    total = sum(times) + sum(rest)
    for line, event in zip(lines, shown, strict=True):
        assert float(line["calls a step"]) == event.count / 2
        assert float(line["ms a step"]) == pytest.approx(event.self_cpu_time_total / 2e3, abs=0.006)
        assert float(line["share"].rstrip("%")) == pytest.approx(
            100 * event.self_cpu_time_total / total, abs=0.06
        )
