"""Every public name exists, in the module that defines it, and is imported on first use."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unmask
from tests.helpers import REPOSITORY
from unmask.names import CLASSES_ELSEWHERE


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((REPOSITORY / "unmask" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared == unmask.PUBLIC_NAMES and len(declared) > 20
    assert set(unmask.__all__) == set(dir(unmask)) == declared.keys() | {"__version__"}


@pytest.mark.slow
def test_a_type_checker_knows_the_names_and_their_arguments(tmp_path: Path) -> None:
    lines = {
        "unmask.nonexistent": "attr-defined",
        "unmask.SFTTrainer('m', unmask.SFTConfig(output_dir='o'), train_dataset=[{'text': 'a'}])": None,
        "unmask.SFTTrainer('m', epochs=3)": "call-arg",
        "unmask.SFTTrainer('m', 'settings')": "arg-type",
        "unmask.load('m').train(False).half().eval().evla()": "attr-defined",
        "unmask.load('m').eval(1)": "call-arg",
        "unmask.load('m', dtypo='auto')": "arg-type",
        "unmask.load('m', dtype='auto', cache_dir='c')": None,
        "sum(p.numel() for p in unmask.load('m').parameters())": None,
        "unmask.GRPOTrainer('m', len, eval_dataset={'a': [], 'b': []}).train()": None,
    }
    script = tmp_path / "script.py"
    script.write_text("import unmask\n" + "\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", str(script)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {
        int(line): code for line, code in re.findall(r":(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M)
    }
    assert found == {number: code for number, code in enumerate(lines.values(), 2) if code}, done.stdout


@pytest.mark.parametrize("name", unmask.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(unmask, name) is not None


def test_the_slow_truth_is_an_attribute() -> None:
    assert unmask.generation.naive.generate is not unmask.generate


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'unmask' has no attribute 'nothing'"):
        _ = unmask.nothing


KTO = "use DPOTrainer and DPOConfig(loss_type='kto')"


def test_a_class_of_trl_is_answered_with_what_does_it_here() -> None:
    trl = pytest.importorskip("trl")
    theirs = {name for name in dir(trl) if name.endswith(("Trainer", "Config"))} - set(unmask.__all__)
    assert theirs > {"KTOTrainer", "KTOConfig", "RewardTrainer", "RLOOTrainer"}
    for name in theirs | {"ORPOTrainer", "PPOConfig", "Trainer", "TrainingArguments", "AutoModelForCausalLM"}:
        assert not hasattr(unmask, name)
        with pytest.raises(AttributeError) as by_attribute:
            getattr(unmask, name)
        with pytest.raises(ImportError) as by_import:
            exec(f"from unmask import {name}")
        said = str(by_attribute.value).removeprefix(f"module 'unmask' has no attribute {name!r}: ")
        assert str(by_import.value) == f"cannot import name {name!r} from 'unmask': {said}"
        assert said == KTO if name.startswith("KTO") else set(re.findall(r"\w+", said)) & set(unmask.__all__)
    with pytest.raises(ImportError, match=r"cannot import name 'nothing' from 'unmask' \("):
        exec("from unmask import nothing")
    assert importlib.util.find_spec("unmask.nothing") is None


@pytest.mark.parametrize(
    "settings", [{"loss_type": "kto"}, {"loss_type": "bco_pair"}, {"loss_type": "simpo"}]
)
def test_the_settings_in_place_of_a_class_are_valid(settings) -> None:
    assert f"DPOConfig(loss_type={settings['loss_type']!r})" in str(CLASSES_ELSEWHERE)
    unmask.DPOConfig(**settings)
    unmask.GRPOConfig(scale_rewards="leave-one-out")


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
