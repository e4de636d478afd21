"""How tests compare errors (`tests/errors.py`), and that the file of messages has no leftovers."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys

import pytest

from tests import errors
from tests.errors import FILE, REPOSITORY, Recorder, merged, raises
from unmask.errors import ConfigError, DataError, UnmaskError


@functools.cache
def functions(file: str) -> set[str]:
    """The ids of a file's tests, without parameters."""
    path = REPOSITORY / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return {f"{file}::{node.name}" for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.fixture
def recorder(request) -> Recorder:
    return request.config.pluginmanager.get_plugin("messages")


def test_messages_belong_to_tests_that_exist(recorder):
    """With their parameters, where all files are collected."""
    cases = set(recorder.collected)
    read = {case.split("::")[0] for case in cases}
    gone = [
        key
        for key in recorder.golden
        if errors.function_of(key) not in functions(key.split("::")[0])
        or ("[" in key and key not in cases and len(read) > 1 and key.split("::")[0] in read)
    ]
    assert not gone, f"remove these from {FILE.name}: {gone}"


def test_the_file_of_messages_is_as_it_would_be_written(recorder):
    assert FILE.read_text(encoding="utf-8") == errors.written(recorder.golden)


def test_another_place_type_or_message_is_a_failure(recorder, monkeypatch):
    with raises(ConfigError, where="a.b"):
        raise ConfigError("is recorded", where="a.b")
    with pytest.raises(AssertionError, match=r"a\.c"), raises(ConfigError, where="a.b"):
        raise ConfigError("is recorded", where="a.c")
    with pytest.raises(DataError), raises(ConfigError, where="a.b"):
        raise DataError("is recorded", where="a.b")
    lacking = pytest.raises(pytest.fail.Exception, match=r"(?s)a\.b: is not recorded.*--write-messages")
    with monkeypatch.context() as patch, lacking, raises(ConfigError, where="a.b"):
        patch.setattr(recorder, "writes", False)
        raise ConfigError("is not recorded", where="a.b")
    recorder.raised.pop()


def test_what_differs_from_run_to_run_is_normalized(recorder, tmp_path):
    try:
        json.loads("[1, 2")
    except json.JSONDecodeError as error:
        try:
            raise DataError(f"malformed JSON: {error}", where=str(tmp_path / "x.json")) from error
        except DataError as raised:
            assert recorder.normalized(raised) == "<tmp>/x.json: malformed JSON: <JSONDecodeError>"
    for text, expected in {
        f"{REPOSITORY}/docs": "<checkout>/docs",
        "http://127.0.0.1:4567/v1": "http://127.0.0.1:<port>/v1",
        "process 4567 writes": "process <pid> writes",
        "<A object at 0x7f12aa34>": "<A object at <address>>",
        "weights 12ab34cd56": "weights <hash>",
        "needs 0.00027 GB": "needs <size> GB",
        "12345678 rows, 0 of them defaced": "12345678 rows, 0 of them defaced",
    }.items():
        assert recorder.normalized(UnmaskError(text)) == expected


@pytest.mark.parametrize(
    "before, ran, collected, after",
    [
        ({}, {"f::a": ["x"], "f::b": []}, ["f::a", "f::b"], {"f::a": ["x"]}),
        ({"f::a": ["x"], "g::a": ["x"]}, {"f::a": []}, ["f::a"], {"g::a": ["x"]}),
        ({}, {"f::a[1]": ["x"], "f::a[2]": ["x"]}, ["f::a[1]", "f::a[2]"], {"f::a": ["x"]}),
        (
            {"f::a": ["x"]},
            {"f::a[1]": ["y"], "f::a[2]": ["x"]},
            ["f::a[1]", "f::a[2]"],
            {"f::a[1]": ["y"], "f::a[2]": ["x"]},
        ),
        (
            {"f::a[1]": ["y"], "f::a[2]": ["x"], "f::a[3]": ["x"]},
            {"f::a[2]": ["y"]},
            ["f::a[1]", "f::a[2]"],
            {"f::a": ["y"]},
        ),
        ({"f::a": ["x"]}, {"f::a[1]": []}, ["f::a[1]", "f::a[2]"], {"f::a[2]": ["x"]}),
    ],
)
def test_only_the_entries_of_tests_that_ran_are_rewritten(before, ran, collected, after):
    assert merged(before, ran, collected, whole=True) == after


def test_the_entries_of_other_parameters_are_kept_where_they_were_not_read():
    before = {"f::a[1]": ["x"], "f::a[2]": ["x"]}
    after = merged(before, {"f::a[2]": ["y"]}, ["f::a[2]"], whole=False)
    assert after == {"f::a[1]": ["x"], "f::a[2]": ["y"]}
    shared = {"f::a": ["x"]}
    assert merged(shared, {"f::a[2]": ["x"]}, ["f::a[2]"], whole=False) == shared
    assert merged(shared, {"f::a[2]": []}, ["f::a[2]"], whole=False) == shared | {"f::a[2]": []}


def test_messages_are_not_written_by_several_processes():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "--write-messages",
        str(REPOSITORY / "tests/test_errors.py"),
    ]
    refused = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR and "leave out -n" in refused.stderr
