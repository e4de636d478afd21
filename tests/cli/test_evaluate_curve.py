"""`unmask evaluate --curve`: each point has its sampler and its speed, and a killed curve goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from unmask.cli.entry import app
from unmask.config.evaluation import EvaluationConfig
from unmask.config.run import ModelConfig
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_model
from unmask.evaluation import tasks
from unmask.evaluation.comparison import labels
from unmask.evaluation.curve import AUP, area_under, curve_scores
from unmask.evaluation.result_file import EvaluationResult, Item, Metric, TaskScores, read_result
from unmask.models.load import load
from unmask.tasks import get_task


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bidirectional model over Sudoku's characters."""
    folder = tmp_path_factory.mktemp("curve")
    character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0).save(
        folder / "causal"
    )
    load(folder / "causal", attention="bidirectional").save(folder / "model")
    return str(folder / "model")


def evaluate(*words: object, status: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "150"}).invoke(app, ["evaluate", *map(str, words)])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output if status == 0 else result.stderr


def test_each_point_has_its_sampler_and_its_speed(model, tmp_path):
    output = tmp_path / "curve.json"
    shown = evaluate(
        model,
        "--task",
        "sudoku",
        "--rows",
        6,
        "--curve",
        "steps=2,17",
        "--no-stop-at-eos",
        "--output",
        output,
    )
    result = read_result(output)
    *points, area = result.tasks
    fast, slow = points
    assert [part.protocol["sampler"]["steps"] for part in points] == [2, 17]
    assert [part.metrics["passes"].mean for part in points] == [2, 17]
    assert [item.id for item in fast.items] == [item.id for item in slow.items]
    for part in points:
        assert part.metrics["tokens per pass"].mean == part.total("tokens") / part.total("passes")
    assert labels(points) == ["sudoku, steps 2", "sudoku, steps 17"] == list(result.times["tasks"])
    expected = area_under(points)
    assert area.task == "sudoku, curve" and area.protocol["curve"] == "steps=2,17" and not area.items
    assert area.metrics[AUP].mean == expected and area.metrics[AUP].low is area.metrics[AUP].high is None
    words = " ".join(shown.split())
    assert f"sudoku, AUP {expected:,.1f}" in words and "steps 17" in words and "6 malformed" in words
    assert "the same scores and items" in evaluate("--rerun", output)


def test_a_curve_is_compared_and_reported(tmp_path):
    """The area has no items, so there is nothing to pair; the report shows it."""
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, solved in zip(paths, ([1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 1]), strict=True):
        points = [of_steps(steps, solved) for steps in (2, 8)]
        write(path, [*points, curve_scores("steps=2,8", points)])
    done = CliRunner(env={"COLUMNS": "150"}).invoke(app, ["compare", *map(str, paths)])
    assert done.exit_code == 0 and "sudoku, steps 2" in done.output and "curve" not in done.output, (
        done.output,
        done.exception,
    )
    done = CliRunner().invoke(app, ["report", str(paths[0]), "--output", str(tmp_path / "report.html")])
    assert done.exit_code == 0, (done.output, done.exception)
    area = area_under(points_of(paths[0]))
    page = (tmp_path / "report.html").read_text()
    assert "sudoku, curve" in page and f">{area:,.0f}" in page


def of_steps(steps, solved):
    """A point with 8 tokens for each answer."""
    items = [
        Item(
            id=str(n),
            group=str(n),
            scores={"solved": float(value)},
            completions=["1"],
            tokens=8,
            steps=steps,
            passes=steps,
        )
        for n, value in enumerate(solved)
    ]
    metrics = {"solved": Metric(mean=sum(solved) / max(1, len(solved)))}
    return TaskScores(
        task="sudoku",
        protocol={"sampler": {"steps": steps}},
        metrics=metrics,
        statuses={"ok": len(items)},
        items=items,
    )


def write(path, tasks):
    EvaluationResult(model={"path": path.stem}, arguments={"model": {}}, tasks=tasks).write(path)


def points_of(path):
    return [part for part in read_result(path).tasks if part.items]


def test_without_a_verdict_a_curve_has_no_area():
    assert curve_scores("steps=2,8", [of_steps(2, []), of_steps(8, [])]) is None


def test_lossy_caches_are_points_too(model, tmp_path):
    evaluate(
        model,
        "--task",
        "sudoku,shuffle",
        "--rows",
        2,
        "--curve",
        "cache=exact,prefix,dual",
        "--output",
        tmp_path / "out.json",
    )
    assert labels(read_result(tmp_path / "out.json").tasks) == [
        *(
            f"{task}, cache {cache}"
            for task in ("sudoku", "shuffle")
            for cache in ("exact", "prefix", "dual")
        ),
        "sudoku, curve",
        "shuffle, curve",
    ]


def test_a_killed_curve_goes_on_at_its_point(model, tmp_path, monkeypatch):
    from unmask.cli.evaluation import evaluate as run

    sections = (
        ModelConfig(path=model),
        EvaluationConfig(task=["sudoku"], rows=4, curve="steps=2,4,8"),
        SamplerConfig(),
    )
    whole = run(*sections, tmp_path / "whole.json")
    calls, generate = [], tasks.generate

    def killed(*given, **more):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*given, **more)

    monkeypatch.setattr(tasks, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        run(*sections, tmp_path / "killed.json")
    resumed = run(*sections, tmp_path / "killed.json")
    assert resumed.times["resumed_items"] == 4 and len(calls) == 4  # the first point is not asked again
    assert resumed.tasks == whole.tasks
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["killed.json", "whole.json"]


def test_what_is_no_curve_is_one_error(model):
    error = evaluate(model, "--task", "sudoku", "--curve", "stpes=2,4", status=2)
    assert "Did you mean 'steps'" in error and len(error.splitlines()) == 1
