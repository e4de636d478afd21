"""The settings of reinforcement learning: recipes with d1's values, and settings without effect, which are
refused."""

from __future__ import annotations

import dataclasses
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.errors import raises
from tests.helpers import each_once, partly_slow
from tests.rl.methods.rollouts import config, held, keys, made_up, masks, usual
from tests.training.tiny_runs import QUICK, SMALL, unmask
from unmask.artifacts import MetricsLog
from unmask.cli.modes import adapt_recipes
from unmask.cli.run import resolved, training_arguments
from unmask.config.layers import read_layers
from unmask.config.run import resolve
from unmask.config.yaml import parse_yaml
from unmask.diffusion.views import MaskRNG
from unmask.errors import ConfigError
from unmask.evaluation.result_file import read_result
from unmask.rl.config import GRPOConfig
from unmask.rl.methods import METHODS, get_method
from unmask.rl.methods.base import fixed_settings, settings_of
from unmask.rl.methods.masking import find_masking
from unmask.tasks import get_rewards, get_task

D1 = {
    "method": "diffu-grpo",
    "num_generations": 6,
    "num_iterations": 12,
    "epsilon": 0.5,
    "epsilon_high": None,
    "beta": 0.04,
    "kl": "k3",
    "kl_to": "reference",
    "scale_rewards": "none",
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "sync_ref_model": True,
    "ref_model_sync_steps": 64,
    "ref_model_mixup_alpha": 0.6,
    "prompt_mask_rate": 0.15,
    "max_completion_length": 256,
    "steps": 128,
    "block_size": 32,
    "remasking": "low_confidence",
    "temperature": 0.9,
    "logprob_temperature": 1.0,
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
    assert (config.sampler.max_new_tokens, config.sampler.tokens_per_step, config.sampler.block_size) == (
        256,
        2,
        32,
    )
    assert config.sampler.temperature == 0


def test_settings_of_ones_own_win_over_the_recipe_and_an_unknown_task_names_the_nearest():
    assert not GRPOConfig.for_task("gsm8k", beta=0.0).sync_ref_model  # it would have no effect
    with raises(ConfigError, where="for_task"):
        GRPOConfig.for_task("sudoko")


@partly_slow("name", METHODS, *range(0, len(METHODS), 2))
def test_a_recipe_leaves_another_method_its_own_settings(name):
    """Settings that it lacks, and that would be refused, are left out; those that no method owns stay."""
    layers = read_layers(
        recipes=["grpo-sudoku"], overrides=["model.path=m", "output_dir=out", f"training.method={name}"]
    )
    config = resolve(adapt_recipes(layers, "grpo", None, recipes=1))
    plain = GRPOConfig(output_dir="out", method=name)
    for args in (
        training_arguments("grpo", config),
        GRPOConfig.for_task("sudoku", output_dir="out", method=name),
    ):
        for setting in (
            "epsilon",
            "epsilon_high",
            "beta",
            "kl",
            "sync_ref_model",
            "ref_model_sync_steps",
            "prompt_mask_rate",
            "loss_type",
            "scale_rewards",
        ):
            expected = (
                D1.get(setting, getattr(plain, setting)) if name == "diffu-grpo" else getattr(plain, setting)
            )
            assert getattr(args, setting) == expected, setting
        assert args.num_iterations == (1 if "num_iterations" in fixed_settings(get_method(name)) else 8)
        assert (args.temperature, args.max_completion_length) == (0.3, 256)


def test_a_recipe_trains_a_model_of_characters(model, tmp_path):
    output = tmp_path / "out"
    result = unmask("grpo", "--recipe", "grpo-sudoku", "--model", model, "--output", output, *QUICK, *SMALL)
    assert result.exit_code == 0, (result.output, result.exception)
    metrics = MetricsLog(output / "training_logs.json").read()
    assert [line["step"] for line in metrics if "kl" in line] == [1, 2]
    assert "rewards/sudoku/published" in metrics[0]
    assert len(read_result(output / "evaluation.json").tasks[0].items) == 4
    training = parse_yaml((output / "config.yaml").read_text(), "config.yaml")["training"]
    assert (training["beta"], training["num_iterations"], training["max_completion_length"]) == (0.04, 8, 17)


# Settings that would change nothing.

OTHERS: dict[str, tuple[Any, ...]] = {
    "epsilon": (0.05,),
    "epsilon_high": (0.05,),
    "delta": (1.01,),
    "log_ratio_clamp": (0.01,),
    "importance_sampling_level": ("sequence", "product"),
    "beta": (0.2,),
    "kl": ("k1", "k2"),
    "kl_to": ("old", "reference"),
    "use_bias_correction_kl": (True,),
    "vllm_importance_sampling_cap": (0.5,),
    "samples": (5,),
    "prompt_mask_rate": (0.9,),
    "segments": (2,),
    "shrink": (3,),
    "eubo_beta": (3.0,),
    "eubo_share": (0.9,),
}
"""Of each setting that not all methods read values, one of which is not the method's own."""


def test_the_table_has_every_setting_that_not_all_methods_read():
    settings = [set(settings_of(method)) for method in METHODS.values()]
    keys = {field.name for field in fields(GRPOConfig)}  # the others are those of `method_settings`
    assert (set.union(*settings) - set.intersection(*settings)) & keys == OTHERS.keys()


def outcome(args: GRPOConfig) -> list[torch.Tensor]:
    """The views of a rollout, and losses of random log-probabilities."""
    method = args.build_method()
    _, rollout = usual("bidirectional", stop_at_eos=args.stop_at_eos)
    views = method.plan(rollout, MaskRNG(0, keys(rollout)))
    chance_BT = torch.rand(rollout.ids_BT.shape, generator=torch.Generator().manual_seed(0))
    made = []
    for seed in range(3):
        scores, _ = made_up(rollout, views, args, seed)
        made.append(
            method.loss(
                replace(scores, importance_BT=2 * chance_BT.clamp_max(args.vllm_importance_sampling_cap / 2))
            ).total
        )
    return [*masks(views), *made]


@each_once("setting, name", OTHERS, METHODS)
def test_a_setting_is_refused_where_it_changes_neither_views_nor_loss(name, setting):
    base = {} if setting == "beta" else held(name)
    if setting == "use_bias_correction_kl" and base:
        base |= {"kl": "k3"}
    plain, changed = config(name, **base), config(name, **base)
    value = next(value for value in OTHERS[setting] if value != getattr(plain, setting))
    setattr(changed, setting, value)
    given = {setting: value}
    if setting == "vllm_importance_sampling_cap":
        # without a server nothing is corrected
        given["rollout"] = {"backend": "vllm", "url": "http://localhost:8000"}
        if plain.remasking == "random":  # in which order no server of vLLM samples
            with raises(ConfigError, where="rollout.backend and remasking"):
                config(name, **base, **given)
            return
    if not all(torch.equal(*pair) for pair in zip(outcome(plain), outcome(changed), strict=True)):
        config(name, **base, **given).refuse_unread(None)
        return
    with raises(ConfigError, where=setting):
        config(name, **base, **given).refuse_unread(None)


@pytest.mark.parametrize(
    ("given", "needed", "where"),
    [
        ({"softmax_temperature": 2.0}, {"scale_rewards": "softmax"}, "softmax_temperature"),
        ({"kl": "k1"}, {"beta": 0.1}, "kl"),
        ({"kl_to": "old"}, {"beta": 0.1}, "kl_to"),
        ({"use_bias_correction_kl": True}, {"beta": 0.1}, "use_bias_correction_kl"),
        (
            {"use_bias_correction_kl": True, "method": "trace-rl", "kl": "k1"},
            {"kl": "k3"},
            "use_bias_correction_kl",
        ),
        ({"ref_model": "m"}, {"beta": 0.1}, "ref_model"),
        ({"sync_ref_model": True, "method": "trace-rl"}, {"kl_to": "reference"}, "sync_ref_model"),
        ({"ref_model_mixup_alpha": 0.5, "beta": 0.1}, {"sync_ref_model": True}, "ref_model_mixup_alpha"),
        ({"difficulty_reward": "sudoku"}, {"difficulty": [0.2, 0.8]}, "difficulty_reward"),
        ({"log_completions_steps": 5}, {"log_completions": True}, "log_completions_steps"),
        ({"top_entropy_quantile": 0.2, "method": "spg"}, {"method": "diffu-grpo"}, "top_entropy_quantile"),
    ],
)
def test_a_setting_is_refused_without_what_it_needs(given, needed, where, tmp_path):
    with raises(ConfigError, where=where):
        GRPOConfig(output_dir=str(tmp_path), **given)
    GRPOConfig(output_dir=str(tmp_path), **given | needed)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"top_p": 0.0}, "top_p"),
        ({"method": "exact-gradient", "top_p": 0.9}, "top_p"),
        ({"method": "exact-gradient", "top_entropy_quantile": 0.2}, "top_entropy_quantile"),
        ({"generation_kwargs": {"cfg_scal": 1.0}}, "generation_kwargs.cfg_scal"),
        ({"generation_kwargs": {"cfg_scale": -1.0}}, "generation_kwargs.cfg_scale"),
        ({"generation_kwargs": {"max_new_tokens": 8}}, "generation_kwargs.max_new_tokens"),
        ({"generation_kwargs": {"top_k": 8}}, "generation_kwargs.top_k"),
        ({"generation_kwargs": {"remask_fraction": 0.5}}, "generation_kwargs.remask_fraction"),
        (
            {"top_k": 5, "rollout": {"backend": "vllm", "url": "http://localhost:8000"}},
            "rollout.backend and top_p, top_k, min_p, repetition_penalty",
        ),
    ],
)
def test_rollouts_that_cannot_be_are_refused(given, where, tmp_path):
    with raises(ConfigError, where=where):
        GRPOConfig(output_dir=str(tmp_path), **given)


def test_rollouts_of_a_server_of_vllm_are_filtered_without_a_correction(tmp_path):
    GRPOConfig(
        output_dir=str(tmp_path),
        top_k=5,
        min_p=0.1,
        rollout={"backend": "vllm", "url": "http://localhost:8000"},
        vllm_importance_sampling_cap=None,
    )


@pytest.mark.parametrize("masking", [None, "optimized", "diffusion"])
@pytest.mark.parametrize("name", ["diffu-grpo", "spg", "coupled-grpo"])
def test_what_stands_behind_the_end_is_shown_by_views_that_show_a_part_alone(name, masking):
    """Optimized masks are the method's own views."""
    args = config(name, masking=masking, after_eos="noise")
    strategy = find_masking(args)
    if name == "coupled-grpo" or masking == "diffusion":
        args.refuse_unread(strategy)
        return
    with raises(ConfigError, where="after_eos"):
        args.refuse_unread(strategy)


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_has_filled_in_can_be_read_again(name):
    run = resolve(
        read_layers(
            overrides=["model.path=m", "output_dir=out", "training.use_cpu=true", f"training.method={name}"]
        )
    )
    first = training_arguments("grpo", run)
    assert training_arguments("grpo", resolved(run, first)).to_dict() == first.to_dict()


@partly_slow("name", METHODS, *range(0, len(METHODS), 2))
def test_a_setting_that_a_method_does_not_read_is_refused_whatever_its_value(name):
    """Also the default of the methods that read it; unset is no value."""
    args, ours = GRPOConfig(method=name), {field.name for field in dataclasses.fields(GRPOConfig)}
    for setting in ours - settings_of(get_method(name)).keys():
        defaults = [
            settings_of(other)[setting] for other in METHODS.values() if setting in settings_of(other)
        ]
        if setting == "samples" and not get_method(name).separable:
            continue  # a masking strategy may read it
        for value in dict.fromkeys(value for value in map(str, defaults) if value != "None"):
            value = next(default for default in defaults if str(default) == value)
            with raises(ConfigError, where=setting):
                GRPOConfig(method=name, **{setting: value})
            assert setting in args.unread()
    assert (
        GRPOConfig(method=name, **dict.fromkeys({"kl", "epsilon", "importance_sampling_level"})).to_dict()
        == args.to_dict()
    )


def test_a_given_default_is_refused_from_every_source(tmp_path):
    (tmp_path / "own.yaml").write_text("training: {method: cj-grpo, prompt_mask_rate: 0.15}\n")
    (tmp_path / "half.yaml").write_text("training: {prompt_mask_rate: 0.15}\n")
    given = ["model.path=m", "output_dir=out"]
    for sources in (
        {"overrides": [*given, "training.method=cj-grpo", "training.prompt_mask_rate=0.15"]},
        {"overrides": given, "config_files": [tmp_path / "own.yaml"]},
        {"overrides": [*given, "training.method=cj-grpo"], "config_files": [tmp_path / "half.yaml"]},
    ):
        run = resolve(read_layers(**sources))
        with raises(ConfigError, where="training.prompt_mask_rate"):
            training_arguments("grpo", run)
    with raises(ConfigError, where="prompt_mask_rate"):
        GRPOConfig(method="cj-grpo", prompt_mask_rate=0.15)
    args = GRPOConfig(prompt_mask_rate=0.15)
    with raises(ConfigError, where="prompt_mask_rate"):
        args.refuse_unread(None, exact=True)
    with raises(ConfigError, where="rollout.backend and vllm_importance_sampling_cap"):
        GRPOConfig(vllm_importance_sampling_cap=2.0)


def test_scale_rewards_takes_the_switches_of_trl(tmp_path):
    for given, meant in ((True, "group"), (False, "none"), ("group", "group")):
        assert GRPOConfig(output_dir=str(tmp_path), use_cpu=True, scale_rewards=given).scale_rewards == meant
