"""Shell scripts are read for variables and for the flags of the one training that they start."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from unmask.errors import ConfigError
from unmask.migration.files import OldFile, read_old


def read(text: str, folder: Path, name: str = "run.sh") -> OldFile:
    (folder / name).write_text(text)
    return read_old(folder / name)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--a 1 --b=2.5 --c", {"a": 1, "b": 2.5, "c": True}),
        (
            "--learning-rate 3e-6 --no_cache --name 'two words'",
            {"learning_rate": 3e-6, "cache": False, "name": "two words"},
        ),
        ("--many q k v --one x", {"many": ["q", "k", "v"], "one": "x"}),
        ("--minus -1 --text no --flag True", {"minus": -1, "text": "no", "flag": True}),
        ("--a 1 2>&1 | tee log --b 2", {"a": 1}),
        ("--a 1 # --b 2", {"a": 1}),
        ("-- --a 1", {"a": 1}),
        (
            "--path $ROOT/x --model ${MODEL:-m/n} --other ${ROOT}",
            {"path": "/r/x", "model": "m/n", "other": "/r"},
        ),
    ],
)
def test_flags_are_read_as_their_program_reads_them(words: str, values: dict[str, Any], tmp_path):
    assert (
        read(f'ROOT="/r"\naccelerate launch --num_processes 2 train.py {words}\n', tmp_path).values == values
    )


def test_what_is_no_setting_is_noted_with_its_reason(tmp_path):
    old = read(
        (
            "srun --nodes 2 python train.py --out $JOB --a 1 \\\n  --b 2\n  --lost 3\nexport "
            "DIFFU_BETA=0.1 OTHER=5\n"
        ),
        tmp_path,
    )
    assert old.values == {"a": 1, "b": 2, "DIFFU_BETA": "0.1"} and old.program == "train.py"
    assert {name: value for name, value, _ in old.notes} == {"--nodes": 2, "--out": "$JOB", "--lost": 3}


def test_commands_that_train_nothing_are_passed_over(tmp_path):
    text = (
        "python download_model.py --model m\npython -m vllm.entrypoints.openai.api_server --port "
        "8000\nbash eval.sh --a 1\necho 'it's\n"
    )
    assert read(text, tmp_path) == OldFile({})


def test_a_yaml_that_a_script_names_is_read_and_its_flags_win(tmp_path):
    (tmp_path / "c.yaml").write_text("a: 1\nb: 1\n")
    assert read("python train.py --config c.yaml --b 2", tmp_path).values == {"a": 1, "b": 2}
    (note,) = read("python train.py --config gone.yaml --b 2", tmp_path).notes
    assert note == ("--config", "gone.yaml", "does not exist: pass the file too, before the script")


def test_files_that_are_not_read_say_why(tmp_path):
    for name, text, where in [
        ("a.json", "{", "a.json"),
        ("a.yaml", "a: [", "a.yaml, line 1"),
        ("b.json", "[]", "b.json"),
    ]:
        with raises(ConfigError, where=str(tmp_path / where)):
            read(text, tmp_path, name)
    with raises(ConfigError, where=str(tmp_path / "absent.yaml")):
        read_old(tmp_path / "absent.yaml")


@given(text=st.text(alphabet="ab$ {}\"'\\\n=-#|;()<>&1.py", max_size=60))
def test_any_script_is_read_or_refused(text: str, tmp_path_factory: pytest.TempPathFactory):
    with contextlib.suppress(ConfigError):
        read(text, tmp_path_factory.getbasetemp())
