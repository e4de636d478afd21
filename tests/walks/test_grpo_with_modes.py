"""Reinforcement learning with modes, masking strategies and variables, as a user of an older GRPO trainer
comes to it: first to last."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask as package
from tests.errors import raises
from tests.helpers import REPOSITORY, partly_slow, run_all
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, SMALL, settings, share_of_a, unmask
from unmask.config.yaml import parse_yaml
from unmask.data.characters import character_model
from unmask.errors import ConfigError
from unmask.rl.methods import METHODS, register
from unmask.rl.methods.masking import STRATEGIES, MaskingStrategy, weighted_views
from unmask.tasks import get_task

HERE = [
    *SMALL,
    "training.use_cpu=true",
    "training.logging_steps=1",
    "training.save_strategy=no",
    "data.max_rows=16",
    "data.eval_rows=2",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grpo") / "model"
    character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0).save(path)
    return path


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def grpo(
    *arguments: str | Path, output: str = "out", steps: int = 2
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the verb: the config that was saved, and the log."""
    result = unmask("grpo", *arguments, "--output", output, *HERE, f"training.max_steps={steps}")
    assert result.exit_code == 0, (result.output, result.exception)
    lines = (Path(output) / "training_logs.json").read_text().splitlines()
    return parse_yaml((Path(output) / "config.yaml").read_text(), output), [
        json.loads(line) for line in lines
    ]


def refused(*arguments: str | Path) -> str:
    """What the verb says to settings that it refuses."""
    result = unmask("grpo", *arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


# The quick start.


@pytest.mark.nightly
def test_a_task_and_a_mode_by_the_script_and_by_variables_alone(model, work):
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_OFFLINE": "1",
    }
    variables = {
        "DIFFU_MODEL_PATH": str(model),
        "DIFFU_DATASET": "sudoku",
        "DIFFU_MIXED_PRECISION": "true",
        "DIFFU_BATCH_SIZE": "6",
    }
    for words, more in [
        (["sudoku", "balanced", "--model", model], {}),
        (["--output", "variables"], variables),
    ]:
        command = ["bash", REPOSITORY / "scripts" / "run.sh", *words, *HERE, "training.max_steps=1"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        called = run_all(command, env=environment | more, cwd=work, check=False, timeout=300, **pipes)
        assert called.returncode == 0, called.stderr
    for folder, bf16 in [("runs/grpo-sudoku-balanced", False), ("variables", True)]:
        config = parse_yaml((work / folder / "config.yaml").read_text(), folder)
        assert (config["data"]["task"], config["training"]["bf16"]) == ("sudoku", bf16)
        assert (work / folder / "model" / "model.safetensors").exists()


def test_variables_set_the_model_the_data_the_precision_and_the_batch(model, monkeypatch):
    monkeypatch.setenv("DIFFU_MODEL_PATH", str(model))
    monkeypatch.setenv("DIFFU_DATASET", "sudoku")
    monkeypatch.setenv("DIFFU_MIXED_PRECISION", "true")
    monkeypatch.setenv("DIFFU_BATCH_SIZE", "12")
    arguments = [word for word in HERE if "per_device" not in word]
    result = unmask(
        "grpo",
        "--mode",
        "balanced",
        "--output",
        "out",
        *arguments,
        "training.num_generations=6",
        "training.max_steps=1",
    )
    assert result.exit_code == 0, (result.output, result.exception)
    config = parse_yaml(Path("out/config.yaml").read_text(), "out")
    assert (config["model"]["path"], config["data"]["task"]) == (str(model), "sudoku")
    assert (config["training"]["bf16"], config["training"]["per_device_train_batch_size"]) == (True, 12)
    assert result.stderr.count(" is read as ") == 4


def test_the_python_api_from_a_ready_config_to_statistics():
    config = package.GRPOConfig.for_task(
        "gsm8k",
        **settings(Path("api"), max_steps=4, per_device_train_batch_size=8, gradient_accumulation_steps=1),
        **{
            "num_generations": 4,
            "num_iterations": 2,
            "max_completion_length": 4,
            "steps": 2,
            "block_size": None,
        },
    )
    # the published values for this data set
    assert (config.beta, config.temperature, config.epsilon) == (0.04, 0.9, 0.5)
    config.bf16 = True  # assigned to the ready config, as its users do
    config.rollout_batch_size = 8
    config.masking, config.adaptive_loss = "optimized", True
    config.performance_log_interval, config.log_memory_usage = 1, True
    trainer = package.GRPOTrainer(llama_lm(), [share_of_a], config, PAIRS)
    assert trainer.accelerator.mixed_precision == "bf16"
    trainer.train()

    stats = trainer.get_performance_stats()
    assert {"generation", "reward", "scoring", "forward", "backward"} <= stats["seconds"].keys()
    assert (
        stats["peak_memory_gb"].keys() == stats["seconds"].keys()
        and min(stats["peak_memory_gb"].values()) > 0
    )
    assert stats["tokens_per_second"]["trained"] > 0 and stats["steps"] == 4
    cache_stats = trainer.masking_strategy.get_cache_stats()
    assert stats["mask_cache"] == cache_stats and 0 < cache_stats["hit_rate"] < 1
    lines = [json.loads(line) for line in Path("api/training_logs.json").read_text().splitlines()]
    assert all("memory_gb" in line and "time/backward" in line for line in lines[:4])
    # one rollout for two updates
    assert ["time/generation" in line for line in lines[:4]] == [True, False, True, False]


@pytest.mark.parametrize("task", ["sudoku", "countdown", "gsm8k", "math500"])
def test_every_data_set_has_a_recipe_and_a_ready_config(task):
    result = unmask(
        "grpo",
        "--recipe",
        f"grpo-{task}",
        "--model",
        "m",
        "--output",
        "out",
        "--print-config",
        "training.use_cpu=true",
    )
    assert result.exit_code == 0, result.output
    printed = parse_yaml(result.stdout, "stdout")
    args = package.GRPOConfig.for_task(task, output_dir="out", use_cpu=True)
    shared = (
        "num_iterations",
        "num_generations",
        "temperature",
        "beta",
        "learning_rate",
        "sync_ref_model",
        "ref_model_sync_steps",
        "block_size",
    )
    assert {name: printed["training"][name] for name in shared} == {
        name: getattr(args, name) for name in shared
    }
    assert printed["data"]["task"] == task and printed["rewards"] == [f"{task}/published"]
    with raises(ConfigError, where="for_task"):
        package.GRPOConfig.for_task("gsm8")


# Modes and masking strategies.


@partly_slow(
    "mode, masking, settings",
    [
        ("speed", "optimized", []),
        ("memory", "diffusion", ["training.samples=2"]),
        ("balanced", "adaptive", ["training.adaptive_loss=true"]),
    ],
    2,
)
def test_each_mode_trains_with_each_masking_strategy(mode, masking, settings, model):
    words = [
        "--recipe",
        "grpo-sudoku",
        "--mode",
        mode,
        "--model",
        model,
        f"training.masking={masking}",
        *settings,
    ]
    config, lines = grpo(*words, "training.num_iterations=1")
    wanted = {"speed": (4096, 1024, False), "memory": (1, 16, True), "balanced": (None, 256, False)}[mode]
    training = config["training"]
    assert (
        training["logprob_batch_size"],
        training["rollout_batch_size"],
        training.get("activation_checkpointing", False),
    ) == wanted
    assert training["masking"] == masking and training.get("adaptive_loss", False) == bool(
        masking == "adaptive"
    )
    assert ("masks/reuse_rate" in lines[0]) == (masking == "optimized")
    assert {"reward", "ratio", "kl", "rewards/sudoku/published", "tokens_per_second"} <= lines[0].keys()
    assert Path("out/model/config.json").exists()


def test_what_is_misspelt_is_refused_with_what_was_meant(model):
    run = ["--recipe", "grpo-sudoku", "--model", model, "--output", "out"]
    assert "'speed'" in refused(*run, "--mode", "fast")
    assert "Did you mean 'optimized'" in refused(*run, "training.masking=optimised")
    assert "training.masking_strategy (command line)" in refused(*run, "training.masking_strategy=optimized")
    assert "Did you mean 'grpo-sudoku'" in refused(
        "--recipe", "grpo-sudoko", "--model", model, "--output", "out"
    )
    assert not Path("out").exists()


# Monitoring, and runs that can be repeated.


def test_performance_is_logged_every_so_many_steps_and_a_run_can_be_repeated(model):
    monitored = [
        "training.performance_log_interval=2",
        "training.log_memory_usage=true",
        "training.num_iterations=1",
    ]
    _, lines = grpo("--recipe", "grpo-sudoku", "--model", model, *monitored, steps=4)
    assert ["time/generation" in line for line in lines[:4]] == [False, True, False, True]
    assert (
        all(line["memory_gb"] > 0 for line in lines)
        and {"memory/forward_gb", "throughput/generated"} <= lines[1].keys()
    )
    again = unmask("grpo", "--config", "out/config.yaml", "--output", "again")
    assert again.exit_code == 0, again.output
    figures = [json.loads(line) for line in Path("again/training_logs.json").read_text().splitlines()]
    same = ("loss", "grad_norm", "reward", "entropy", "completion_length")
    assert [[line[name] for name in same] for line in figures[:4]] == [
        [line[name] for name in same] for line in lines[:4]
    ]


def test_a_profile_shows_what_takes_the_time_and_the_memory(model):
    result = unmask(
        "profile",
        "grpo",
        "--recipe",
        "grpo-sudoku",
        "--model",
        model,
        "--output",
        "out",
        "--steps",
        "1",
        *HERE,
    )
    assert result.exit_code == 0, (result.output, result.exception)
    assert all(word in result.output for word in ("phases", "generation", "backward", "peak GB"))
    assert json.loads(Path("out/trace.json").read_text())["traceEvents"]


# What older code and configurations become.


def test_reward_functions_of_the_older_trainer_run_unchanged_and_one_that_fails_does_not_end_the_run(caplog):
    seen = []

    def correctness_reward_func(
        prompts, completions, answer, step=None, run_name=None, **kwargs
    ) -> list[float]:
        responses = [completion[0]["content"] for completion in completions]
        seen.append((prompts[0][-1]["content"], answer[0]))
        return [2.0 if a in r else 0.0 for r, a in zip(responses, answer, strict=True)]

    def breaks(completions, **kwargs):
        raise RuntimeError("the judge is down")

    rows = [{"prompt": [{"role": "user", "content": "ab"}], "answer": "a"}] * 4
    given = settings(Path("chat"), num_generations=4, max_completion_length=4, max_steps=1)
    trainer = package.GRPOTrainer(llama_lm(), [correctness_reward_func], package.GRPOConfig(**given), rows)
    trainer.train()
    assert seen[0] == ("ab", "a") and "rewards/correctness_reward_func" in trainer.state.log_history[0]
    trainer = package.GRPOTrainer(llama_lm(), [share_of_a, breaks], package.GRPOConfig(**given), PAIRS)
    trainer.train()
    assert "reward function breaks: raised RuntimeError: the judge is down" in caplog.text
    assert trainer.state.log_history[0]["unscored"] == 1


def test_an_older_configuration_is_migrated_and_is_not_read_as_it_is(model):
    older = {
        **{"model_path": str(model), "dataset": "gsm8k", "num_iterations": 2, "num_generations": 4},
        "optimization": {
            "enable_mixed_precision": True,
            "generation_batch_size": 8,
            "enable_profiling": True,
        },
        "masking": {"strategy_type": "optimized"},
        **{
            "enable_performance_logging": True,
            "performance_log_interval": 100,
            "log_memory_usage": True,
            "output_dir": "out",
        },
    }
    Path("older.json").write_text(json.dumps(older))
    assert "unmask migrate older.json --output NEW.yaml" in refused("--config", "older.json")
    migrated = unmask("migrate", "older.json", "--output", "new.yaml")
    assert migrated.exit_code == 0 and "unmask grpo --config new.yaml" in migrated.output, migrated.output
    printed = unmask("grpo", "--config", "new.yaml", "--print-config")
    assert printed.exit_code == 0, printed.output
    training = parse_yaml(printed.stdout, "stdout")["training"]
    assert (training["bf16"], training["rollout_batch_size"], training["masking"]) == (True, 8, "optimized")
    assert (
        training["performance_log_interval"],
        training["log_memory_usage"],
        training["num_generations"],
    ) == (100, True, 4)


# Extensions: masks, losses and sampling of one's own (a reward of one's own is above).


def test_what_plans_samples_and_compares_can_be_replaced(monkeypatch):
    planned, sampled, compared = [], [], []

    class EverySecond(MaskingStrategy):
        def plan(self, rollout, draw, config, progress):
            planned.append(progress)
            even_T = torch.arange(rollout.ids_BT.shape[1]) % 2 == 0
            return weighted_views(rollout, (rollout.completion_BT & even_T)[:, None], config)

    class Greedy(package.GRPOTrainer):
        def sample(self, rows, *, temperature, step):
            sampled.append(step)
            return super().sample(rows, temperature=0.01, step=step)

    monkeypatch.setattr("unmask.rl.methods.base.METHODS", dict(METHODS))

    @register
    class Mine(METHODS["diffu-grpo"]):
        name = "mine"

        def loss(self, inputs):
            compared.append(inputs)
            return super().loss(inputs)

    args = package.GRPOConfig(
        **settings(Path("own")), method="mine", num_generations=4, max_completion_length=4
    )
    trainer = Greedy(llama_lm(), [share_of_a], args, PAIRS, masking=EverySecond())
    trainer.train()
    assert planned == [0.0, 0.5] and len(sampled) == 2 and compared
    assert set(STRATEGIES) >= {"diffusion", "optimized", "adaptive"}


# Troubleshooting.


def test_out_of_memory_takes_a_batch_of_2_in_the_mode_memory(model, monkeypatch):
    monkeypatch.setenv("DIFFU_BATCH_SIZE", "2")
    run = ["--recipe", "grpo-sudoku", "--mode", "memory", "--model", model, "--output", "out"]
    here = [word for word in HERE if "per_device" not in word and "accumulation" not in word] + [
        "training.max_steps=1"
    ]
    result = unmask("grpo", *run, *here)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "training.gradient_accumulation_steps is 6" in result.stderr
    error = refused(*run, "--overwrite", *here, "training.gradient_accumulation_steps=4")
    assert (
        "num_generations: 8 completions a step are not a multiple of 6. Set gradient_accumulation_steps to 3."
        in error
    )
    result = unmask("grpo", *run, "--overwrite", *here, "training.gradient_accumulation_steps=3")
    assert result.exit_code == 0, (result.output, result.exception)


def test_slow_training_takes_the_mode_speed_in_mixed_precision(model, monkeypatch):
    monkeypatch.setenv("DIFFU_MIXED_PRECISION", "true")
    config, _ = grpo("--recipe", "grpo-sudoku", "--mode", "speed", "--model", model, steps=1)
    assert config["training"]["bf16"] is True and config["training"]["logprob_batch_size"] == 4096


def test_a_configuration_that_is_wrong_is_told_with_its_source(model):
    Path("run.yaml").write_text("training: {num_generation: 4}\n")
    error = refused("--config", "run.yaml", "--model", model, "--output", "out")
    assert "training.num_generation (run.yaml)" in error and "Did you mean 'num_generations'" in error
