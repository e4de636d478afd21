"""The trainers' arguments are those of TRL, by name and position, and mean the same or are refused."""

from __future__ import annotations

import copy
import inspect
from dataclasses import fields
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset, DatasetDict
from transformers import LlamaForSequenceClassification, TrainingArguments

import unmask
from tests.errors import raises
from tests.helpers import each_once
from tests.tiny import adapted, build_config, llama_causal, llama_lm
from tests.training.tiny_runs import (
    PAIRS,
    PREFERENCES,
    TEXTS,
    equal,
    make,
    ranks,
    settings,
    share_of_a,
    weights,
)
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.errors import ConfigError, DataError, ModelError
from unmask.models.auto_config import SETTINGS_KEY
from unmask.rl.weighted_rewards import Rewards

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.* is deprecated and will be removed in v6:FutureWarning"
)
TRAINERS = ["PretrainTrainer", "ConvertTrainer", "SFTTrainer", "DPOTrainer", "GRPOTrainer"]
VERBS = ["pretrain", "sft", "dpo", "grpo"]
ROWS: dict[str, Any] = {
    "pretrain": TEXTS,
    "sft": PAIRS,
    "dpo": PREFERENCES,
    "kto": PREFERENCES,
    "grpo": PAIRS,
}


class Stream:
    """Rows that are iterated only."""

    def __init__(self, rows: list[dict[str, str]]):
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def stream(rows: list[dict[str, str]]) -> Any:
    return Dataset.from_list(rows).to_iterable_dataset()


@pytest.mark.parametrize("name", TRAINERS)
def test_every_argument_is_named(name):
    shown = inspect.signature(getattr(unmask, name))
    assert all(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in shown.parameters.values())
    assert all(each.annotation is not each.empty for each in shown.parameters.values())
    assert {"model", "args", "train_dataset", "eval_dataset", "peft_config", "callbacks"} <= {
        *shown.parameters
    }


@pytest.mark.parametrize("name", ["SFTTrainer", "DPOTrainer", "GRPOTrainer"])
def test_the_arguments_of_trl_have_the_same_places(name):
    theirs, ours = (list(inspect.signature(getattr(each, name)).parameters) for each in (trl, unmask))
    assert ours[: len(theirs)] == theirs


def test_the_arguments_of_transformers_have_the_same_places():
    theirs = list(inspect.signature(transformers.Trainer).parameters)
    assert list(inspect.signature(unmask.PretrainTrainer).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize(("name", "rows"), [("SFT", PAIRS), ("DPO", PREFERENCES)])
def test_without_args_the_defaults_are_taken_in_a_folder_named_as_by_trl(name, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama_lm().save(tmp_path / "base")
    trainer = getattr(unmask, f"{name}Trainer")(str(tmp_path / "base"), train_dataset=rows)
    assert trainer.args.output_dir == f"base-{name}"
    if name == "SFT":
        trainer.train()
        assert list(Path(f"base-{name}").glob("checkpoint-*"))
    assert (
        getattr(unmask, f"{name}Trainer")(llama_lm(), train_dataset=rows).args.output_dir == f"model-{name}"
    )


@pytest.mark.parametrize("config", [TrainingArguments, trl.SFTConfig, unmask.DPOConfig, dict])
def test_the_config_of_another_trainer_or_library_is_refused(config, tmp_path):
    with raises(ConfigError, where="args"):
        unmask.SFTTrainer(llama_lm(), config(output_dir=str(tmp_path), use_cpu=True), train_dataset=PAIRS)


def test_settings_that_are_assigned_later_act_or_are_refused(tmp_path):
    trainer = make("sft", tmp_path)
    trainer.args.learning_rate = 0.5
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 0.5


@pytest.mark.parametrize("name", ["compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"])
def test_functions_of_whole_logits_are_refused(name, tmp_path):
    for verb in ("pretrain", "sft", "dpo"):
        trainer = type(make(verb, tmp_path))
        if name in inspect.signature(trainer).parameters:
            with raises(ConfigError, where=name):
                trainer(llama_lm(), train_dataset=ROWS[verb], **{name: lambda *_: {}})


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_rollouts_of_several_turns_are_refused(name, tmp_path):
    with raises(ConfigError, where=name):
        unmask.GRPOTrainer(llama_lm(), share_of_a, train_dataset=PAIRS, **{name: [len]})


def test_collators_that_mark_no_documents_are_refused(tmp_path):
    tokenizer = llama_lm().tokenizer
    for collator in (
        transformers.default_data_collator,
        transformers.DataCollatorWithPadding(tokenizer),
        trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0),
    ):
        for name in ("SFTTrainer", "DPOTrainer", "ConvertTrainer"):
            with raises(ConfigError, where="data_collator"):
                getattr(unmask, name)(llama_lm(), data_collator=collator, train_dataset=PAIRS)


@pytest.mark.parametrize("verb", VERBS)
def test_optimizers_are_those_of_transformers(verb, tmp_path):
    lm = llama_lm("causal" if verb == "pretrain" else "bidirectional")
    sgd = torch.optim.SGD(lm.model.parameters(), lr=0.5)
    trainer = make(verb, tmp_path / "given", lm, optimizers=(sgd, None))
    trainer.train()
    assert trainer.optimizer.optimizer is sgd
    named = make(verb, tmp_path / "named", optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5}))
    named.train()
    assert isinstance(named.optimizer.optimizer, torch.optim.SGD)
    assert equal(weights(trainer.lm), weights(named.lm))


def test_rows_and_settings_at_the_place_of_another_argument_are_named(tmp_path):
    args = unmask.SFTConfig(**settings(tmp_path))
    with raises(ConfigError, where="data_collator"):
        unmask.SFTTrainer(llama_lm(), args, PAIRS)
    with raises(ConfigError, where="ref_model"):
        unmask.DPOTrainer(llama_lm(), unmask.DPOConfig(**settings(tmp_path)), train_dataset=PREFERENCES)
    with raises(ConfigError, where="reward_funcs"):
        unmask.GRPOTrainer(llama_lm(), args=unmask.GRPOConfig(**settings(tmp_path)), train_dataset=PAIRS)


# Models and tokenizers.


def test_a_tokenizer_is_given_by_its_path_or_in_place_of_the_models_own(tmp_path):
    tokenizer = llama_lm().tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    llama_lm().save(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}]
    for model in (str(tmp_path / "model"), llama_lm(), llama_causal()[0]):
        for given in (str(tmp_path / "tokenizer"), tokenizer):
            args = unmask.SFTConfig(**settings(tmp_path / "run", max_length=32))
            made = unmask.SFTTrainer(model, args, train_dataset=rows, processing_class=given)
            assert made.processing_class.decode(made.train_dataset[0]["input_ids"]).startswith("abcd")
    with raises(ModelError, where="processing_class"):
        make("sft", tmp_path, processing_class=character_tokenizer("xyz"))


def test_a_model_in_memory_is_not_quantized(tmp_path):
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    with raises(ConfigError, where="quantization_config"):
        make("sft", tmp_path, quantization_config=config)


def test_a_model_that_is_loaded_is_quantized_as_asked(tmp_path):
    pytest.importorskip("bitsandbytes")
    llama_lm().save(tmp_path / "model")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with raises(ConfigError, where="model.quantization and lora"):
        make("sft", tmp_path, str(tmp_path / "model"), quantization_config=config)


def test_a_reference_is_a_model_a_path_or_a_setting(tmp_path):
    other = adapted(llama_lm()).model.merge_and_unload()
    stock = copy.deepcopy(other)
    llama_lm().bind(other).save(tmp_path / "other")
    assert not hasattr(stock.config, SETTINGS_KEY)
    ends = []
    for number, (given, config) in enumerate(
        [
            (None, {"ref_model": str(tmp_path / "other")}),
            (tmp_path / "other", {}),
            (unmask.load(tmp_path / "other"), {}),
            (stock, {}),
            (unmask.load(tmp_path / "other"), {"reference": "frozen"}),
        ]
    ):
        trainer = make("dpo", tmp_path / f"run-{number}", beta=1.0, **({"ref_model": given} | config))
        trainer.train()
        ends.append(weights(trainer.lm))
    assert all(equal(ends[0], each) for each in ends[1:-1])
    assert all(torch.allclose(ends[0][name], weight, atol=1e-5) for name, weight in ends[-1].items())
    alone = make("dpo", tmp_path / "alone", beta=1.0)
    alone.train()
    assert not equal(ends[0], weights(alone.lm))


def test_a_reference_that_would_not_be_read_is_refused(tmp_path):
    lm = llama_lm()
    with raises(ConfigError, where="ref_model"):
        make("dpo", tmp_path, lm, ref_model=lm)
    with raises(ConfigError, where="ref_model"):
        unmask.DPOTrainer(
            lm, llama_lm(), unmask.DPOConfig(**settings(tmp_path), ref_model="x"), train_dataset=PREFERENCES
        )
    with raises(ConfigError, where="ref_model and loss_type"):
        make("dpo", tmp_path, lm, ref_model=llama_lm(), loss_type="simpo")
    with raises(ConfigError, where="ref_model"):
        make("dpo", tmp_path, lm, ref_model=llama_lm("block_causal", 4))


@pytest.fixture
def classifier(tmp_path):
    tokenizer = character_tokenizer("abcdefgh")
    torch.manual_seed(0)
    sizes = {"width": 8, "layers": 1, "intermediate_size": 16, "num_labels": 1, "ids": ()}
    model = LlamaForSequenceClassification(build_config("llama", tokenizer, **sizes)).eval()
    model.save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    return model, tokenizer, str(tmp_path / "classifier")


def test_a_reward_model_is_a_path_or_a_model_with_its_tokenizer(classifier, tmp_path):
    model, tokenizer, path = classifier
    lines = []
    for number, (rewards, tokenizers) in enumerate(
        [
            ([path, share_of_a], None),
            ([f"model:{path}", share_of_a], None),
            ([LlamaForSequenceClassification.from_pretrained(path), share_of_a], None),
            ([model, share_of_a], [tokenizer, None]),
        ]
    ):
        trainer = make("grpo", tmp_path / f"{number}", reward=rewards, reward_processing_classes=tokenizers)
        trainer.train()
        lines.append([line["rewards/reward_model"] for line in trainer.state.log_history if "loss" in line])
    assert lines[0] and all(line == lines[0] for line in lines)
    assert Rewards(path).names == ["reward_model"] and Rewards(model, tokenizers=tokenizer).weights == [1.0]


def test_reward_processing_classes_that_fit_no_model_are_refused(classifier, tmp_path):
    model, tokenizer, path = classifier
    for rewards, tokenizers in (([path, ranks], tokenizer), ([path], [tokenizer, None]), (ranks, tokenizer)):
        with raises(ConfigError, where="reward_processing_classes"):
            make("grpo", tmp_path, reward=rewards, reward_processing_classes=tokenizers)
    with raises(ModelError, where="LlamaForSequenceClassification"):
        make("grpo", tmp_path, reward=model)
    with raises(ConfigError, where="task"):
        make("grpo", tmp_path, reward="sudoko/partial")
    with raises(ModelError, where=str(tmp_path / "classifer")):
        make("grpo", tmp_path, reward=str(tmp_path / "classifer"))


# Rows.


@each_once("kind, verb", [dict, DatasetDict], ["pretrain", "sft", "dpo", "kto", "grpo"])
def test_held_out_sets_have_metrics_of_their_own(verb, kind, tmp_path):
    rows = ROWS[verb]
    sets = {"few": rows[:3], "more": rows[2:]}
    given = (
        sets if kind is dict else DatasetDict({name: Dataset.from_list(each) for name, each in sets.items()})
    )
    metric = "reward" if verb == "grpo" else "loss"
    trainer = make(
        verb,
        tmp_path / "both",
        eval_dataset=given,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model=f"eval_more_{metric}",
    )
    before = trainer.evaluate()
    for name, each in sets.items():
        alone = make(verb, tmp_path / name, eval_dataset=each).evaluate()[f"eval_{metric}"]
        assert before[f"eval_{name}_{metric}"] == pytest.approx(alone, rel=1e-6)
        assert trainer.evaluate(name)[f"eval_{metric}"] == before[f"eval_{name}_{metric}"]
    if verb not in ("dpo", "kto"):  # their reference is stored for the rows that the trainer knows
        assert trainer.evaluate(given)[f"eval_few_{metric}"] == before[f"eval_few_{metric}"]
    trainer.train()
    logged = [line for line in trainer.state.log_history if f"eval_more_{metric}" in line]
    assert len(logged) == 2 and trainer.state.best_metric in [line[f"eval_more_{metric}"] for line in logged]


def test_a_conversion_evaluates_on_several_sets(tmp_path):
    args = unmask.ConvertConfig(**settings(tmp_path, max_length=16), stages=[{}])
    trainer = unmask.ConvertTrainer(
        llama_lm("causal"), args, train_dataset=TEXTS, eval_dataset={"a": TEXTS[:2], "b": stream(TEXTS)}
    )
    trainer.train()
    assert {"eval_a_loss", "eval_b_loss"} <= {name for line in trainer.state.log_history for name in line}


@pytest.mark.parametrize("verb", [*VERBS, "convert"])
def test_the_splits_of_a_dataset_dict_are_named_where_one_is_needed(verb, tmp_path):
    splits = DatasetDict(
        {"train": Dataset.from_list(ROWS.get(verb, TEXTS)), "test": Dataset.from_list(TEXTS)}
    )
    with raises(DataError, where="train_dataset"):
        if verb == "convert":
            args = unmask.ConvertConfig(**settings(tmp_path), stages=[{}])
            unmask.ConvertTrainer(llama_lm("causal"), args, train_dataset=splits)
        else:
            make(verb, tmp_path, rows=splits)


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_of_pairs_trains_as_its_rows_do(packing, tmp_path):
    ends = []
    run = {"packing": packing, "max_length": 12, "train_sampling_strategy": "sequential"}
    for number, rows in enumerate((PAIRS, stream(PAIRS), Stream(PAIRS))):
        trainer = make("sft", tmp_path / f"{number}", rows=rows, **run, per_device_train_batch_size=2)
        trainer.train()
        ends.append(weights(trainer.lm))
    assert equal(ends[0], ends[1]) and equal(ends[0], ends[2])


def test_bad_rows_of_a_stream_of_pairs_are_numbered_and_may_be_all_of_its_last(tmp_path, monkeypatch):
    monkeypatch.setattr("unmask.supervised.sft.PACKED_TOGETHER", 2)
    rows = [*PAIRS[:4], {"prompt": "a" * 40, "completion": "b"}]
    run = {"max_length": 32, "max_steps": 4, "per_device_train_batch_size": 2}
    make("sft", tmp_path / "skipped", rows=stream(rows), bad_rows="skip", **run).train()
    with raises(DataError, where="train_dataset, row 4"):
        make("sft", tmp_path / "error", rows=stream(rows), **run).train()


def test_a_resumed_run_on_a_stream_of_pairs_is_the_same_bit_for_bit(tmp_path):
    run = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5, "per_device_train_batch_size": 2}
    whole = make("sft", tmp_path / "run", rows=stream(PAIRS), **run)
    whole.train()
    resumed = make("sft", tmp_path / "run", rows=stream(PAIRS), **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert equal(weights(whole.lm), weights(resumed.lm))


@pytest.mark.parametrize("verb", ["dpo", "kto", "grpo"])
def test_the_rows_of_a_stream_that_a_run_visits_are_read_first(verb, tmp_path):
    read: list[int] = []

    class Endless:
        def __iter__(self) -> Any:
            for row in cycle(ROWS[verb]):
                read.append(len(read))
                yield row

    trainer = make(verb, tmp_path, rows=Endless())
    assert len(read) == (4 if verb == "grpo" else 8)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("verb", ["sft", "dpo", "grpo"])
def test_a_stream_needs_max_steps(verb, tmp_path):
    with raises(ConfigError, where="max_steps"):
        make(verb, tmp_path, rows=stream(ROWS[verb]), max_steps=-1)


@pytest.mark.parametrize("verb", VERBS)
def test_a_stream_of_held_out_rows_is_read(verb, tmp_path):
    metric = "eval_reward" if verb == "grpo" else "eval_loss"
    rows = ROWS[verb][:3]
    ours = make(verb, tmp_path / "stream", eval_dataset=stream(rows)).evaluate()
    assert ours[metric] == make(verb, tmp_path / "list", eval_dataset=rows).evaluate()[metric]


def as_text(row: dict[str, str]) -> str:
    return f"{row['prompt']}{row['completion']}"


@pytest.mark.parametrize("kind", [list, Dataset.from_list, stream, Stream])
def test_formatting_func_makes_the_text_of_a_row(kind, tmp_path):
    texts = [{"text": as_text(row)} for row in PAIRS]
    run = {"train_sampling_strategy": "sequential", "max_steps": 1}
    expected = make("sft", tmp_path / "texts", rows=texts, eval_dataset=texts[:3], **run)
    made = make(
        "sft",
        tmp_path / "rows",
        rows=kind(PAIRS),
        eval_dataset=kind(PAIRS[:3]),
        formatting_func=as_text,
        **run,
    )
    for rows, text in ((None, None), (PAIRS, texts)):
        assert made.evaluate(rows)["eval_loss"] == expected.evaluate(text)["eval_loss"]
    made.train()
    expected.train()
    assert equal(weights(made.lm), weights(expected.lm))


def trl_rows(rows: list[dict[str, Any]], folder: Path) -> Dataset:
    """The tokens that TRL's own trainer makes."""
    lm = llama_lm("causal")
    args = trl.SFTConfig(output_dir=str(folder), use_cpu=True, max_length=32, report_to="none")
    return trl.SFTTrainer(
        lm.model, args, train_dataset=Dataset.from_list(rows), processing_class=lm.tokenizer
    ).train_dataset


@pytest.mark.parametrize("rows", [PAIRS, TEXTS], ids=["pairs", "texts"])
def test_rows_that_trl_has_tokenized_are_those_of_their_text(rows, tmp_path):
    tokens = trl_rows(rows, tmp_path)
    assert {"input_ids", "labels"} <= {*tokens.column_names}
    trained = []
    for number, given in enumerate((rows, tokens, tokens.to_iterable_dataset(), tokens.with_format("torch"))):
        trainer = make("sft", tmp_path / f"{number}", rows=given, train_sampling_strategy="sequential")
        trainer.train()
        trained.append(weights(trainer.lm))
    assert all(equal(trained[0], each) for each in trained[1:])


def test_masks_say_which_tokens_are_trained_on(tmp_path):
    end = llama_lm().tokenizer.eos_token_id
    ids = [5, 6, 7, 8, 9, end]
    rows = [
        {"input_ids": ids, "labels": [-100, -100, 7, -100, 9, end]},
        {"input_ids": ids, "completion_mask": [0, 0, 1, 0, 1, 1], "position_ids": [*range(6)]},
        {"input_ids": ids, "assistant_masks": [0, 0, 1, 0, 1, 1], "completion_mask": [0, 1, 1, 1, 1, 1]},
        {"input_ids": [*ids, 3], "labels": [-100, -100, 7, -100, 9, end, -100], "text": "not read"},
        {"input_ids": [3, *ids], "completion_mask": [0, 0, 0, 1, 0, 1, 1], "attention_mask": [0, *[1] * 6]},
    ]
    made = [make("sft", tmp_path, rows=[row]).train_dataset[0] for row in rows]
    assert made[0]["maskable"] == [False, False, True, False, True, True] and made[0]["input_ids"] == ids
    assert all(each == made[0] for each in made[1:])
    blocks = make("sft", tmp_path, llama_lm("block_causal", 4), rows=[rows[0], {"input_ids": [5, 6, 7]}])
    assert [len(row["input_ids"]) for row in blocks.train_dataset] == [
        8,
        3,
    ]  # no end token: nothing is filled


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [5, 6], "labels": [-100, 7]},
        {"input_ids": [5, 6], "labels": [-100]},
        {"input_ids": [5, 6], "completion_mask": [1], "assistant_masks": [0, 1]},
        {"input_ids": [5, 6], "seq_lengths": [1, 1]},
        {"input_ids": [5, 6, 5, 6], "position_ids": [0, 1, 0, 1]},
        {"input_ids": [5, 6, 5, 6], "attention_mask": [1, 1, 2, 2]},
        {"input_ids": [5, 6], "position_ids": [0]},
        {"input_ids": [5, 6], "labels": [5, -100]},
        {"input_ids": [5, 600]},
        {"input_ids": [], "labels": []},
    ],
)
def test_tokens_that_cannot_be_trained_on_are_refused(row, tmp_path):
    with pytest.raises(DataError, match="train_dataset, row 0"):
        make("sft", tmp_path, rows=[row])


def test_preferences_may_be_tokens(tmp_path):
    lm = llama_lm()
    text = make("dpo", tmp_path / "text")
    tokens = []
    for row in text.train_dataset:
        sides = [
            [
                token
                for token, number in zip(row["input_ids"], row["documents"], strict=True)
                if number == side
            ]
            for side in (1, 2)
        ]
        start = row["maskable"].index(True)
        tokens.append(
            {"prompt_ids": sides[0][:start], "chosen_ids": sides[0][start:], "rejected_ids": sides[1][start:]}
        )
    given = make("dpo", tmp_path / "tokens", lm, rows=Dataset.from_list(tokens))
    text.train()
    given.train()
    assert equal(weights(text.lm), weights(given.lm))


# A model for each run.


@pytest.mark.parametrize("verb", ["pretrain", "sft"])
def test_model_init_makes_the_model_of_each_run(verb, tmp_path):
    attention = "causal" if verb == "pretrain" else "bidirectional"
    expected = make(verb, tmp_path / "given")
    expected.train()
    rows, kind = ROWS[verb], type(expected)
    trainer = kind(
        args=type(expected.args)(**settings(tmp_path / "made", max_length=32, **({"packing": False}))),
        train_dataset=rows,
        model_init=lambda: llama_lm(attention),
    )
    for _ in range(2):
        trainer.train()
        assert equal(weights(trainer.lm), weights(expected.lm))


def test_model_init_beside_what_it_replaces_is_refused(tmp_path):
    args = unmask.SFTConfig(**settings(tmp_path))
    optimizer = torch.optim.SGD(llama_lm().model.parameters(), lr=1.0)
    with raises(ConfigError, where="model_init and model"):
        unmask.SFTTrainer(llama_lm(), args, train_dataset=PAIRS, model_init=lambda: llama_lm())
    with raises(ConfigError, where="model_init and optimizers"):
        unmask.SFTTrainer(
            args=args, train_dataset=PAIRS, model_init=lambda: llama_lm(), optimizers=(optimizer, None)
        )
    with raises(ConfigError, where="model"):
        unmask.SFTTrainer(args=args, train_dataset=PAIRS)
    with raises(ConfigError, where="model_init"):
        unmask.DPOTrainer(args=unmask.DPOConfig(**settings(tmp_path)), model_init=lambda: llama_lm())
    with raises(ConfigError, where="model_init"):
        make("dpo", tmp_path).hyperparameter_search()
    kinds = iter(["bidirectional", "causal"])
    changing = unmask.SFTTrainer(args=args, train_dataset=PAIRS, model_init=lambda: llama_lm(next(kinds)))
    with raises(ConfigError, where="model_init"):
        changing.train()


@pytest.mark.slow
def test_optuna_searches_settings(tmp_path):
    pytest.importorskip("optuna")
    args = unmask.SFTConfig(**settings(tmp_path, max_length=32, eval_strategy="epoch", save_strategy="steps"))
    trainer = unmask.SFTTrainer(
        args=args, train_dataset=PAIRS, eval_dataset=PAIRS[:4], model_init=lambda: llama_lm()
    )

    def space(trial: Any) -> dict[str, float]:
        return {"learning_rate": trial.suggest_categorical("learning_rate", [1e-6, 1e-2])}

    best = trainer.hyperparameter_search(space, backend="optuna", n_trials=4, direction="minimize")
    assert best.hyperparameters == {"learning_rate": 1e-2}
    alone = make("sft", tmp_path / "alone", eval_dataset=PAIRS[:4])
    alone.train()
    assert best.objective == pytest.approx(alone.evaluate()["eval_loss"], rel=1e-6)
    assert all((tmp_path / f"run-{number}" / "checkpoint-2").is_dir() for number in range(4))

    def unread(trial: Any) -> dict[str, int]:
        return {"max_length": trial.suggest_int("max_length", 8, 9)}

    with raises(ConfigError, where="max_length"):
        trainer.hyperparameter_search(unread, backend="optuna", n_trials=1, hp_name=lambda trial: "another")


@pytest.mark.parametrize("name", ["PretrainConfig", "ConvertConfig", "SFTConfig", "DPOConfig", "GRPOConfig"])
def test_the_docstring_of_a_config_lists_its_fields(name):
    config = getattr(unmask, name)
    own = {each.name for each in fields(config)} - {each.name for each in fields(TrainingArguments)}
    lines = {line.strip().split(" ")[0].rstrip(":"): line for line in inspect.getdoc(config).splitlines()}
    for field in own:
        assert config.__dataclass_fields__[field].metadata["help"] in lines[field]


def test_the_docstring_of_the_sampler_lists_its_fields():
    lines = inspect.getdoc(SamplerConfig).splitlines()
    assert all(
        any(line.startswith(f"    {name} (") for line in lines) for name in unmask.SamplerConfig.model_fields
    )


@pytest.mark.parametrize(
    ("trainer", "method", "called"),
    [
        ("SFTTrainer", "_prepare_dataset", "make_rows"),
        ("SFTTrainer", "compute_loss", None),
        ("SFTTrainer", "micro_loss", None),
        ("DPOTrainer", "compute_loss", "loss_on"),
        ("DPOTrainer", "micro_loss", "loss_on"),
        ("DPOTrainer", "loss_on", None),
        ("GRPOTrainer", "_compute_loss", "loss_on"),
        ("GRPOTrainer", "_generate_and_score_completions", "generate_and_score"),
    ],
)
def test_a_method_of_a_subclass_is_called_or_refused(trainer, method, called):
    def of_a_user(*_, **__): ...

    subclass = type("Mine", (getattr(unmask, trainer),), {method: of_a_user})
    if called is None:
        subclass.__new__(subclass)
        return
    with raises(ConfigError, where=f"Mine.{method}") as refused:
        subclass.__new__(subclass)
    assert f"Override {called}" in str(refused.value)
