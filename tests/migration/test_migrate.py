"""`unmask migrate`: old configurations become ones that Unmask's strict config accepts, and every lost key is
reported."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises
from tests.migration.examples import (
    ACCELERATE,
    CONVERTER_HARDWARE,
    CONVERTER_MODEL,
    D1_YAML,
    EXAMPLES,
    Example,
)
from tests.training.tiny_runs import unmask
from unmask.cli.verbs import VERBS
from unmask.config.run import RunConfig
from unmask.config.yaml import parse_yaml
from unmask.data.characters import character_model
from unmask.errors import ConfigError
from unmask.migration.formats import FORMATS, candidates
from unmask.migration.migrate import migrate
from unmask.migration.rules import TRANSFORMERS, DroppedError
from unmask.tasks import get_task
from unmask.training.settings.listing import stock_settings

SAMPLES = (
    True,
    False,
    "true",
    "false",
    1,
    3,
    0.5,
    "fp16",
    "bfloat16",
    "no",
    "1",
    "a/b",
    "sigmoid",
    "dapo",
    "linear",
    "sudoku",
    ["a"],
    {},
)


def write(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_an_old_configuration_becomes_one_that_the_verb_accepts(example: Example, tmp_path):
    out = tmp_path / "new.yaml"
    files = write(tmp_path, example.files)
    found = migrate(files)
    assert (found.verb or "sft") == example.verb
    called = unmask("migrate", *files, "--output", out)
    assert called.exit_code == 0 and called.stdout == "", called.output
    assert parse_yaml(out.read_text(), "new") == found.config
    verb = [example.verb, "--config", out, "--print-config"]
    options = [word for option in found.missing for word in shlex.split(option.partition(" or ")[0])]
    printed = unmask(*verb, *options, "training.report_to=none")  # trackers that are absent are refused
    assert printed.exit_code == 0, printed.output
    config = parse_yaml(printed.stdout, "stdout")
    config["training"]["report_to"] = found.config["training"].get("report_to")
    assert {key: value_of(config, key) for key in example.settings} == example.settings
    told = {change.old: change.why for change in found.changes if change.what == "dropped"}
    assert set(example.dropped) <= told.keys() and all(told.values())


def test_each_key_is_told_once_and_only_those_that_stay_as_they_are_go_without_a_row(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (path,) = write(tmp_path, {"train.yaml": D1_YAML})
    found = migrate([path])
    told = [change for change in found.changes if change.what != "added"]
    assert [change.old for change in told] == list(parse_yaml(D1_YAML, "d1"))
    kept = {change.old for change in told if change.what == "kept"}
    assert {"bf16", "adam_beta2", "beta", "num_generations"} <= kept
    assert len(found.table()) == len(found.changes) - len(kept)
    assert [row[0] for row in found.table() if row[1] == "added"] == [""] * sum(
        change.what == "added" for change in found.changes
    )
    called = unmask("migrate", path)
    assert parse_yaml(called.stdout, "stdout") == found.config
    for words in ("model_path = my-llada", "random_masking", "for: unmask grpo --config FILE"):
        assert words in called.stderr


def test_what_several_keys_say_together_is_told_once(tmp_path):
    (path,) = write(tmp_path, {"c.yaml": CONVERTER_MODEL + "eval_steps: 10\n"})
    rows = {row[0].partition(" = ")[0]: row for row in migrate([path]).table()}
    assert "'rate': 0.5" in rows["stage1_epochs"][2]
    assert (
        rows["stage2_epochs"][2]
        == rows["stage3_epochs"][2]
        == "training.num_train_epochs, training.stages, as above"
    )
    assert rows["eval_steps"][1] == "dropped" and "training.eval_strategy=steps" in rows["eval_steps"][3]


def test_the_later_file_wins_and_the_row_says_so(tmp_path):
    files = write(tmp_path, {"a.yaml": D1_YAML, "b.yaml": "generation_batch_size: 7\nblock_length: 16\n"})
    assert migrate(files).config["training"]["rollout_batch_size"] == 7
    plain = CONVERTER_HARDWARE.replace("gradient_checkpointing: true", "gradient_checkpointing: false")
    files = write(
        tmp_path,
        {"m.yaml": CONVERTER_MODEL, "h.yaml": plain},
    )
    found = migrate(files)
    assert found.config["training"]["activation_checkpointing"] is False
    assert "overrides an earlier key" in next(
        change.why for change in found.changes if change.old == "gradient_checkpointing"
    )


def test_weights_stay_in_float32_where_the_converter_had_them_in_float16(tmp_path):
    (path,) = write(tmp_path, {"h.yaml": CONVERTER_HARDWARE.replace("bfloat16", "float16")})
    found = migrate([path]).config
    assert (
        found["model"]["dtype"] == "float32"
        and found["training"]["fp16"] is True
        and found["training"]["bf16"] is False
    )


@pytest.mark.parametrize(
    ("text", "form", "steps"),
    [
        ("sync_ref_model: true\np_mask_prompt: 0.1\n", "diffu-grpo", 512),
        ("sync_ref_model: true\nref_model_sync_steps: 9\n", "diffu-grpo", 9),
        ("sync_ref_model: true\nref_model_sync_steps: 9\nbeta: 0\n", "diffu-grpo", None),
        ("sync_ref_model: false\nref_model_sync_steps: 9\n", "diffu-grpo", None),
        ("sync_ref_model: true\nref_model_sync_steps: 9\n", "trl-grpo", None),
        ("sync_ref_model: true\nbeta: 0.1\n", "trl-grpo", 512),
    ],
)
def test_a_reference_moves_where_it_did(text, form, steps, tmp_path):
    (path,) = write(tmp_path, {"old.yaml": text})
    assert migrate([path], form).config["training"].get("ref_model_sync_steps") == steps


def test_what_is_still_to_be_given_is_told(tmp_path):
    (path,) = write(tmp_path, {"run.env": "DIFFU_BATCH_SIZE=2\n"})
    assert migrate([path]).missing == ["--model PATH_OR_ID", "--output DIR", "--data FILE or --task NAME"]
    assert "unmask grpo --config FILE --model PATH_OR_ID --output DIR" in unmask("migrate", path).stderr


def test_nothing_is_overwritten_unless_asked_for(tmp_path):
    (path,) = write(tmp_path, {"train.yaml": D1_YAML})
    out = tmp_path / "new.yaml"
    out.write_text("mine")
    called = unmask("migrate", path, "--output", out)
    assert called.exit_code == 2 and "the file exists" in called.stderr and out.read_text() == "mine"
    assert (
        unmask("migrate", path, "--output", out, "--overwrite").exit_code == 0 and out.read_text() != "mine"
    )


def test_a_program_is_refused_with_what_can_be_read(tmp_path):
    (path,) = write(tmp_path, {"train.py": "args = GRPOConfig(beta=0.1)"})
    with raises(ConfigError, where=str(path)):
        migrate([path])


def test_a_reward_is_asked_for_where_neither_reward_nor_task_is_named(tmp_path):
    (path,) = write(tmp_path, {"grpo.yaml": "num_generations: 4\nbeta: 0.1\ndataset_name: prompts.jsonl\n"})
    assert "rewards=FILE.py:FUNCTION" in migrate([path], "trl-grpo").missing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "beta: 0.1\nlearning_rate: 1e-6\n",
            "may be trl-grpo (TRL's GRPOConfig) or trl-dpo (TRL's DPOConfig). Say which: --format trl-grpo.",
        ),
        ("colour: red\n", "is of no known format. Known: diffu-GRPO"),
        ("model: {path: m}\noutput_dir: o\n", "is a config of Unmask already"),
        ("- 1\n", "has no keys and values"),
        ("num_generations: many\n", "training.num_generations"),
        (
            "preference_data_path: p\nuse_mixed_precision: maybe\n",
            "use_mixed_precision: 'maybe' is not valid in the config.yaml",
        ),
    ],
)
def test_a_file_that_cannot_be_read_gets_one_clear_line(text, words, tmp_path):
    (path,) = write(tmp_path, {"old.yaml": text})
    called = unmask("migrate", path)
    errors = [line for line in called.stderr.splitlines() if line.startswith("error: ")]
    assert called.exit_code == 2 and len(errors) == 1 and words in errors[0], called.stderr


def test_the_format_can_be_said(tmp_path):
    (path,) = write(tmp_path, {"old.yaml": "beta: 0.3\nlearning_rate: 1e-6\n"})
    assert migrate([path], "trl-dpo").verb == "dpo" and migrate([path], "trl-grpo").verb == "grpo"
    with raises(ConfigError, where="--format"):
        migrate([path], "trl-dop")


def test_a_script_with_two_trainings_is_refused(tmp_path):
    (path,) = write(tmp_path, {"both.sh": "python sft_train.py --num_epochs 1\ntrl dpo --beta 0.1\n"})
    with raises(ConfigError, where=str(path)):
        migrate([path])


def test_a_training_verb_that_is_given_an_old_file_names_the_command(tmp_path):
    paths = write(
        tmp_path,
        {
            "train.yaml": D1_YAML,
            "model.yaml": CONVERTER_MODEL,
            "a.yaml": ACCELERATE,
            "run.sh": "trl dpo --beta 0.1\n",
        },
    )
    for path in paths:
        for verb in VERBS:
            refused = unmask(verb, "--config", path, "--print-config")
            assert refused.exit_code == 2 and f"unmask migrate {path}" in refused.stderr, refused.output
    own = write(
        tmp_path,
        {
            "own.yaml": "model: {path: m}\noutput_dir: o\nbeta: 1\n",
            "broken.yaml": "a: [",
            "odd.yaml": "colour: red\n",
        },
    )
    for path, words in zip(own, ("is not a known key", "Fix the YAML", "is not a known key"), strict=True):
        refused = unmask("sft", "--config", path, "--print-config")
        assert refused.exit_code == 2 and words in refused.stderr and "migrate" not in refused.stderr


def test_deepspeed_and_shards_of_accelerate_become_settings(tmp_path):
    base = ACCELERATE.replace("MULTI_GPU", "{kind}")
    deep = (
        base.format(kind="DEEPSPEED") + "deepspeed_config: {zero_stage: 2, offload_optimizer_device: none}\n"
    )
    offload = deep.replace("optimizer_device: none", "optimizer_device: cpu")
    fsdp = (
        base.format(kind="FSDP")
        + "fsdp_config: {fsdp_offload_params: false, fsdp_transformer_layer_cls_to_wrap: 'A,B'}\n"
    )
    plain, offloaded, sharded = (
        migrate([path]).config["training"]
        for path in write(tmp_path, {"1.yaml": deep, "2.yaml": offload, "3.yaml": fsdp})
    )
    assert plain["deepspeed"] == "zero2"
    assert offloaded["deepspeed"]["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert sharded["fsdp"] is True and sharded["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["A", "B"]


@pytest.mark.parametrize("name", FORMATS)
def test_tables_name_only_settings_that_there_are(name):
    """Every rule is tried with values of every type; those that it accepts must become settings of the
    verb."""
    form = FORMATS[name]
    verbs = [form.verb] if form.verb else VERBS
    fields = {field.name for verb in verbs for field in dataclasses.fields(VERBS[verb].config_class)}
    others = {key: True for key in form.table} | {
        "dataset_name": "d",
        "loss_type": "sigmoid",
        "masking.strategy_type": "adaptive",
    }
    settled = 0
    for key, rule in form.table.items():
        for old in ({}, others):
            for sample in SAMPLES:
                try:
                    found = rule.read(sample, {**old, key: sample})
                except (DroppedError, KeyError, ValueError, TypeError, AttributeError):
                    continue
                for setting in found | dict(form.defaults({}, None)):
                    section, _, rest = setting.partition(".")
                    assert section in RunConfig.model_fields, (key, setting)
                    known = fields if section == "training" else {*RunConfig.model_fields, *sections(section)}
                    assert not rest or rest.partition(".")[0] in known, (key, setting)
                    settled += 1
    assert settled > 10


def sections(name: str) -> set[str]:
    import unmask.config.run as config

    classes = {
        "model": config.StartConfig,
        "data": config.DataConfig,
        "lora": config.LoraSettings,
        "hardware": config.HardwareConfig,
        "sampler": config.SamplerConfig,
        "retention": config.EvaluationConfig,
    }
    return set(classes[name].model_fields) if name in classes else set()


def test_marks_are_keys_of_their_table():
    for name, form in FORMATS.items():
        known = form.table.keys() | TRANSFORMERS.keys() | {each.name for each in stock_settings().values()}
        assert {mark.partition("=")[0] for mark in form.marks} <= known, name


def test_recognition_is_by_what_only_one_format_knows():
    assert candidates({"p_mask_prompt": 0.1, "block_length": 32}, None) == ["diffu-grpo"]
    assert candidates({"beta": 0.1, "loss_type": "dapo"}, None) == ["trl-grpo"]
    assert candidates({"beta": 0.1, "loss_type": "sigmoid"}, None) == ["trl-dpo"]
    assert candidates({"beta": 0.1}, "trl dpo") == ["trl-dpo"]
    assert candidates({"dataset_name": "d", "text_column": "content", "cache_dir": "c"}, None) == [
        "converter"
    ]
    assert candidates({"learning_rate": 0.1}, None) == []


def test_a_mixture_of_dllm_keeps_its_sources_and_shares(tmp_path):
    script = "python examples/llada/sft.py --output_dir o --dataset_args '{}'\n"
    texts = {
        "even.sh": "a/b + c",
        "counted.sh": "a/b[train:3000,test:9]|c[name:x,train:1_000]",
        "unknown.sh": "a/b[lang:python]",
    }
    even, counted, unknown = (
        migrate([path])
        for path in write(tmp_path, {name: script.format(text) for name, text in texts.items()})
    )
    assert even.config["data"] == {"train": [{"path": "a/b"}, {"path": "c"}]}
    shares = [{"path": "a/b", "weight": 3000.0}, {"path": "c:x", "weight": 1000.0}]
    assert counted.config["data"] == {"train": shares, "max_rows": 4000}
    assert "data" not in unknown.config and "lang" in next(
        change.why for change in unknown.changes if change.old == "dataset_args"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model, training and hardware files", "dLLM's text, from a cluster"])
def test_a_migrated_conversion_trains(name: str, tmp_path):
    """Settings that this machine lacks the hardware for are reset; all others are as migrated."""
    found = migrate(write(tmp_path, EXAMPLES[name].files))
    (tmp_path / "new.yaml").write_text(found.to_yaml())
    model = tmp_path / "causal"
    character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0).save(model)
    (tmp_path / "rows.jsonl").write_text('{"content": "12341234", "Text": "43214321"}\n' * 64)
    given = [
        "--config",
        tmp_path / "new.yaml",
        "--model",
        model,
        "--data",
        tmp_path / "rows.jsonl",
        "--output",
        tmp_path / "out",
    ]
    machine = [
        "model.device=cpu",
        "training.use_cpu=true",
        "training.torch_compile=false",
        "training.flash_attention=false",
    ]
    machine += [
        "training.optim=adamw_torch",
        "training.report_to=none",
        "training.max_steps=8",
        "training.gradient_accumulation_steps=1",
    ]
    called = unmask("convert", *given, *machine)
    assert called.exit_code == 0, called.output
    trained = parse_yaml((tmp_path / "out" / "config.yaml").read_text(), "config")["training"]
    assert [stage["share"] for stage in trained["stages"]] == (
        [2.0, 4.0, 2.0] if name.startswith("model") else [1.0]
    )
    assert (tmp_path / "out" / "model").is_dir()


def test_a_field_that_begins_with_no_keeps_its_name_and_a_temperature_of_zero_is_left_out(tmp_path):
    found = migrate(
        write(
            tmp_path,
            {"train.sh": "python examples/llada/sft.py --model_name_or_path m --no_cuda --no_bf16\n"},
        )
    )
    assert found.config["training"]["bf16"] is False and not any(
        change.old.startswith("cuda") for change in found.changes
    )
    found = migrate(write(tmp_path, {"run.env": "export GRPO_USE_VLLM=true\nexport GRPO_TEMPERATURE=0\n"}))
    assert found.config["training"]["temperature"] > 0 and any(
        change.old == "GRPO_TEMPERATURE" and change.what == "dropped" for change in found.changes
    )


@pytest.mark.parametrize(
    ("name", "text"),
    {
        "old.yaml": "model_path: x\nhub_token: hunter2\nwandb_api_key: hunter2\nnum_generations: 4\n",
        "old.sh": (
            "export HF_TOKEN=hunter2\nexport VLLM_SERVER_HOST=u:hunter2@h:8000\nexport "
            "GRPO_NUM_GENERATIONS=4\n"
        ),
    }.items(),
)
def test_secrets_of_an_old_configuration_are_not_shown(name, text, tmp_path):
    called = unmask("migrate", *write(tmp_path, {name: text}), "--output", tmp_path / "new.yaml")
    assert "hunter2" not in called.output + called.stderr and "********" in called.stderr, called.stderr
