"""The recipes of reinforcement learning: d1's values, and runs from the command line."""

from __future__ import annotations

import json

import pytest

from tests.training.conftest import QUICK, SMALL, unmask
from unmask.config import resolve
from unmask.config_files import parse_yaml, read_layers
from unmask.errors import ConfigError
from unmask.monitor import MetricsLog
from unmask.tasks import get_rewards, get_task
from unmask.training.grpo_config import GRPOConfig
from unmask.training.run import training_arguments

D1 = {
    "method": "diffu-grpo",
    "num_generations": 6,
    "num_iterations": 12,
    "epsilon": 0.5,
    "epsilon_high": None,
    "beta": 0.04,
    "kl": "k3",
    "kl_to": "reference",
    "advantage": "r-mean",
    "aggregation": "token",
    "ratio": "token",
    "reference_sync_steps": 64,
    "reference_sync_share": 0.6,
    "prompt_mask_rate": 0.15,
    "max_completion_length": 256,
    "steps": 128,
    "block_size": 32,
    "policy": "confidence",
    "temperature": 0.9,
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 10,
    "learning_rate": 3e-6,
    "lr_scheduler_type": "constant_with_warmup",
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "max_grad_norm": 0.2,
    "seed": 42,
}
"""What d1 published (Zhao et al. 2025): diffu-grpo/slurm_scripts/train.yaml of its repository."""
RECIPES = {
    "gsm8k": ("gsm8k", "gsm8k/published", {}),
    "math500": ("math500", "math500/published", {}),
    "countdown": ("countdown", "countdown/published", {"num_iterations": 8}),
    "sudoku": ("sudoku", "sudoku/published", {"num_iterations": 8, "temperature": 0.3}),
    "code-python": ("mbpp", "mbpp/partial", {}),
    "code-ocaml": ("multipl_t_ocaml", "multipl_t_ocaml/partial", {}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_values_of_d1_and_is_a_word_in_python_and_on_the_command_line(name):
    task, reward, own = RECIPES[name]
    config = resolve(read_layers(recipes=[f"grpo-{name}"], overrides=["model.path=m", "output_dir=out"]))
    for args in (training_arguments("grpo", config), GRPOConfig.for_task(name, output_dir="out")):
        assert {key: getattr(args, key) for key in D1} == D1 | own
    assert (config.data.task, config.data.style, config.rewards) == (task, "chat", [reward])
    assert get_task(task) and get_rewards(reward)
    assert config.lora and (config.lora.r, config.lora.alpha, config.lora.dropout) == (128, 64, 0.05)
    assert (config.sampler.max_new_tokens, config.sampler.tokens_per_step, config.sampler.block_size) == (256, 2, 32)
    assert config.sampler.temperature == 0


def test_settings_of_ones_own_win_over_the_recipe_and_an_unknown_task_names_the_nearest():
    assert GRPOConfig.for_task("gsm8k", beta=0.0, reference_sync_steps=None).beta == 0
    with pytest.raises(ConfigError, match=r"there is no recipe for 'sudoko'.*'sudoku'"):
        GRPOConfig.for_task("sudoko")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT 0.21 asks for it
def test_a_recipe_trains_a_model_of_characters(model, tmp_path):
    output = tmp_path / "out"
    result = unmask("grpo", "--recipe", "grpo-sudoku", "--model", model, "--output", output, *QUICK, *SMALL)
    assert result.exit_code == 0, (result.output, result.exception)
    metrics = MetricsLog(output / "training_logs.json").read()
    assert [line["step"] for line in metrics if "kl" in line] == [1, 2]
    assert "rewards/sudoku" in metrics[0]
    assert json.loads((output / "evaluation.json").read_text())["rows"] == 4
    training = parse_yaml((output / "config.yaml").read_text(), "config.yaml")["training"]
    assert (training["beta"], training["num_iterations"], training["max_completion_length"]) == (0.04, 8, 17)
