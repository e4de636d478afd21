"""A dry run makes two steps of every stage, prints the estimate, and leaves nothing behind; a debugging run
looks at each step."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback
from typer.testing import CliRunner

from tests.diffusion_gemma import save_published
from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import QUICK, make, unmask
from unmask.artifacts import MetricsLog
from unmask.cli import app
from unmask.cli.dry_run import dry_run, estimate_run
from unmask.cli.run import planned_arguments, training_arguments
from unmask.config.run import DataConfig, HardwareConfig, LoraSettings, RunConfig, StartConfig
from unmask.errors import ConfigError, UnmaskError
from unmask.models.load import load
from unmask.planning import calibration
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import matmul_flops
from unmask.preference.trainer import DPOTrainer

BLOCK = {
    "attention": "block_causal",
    "block_size": 4,
    "use_cpu": True,
    "max_length": 32,
    "per_device_train_batch_size": 4,
}
TWO_STAGES = [{"share": 1, "rate": 0.5, "train": ["attention"]}, {"share": 3, "attention": "bidirectional"}]


@pytest.fixture(autouse=True)
def _few_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """How well this computer is calibrated is not looked at here."""
    monkeypatch.setattr(calibration, "CALIBRATION_SECONDS", 0.01)


def run_config(model: Path, text: Path, tmp_path: Path, **training: Any) -> RunConfig:
    data = DataConfig(train=str(text))
    return RunConfig(
        model=StartConfig(path=str(model)),
        data=data,
        output_dir=str(tmp_path / "run"),
        training=BLOCK | training,
    )


def test_a_line_for_every_stage_says_what_it_takes(model, text, tmp_path, monkeypatch):
    steps: list[int] = []
    original = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *rest: (steps.append(1), original(self, *rest))[1]
    )
    monkeypatch.setattr("unmask.planning.hardware.calibrate", lambda *_: 0.125)  # which makes steps too
    config = run_config(
        model,
        text,
        tmp_path,
        stages=TWO_STAGES,
        max_steps=1000,
        learning_rate=1e-3,
        optim="adamw_torch",
        warmup_steps=50,
    )
    first, second = dry_run("convert", config)
    assert len(steps) == 4  # two of each stage
    assert (first["attention"], first["trains"], first["steps"], first["rate"]) == (
        "block_causal 4",
        "attention",
        "250",
        "0.0005",
    )
    assert (second["attention"], second["trains"], second["steps"], second["rate"]) == (
        "bidirectional",
        "all",
        "750",
        "0.001",
    )
    for line in (first, second):
        assert (
            line["predicted seconds a step"] == "0.125"
            and float(line["seconds a step"]) > 0
            and float(line["predicted peak GB"]) > 0
        )
        hours = float(line["seconds a step"]) * int(line["steps"]) / 3600
        assert float(line["hours in all"]) == pytest.approx(hours, rel=0.02)
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_is_said_before_a_step(model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "unmask.cli.dry_run.make_trainer", lambda *_, **__: pytest.fail("a step was paid for")
    )
    small = HardwareConfig(
        name="gpu",
        devices=[{"name": "gpu", "memory_gb": 24, "tflops": 10, "bandwidth_gb_s": 100}],
        max_memory_gb=0.5,
    )
    config = run_config(model, text, tmp_path).model_copy(update={"hardware": small})
    with raises(ConfigError, where="hardware"):
        dry_run("convert", config)


def test_the_time_of_sampling_is_measured_and_not_predicted(model, text, tmp_path):
    more = {"distillation": 1.0, "lmbda": 0.5, "max_new_tokens": 4, "stages": [{}]}
    [line] = dry_run("convert", run_config(model, text, tmp_path, max_steps=10, **more))
    assert line["predicted seconds a step"] == "-" and float(line["seconds a step"]) > 0
    assert float(line["predicted peak GB"]) > 0


@pytest.mark.slow
def test_a_teacher_is_planned_for(model, text, tmp_path):
    plain, taught = (
        run_config(model, text, tmp_path, max_steps=10, **more) for more in ({}, {"distillation": 1.0})
    )
    plans = [estimate_run(config, training_arguments("convert", config)) for config in (plain, taught)]
    weights = ModelSpec.read(plain.model).network(plans[0].workload).parameters * 4
    assert plans[1].peak - plans[0].peak == weights


@pytest.mark.parametrize("verb", ["dpo", pytest.param("sft", marks=pytest.mark.slow)])
def test_the_other_verbs_rehearse_too(verb, model, tmp_path):
    config = run_config(model, tmp_path, tmp_path)
    kept = {name: value for name, value in BLOCK.items() if name not in ("attention", "block_size")} | {
        "max_length": 64
    }
    task = DataConfig(task="sudoku", max_rows=16)
    (line,) = dry_run(verb, config.model_copy(update={"data": task, "training": kept | {"max_steps": 30}}))
    assert (
        line["steps"] == "30"
        and float(line["predicted seconds a step"]) > 0
        and float(line["predicted peak GB"]) > 0
    )


RESPONSE = "abcdefgh" * 7
LONG_PAIRS = [{"prompt": "ab", "chosen": RESPONSE, "rejected": RESPONSE[::-1]}] * 8
"""Rows of which a pair fills twice `max_length`, but for a few tokens."""


@pytest.mark.slow
@partly_slow(
    "attention, more",
    [
        ("bidirectional", {"samples": 4}),
        ("bidirectional", {"samples": 1, "reference": "frozen"}),
        (
            "bidirectional",
            {"samples": 4, "logprob_batch_size": 16, "loss_type": "simpo", "activation_checkpointing": True},
        ),
        ("causal", {}),
    ],
    0,
    ids=["view by view", "frozen reference", "views together", "causal"],
)
def test_a_step_of_preferences_takes_the_memory_and_the_products_that_were_predicted(
    attention, more, tmp_path, monkeypatch
):
    lm = llama_lm(
        attention, hidden_size=64, num_hidden_layers=4, intermediate_size=192, num_attention_heads=4
    )
    lm.save(tmp_path / "model")
    more = {"max_length": 60, "optim": "adamw_torch_fused", "max_steps": 2} | more
    config = run_config(tmp_path / "model", tmp_path, tmp_path).model_copy(
        update={"training": {"use_cpu": True, **more}}
    )
    config = config.model_copy(update={"training": config.training | {"per_device_train_batch_size": 4}})
    monkeypatch.setattr("unmask.planning.hardware.calibrate", lambda *_: 1.0)
    estimate = estimate_run(config, training_arguments("dpo", config))
    assert estimate is not None
    made = Products()
    trainer = make("dpo", tmp_path, lm, LONG_PAIRS, callbacks=[made], **more)
    trainer.train()
    planned = estimate.workload.rounds * matmul_flops(
        ModelSpec.read(config.model).network(estimate.workload), estimate.workload
    )
    # checkpointing does not make the last product again
    assert planned == pytest.approx(made.flops[-1], rel=0.07)
    trainer = make("dpo", tmp_path / "again", load(tmp_path / "model"), LONG_PAIRS, **more)
    weights = sum(weight.nbytes for weight in trainer.lm.model.parameters())
    held = weights * (2 if more.get("reference") == "frozen" else 1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        trainer.train()
    changes = [
        event.nbytes() for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    assert estimate.memory.total == pytest.approx(held + max(itertools.accumulate(changes)), rel=0.15)


@partly_slow("attention", ["bidirectional", "block_causal"], 0)
@partly_slow("noise", ["uniform", "hybrid", "masked"], 0)
def test_a_step_predicts_what_its_noise_leaves_to_predict(noise, attention, tmp_path):
    """With random tokens, every token of an answer."""
    block = {"attention": "block_causal", "block_size": 4} if attention == "block_causal" else {}
    lm = llama_lm(*block.values() or [attention], hidden_size=16, num_hidden_layers=1)
    lm.save(tmp_path / "model")
    more = {
        "max_length": 60,
        "max_steps": 2,
        "noise": noise,
        "exact_count": True,
        "optim": "adamw_torch_fused",
    }
    config = run_config(tmp_path / "model", tmp_path, tmp_path).model_copy(
        update={"training": {"use_cpu": True, "per_device_train_batch_size": 4, **more}}
    )
    estimate = estimate_run(config, training_arguments("sft", config))
    made = Products()
    rows = [{"prompt": "a", "completion": RESPONSE}] * 8
    make("sft", tmp_path, lm, rows, callbacks=[made], per_device_train_batch_size=4, **more).train()
    network = ModelSpec.read(config.model).network(estimate.workload)
    planned = matmul_flops(network, estimate.workload)
    of_all, of_none = (
        matmul_flops(network, dataclasses.replace(estimate.workload, noise=kind))
        for kind in ("uniform", "masked")
    )
    assert planned == (of_none if noise == "masked" else of_all)
    assert planned == pytest.approx(made.flops[-1], rel=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.:FutureWarning")
def test_adapters_of_diffusion_gemma_rehearse_too(tmp_path):
    save_published(tmp_path / "model")
    rows = [json.dumps({"prompt": "ab", "completion": "cdefgh" * 4})] * 8
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    config = run_config(tmp_path / "model", tmp_path / "pairs.jsonl", tmp_path)
    training = {"use_cpu": True, "max_length": 32, "per_device_train_batch_size": 2, "max_steps": 4}
    (line,) = dry_run("sft", config.model_copy(update={"training": training, "lora": LoraSettings(r=4)}))
    assert float(line["predicted seconds a step"]) > 0 and float(line["predicted peak GB"]) > 0


class Products(TrainerCallback):
    """The FLOPs of the matrix products of every optimizer step, including those of the reference on its
    batch."""

    def __init__(self) -> None:
        self.flops: list[int] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.flops.append(self.counter.get_total_flops() - sum(self.flops))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.counter.__exit__(None, None, None)


@pytest.mark.slow
def test_no_more_is_scored_by_the_reference_than_two_steps_take(model, tmp_path, monkeypatch):
    scored: list[int] = []
    original = DPOTrainer.response_log_probs
    monkeypatch.setattr(
        DPOTrainer,
        "response_log_probs",
        lambda self, lm, batch: scored.append(self.count_samples(batch)) or original(self, lm, batch),
    )
    (tmp_path / "judge.py").write_text("def judge(prompts, completions, chosen): return [0.5] * len(chosen)")
    training = {
        "use_cpu": True,
        "max_length": 64,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "eval_strategy": "epoch",
    }
    training |= {"judge": f"{tmp_path}/judge.py:judge"}
    config = run_config(model, tmp_path, tmp_path)
    (line,) = dry_run(
        "dpo",
        config.model_copy(update={"data": DataConfig(task="sudoku", max_rows=40), "training": training}),
    )
    assert sum(scored) == 8 and line["steps"] == "30"
    # and the reference's log-probabilities for three epochs
    assert float(line["hours in all"]) > 30 * float(line["seconds a step"]) / 3600


def test_every_update_on_a_rollout_is_a_step(model, tmp_path):
    """A step takes 4 of the 10 prompts; the 2 left over make none. There are three updates on each
    rollout."""
    training = {
        "num_generations": 2,
        "num_iterations": 3,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "use_cpu": True,
    }
    kept = {"max_completion_length": 4, "bf16": False, "warmup_steps": 0}
    config = run_config(model, tmp_path, tmp_path)
    (line,) = dry_run(
        "grpo",
        config.model_copy(
            update={"data": DataConfig(task="sudoku", max_rows=10), "training": training | kept}
        ),
    )
    assert line["steps"] == str(10 // 4 * 3 * 2)


def test_from_the_command_line(model, text, tmp_path):
    output = tmp_path / "run"
    result = unmask(
        "convert",
        "--model",
        model,
        "--data",
        text,
        "--output",
        output,
        "--recipe",
        "block",
        "--dry-run",
        *QUICK,
        "training.max_steps=10",
    )
    assert result.exit_code == 0, result.output
    assert "two steps of every stage" in result.output and "hours in all" in result.output
    assert not output.exists()


def test_a_stage_without_a_step_in_the_run_itself_is_refused(model, text, tmp_path):
    with raises(ConfigError, where="stages, stage 1"):
        dry_run("convert", run_config(model, text, tmp_path, stages=TWO_STAGES, max_steps=2, warmup_steps=0))


@pytest.mark.slow
def test_debug_looks_at_every_step_of_a_short_run(model, text, tmp_path, debugging):
    output = tmp_path / "run"
    result = unmask(
        "convert", "--model", model, "--data", text, "--output", output, "--debug", "training.use_cpu=true"
    )
    assert torch.is_anomaly_enabled()
    assert result.exit_code == 0, result.output
    lines = [line for line in MetricsLog(output / "training_logs.json").read() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 11)) and all(
        "memory_gb" in line for line in lines
    )


@pytest.mark.slow
def test_a_step_is_rehearsed_with_checks(model, text, tmp_path, debugging):
    result = unmask(
        "pretrain",
        "--model",
        model,
        "--data",
        text,
        "--output",
        tmp_path,
        "--debug",
        "--dry-run",
        "training.use_cpu=true",
    )
    assert result.exit_code == 0, result.output


def test_debug_shows_the_traceback(tmp_path, debugging):
    result = CliRunner().invoke(
        app, ["sft", "--model", str(tmp_path / "none"), "--output", str(tmp_path / "run"), "--debug"]
    )
    assert isinstance(result.exception, UnmaskError)


# Runs of several processes, planned by one.

SHARDED: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "zero1": {"deepspeed": "zero1"},
    "zero3": {"deepspeed": "zero3"},
    "a mapping": {
        "deepspeed": {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
    },
}
NODE = HardwareConfig(
    name="node", devices=[{"name": "gpu", "count": 4, "memory_gb": 80, "tflops": 900, "bandwidth_gb_s": 3000}]
)


@partly_slow("kind", SHARDED, *range(0, len(SHARDED), 2))
def test_a_sharded_run_is_planned_by_one_process_without_steps(kind, model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "unmask.cli.dry_run.make_trainer", lambda *_, **__: pytest.fail("the model was loaded")
    )
    monkeypatch.setattr(
        "unmask.training.sharding.require", lambda *_, **__: pytest.fail("DeepSpeed is not needed")
    )
    sharded = {"stages": TWO_STAGES, "max_steps": 40, **SHARDED[kind]}
    config = run_config(model, text, tmp_path, **sharded).model_copy(update={"hardware": NODE})
    first, second = dry_run("convert", config)
    assert [first["steps"], second["steps"]] == ["10", "30"] and {
        first["seconds a step"],
        first["peak GB so far"],
    } == {"-"}
    assert float(first["predicted seconds a step"]) > 0 and float(first["hours in all"]) > 0
    estimate = estimate_run(config, planned_arguments("convert", config))
    assert estimate is not None and estimate.workload.shards == (1 if kind == "zero1" else 4)


@pytest.mark.parametrize("kind", SHARDED)
def test_what_cannot_be_combined_with_shards_is_refused_in_a_plan_too(kind, model, text, tmp_path):
    config = run_config(model, text, tmp_path, **SHARDED[kind]).model_copy(update={"lora": LoraSettings(r=2)})
    with pytest.raises(ConfigError) as refused:
        dry_run("convert", config)
    assert refused.value.where.endswith(" and lora")
    with raises(ConfigError, where="training.deepspeed"):
        dry_run("convert", run_config(model, text, tmp_path, deepspeed="zero9"))


@pytest.mark.parametrize("setting", ["training.fsdp=true", "training.deepspeed=zero2"])
def test_the_command_line_plans_and_prints_a_sharded_run(setting, model, text, tmp_path):
    words = [
        "pretrain",
        "--model",
        model,
        "--data",
        text,
        "--output",
        tmp_path / "run",
        *QUICK,
        "training.max_length=32",
        setting,
    ]
    planned = unmask(*words, "--dry-run")
    assert planned.exit_code == 0 and "the plan" in planned.stdout and not (tmp_path / "run").exists(), (
        planned.output
    )
    printed = unmask(*words, "--print-config")
    assert printed.exit_code == 0 and setting.removeprefix("training.").replace("=", ": ") in printed.stdout
    assert unmask(*words).exit_code != 0  # no launcher
