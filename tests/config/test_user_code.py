"""Code that a config names is found by file and by module, and what is wrong with it is one error."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from tests.errors import raises
from unmask.config.user_code import load_class, load_function, load_module
from unmask.errors import ConfigError

CODE = """
import os
from fractions import Fraction
NUMBER = 7
def double(value): return 2 * value
class Half(Fraction): pass
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.py"


def test_code_is_found_by_file_and_by_module(file):
    for target in ("mine.py:double", f"{file}:double", "mine:double"):
        assert load_function(target)(3) == 6
    assert load_function("os.path:basename")("a/b") == "b"
    sys.modules.pop("mine")


def test_a_file_is_run_once_until_it_changes(file):
    """A task is asked for several times, and has to stay one class."""
    before = load_class("mine.py:Half", Fraction)
    assert before is load_class(f"{file}:Half", Fraction)
    file.write_text(CODE.replace("2 *", "3 *"))
    assert load_function("mine.py:double")(3) == 9
    assert not list(file.parent.glob("__pycache__"))


@pytest.mark.parametrize(
    ("target", "what", "remedy"),
    [
        ("absent.py:double", "there is no such file", "current folder, {folder}"),
        ("absent:double", "No module named 'absent'", "package.module:NAME or path/to/file.py:NAME"),
        ("mine.py:doubel", "there is no such name", "Did you mean 'double'?"),
        ("os:absent", "there is no such name", "Known: "),
        ("mine.py:NUMBER", "is of type int, not a function", "Known: double"),
        ("mine.py:os", "is of type module, not a function", "Known: double"),
        ("mine.py:Half", "is a class, not a function", "Known: double"),
        ("os", "Empty module name", "package.module:NAME"),
    ],
)
def test_what_is_wrong_with_a_name_is_one_error(target, what, remedy, file):
    with pytest.raises(ConfigError) as caught:
        load_function(target)
    assert (
        caught.value.where == target
        and what in caught.value.what
        and remedy.format(folder=file.parent) in caught.value.remedy
    )


def test_a_class_has_to_be_of_its_kind(file):
    with raises(ConfigError, where="mine.py:double"):
        load_class("mine.py:double", int)
    with raises(ConfigError, where="mine.py:Half"):
        load_class("mine.py:Half", int)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("x = 1\n\ndef f():\n    1 / 0\nf()", "ZeroDivisionError: division by zero, line 4 of broken.py"),
        ("import json\n\njson.loads('[')", "line 3 of broken.py"),
        ("x = 1\nif x", "broken.py, line 2"),
        ("import sys\nsys.exit(3)", "SystemExit: 3, line 2 of broken.py"),
        ("import absent_module", "No module named 'absent_module', line 1 of broken.py"),
    ],
)
@pytest.mark.parametrize("source", ["broken.py", "broken"])
def test_an_exception_in_a_file_is_named_with_its_line(source, code, what, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            load_module(source)
        assert f"{source}: cannot be imported" in str(caught.value) and what in caught.value.what
    assert not {name for name in sys.modules if name.startswith("broken")}


def test_reading_the_code_of_a_user_imports_no_torch():
    """Workers and the command line do it first."""
    code = (
        "import sys, unmask.config.user_code; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
