"""`unmask evaluate --curve`: each point has its sampler and its speed, and a killed curve goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from unmask.cli.entry import app
from unmask.config.evaluation import EvaluationConfig
from unmask.config.run import ModelConfig, SamplerConfig
from unmask.demo import DemoSettings, small_model
from unmask.evaluation import tasks
from unmask.evaluation.comparison import labels
from unmask.evaluation.curve import area_under
from unmask.evaluation.result_file import read_result
from unmask.models.load import load
from unmask.tasks import get_task


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bidirectional model over Sudoku's characters."""
    folder = tmp_path_factory.mktemp("curve")
    small_model(get_task("sudoku"), DemoSettings(hidden=16, layers=1), 0).save(folder / "causal")
    load(folder / "causal", attention="bidirectional").save(folder / "model")
    return str(folder / "model")


def evaluate(*words: object, status: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "150"}).invoke(app, ["evaluate", *map(str, words)])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output if status == 0 else result.stderr


def test_each_point_has_its_sampler_and_its_speed(model, tmp_path):
    output = tmp_path / "curve.json"
    shown = evaluate(model, "--task", "sudoku", "--rows", 6, "--curve", "steps=2,17", "--no-stop-at-eos", "--output", output)
    result = read_result(output)
    fast, slow = result.tasks
    assert [part.protocol["sampler"]["steps"] for part in result.tasks] == [2, 17]
    assert [part.metrics["passes"].mean for part in result.tasks] == [2, 17]
    assert [item.id for item in fast.items] == [item.id for item in slow.items]
    for part in result.tasks:
        assert part.metrics["tokens per pass"].mean == part.total("tokens") / part.total("passes")
    assert labels(result.tasks) == ["sudoku, steps 2", "sudoku, steps 17"] == list(result.times["tasks"])
    words = " ".join(shown.split())
    assert f"sudoku, AUP {area_under(result.tasks):.1f}" in words and "steps 17" in words and "6 malformed" in words
    assert "the same scores and items" in evaluate("--rerun", output)


def test_lossy_caches_are_points_too(model, tmp_path):
    evaluate(model, "--task", "sudoku,shuffle", "--rows", 2, "--curve", "cache=exact,prefix,dual", "--output", tmp_path / "out.json")
    assert labels(read_result(tmp_path / "out.json").tasks) == [
        f"{task}, cache {cache}" for task in ("sudoku", "shuffle") for cache in ("exact", "prefix", "dual")
    ]


def test_a_killed_curve_goes_on_at_its_point(model, tmp_path, monkeypatch):
    from unmask.commands.evaluate import evaluate as run

    sections = ModelConfig(path=model), EvaluationConfig(task=["sudoku"], rows=4, curve="steps=2,4,8"), SamplerConfig()
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
