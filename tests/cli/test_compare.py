"""`unmask compare` on files, as a user sees it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from unmask.cli.entry import app
from unmask.evaluation.result_file import EvaluationResult, Item, Metric, TaskScores


@pytest.fixture
def files(tmp_path):
    """Two results on 30 shared items; the second solves twelve more, in fewer steps. One more item each."""
    paths = []
    for folder, solved, steps, extra in (("before", 6, 16, "x"), ("after", 18, 8, "y")):
        items = [Item(id=str(n), group=str(n), scores={"solved": float(n < solved)}) for n in range(30)]
        items.append(Item(id=extra, group=extra, scores={"solved": 1.0}))
        part = TaskScores(
            task="sudoku",
            protocol={"sampler": {"steps": steps}},
            metrics={"solved": Metric(mean=0.5)},
            items=items,
        )
        path = tmp_path / folder / "result.json"
        path.parent.mkdir()
        EvaluationResult(model={}, arguments={}, tasks=[part]).write(path)
        paths.append(str(path))
    return paths


def run(*words):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["compare", *map(str, words)])


def test_the_table_the_items_and_the_settings_are_printed_and_the_picture_drawn(files, tmp_path):
    done = run(*files, "--picture", tmp_path / "forest.svg")
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    for text in ("before/result", "20.0%", "60.0%", "+40.0% [", "better", "sampler.steps"):
        assert text in words
    assert "sudoku: 30 items shared, 1 only in before/result, 1 only in after/result" in words
    assert (tmp_path / "forest.svg").read_text().startswith("<?xml")
    again = run(*files, "--picture", tmp_path / "forest.svg")
    assert again.exit_code == 2 and "the file exists" in again.stderr
    assert run(*files, "--picture", tmp_path / "forest.svg", "--overwrite").exit_code == 0


@pytest.mark.parametrize(("other", "first"), [("result.bak", "result"), ("result", "result.json")])
def test_files_that_differ_in_their_suffix_only_have_different_names(other, first, files, tmp_path):
    copy = tmp_path / "before" / other
    copy.write_bytes((tmp_path / "before" / "result.json").read_bytes())
    assert f"31 items shared, 0 only in {first}, 0 only in {other}" in run(files[0], copy).output


def test_bad_input_is_one_line(files, tmp_path):
    cut = tmp_path / "cut.json"
    cut.write_text((tmp_path / "after" / "result.json").read_text()[:-9])
    for words, message in (
        ([files[0]], "a comparison needs two results"),
        ([files[0], files[0]], "is given twice"),
        ([files[0], cut], "it was cut"),
        ([files[0], tmp_path / "missing.json"], "cannot be read"),
        ([*files, "--picture", tmp_path / "forest.pdf"], "neither a PNG nor an SVG"),
    ):
        done = run(*words)
        assert done.exit_code == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_sampler_that_is_none_is_no_setting(files, tmp_path):
    text = (tmp_path / "after" / "result.json").read_text()
    (tmp_path / "after" / "result.json").write_text(
        text.replace('"sampler": {\n     "steps": 8\n    }', '"sampler": [8]')
    )
    done = run(*files)
    assert done.exit_code == 0 and "[8]" in done.output
