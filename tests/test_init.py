"""Every public name exists, in the module that defines it, and is imported on first use."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import unmask
from tests.helpers import REPOSITORY


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    tree = ast.parse((REPOSITORY / "unmask" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared == {**unmask.PUBLIC_NAMES, "generation": "unmask", "losses": "unmask"}
    assert set(unmask.__all__) == declared.keys() | {"__version__"}
    assert set(dir(unmask)) == set(unmask.__all__)


@pytest.mark.parametrize("name", unmask.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(unmask, name) is not None


def test_the_slow_truth_is_an_attribute() -> None:
    assert unmask.generation.naive.generate is not unmask.generate


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'unmask' has no attribute 'nothing'"):
        _ = unmask.nothing


def test_importing_the_package_and_its_configs_imports_no_torch() -> None:
    code = "import unmask, sys; unmask.SamplerConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


@pytest.mark.slow
def test_nothing_is_written_where_a_model_is_loaded_in_python():
    """Not by torchao, bitsandbytes or torch either, whichever module is imported first."""
    for code in (
        "import unmask; unmask.load; unmask.GRPOTrainer; unmask.ConvertTrainer",
        "from unmask.rl.methods import Method",
    ):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        assert (done.stdout, done.stderr) == ("", "")
