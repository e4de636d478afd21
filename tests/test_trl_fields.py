"""Every field of TRL's configs has the same name and default here, or docs and errors say what to do."""

import re
from dataclasses import MISSING, fields
from typing import get_type_hints

import pytest
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

import unmask
from tests.errors import raises
from tests.helpers import REPOSITORY
from unmask.config.yaml import parse_yaml
from unmask.errors import ConfigError
from unmask.names import INSTEAD, NOT_NEEDED, VALUES_ELSEWHERE
from unmask.training.settings.listing import check_training

trl = pytest.importorskip("trl")
CONFIGS = {
    "SFTConfig": {"SFTConfig": {}},
    "DPOConfig": {"DPOConfig": {}},
    "KTOConfig": {"DPOConfig": {"loss_type": "kto"}},
    "GRPOConfig": {"GRPOConfig": {}},
}
"""Ours by TRL's."""
REMEDIES = INSTEAD | NOT_NEEDED
EARLIER = [
    "_n_gpu",
    "adafactor",
    "dispatch_batches",
    "evaluation_strategy",
    "fp16_backend",
    "fp16_opt_level",
    "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap",
    "group_by_length",
    "half_precision_backend",
    "include_inputs_for_metrics",
    "include_tokens_per_second",
    "jit_mode_eval",
    "mp_parameters",
    "no_cuda",
    "overwrite_output_dir",
    "past_index",
    "per_gpu_eval_batch_size",
    "per_gpu_train_batch_size",
    "push_to_hub_model_id",
    "push_to_hub_organization",
    "push_to_hub_token",
    "ray_scope",
    "save_safetensors",
    "sharded_ddp",
    "split_batches",
    "torchdynamo",
    "tpu_metrics_debug",
    "tpu_num_cores",
    "use_ipex",
    "use_legacy_prediction_loop",
    "use_mps_device",
    "warmup_ratio",
    "xpu_backend",
    "max_prompt_length",
    "max_seq_length",
    "rpo_alpha",
    "reference_free",
    "dataset_batch_size",
]
"""Fields that transformers and TRL had."""


def rows_of(page, after):
    """The cells of the first table after a text."""
    text = (REPOSITORY / "docs" / page).read_text().split(after)[1]
    table = re.split(r"\|\n\n|\|\n$", re.split(r"\n[|-]+\n", text)[1])[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def ours(name):
    [(own, more)] = CONFIGS[name].items()
    return getattr(unmask, own), more


def missing(name):
    own, _ = ours(name)
    return {field.name for field in fields(getattr(trl, name))} - {field.name for field in fields(own)}


def test_the_table_of_the_docs_is_that_of_the_errors():
    described = {
        field: text
        for names, text in rows_of("migration.md", "Fields of TRL")
        for field in re.findall(r"`(\w+)`", names)
    }
    assert described == {field: REMEDIES[field] for name in CONFIGS for field in missing(name)}
    assert {field.name for field in fields(TrainingArguments)} <= {
        field.name for field in fields(unmask.SFTConfig)
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_default_is_that_of_trl_or_has_a_reason(name):
    own, more = ours(name)
    args, reasons = own(output_dir="out", **more), {}
    for names, values, _ in rows_of("coming-from-trl.md", "Defaults that differ"):
        field, *of = re.findall(r"`(\w+)`", names)
        if of in ([], [name]):
            reasons[field] = tuple(parse_yaml(value, "docs") for value in re.findall("`(.*?)`", values))
    declared = {field.name: field.default for field in fields(own)}
    for field in fields(getattr(trl, name)):
        theirs = field.default_factory() if field.default is MISSING else field.default
        if field.name not in declared or theirs in (declared[field.name], getattr(args, field.name)):
            assert field.name not in reasons or field.name not in declared
        elif theirs != [getattr(args, field.name)]:  # a list of one loss
            assert reasons[field.name] == (theirs, getattr(args, field.name)), field.name


@pytest.mark.parametrize("theirs", CONFIGS)
def test_what_asks_for_something_when_it_is_off_has_a_reason(theirs):
    config = getattr(unmask, theirs.replace("KTO", "DPO"))
    known = {field.name for field in fields(config)}
    for field in fields(getattr(trl, theirs)):
        if field.name in known or "bool" not in str(field.type) or field.default is False:
            continue
        with pytest.raises(ConfigError) as caught:
            config(**{field.name: False})
        plain = f"{field.name}: Leave it out. " in str(caught.value.remedy)
        assert plain == (field.name in ("ds3_gather_for_generation", "log_multimodal")), field.name


@pytest.mark.parametrize("own", ["PretrainConfig", "SFTConfig", "DPOConfig", "GRPOConfig"])
def test_the_error_for_a_field_of_another_library_says_what_to_do(own):
    """It is the table's text, the verbs that have the setting, or another name of ours for the same."""
    config = getattr(unmask, own)
    known = {field.name for field in fields(config)}
    theirs = [
        *(getattr(trl, name) for name in [*CONFIGS, "RewardConfig", "RLOOConfig"]),
        Seq2SeqTrainingArguments,
    ]
    for name in {*EARLIER, *REMEDIES, *(field.name for kind in theirs for field in fields(kind))} - known:
        with pytest.raises(ConfigError) as caught:
            config(**{name: None})
        remedy = str(caught.value.remedy)
        if name in INSTEAD:
            assert INSTEAD[name][1:] in remedy, name
        elif name in NOT_NEEDED:
            assert f"Leave it out: {NOT_NEEDED[name]}" in remedy, name
        elif name in ("no_cuda", "max_seq_length"):
            assert (
                f"{name}: Did you mean '{dict(no_cuda='use_cpu', max_seq_length='max_length')[name]}'?"
                in remedy
            )
        else:
            assert f"{name}: It is a setting of " in remedy, name


def values_of_trl():
    """Ours, and each field of TRL that it has, with the values that TRL's type, choices and description name."""
    stock = {field.name for field in fields(TrainingArguments)}
    for name in CONFIGS:
        own, _ = ours(name)
        theirs = getattr(trl, name)
        names = {field.name for field in fields(theirs)}
        for field in fields(theirs):
            if field.name in {each.name for each in fields(own)} - stock:
                kind = str(get_type_hints(theirs)[field.name])
                found = [*([None] if "None" in kind else []), *([True, False] if "bool" in kind else [])]
                found += field.metadata.get("choices") or ()
                if kind in (str(str), str(list[str])):
                    text = re.sub(r"\w+=\S+", "", field.metadata["help"].split("Only")[0])
                    found += re.findall(r"(?<!\w)[`']+(\w+)", text)
                found = [{"True": True, "False": False}.get(value, value) for value in found]
                for value in dict.fromkeys(found):
                    if value not in names:
                        yield pytest.param(name, field.name, value, id=f"{name}-{field.name}-{value}")


NEEDED = {
    ("DPOConfig", "sync_ref_model"): {"reference": "frozen"},
    ("KTOConfig", "sync_ref_model"): {"reference": "frozen"},
    ("GRPOConfig", "sync_ref_model"): {"beta": 0.1},
    ("GRPOConfig", "use_bias_correction_kl"): {"beta": 0.1},
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # of TRL
@pytest.mark.parametrize(("name", "field", "value"), [*values_of_trl()])
def test_a_value_of_trl_is_one_here_or_the_error_says_what_to_write(name, field, value):
    own, more = ours(name)
    more = {"output_dir": "out"} | more | (NEEDED.get((name, field), {}) if value else {})
    if field == "num_generations" and value is None:
        with pytest.raises(TypeError):  # of TRL, whatever its type says
            trl.GRPOConfig(**more, bf16=False, num_generations=None)
        return
    instead = VALUES_ELSEWHERE.get(field, {}).get(value)
    if instead is None:
        assert getattr(own(**more | {field: value}), field) == {True: "group", False: "none"}.get(
            value if field == "scale_rewards" else None, value
        )
        return
    with raises(ConfigError, where=field):
        own(**more | {field: value})
    if isinstance(instead, dict):
        own(**more | instead)


@pytest.mark.parametrize("loss_type", [["sigmoid_norm"], ["sigmoid_norm", "sft"], ["sigmoid", "robust"]])
def test_the_error_for_a_loss_of_a_list_is_of_this_list(loss_type):
    with raises(ConfigError, where="loss_type"):
        unmask.DPOConfig(output_dir="out", loss_type=loss_type)


@pytest.mark.parametrize("verb", ["sft", "dpo", "grpo"])
def test_the_command_line_says_what_to_write_for_a_value_of_trl(verb):
    for name, value in [("max_length", None), ("loss_type", "bnpo"), ("loss_type", "robust")]:
        with raises(ConfigError, where=f"training.{name}"):
            check_training(verb, {name: value})
    if verb != "sft":
        check_training(verb, {"sync_ref_model": False})  # needs nothing


def test_a_typing_error_is_answered_with_the_nearest_name():
    with raises(ConfigError, where="SFTConfig: lerning_rate"):
        unmask.SFTConfig(lerning_rate=1e-4)


def test_no_remedy_is_for_a_setting():
    names = {
        field.name
        for name in ("SFTConfig", "DPOConfig", "GRPOConfig", "PretrainConfig", "ConvertConfig")
        for field in fields(getattr(unmask, name))
    }
    assert not names & REMEDIES.keys() and not INSTEAD.keys() & NOT_NEEDED.keys()


@pytest.mark.parametrize("own", ["PretrainConfig", "SFTConfig", "DPOConfig", "GRPOConfig", "ConvertConfig"])
@pytest.mark.parametrize("of_trl", [False, True])
def test_the_parsers_of_transformers_and_trl_read_every_config(own, of_trl, tmp_path):
    config = getattr(unmask, own)
    given = ["--output_dir", str(tmp_path), "--learning_rate", "0.5", "--use_cpu"]
    if of_trl:
        parser = trl.TrlParser((trl.ScriptArguments, config, trl.ModelConfig))
        _, args, _ = parser.parse_args_and_config([*given, "--dataset_name", "rows"])
    else:
        parser = HfArgumentParser(config)
        [args] = parser.parse_args_into_dataclasses(given)
    expected = config(output_dir=str(tmp_path), learning_rate=0.5, use_cpu=True)
    for field in fields(config):
        assert getattr(args, field.name) == getattr(expected, field.name), field.name
    assert "--learning_rate" in parser.format_help()


def test_words_and_switches_are_parsed(tmp_path):
    def parse(config, *given):
        return HfArgumentParser(config).parse_args_into_dataclasses(["--output_dir", str(tmp_path), *given])[
            0
        ]

    assert parse(unmask.DPOConfig, "--loss_type", "ipo").loss_type == "ipo"
    grpo = parse(unmask.GRPOConfig, "--scale_rewards", "False", "--loss_type", "grpo", "--log_completions")
    assert (grpo.scale_rewards, grpo.loss_type, grpo.log_completions) == ("none", "grpo", True)
