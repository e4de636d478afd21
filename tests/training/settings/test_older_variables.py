"""Variables of older names: what they set, their precedence, and their warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.errors import raises
from tests.training.tiny_runs import unmask
from unmask.config.layers import Layer, Layers, read_layers
from unmask.config.yaml import parse_yaml
from unmask.errors import ConfigError
from unmask.training.settings.older_variables import OLDER_GRPO_VARIABLES, older_layers, with_whole_groups


def read(verb: str = "grpo", **environ: str) -> dict[str, Any]:
    return read_layers(older=older_layers(environ, verb), environ=environ).merged()


@pytest.mark.parametrize(
    ("name", "text", "settings"),
    [
        ("DIFFU_MODEL_PATH", "runs/sft/model", {"model": {"path": "runs/sft/model"}}),
        ("DIFFU_DATASET", "sudoku", {"data": {"task": "sudoku"}}),
        ("DIFFU_DATASET", "openai/gsm8k:main", {"data": {"train": "openai/gsm8k:main"}}),
        ("DIFFU_MIXED_PRECISION", "bf16", {"training": {"bf16": True, "fp16": False}}),
        ("DIFFU_MIXED_PRECISION", "fp16", {"training": {"bf16": False, "fp16": True}}),
        ("DIFFU_MIXED_PRECISION", "no", {"training": {"bf16": False, "fp16": False}}),
        ("DIFFU_MIXED_PRECISION", "0", {"training": {"bf16": False, "fp16": False}}),
        ("DIFFU_MIXED_PRECISION", "False", {"training": {"bf16": False, "fp16": False}}),
        ("DIFFU_MIXED_PRECISION", "OFF", {"training": {"bf16": False, "fp16": False}}),
        ("DIFFU_BATCH_SIZE", "12", {"training": {"per_device_train_batch_size": 12}}),
        ("GRPO_USE_VLLM", "1", {"training": {"rollout": {"backend": "vllm"}}}),
        ("GRPO_USE_VLLM", "False", {"training": {"rollout": {"backend": "local"}}}),
        ("VLLM_SERVER_HOST", "gpu7", {"training": {"rollout": {"url": "http://gpu7:8000"}}}),
        ("VLLM_SERVER_HOST", "[::1]", {"training": {"rollout": {"url": "http://[::1]:8000"}}}),
        ("VLLM_SERVER_HOST", "10.0.0.7:81", {"training": {"rollout": {"url": "http://10.0.0.7:81"}}}),
        ("VLLM_SERVER_HOST", "https://gpu7/vllm", {"training": {"rollout": {"url": "https://gpu7/vllm"}}}),
        ("GRPO_USE_TORCH_COMPILE", "TRUE", {"training": {"torch_compile": True}}),
        ("GRPO_BATCH_SIZE", "6", {"training": {"per_device_train_batch_size": 6}}),
        ("GRPO_NUM_GENERATIONS", "6", {"training": {"num_generations": 6}}),
        ("GRPO_GRAD_ACCUM_STEPS", "2", {"training": {"gradient_accumulation_steps": 2}}),
        ("GRPO_BATCH_SIZE", "", {}),
    ],
)
def test_a_variable_is_read_as_the_setting_that_took_its_place(name, text, settings, capsys):
    assert read(**{name: text}) == settings
    note = capsys.readouterr().err
    assert note.startswith(f"{name} is read as ") == bool(settings) and note.count("\n") == bool(settings)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[
            (name, text)
            for name in ("DIFFU_BATCH_SIZE", "GRPO_BATCH_SIZE", "GRPO_NUM_GENERATIONS")
            for text in ("many", "0", "-1", "2.5")
        ],
        *[(name, "maybe") for name in ("GRPO_USE_VLLM", "GRPO_USE_TORCH_COMPILE", "DIFFU_MIXED_PRECISION")],
        *[("VLLM_SERVER_HOST", text) for text in ("http://", "ftp://gpu7", ":80", "gpu7:port", "gpu7:99999")],
    ],
)
def test_a_value_that_means_nothing_is_refused_by_the_name_of_its_variable(name, text):
    with raises(ConfigError, where=f"environment variable {name}"):
        read(**{name: text})


@pytest.mark.parametrize("text", ["true", "1", "Yes", "on"])
def test_mixed_precision_that_is_on_is_bfloat16_wherever_there_is_any(text, monkeypatch):
    def meant() -> str:
        training = read(DIFFU_MIXED_PRECISION=text)["training"]
        return " ".join(name for name, on in training.items() if on)

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert meant() == "bf16"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for supported, name in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(
            "torch.cuda.is_bf16_supported", lambda including_emulation=True, found=supported: found
        )
        assert meant() == name


def test_each_has_its_rank():
    older = {"DIFFU_BATCH_SIZE": "2", "GRPO_BATCH_SIZE": "3"}
    assert read(**older)["training"] == {"per_device_train_batch_size": 3}
    # the others are GRPO's alone
    assert read("sft", **older)["training"] == {"per_device_train_batch_size": 2}
    assert read(**older, UNMASK_TRAINING__PER_DEVICE_TRAIN_BATCH_SIZE="4")["training"] == {
        "per_device_train_batch_size": 4
    }
    assert not any(read("sft", **{name: "1"}) for name in OLDER_GRPO_VARIABLES)


def test_without_vllm_its_address_is_passed_over():
    assert read(VLLM_SERVER_HOST="gpu7", GRPO_USE_VLLM="no") == {
        "training": {"rollout": {"backend": "local"}}
    }
    served = {"training": {"rollout": {"backend": "vllm", "url": "http://gpu7:8000"}}}
    assert read(VLLM_SERVER_HOST="gpu7", GRPO_USE_VLLM="1") == served


@pytest.mark.parametrize(
    ("verb", "name", "remedy"),
    [
        ("sft", "DIFFU_BATCHSIZE", "Did you mean 'DIFFU_BATCH_SIZE'?"),
        ("grpo", "DIFFU_MODEL", "Did you mean 'DIFFU_MODEL_PATH'?"),
        ("grpo", "GRPO_BATCH", "Did you mean 'GRPO_BATCH_SIZE'?"),
        (
            "pretrain",
            "DIFFU_XYZ",
            "Known: DIFFU_BATCH_SIZE, DIFFU_DATASET, DIFFU_MIXED_PRECISION, DIFFU_MODEL_PATH.",
        ),
        ("sft", "GRPO_BATCH", None),
        ("grpo", "VLLM_USE_V1", None),
    ],
)
def test_a_variable_that_is_unknown_is_told(verb, name, remedy, capsys):
    assert read(verb, **{name: "1"}) == {}
    assert capsys.readouterr().err == (
        f"{name} is not read: no variable has this name. {remedy}\n" if remedy else ""
    )


def grouped(
    config: dict[str, Any] | None = None, verb_layers: Sequence[Layer] = (), **environ: str
) -> tuple[int, int]:
    """The batch and the accumulation of a run with the values of the recipe grpo-sudoku: groups of 6, two
    batches of 6."""
    recipe = {"num_generations": 6, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    layers = [
        Layer("recipe grpo-sudoku", {"training": recipe}),
        *([Layer("run.yaml", {"training": config})] if config else []),
    ]
    training = with_whole_groups(
        Layers([*layers, *older_layers(environ, "grpo"), *verb_layers]), environ
    ).merged()["training"]
    return training["per_device_train_batch_size"], training["gradient_accumulation_steps"]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["DIFFU_BATCH_SIZE", "GRPO_BATCH_SIZE"])
@pytest.mark.parametrize("batch", range(1, 17))
def test_a_batch_of_a_variable_leaves_groups_whole_and_the_step_as_it_was(batch, name, world):
    found, steps = grouped(**{name: str(batch)}, WORLD_SIZE=str(world))
    assert found == batch and found * steps * world % 6 == 0
    fitting = [number for number in range(1, 13) if batch * number * world % 6 == 0]
    assert steps == 2 if 2 in fitting else steps in fitting
    if 12 % batch == 0 and 2 not in fitting and 12 // batch in fitting:
        assert found * steps == 12


def test_what_a_user_says_of_accumulation_stays(capsys):
    assert grouped(DIFFU_BATCH_SIZE="2") == (2, 6)
    assert (
        "training.gradient_accumulation_steps is 6, as 2 batches of 2 completions are no whole groups of 6"
        in capsys.readouterr().err
    )
    assert grouped({"gradient_accumulation_steps": 2}, DIFFU_BATCH_SIZE="2") == (2, 2)
    assert grouped(DIFFU_BATCH_SIZE="2", GRPO_GRAD_ACCUM_STEPS="4") == (2, 4)
    assert grouped({"per_device_train_batch_size": 5}) == (5, 2)  # no variable's
    assert grouped(
        verb_layers=[Layer("command line", {"training": {"per_device_train_batch_size": 4}})],
        DIFFU_BATCH_SIZE="2",
    ) == (4, 2)
    assert grouped({"num_generations": "six"}, DIFFU_BATCH_SIZE="2") == (2, 2)  # is refused later


def test_of_several_processes_only_the_first_tells(capsys):
    assert read(DIFFU_BATCH_SIZE="2", DIFFU_X="1", RANK="1")
    assert capsys.readouterr().err == ""


def test_the_command_line_reads_them_above_files_and_names_them_in_errors(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(
        "training: {per_device_train_batch_size: 7, gradient_accumulation_steps: 7, use_cpu: true}"
    )
    monkeypatch.setenv("DIFFU_MODEL_PATH", "m")
    monkeypatch.setenv("GRPO_BATCH_SIZE", "6")
    monkeypatch.setenv("GRPO_GRAD_ACCUM_STEPS", "5")
    run = ["grpo", "--config", tmp_path / "run.yaml", "--output", tmp_path / "out", "--print-config"]
    result = unmask(*run, "training.gradient_accumulation_steps=4")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        "DIFFU_MODEL_PATH is read as model.path",
        "GRPO_BATCH_SIZE is read as training.per_device_train_batch_size",
        "GRPO_GRAD_ACCUM_STEPS is read as training.gradient_accumulation_steps",
    ]
    printed = parse_yaml(result.stdout, "stdout")
    assert printed["model"]["path"] == "m"
    assert [
        printed["training"][name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    ] == [6, 4]
    monkeypatch.setenv("VLLM_SERVER_HOST", "gpu7")
    refused = unmask(*run)
    where = "training.rollout.url (environment variable VLLM_SERVER_HOST)"
    assert refused.exit_code == 2 and f"error: {where}: has no effect with backend 'local'" in refused.stderr
    monkeypatch.setenv("GRPO_USE_VLLM", "true")
    served = parse_yaml(unmask(*run).stdout, "stdout")["training"]["rollout"]
    assert (served["backend"], served["url"]) == ("vllm", "http://gpu7:8000")
    monkeypatch.setenv("GRPO_NUM_GENERATIONS", "1")
    refused = unmask(*run)
    assert refused.exit_code == 2
    assert (
        "error: training.num_generations (environment variable GRPO_NUM_GENERATIONS): 1 is out of "
        "range. Use at least 2"
    ) in refused.stderr
