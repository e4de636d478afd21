"""A path that leads to no model, or to half of one, is an error that names what is meant, before torch is
imported."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest

from tests.errors import raises
from tests.helpers import shared_path
from unmask.errors import ModelError
from unmask.models.model_paths import check_model, near_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    shutil.copytree(shared_path("models", "stories260K"), folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    return folder


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_a_whole_model_passes(model: Path) -> None:
    check_model(model)


@pytest.mark.parametrize("size", [0, 5, 8, 1000, 500_000, -1])
def test_weights_that_end_early_are_refused(model: Path, size: int) -> None:
    cut(model / "model.safetensors", size)
    with raises(ModelError, where=str(model)):
        check_model(model)
    check_model(model, weights=False)


def test_a_pointer_of_git_lfs_is_refused(model: Path) -> None:
    (model / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
    )
    with raises(ModelError, where=str(model)):
        check_model(model)


def test_a_part_of_a_run_names_the_trained_model(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "block"
    (run / "stage-1" / "checkpoint-5").mkdir(parents=True)
    model.rename(run / "model")
    for part in (run / "stage-1", run / "stage-1" / "checkpoint-5"):
        with raises(ModelError, where=str(part)):
            check_model(part)
    with raises(ModelError, where=str(tmp_path / "runs")):
        check_model(tmp_path / "runs")
    check_model(run)


def test_a_file_is_no_folder(model: Path) -> None:
    with raises(ModelError, where=str(model / "config.json")):
        check_model(model / "config.json")


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("runs/demo/sfft", "Did you mean runs/demo/sft?"),
        ("runs/dmo/sft", "Did you mean runs/demo/sft?"),
        ("rusn/demo/sft", "Did you mean runs/demo/sft?"),
        ("runs/demo/xyzzy", "Check the path"),
        ("runs/dmo/nothing", "Check the path"),
    ],
)
def test_a_near_path_is_proposed(
    typed: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/demo/sft").mkdir(parents=True)
    assert near_path(Path(typed)) == remedy
    with raises(ModelError, where=typed) as refused:
        check_model(typed)
    assert refused.value.remedy == remedy


def test_a_name_on_the_hub_is_no_wrong_path_but_one_beside_runs_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_model("gpt2")
    check_model("runs/sfft")
    Path("runs/sft").mkdir(parents=True)
    check_model("runs/sfft")  # as a folder `Qwen` may hold another model of that owner
    Path("runs/sft/manifest.json").write_text("{}")
    with raises(ModelError, where="runs/sfft"):
        check_model("runs/sfft")


def test_the_model_of_an_unfinished_run_warns(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    model.rename(run / "model")
    (run / "manifest.json").write_text('{"state": "interrupted"}')
    with warnings.catch_warnings(), pytest.raises(Warning, match="has not finished"):
        warnings.simplefilter("error")
        check_model(run)
