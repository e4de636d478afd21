"""Every setting of every verb, changed between the start of a run and its resume, acts as it is declared."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import TrainingArguments

from tests.diffusion_gemma import loaded
from tests.helpers import partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, PREFERENCES, ROLLOUT, TEXTS, equal, make, ranks, settings, weights
from unmask.artifacts import MetricsLog
from unmask.config.base import OnResume, kinds_of
from unmask.config.rollout import RolloutConfig
from unmask.config.run import RunConfig
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.errors import ConfigError, TrainingError
from unmask.preference.config import DPOConfig
from unmask.rl.config import GRPOConfig
from unmask.supervised.canvas import ONLY_ON_CANVASES
from unmask.supervised.pretrain import PretrainConfig
from unmask.supervised.sft import SFTConfig
from unmask.training.config import UNRECORDED
from unmask.training.config_fields import NOT_READ
from unmask.training.noising import NOISING_FIELDS
from unmask.training.run.log import LOG_NAME
from unmask.training.run.record import RunRecord
from unmask.training.run.resume import ACTS, NEUTRAL

CONFIGS = {
    "pretrain": PretrainConfig,
    "convert": ConvertConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "grpo": GRPOConfig,
}
EVAL = {"eval_strategy": "steps", "eval_steps": 2}
BASE = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "lr_scheduler_type": "linear",
    "seed": 3,
    **EVAL,
}
"""Six steps, of which the checkpoint after the second is resumed."""
GRPO = {"num_generations": 2, "max_completion_length": 4}
EPOCHS = {"max_steps": -1, "num_train_epochs": 3.0}
ADAPTIVE = {"masking": "adaptive", "samples": 2}
WRITTEN = {"lmbda": 0.9, "max_new_tokens": 2}
VISITED = {"states": "sampler", "distillation": 1.0, "max_new_tokens": 3}

FIRST: dict[str, dict[str, Any]] = {
    "num_train_epochs": EPOCHS,
    "max_grad_norm": {"max_grad_norm": 1e-3, "optim": "sgd"},
    "eval_delay": {"eval_delay": 0},
    "eval_strategy": {"eval_strategy": "epoch", "eval_steps": None},
    "lr_scheduler_kwargs": {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.5},
    },
    "greater_is_better": {
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "load_best_model_at_end": True,
    },
    "metric_for_best_model": {"metric_for_best_model": "loss"},
    "dataloader_in_order": {"dataloader_num_workers": 1},
    "dataloader_persistent_workers": {"dataloader_num_workers": 1},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "activation_checkpointing_kwargs": {"activation_checkpointing": True},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing": True},
    "cart_p": {"weighting": "cart"},
    "teacher_top_k": {"distillation": 0.5},
    "max_new_tokens": WRITTEN,
    "block_size": {},
    "kl": {"beta": 0.1},
    "kl_to": {"beta": 0.1},
    "use_bias_correction_kl": {"beta": 0.1, "kl": "k3"},
    "ref_model": {"beta": 0.1},
    "sync_ref_model": {"beta": 0.1, "kl_to": "reference"},
    "ref_model_sync_steps": {"beta": 0.1, "kl_to": "reference", "sync_ref_model": True},
    "ref_model_mixup_alpha": {"beta": 0.1, "kl_to": "reference", "sync_ref_model": True},
    "softmax_temperature": {"scale_rewards": "softmax"},
    "mask_rate": ADAPTIVE,
    "adaptive_loss": ADAPTIVE,
    "samples": {"masking": "diffusion"},
    "shrink": {"method": "trace-rl"},
    "segments": {"method": "step-merge"},
    "eubo_beta": {"method": "spg"},
    "eubo_share": {"method": "spg"},
    "num_completions_to_print": {"log_completions": True, "log_completions_steps": 1},
    "log_completions_steps": {"log_completions": True},
    "loss_weights": {"loss_type": ["sigmoid", "sft"]},
    "f_alpha_divergence_coef": {"f_divergence_type": "alpha_divergence"},
    "difficulty_reward": {"difficulty": [0.0, 5.0]},
    "max_resample_rounds": {"filter_zero_std_groups": True},
    "simpo_gamma": {"loss_type": "simpo"},
    "desirable_weight": {"loss_type": "kto"},
    "undesirable_weight": {"loss_type": "kto"},
    "stale_reference": {},
    "quality_tokens": {"quality_head": "joint"},
    "p_uniform": {"noise": "hybrid"},
    **{name: {"of_canvases": True} for name in ONLY_ON_CANVASES},
}
"""The settings without which a setting has no effect, or another first value."""

SECOND: dict[str, Any] = {
    **{
        "learning_rate": 5e-3,
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 5,
    },
    **{
        "max_steps": 8,
        "num_train_epochs": 4.0,
        "weight_decay": 0.5,
        "adam_beta1": 0.5,
        "adam_beta2": 0.5,
        "adam_epsilon": 1e-2,
    },
    **{
        "max_grad_norm": 1.0,
        "bf16": True,
        "logging_strategy": "epoch",
        "logging_steps": 3,
        "eval_strategy": "no",
        "eval_steps": 1,
    },
    **{
        "eval_delay": 6,
        "save_strategy": "no",
        "save_steps": 3,
        "save_total_limit": 1,
        "optim": "sgd",
        "data_seed": 4,
    },
    **{
        "metric_for_best_model": "runtime",
        "gradient_accumulation_steps": 2,
        "dataloader_num_workers": 1,
        "report_to": "tensorboard",
    },
    **{
        "include_num_input_tokens_seen": "all",
        "log_level": "error",
        "run_name": "x",
    },
    **{"dataloader_prefetch_factor": 3},
    **{
        "train_sampling_strategy": "group_by_length",
        "accelerator_config": {"use_seedable_sampler": False},
    },
    **{
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    **{
        "hub_token": "secret",
        "ddp_timeout": 60,
        "torch_empty_cache_steps": 2,
        "optim_args": "foreach=False",
        "data_source": "x",
    },
    **{
        "text_column": "story",
        "dataset_num_proc": 2,
        "schedule": "cosine",
        "weighting": "uniform",
        "min_time": 0.2,
        "max_time": 0.8,
    },
    **{
        "noise": "uniform",
        "p_uniform": 0.3,
        "num_timesteps": 4,
        "canvas_length": 8,
        "max_length": 16,
        "bad_rows": "skip",
        "logging_dir": "events",
        "views": 2,
    },
    **{
        "attention": "block_causal",
        "block_size": 2,
        "stages": [{"rate": 0.5}],
        "recipe": "mine",
        "logit_shift": True,
    },
    **{
        "bound": "elbo",
        "samples": 3,
        "reference": "frozen",
        "log_variance_steps": 2,
        "judge": None,
    },
    **{
        "method": "wd1",
        "num_generations": 4,
        "masking": "diffusion",
        "mask_rate": [0.2, 0.8],
        "difficulty": [0.0, 5.0],
    },
    **{"remasking": "random", "max_gap": 3},
    **{
        "reward_weights": [2.0],
        "steps": 2,
        "scale_rewards": "group",
        "importance_sampling_level": "sequence",
        "kl": "k1",
    },
    **{
        "kl_to": "old",
        "after_eos": "train",
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "curriculum": 0.5,
        "overlong_buffer": 2,
    },
    **{"logprob_temperature": 0.7, "constraint": {"regex": "[a-h]*"}},
    **{"min_p": 0.5, "generation_kwargs": {"cfg_scale": 1.0}, "num_generations_eval": 2},
    **{"loss_weights": [1.0, 2.0], "length_normalization": True},
    **{
        "reward_errors": "raise",
        "logprob_batch_size": 1,
        "rollout": {"patience": 31.0},
        "difficulty_reward": "ranks",
        "num_completions_to_print": 2,
    },
    **{
        "log_completions_steps": 3,
        "delta": 3.0,
        "log_ratio_clamp": 5.0,
        "epsilon_high": 0.5,
        "max_completion_length": 5,
    },
    **{"start_new_tokens": 2},
}
"""Another value for settings where `another` finds none."""

ROUNDS = {
    "logprob_batch_size",
    "activation_checkpointing",
    "gradient_checkpointing",
    "full_determinism",
    "rollout_batch_size",
    "reference",
}
"""Neutral settings that may change the last bits."""


def another(verb: str, each: dataclasses.Field[Any], value: Any) -> Any:
    """A valid value other than this."""
    if (verb, each.name) in SECOND_OF:
        return SECOND_OF[verb, each.name]
    if each.name in SECOND and SECOND[each.name] != value:
        return SECOND[each.name]
    if choices := each.metadata.get("choices"):
        return next(choice for choice in choices if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.5 if value else 0.1
    raise NotImplementedError(f"{verb}, {each.name}: give another value than {value!r} in SECOND")


def started(verb: str, folder: Path, **more: Any) -> Any:
    """A trainer with these settings."""
    if verb != "convert":
        held_out = {"pretrain": TEXTS, "dpo": PREFERENCES}.get(verb, PAIRS)[:2]
        reward = {"reward": ranks} if verb == "grpo" else {}
        lm = [loaded(folder / "base")] if more.pop("of_canvases", False) else []
        return make(verb, folder, *lm, **{**BASE, **reward, "eval_dataset": held_out, **more})
    args = ConvertConfig(**settings(folder, max_length=32, packing=False, stages=[{}], **BASE) | more)
    rows = [row | {"prompt": row["text"]} for row in TEXTS]
    return ConvertTrainer(llama_lm("causal"), args, train_dataset=rows, eval_dataset=rows[:2])


def inner(trainer: Any) -> Any:
    """The trainer that holds the optimizer: of a conversion, that of its stage."""
    return trainer.trainer if isinstance(trainer, ConvertTrainer) else trainer


FIRST_OF: dict[tuple[str, str], dict[str, Any]] = {
    ("grpo", "samples"): {"masking": "diffusion"},
    ("dpo", "samples"): {},
    ("dpo", "sync_ref_model"): {"reference": "frozen"},
    **{
        ("dpo", name): {"reference": "frozen", "sync_ref_model": True}
        for name in ("ref_model_sync_steps", "ref_model_mixup_alpha")
    },
}
BY_REWARD = {"metric_for_best_model": "reward"}
FIRST_OF |= {
    **{("convert", name): WRITTEN for name in ("temperature", "generation_kwargs")},
    **{
        ("convert", name): VISITED
        for name in ("beta", "reverse_kl_weight", "exclude_im_end", "start_new_tokens")
    },
    ("convert", "ramp_steps"): VISITED | {"start_new_tokens": 1},
    ("convert", "states"): VISITED | {"lmbda": 0.9},
    **{
        ("convert", name): {"attention": "block_causal", "block_size": 4}
        for name in ("block_size", "causal_context")
    },
    **{
        ("pretrain", name): {"attention": "bidirectional"} | FIRST.get(name, {})
        for name in sorted(NOISING_FIELDS)
    },
    ("pretrain", "block_size"): {"attention": "block_causal"},
    **{("grpo", name): {"method": "spg", "epsilon": None} for name in ("eubo_beta", "eubo_share")},
    ("grpo", "metric_for_best_model"): BY_REWARD,
    ("grpo", "greater_is_better"): BY_REWARD | {"greater_is_better": True, "load_best_model_at_end": True},
}
"""As FIRST, of one verb."""
SECOND_OF: dict[tuple[str, str], Any] = {
    ("sft", "loss_type"): "sequence_nll",
    ("dpo", "loss_type"): "hinge",
    ("grpo", "loss_type"): "grpo",
    ("grpo", "per_device_train_batch_size"): 8,
    ("dpo", "beta"): 0.5,
    ("grpo", "block_size"): 2,
    ("grpo", "method"): "coupled-grpo",
    ("grpo", "metric_for_best_model"): "unscored",
}
"""As SECOND, of one verb."""


def seen(trainer: Any, folder: Path) -> dict[str, Any]:
    """What a run shows of its settings after the second step."""
    of, lines = (
        inner(trainer),
        [
            line
            for line in MetricsLog(folder / LOG_NAME).read()
            if line["step"] > 2 and "train_loss" not in line
        ],
    )
    samples, of_groups = folder / "completions.jsonl", ("weight_decay", "betas", "eps")
    checkpoints = [
        path for path in of.args.output_folder.glob("checkpoint-*") if int(path.name.split("-")[1]) > 2
    ]
    files = [
        path.relative_to(of.args.output_folder).as_posix()
        for saved in checkpoints
        for path in saved.iterdir()
    ]
    return {
        "rates": [line["learning_rate"] for line in lines if "learning_rate" in line],
        "logged": [line["step"] for line in lines if "loss" in line],
        "evaluated": [line["step"] for line in lines if any(name.startswith("eval_") for name in line)],
        "metrics": sorted({name for line in lines for name in line}),
        "files": sorted(files),
        "groups": [
            {name: group[name] for name in of_groups if name in group} for group in of.optimizer.param_groups
        ],
        "best": (
            of.args.metric_for_best_model,
            of.state.best_metric is not None,
            of.args.load_best_model_at_end,
        ),
        "rewards": (of.rewards.seconds, of.rewards.errors) if hasattr(of, "rewards") else None,
        "samples": [line["step"] for line in MetricsLog(samples).read() if line["step"] > 2]
        if samples.exists()
        else [],
    }


class Uninterrupted(NamedTuple):
    folder: Path
    seen: dict[str, Any]
    weights: dict[str, torch.Tensor]


FINISHED: dict[str, Uninterrupted] = {}
"""The runs by verb and settings."""


def uninterrupted(verb: str, runs: Path, extra: dict[str, Any]) -> Uninterrupted:
    """A run with these settings, in a folder of its own that stays for `interrupted`."""
    if (key := f"{verb} {extra}") not in FINISHED:
        folder = runs / str(len(FINISHED))
        trainer = started(verb, folder, **extra)
        trainer.train()
        FINISHED[key] = Uninterrupted(folder, seen(trainer, folder), weights(trainer.lm))
    return FINISHED[key]


def interrupted(run: Path, folder: Path) -> None:
    """Copy a run as it was when it was killed after the second step's checkpoint."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint-[!2]*", "model"))


AT_ITS_START = {"eval_on_start", "logging_first_step", "ignore_data_skip"}
"""Settings that act only at the start or at the resume itself."""
IN_WEIGHTS = {"max_grad_norm", "bf16"}
"""Settings that are seen in the trained weights only."""
WITHOUT_A_TRACE = {
    "eval_on_start",
    "logging_first_step",
    "judge",
    "num_completions_to_print",
    "num_generations_eval",
    "greater_is_better",
    "ignore_data_skip",
}
"""Settings that show nothing in these runs."""


def check(verb: str, name: str, runs: Path, folder: Path) -> None:
    """Change a setting between start and resume, and check that it acts as its kind says."""
    config = CONFIGS[verb]
    each = next(field for field in dataclasses.fields(config) if field.name == name)
    first = FIRST_OF.get((verb, name), FIRST.get(name, {}))
    run, old, straight = uninterrupted(verb, runs, first)
    value = started(verb, run, **first).args.to_dict()[name]
    new = first | {name: another(verb, each, value)}
    kind = config.kinds_on_resume()[name]
    interrupted(run, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if kind is OnResume.OTHER:
        with pytest.raises(
            (ConfigError, TrainingError),
            match=f"{name}.*would make another run|holds log-probabilities of another",
        ):
            started(verb, folder, **new).train(resume_from_checkpoint=True)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        return
    resumed = started(verb, folder, **new)
    resumed.train(resume_from_checkpoint=True)
    if kind is OnResume.NEUTRAL:
        close = {"rtol": 0, "atol": 1e-5 if name in ROUNDS else 0}
        torch.testing.assert_close(weights(resumed.lm), straight, **close)
        return
    assert f"training.{name}" in {change["setting"] for change in resumed.run_record.changes}
    now = seen(resumed, folder)
    if name not in AT_ITS_START:
        assert now == uninterrupted(verb, runs, new).seen
    if name in IN_WEIGHTS:
        assert not equal(weights(resumed.lm), straight)
    elif name not in WITHOUT_A_TRACE:
        assert now != old


UNTRAINED = {
    # Of a launch, of devices, libraries and services that tests do not have, or refused by every trainer.
    *(
        "output_dir",
        "resume_from_checkpoint",
        "local_rank",
        "hub_token",
        "disable_tqdm",
        "log_level",
        "log_level_replica",
    ),
    *(
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "use_liger_kernel",
        "liger_kernel_config",
        "tf32",
        "fp16",
        "use_cpu",
    ),
    *(
        "parallelism_config",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
    ),
    *(
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "cudnn_benchmark",
        "flash_attention",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
    ),
    *(
        "push_to_hub",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "debug",
    ),
    *(
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "optim_target_modules",
    ),
    *(
        "dataloader_multiprocessing_context",
        "auto_find_batch_size",
    ),
    *(
        "logging_dir",
        "stale_reference",
        "judge",
        "ref_model",
        "model_init_kwargs",
        "chat_template_kwargs",
    ),
    *NOT_READ,
    *("text_column", "rollout", "vllm_importance_sampling_cap", "max_staleness", "method_settings"),
}
"""Settings whose kind is checked by the record alone."""
ANOTHER_RUN = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "auto_find_batch_size",
    "optim",
    "optim_args",
    "optim_target_modules",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "seed",
    "data_seed",
    "dataloader_drop_last",
    "dataloader_in_order",
    "train_sampling_strategy",
    "length_column_name",
    # the order of rows; the format of checkpoints
    "accelerator_config",
    "fsdp",
    "fsdp_config",
    "deepspeed",
}
"""The fields of TrainingArguments that make another run of one that is resumed."""
OF_ONE_VERB = NEUTRAL | ANOTHER_RUN
"""Settings that all trainers read in the same way: they are trained with by one verb only."""
ALL = [
    (verb, each.name)
    for verb, config in CONFIGS.items()
    for each in dataclasses.fields(config)
    if each.init and each.name not in UNTRAINED and not (verb != "sft" and each.name in OF_ONE_VERB)
]


STOCK = {each.name for each in dataclasses.fields(TrainingArguments)}
"""The settings of transformers. They act in the loop that all trainers share: `sft` and `grpo` try them, the
other verbs each night."""


@pytest.mark.parametrize("verb", CONFIGS)
def test_the_record_of_a_run_has_every_setting(verb, tmp_path):
    args = CONFIGS[verb](output_dir=str(tmp_path), use_cpu=True, **(GRPO if verb == "grpo" else {}))
    names = {each.name for each in dataclasses.fields(args) if each.init} - UNRECORDED - {"rollout"}
    if verb == "grpo":
        names |= kinds_of(RolloutConfig, "rollout.").keys() - {"rollout.api_key"}
    assert {f"training.{name}" for name in names} <= RunRecord(args, {}, {}).values.keys()


def test_every_field_of_the_installed_transformers_has_a_kind():
    known = [*ACTS, *NEUTRAL, *ANOTHER_RUN, *UNRECORDED]
    assert sorted(known) == sorted(field.name for field in dataclasses.fields(TrainingArguments))


WITHOUT_A_DECLARATION = {
    *ONLY_ON_CANVASES,
    *("chat_template_kwargs", "f_divergence_type", "f_alpha_divergence_coef", "generation_kwargs"),
    *("loss_weights", "min_p", "repetition_penalty", "top_entropy_quantile", "top_k", "top_p"),
    # Settings of Unmask's own: losses, methods, masks, lengths and data.
    *("adaptive_loss", "scale_rewards", "loss_type", "alignment", "attention", "attention_annealing", "beta"),
    *(
        "after_eos",
        "block_size",
        "bound",
        "canvas_length",
        "cart_p",
        "causal_context",
        "complementary",
        "constraint",
        "curriculum",
    ),
    *(
        "desirable_weight",
        "difficulty",
        "difficulty_reward",
        "distillation",
        "filter_zero_std_groups",
        "delta",
    ),
    *(
        "max_resample_rounds",
        "epsilon",
        "epsilon_high",
        "eubo_beta",
        "eubo_share",
        "exact_count",
        "vllm_importance_sampling_cap",
        "kl",
    ),
    *(
        "kl_to",
        "use_bias_correction_kl",
        "label_smoothing",
        "learn",
        "length_normalization",
        "log_ratio_clamp",
        "logit_shift",
    ),
    *(
        "loss_type",
        "mask_rate",
        "mask_truncated_completions",
        "masking",
        "max_completion_length",
        "max_gap",
        "max_length",
        "max_staleness",
    ),
    *("max_time",),
    *(
        "method",
        "method_settings",
        "min_time",
        "num_generations",
        "num_iterations",
        "num_timesteps",
        "lmbda",
        "states",
        "start_new_tokens",
        "ramp_steps",
        "reverse_kl_weight",
        "exclude_im_end",
        "optimizer_offload",
    ),
    *(
        "overlong_buffer",
        "packing",
        "plan_reused",
        "remasking",
        "prompt_mask_rate",
        "quality_head",
        "quality_tokens",
        "importance_sampling_level",
        "reference",
    ),
    *(
        "ref_model",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
        "sync_ref_model",
        "reward_weights",
        "rollout",
    ),
    *(
        "max_new_tokens",
        "samples",
        "schedule",
        "logprob_temperature",
        "segments",
        "shrink",
        "simpo_gamma",
    ),
    *("softmax_temperature", "stages", "steps", "stop_at_eos", "teacher_top_k", "temperature", "text_column"),
    *(
        "time_embedding",
        "truncation_mode",
        "undesirable_weight",
        "views",
    ),
    *("weighting", "noise", "p_uniform"),
    # Settings of the sections.
    *(
        "data.max_rows",
        "data.seed",
        "data.shuffle_buffer",
        "data.split",
        "data.streaming",
        "data.style",
        "data.task",
    ),
    *("data.text_column", "lora.alpha", "lora.dropout", "lora.r", "lora.target_modules", "model.attention"),
    *("model.block_size", "model.dtype", "model.eos_token_ids", "model.from_scratch", "model.logit_shift"),
    *(
        "model.parse_special_tokens",
        "model.quantization",
        "model.revision",
        "training",
        "training.rollout.backend",
    ),
    *("training.rollout.model", "training.rollout.sync_steps"),
}
"""Settings that make another run because they declare nothing. Add one here only if changing it makes another
run."""


def test_a_new_setting_declares_its_kind_or_is_known_to_make_another_run():
    own = {
        each.name: each.metadata.get("on_resume")
        for config in CONFIGS.values()
        for each in dataclasses.fields(config)
        if each.init
    }
    sections = kinds_of(RunConfig) | kinds_of(RolloutConfig, "training.rollout.")
    undeclared = {name for name, kind in own.items() if kind is None and name not in STOCK}
    assert (
        undeclared | {name for name, kind in sections.items() if kind is OnResume.OTHER}
        == WITHOUT_A_DECLARATION
    )


@pytest.mark.parametrize("verb", CONFIGS)
def test_every_setting_that_tests_change_has_another_value(verb, tmp_path):
    names, made = {each.name: each for each in dataclasses.fields(CONFIGS[verb]) if each.init}, {}
    for name in {name for of, name in ALL if of == verb}:
        first = FIRST_OF.get((verb, name), FIRST.get(name, {}))
        if (key := str(first)) not in made:
            given = settings(tmp_path, **BASE) | (ROLLOUT if verb == "grpo" else {}) | first
            given.pop("of_canvases", None)
            made[key] = CONFIGS[verb](**given).to_dict()
        assert another(verb, names[name], made[key][name]) != made[key][name], name


def test_no_list_of_this_file_names_a_setting_that_is_gone():
    names = {each.name for config in CONFIGS.values() for each in dataclasses.fields(config)}
    lists = [
        FIRST,
        SECOND,
        ROUNDS,
        AT_ITS_START,
        IN_WEIGHTS,
        WITHOUT_A_TRACE,
        UNTRAINED,
        [name for _, name in [*FIRST_OF, *SECOND_OF]],
    ]
    assert {name for each in lists for name in each} <= names


OF_EACH_KIND = [
    "learning_rate",
    "weight_decay",
    "lr_scheduler_type",
    "max_steps",
    "logging_steps",
    "save_steps",
    "eval_steps",
]
OF_EACH_KIND += [
    "dataloader_num_workers",
    "logprob_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "optim",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@partly_slow("name", OF_EACH_KIND, *range(0, len(OF_EACH_KIND), 2))
def test_some_settings_of_each_kind_act_as_declared(name, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check("sft", name, runs, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "name"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly] * (case[0] != "sft" and case[1] in STOCK))
        for case in ALL
    ],
)
def test_every_setting_acts_as_declared(verb, name, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(verb, name, runs, tmp_path / "run")
