"""The default of mixed precision: on where it is faster."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import SchedulerType, TrainingArguments, get_scheduler

from tests.errors import raises
from tests.helpers import require_bfloat16
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, PREFERENCES, TEXTS, make, ranks, settings, unmask, weights
from unmask.cli.run import resolved, training_arguments
from unmask.cli.verbs import VERBS
from unmask.config.layers import read_layers
from unmask.config.run import resolve
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.errors import ConfigError
from unmask.preference.config import MASK_FIELDS, DPOConfig
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.supervised.pretrain import PretrainConfig
from unmask.supervised.sft import VIEW_FIELDS, SFTConfig, SFTTrainer
from unmask.training import config as stage_config
from unmask.training import hardware_checks
from unmask.training.model_history import chosen_settings
from unmask.training.noising import TIME_FIELDS


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which mixed precision is faster, as far as the choice depends on it."""
    monkeypatch.setattr(stage_config, "amp_faster", lambda: True)


def config(folder, kind=SFTConfig, **more):
    return kind(**settings(folder, **{"use_cpu": False} | more))


@pytest.mark.parametrize(
    ("available", "capability", "pays"),
    [
        (False, (0, 0), False),
        (True, (7, 0), False),
        (True, (7, 5), False),
        (True, (8, 0), True),
        (True, (8, 9), True),
        (True, (9, 0), True),
    ],
)
def test_mixed_precision_pays_on_gpus_since_ampere(available, capability, pays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert hardware_checks.amp_faster() is pays


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_computes_in_bfloat16_where_that_pays(verb, tmp_path):
    args = config(tmp_path, VERBS[verb].config_class)
    assert (args.bf16, args.fp16, args.mixed_precision) == (True, False, "bf16")
    assert chosen_settings(args)["bf16"] is True


@pytest.mark.parametrize("kind", [PretrainConfig, SFTConfig, DPOConfig, GRPOConfig])
def test_on_a_cpu_nothing_is_chosen_or_told(kind, tmp_path):
    args = config(tmp_path, kind, use_cpu=True)
    assert (args.bf16, args.mixed_precision) == (False, "no")
    assert "bf16" not in chosen_settings(args)


@pytest.mark.usefixtures("ampere")
def test_what_is_asked_for_wins(tmp_path, monkeypatch):
    asked = {"bf16": False}, {"use_cpu": True}
    assert not any(config(tmp_path, **more).bf16 for more in asked)
    monkeypatch.setattr(stage_config, "amp_supported", lambda bf16: True)
    assert (args := config(tmp_path, fp16=True)).fp16 and not args.bf16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")  # of `accelerate launch`
    assert not config(tmp_path).bf16


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_weights_in_other_types_than_float32_are_computed_as_they_are(dtype, tmp_path):
    args = config(tmp_path)
    trainer = make("sft", tmp_path, llama_lm(dtype=dtype), use_cpu=False)
    chosen = dtype == torch.float32
    assert trainer.args.bf16 is chosen and trainer.accelerator.mixed_precision == ("bf16" if chosen else "no")
    for in_float32 in (False, True):  # the same config for one model after another
        args.choose_precision(in_float32=in_float32)
        assert (args.bf16, args.mixed_precision) == (in_float32, "bf16" if in_float32 else "no")


@pytest.mark.parametrize("chooses", [False, True])
def test_precision_that_is_assigned_to_a_config_that_was_made_is_taken_up(chooses, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_config, "amp_faster", lambda: chooses)
    monkeypatch.setattr(stage_config, "amp_supported", lambda bf16: True)
    for assigned, runs in [({"bf16": not chooses}, "no" if chooses else "bf16"), ({"fp16": True}, "fp16")]:
        args = config(tmp_path)
        for name, value in assigned.items():
            setattr(args, name, value)
        for _ in range(2):
            args.choose_precision(in_float32=True)
            assert args.mixed_precision == runs and (args.bf16, args.fp16) == (runs == "bf16", runs == "fp16")
    args = config(tmp_path, bf16=True)
    args.fp16 = True
    with raises(ConfigError, where="bf16, fp16"):
        args.choose_precision(in_float32=True)


def test_precision_that_is_assigned_and_does_not_work_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_config, "amp_supported", lambda bf16: False)
    args = config(tmp_path, use_cpu=True)
    args.bf16 = True
    with pytest.warns(RuntimeWarning, match="bf16 is set, but this machine cannot train in it"):
        args.choose_precision(in_float32=True)
    assert (args.bf16, args.mixed_precision) == (False, "no")


@pytest.mark.usefixtures("ampere")
def test_what_is_chosen_is_what_runs(tmp_path):
    """The results equal those of the explicit setting bit for bit, with weights in float32."""
    chosen, asked = make("sft", tmp_path / "a", use_cpu=False), make("sft", tmp_path / "b", bf16=True)
    exact = make("sft", tmp_path / "c")
    for trainer in (chosen, asked, exact):
        trainer.train()
    assert all(
        torch.equal(one, other)
        for one, other in zip(weights(chosen.lm).values(), weights(asked.lm).values(), strict=True)
    )
    assert not all(
        torch.equal(one, other)
        for one, other in zip(weights(chosen.lm).values(), weights(exact.lm).values(), strict=True)
    )
    assert {weight.dtype for weight in weights(chosen.lm).values()} == {torch.float32}


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("overrides", "bf16"),
    [
        ([], True),
        (["training.bf16=null"], True),
        (["training.bf16=false"], False),
        (["training.use_cpu=true"], False),
        (["model.dtype=bfloat16"], False),
        (["model.dtype=float64"], False),
    ],
)
def test_print_config_shows_what_is_chosen(overrides, bf16, tmp_path):
    shown = unmask("sft", "--model", "m", "--output", tmp_path, "--data", "d", *overrides, "--print-config")
    assert yaml.safe_load(shown.stdout)["training"]["bf16"] is bf16


@pytest.mark.parametrize(("variable", "expected"), [("bf16", (True, False)), ("no", (False, False))])
def test_the_variable_wins_over_the_choice(variable, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_config, "amp_faster", lambda: variable == "no")
    monkeypatch.setenv("DIFFU_MIXED_PRECISION", variable)
    shown = unmask("sft", "--model", "m", "--output", tmp_path, "--data", "d", "--print-config")
    training = yaml.safe_load(shown.stdout)["training"]
    assert (training["bf16"], training["fp16"]) == expected


@pytest.mark.usefixtures("ampere")
def test_the_config_that_a_run_writes_says_what_was_chosen(model, text, tmp_path):
    require_bfloat16()
    quick = [
        f"training.{setting}"
        for setting in ("max_steps=1", "logging_steps=1", "per_device_train_batch_size=2", "save_strategy=no")
    ]
    done = unmask(
        "pretrain",
        "--model",
        model,
        "--data",
        text,
        "--output",
        tmp_path / "run",
        "data.text_column=text",
        *quick,
    )
    assert done.exit_code == 0, done.output
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["training"]["bf16"] is True


@pytest.mark.parametrize(
    "name", [each.value for each in SchedulerType if each.value not in stage_config.METRIC_SCHEDULERS]
)
def test_a_schedule_that_needs_arguments_is_refused_without_and_taken_with_those_of_the_error(name, tmp_path):
    given = {"output_dir": str(tmp_path), "lr_scheduler_type": name}
    try:
        args = SFTConfig(**given)
    except ConfigError as error:
        assert error.where == "lr_scheduler_kwargs" and name in stage_config.SCHEDULE_NEEDS
        args = SFTConfig(**given, lr_scheduler_kwargs=json.loads(error.remedy.removeprefix("For example ")))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    get_scheduler(name, optimizer, 1, 1000, scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}))


@pytest.mark.parametrize(
    ("name", "value"), [("dataloader_persistent_workers", True), ("dataloader_prefetch_factor", 2)]
)
def test_settings_of_processes_that_load_rows_are_refused_without_any(name, value, tmp_path):
    with raises(ConfigError, where=name):
        SFTConfig(**settings(tmp_path, **{name: value}))
    SFTConfig(**settings(tmp_path, dataloader_num_workers=1, **{name: value}))
    override = f"training.{name}={str(value).lower()}"
    done = unmask("sft", "--model", "m", "--output", tmp_path, "--data", "d", override, "--print-config")
    assert done.exit_code and f"training.{name} (command line): there are no processes" in done.output


def test_evaluation_steps_that_nothing_reads_are_refused(tmp_path):
    for strategy in ("no", "epoch"):
        with raises(ConfigError, where="eval_steps"):
            SFTConfig(output_dir=str(tmp_path), eval_steps=1, eval_strategy=strategy)
    assert SFTConfig(output_dir=str(tmp_path), eval_steps=1, eval_strategy="steps").eval_steps == 1


@pytest.mark.parametrize("cls", [PretrainConfig, ConvertConfig, SFTConfig, DPOConfig, GRPOConfig])
def test_a_setting_that_is_assigned_later_is_known(cls, tmp_path):
    args = cls(output_dir=str(tmp_path))
    args.max_steps, args.seed, args.log_memory_usage, args._private = 3, 1, True, 2
    for name in ("enable_performance_logging", "masking_strategy", "lerning_rate"):
        with raises(ConfigError, where=f"{cls.__name__}: {name}"):
            setattr(args, name, True)
    assert copy.deepcopy(args).max_steps == pickle.loads(pickle.dumps(args)).max_steps == 3
    if cls is GRPOConfig:
        with raises(ConfigError, where="GRPOConfig: masking_strategy"):
            args.masking_strategy = "optimized"


@pytest.mark.parametrize(
    ("verb", "name", "value"),
    [
        ("sft", "bad_rows", "foo"),
        ("sft", "eval_steps", 1),
        ("sft", "per_device_train_batch_size", 0),
        ("dpo", "learning_rate", "abc"),
        ("pretrain", "max_steps", 2.5),
        ("sft", "seed", "x"),
        ("sft", "max_length", -5),
        ("grpo", "scale_rewards", "softmaxx"),
        ("grpo", "eubo_beta", 2.0),
    ],
)
def test_a_value_that_is_assigned_later_is_one_that_a_new_config_accepts(verb, name, value, tmp_path):
    trainer = make(verb, tmp_path)
    setattr(trainer.args, name, value)
    rows = {"pretrain": TEXTS, "dpo": PREFERENCES}.get(verb, PAIRS)
    with pytest.raises(ConfigError) as refused:
        rewards = {"reward_funcs": ranks} if verb == "grpo" else {}
        type(trainer)(trainer.lm, args=trainer.args, train_dataset=rows, **rewards)
    assert name in refused.value.where


def test_a_value_that_is_assigned_is_converted_as_that_of_a_new_config(tmp_path):
    given = {
        "packing": "false",
        "learning_rate": "1e-3",
        "max_length": "64",
        "per_device_train_batch_size": "2",
        "eval_strategy": "no",
    }
    args, new = SFTConfig(output_dir=str(tmp_path)), SFTConfig(output_dir=str(tmp_path), **given)
    for name, value in given.items():
        setattr(args, name, value)
    trainer = SFTTrainer(llama_lm(), args, train_dataset=PAIRS)
    assert all(getattr(trainer.args, name) == getattr(new, name) for name in given) and len(
        trainer.train_dataset
    ) == len(PAIRS)


@pytest.mark.parametrize("verb", ["pretrain", "convert", "sft", "dpo", "grpo"])
def test_a_setting_that_the_trainer_has_read_is_not_changed_any_more(verb, tmp_path):
    trainer = make(verb, tmp_path)
    trainer.args.max_length = 3
    with raises(ConfigError, where="max_length"):
        trainer.train()


@pytest.mark.parametrize("verb", ["convert", "sft"])
def test_another_model_is_not_assigned_to_a_trainer(verb, tmp_path):
    trainer = make(verb, tmp_path)
    trainer.model = trainer.model
    with raises(ConfigError, where="trainer.model"):
        trainer.model = llama_lm().model
    assert trainer.model is trainer.lm.model


@pytest.mark.parametrize("cls", [PretrainConfig, ConvertConfig, SFTConfig, DPOConfig, GRPOConfig])
def test_arguments_without_names_are_those_of_transformers(cls, tmp_path):
    stock, own = ([*inspect.signature(each.__init__).parameters] for each in (TrainingArguments, cls))
    assert own[: len(stock)] == stock
    named = cls(output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=2, label_names=[])
    given = cls(str(tmp_path), 4, 2, label_names=[])
    assert dataclasses.asdict(given) == dataclasses.asdict(named) and given.given == named.given
    with raises(ConfigError, where="output_dir"):
        cls(5)


@pytest.mark.parametrize("cls", [PretrainConfig, SFTConfig, DPOConfig, GRPOConfig, ConvertConfig])
def test_a_config_is_copied(cls, tmp_path):
    config = cls(output_dir=str(tmp_path), seed=3)
    for copied in (dataclasses.replace(config, max_steps=2), cls(**config.to_dict() | {"max_steps": 2})):
        assert (copied.seed, copied.max_steps) == (3, 2)
        copied.eval_strategy, copied.eval_steps = "steps", "4"
        copied.check_assigned()
        copied.eval_steps = 5
        copied.check_assigned()
        assert copied.eval_steps == 5


def test_unknown_settings_are_refused_at_once_with_their_names_here(tmp_path):
    with pytest.raises(ConfigError) as refused:
        GRPOConfig(output_dir=str(tmp_path), rank=4, max_seq_length=32, color="red")
    words = (
        "GRPOConfig: rank, max_seq_length, color: no known setting",
        "'max_length'",
    )
    assert all(word in str(refused.value) for word in words)
    assert DPOConfig(output_dir=str(tmp_path), loss_type="ipo").loss_type == "ipo"


@pytest.mark.parametrize(
    ("trainer", "args", "rows"),
    [
        (SFTTrainer, SFTConfig, PAIRS),
        (ConvertTrainer, ConvertConfig, [{"text": "a"}]),
        (partial(GRPOTrainer, reward_funcs=ranks), GRPOConfig, PAIRS),
        (GRPOTrainer, GRPOConfig, PAIRS),
    ],
)
def test_an_unknown_argument_of_a_trainer_is_named_with_the_setting_that_is_meant(
    trainer, args, rows, tmp_path
):
    for name, words in {
        "learning_rate": f"It is a setting: {args.__name__}(learning_rate=...)",
        "callback": "Did you mean 'callbacks'?",
        "enable_profiling": "Leave it out",
    }.items():
        with raises(ConfigError, where=name) as refused:
            trainer(
                model=llama_lm("causal"),
                args=args(output_dir=str(tmp_path), use_cpu=True),
                train_dataset=rows,
                **{name: 1},
            )
        assert words in str(refused.value)


CONDITIONAL = [
    (kind, each.name, each.default)
    for kind in (SFTConfig, DPOConfig, GRPOConfig, ConvertConfig)
    for each in dataclasses.fields(kind)
    if each.metadata.get("needs") and each.default is not None
]


@pytest.mark.parametrize(("kind", "name", "default"), CONDITIONAL)
def test_a_setting_without_what_it_needs_is_refused_whatever_its_value(kind, name, default, tmp_path):
    others = (
        [{}, *({"loss_type": loss} for loss in ("ipo", "simpo", "kto")), {"reference": "frozen"}]
        if kind is DPOConfig
        else [{}]
    )
    refused = 0
    for other in others:
        args = config(tmp_path, kind, **other)
        if name in args.unread():
            refused += 1
            for value in (default, args.to_dict()[name]):
                if value is False:  # off is what it is
                    config(tmp_path, kind, **other | {name: value})
                    continue
                with pytest.raises(ConfigError) as caught:
                    config(tmp_path, kind, **other | {name: value})
                assert name in str(caught.value.where)
        else:
            config(tmp_path, kind, **other | {name: default})
    assert refused


@pytest.mark.parametrize(
    ("kind", "with_", "names"),
    [
        (
            SFTConfig,
            {"max_gap": 4},
            [name for name in VIEW_FIELDS if getattr(SFTConfig, name) is not None],
        ),
        (SFTConfig, {"exact_count": True}, [name for name in TIME_FIELDS if name != "num_timesteps"]),
        (ConvertConfig, {"exact_count": True}, [name for name in TIME_FIELDS if name != "num_timesteps"]),
    ],
)
def test_a_default_that_another_setting_rules_out_is_refused_if_it_is_given(kind, with_, names, tmp_path):
    args = config(tmp_path, kind, **with_)
    for name in names:
        with pytest.raises(ConfigError):
            config(tmp_path, kind, **with_, **{name: getattr(args, name)})


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        *((verb, []) for verb in VERBS),
        *(("dpo", [f"training.loss_type={loss}"]) for loss in ("ipo", "simpo", "kto")),
        ("sft", ["training.max_gap=4"]),
        ("sft", ["training.exact_count=true"]),
        ("sft", ["training.weighting=cart"]),
        ("convert", ["training.distillation=0.5", "training.lmbda=0.1"]),
        ("convert", ["training.distillation=1.0", "training.states=sampler", "training.beta=0.5"]),
        ("grpo", ["training.beta=0.1", "training.sync_ref_model=true"]),
        ("grpo", ["training.masking=adaptive"]),
        ("grpo", ["training.log_completions=true", "training.log_completions_steps=5"]),
        ("grpo", ["training.top_p=0.9", "training.generation_kwargs={cfg_scale: 1.0}"]),
        ("dpo", ["training.loss_type=[sigmoid, sft]", "training.loss_weights=[1.0, 0.5]"]),
        ("dpo", ["training.reference=frozen", "training.sync_ref_model=true"]),
        ("dpo", ["training.f_divergence_type=alpha_divergence", "training.f_alpha_divergence_coef=0.3"]),
    ],
)
def test_a_recorded_config_can_be_read_again(verb, more):
    run = resolve(read_layers(overrides=["model.path=m", "output_dir=out", "training.use_cpu=true", *more]))
    first = training_arguments(verb, run)
    again = resolved(run, first)
    assert training_arguments(verb, again).to_dict() == first.to_dict()
    assert resolved(again, training_arguments(verb, again)) == again


def test_a_record_of_dpo_names_masks_that_an_exact_likelihood_does_not_draw(tmp_path):
    causal = SimpleNamespace(attention="causal", block_size=None, autoregressive=True)
    record = {name: getattr(DPOConfig, name) for name in MASK_FIELDS}
    assert config(tmp_path, DPOConfig, **record).exact(causal)
    for name, value in record.items():
        with raises(ConfigError, where=name):
            config(tmp_path, DPOConfig, **{name: value}).exact(causal)
    with raises(ConfigError, where="samples"):
        config(tmp_path, DPOConfig, **record | {"samples": 9}).exact(causal)


def test_a_limit_of_prompts_has_no_equal(tmp_path):
    for kind in (GRPOConfig, DPOConfig):
        with raises(ConfigError, where=f"{kind.__name__}: max_prompt_length"):
            kind(output_dir=str(tmp_path), max_prompt_length=32)


def test_a_switch_of_transformers_is_read_as_one(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), bf16="no", use_cpu="true", eval_on_start="false")
    assert (args.bf16, args.use_cpu, args.eval_on_start) == (False, True, False)
    with raises(ConfigError, where="use_cpu"):
        SFTConfig(output_dir=str(tmp_path), use_cpu="maybe")
