"""Variables of older names: what they set, their precedence, and their warnings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.tiny_runs import unmask
from unmask.commands.settings.older_variables import OLDER_OF_GRPO, older_layers
from unmask.config.layers import read_layers
from unmask.config.yaml import parse_yaml
from unmask.errors import ConfigError


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
        *[(name, text) for name in ("DIFFU_BATCH_SIZE", "GRPO_BATCH_SIZE", "GRPO_NUM_GENERATIONS") for text in ("many", "0", "-1", "2.5")],
        *[(name, "maybe") for name in ("GRPO_USE_VLLM", "GRPO_USE_TORCH_COMPILE", "DIFFU_MIXED_PRECISION")],
        *[("VLLM_SERVER_HOST", text) for text in ("http://", "ftp://gpu7", ":80", "gpu7:port", "gpu7:99999")],
    ],
)
def test_a_value_that_means_nothing_is_refused_by_the_name_of_its_variable(name, text):
    with pytest.raises(ConfigError, match=rf"environment variable {name}: '{text}' is not valid\. It should be "):
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
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True, found=supported: found)
        assert meant() == name


def test_each_has_its_rank():
    older = {"DIFFU_BATCH_SIZE": "2", "GRPO_BATCH_SIZE": "3"}
    assert read(**older)["training"] == {"per_device_train_batch_size": 3}
    assert read("sft", **older)["training"] == {"per_device_train_batch_size": 2}  # the others are GRPO's alone
    assert read(**older, UNMASK_TRAINING__PER_DEVICE_TRAIN_BATCH_SIZE="4")["training"] == {"per_device_train_batch_size": 4}
    assert not any(read("sft", **{name: "1"}) for name in OLDER_OF_GRPO)


def test_without_vllm_its_address_is_passed_over():
    assert read(VLLM_SERVER_HOST="gpu7", GRPO_USE_VLLM="no") == {"training": {"rollout": {"backend": "local"}}}
    served = {"training": {"rollout": {"backend": "vllm", "url": "http://gpu7:8000"}}}
    assert read(VLLM_SERVER_HOST="gpu7", GRPO_USE_VLLM="1") == served


def test_of_several_processes_only_the_first_tells(capsys):
    assert read(DIFFU_BATCH_SIZE="2", RANK="1")
    assert capsys.readouterr().err == ""


def test_the_command_line_reads_them_above_files_and_names_them_in_errors(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("training: {per_device_train_batch_size: 7, gradient_accumulation_steps: 7, use_cpu: true}")
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
    assert [printed["training"][name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps")] == [6, 4]
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
        "error: training.num_generations (environment variable GRPO_NUM_GENERATIONS): 1 is out of range. Use at least 2" in refused.stderr
    )
