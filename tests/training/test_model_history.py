"""What training records in the model's history and card: exact counts, also with accumulation, resume and
every way of saving."""

from __future__ import annotations

import json
import shutil

import peft
import pytest

from tests.models.test_model_card import run_snippet
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, TEXTS, make, settings
from unmask.cli.inputs import data_name
from unmask.config.run import DataConfig
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.models.load import load
from unmask.models.model_card import MARKER, history
from unmask.supervised.sft import SFTConfig, SFTTrainer
from unmask.tasks import get_task
from unmask.training.model_history import last_metrics


def tokens_of(trainer) -> int:
    """The number of tokens in an epoch of the training data."""
    return sum(len(row["input_ids"]) for row in trainer.train_dataset)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_tokens_are_counted_exactly_under_accumulation(tmp_path, accumulation):
    batch = {
        "per_device_train_batch_size": 8 // (2 * accumulation) or 1,
        "gradient_accumulation_steps": accumulation,
    }
    trainer = make("sft", tmp_path, max_steps=-1, num_train_epochs=3, **batch)
    trainer.train()
    (entry,) = history(trainer.lm)
    assert entry["tokens"] == 3 * tokens_of(trainer) and entry["rows"] == len(PAIRS)


def test_a_resumed_run_leaves_the_same_history(tmp_path):
    run = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 3}
    straight = make("sft", tmp_path, **run)
    straight.train()
    shutil.rmtree(tmp_path / "checkpoint-5")
    resumed = make("sft", tmp_path, **run)
    resumed.train(resume_from_checkpoint=True)
    again = make("sft", tmp_path, **run)  # nothing left to do
    again.train(resume_from_checkpoint=True)
    assert history(straight.lm) == history(resumed.lm) == history(again.lm)


def test_a_conversion_tells_its_recipe_and_what_each_stage_was(tmp_path):
    lm = llama_lm("causal")
    args = ConvertConfig.for_recipe("block", **settings(tmp_path, max_steps=10))
    ConvertTrainer(lm, args, train_dataset=TEXTS).train()
    attention, everything, last = [entry["settings"] for entry in history(lm)]
    assert {told["recipe"] for told in (attention, everything, last)} == {"block"}
    assert attention["train"] == ["attention", "time_embedding", "mask_token"] and attention["rate"] == 0.5
    assert (
        "train" not in everything
        and last["lm_loss"] == 0.1
        and last["learning_rate"] == pytest.approx(0.3 * args.learning_rate)
    )


@pytest.mark.parametrize("verb", ["pretrain", "sft", "dpo", "grpo"])
def test_every_verb_writes_its_card(tmp_path, verb, monkeypatch):
    trainer = make(verb, tmp_path / "run", data_source="tales.jsonl", seed=5)
    trainer.train()
    trainer.save_model(tmp_path / "model")
    text = (tmp_path / "model/README.md").read_text()
    (entry,) = history(load(tmp_path / "model"))
    assert entry["verb"] == verb and entry["steps"] == 2 and entry["seed"] == 5 and entry["tokens"] > 0
    assert f"| {verb} | tales.jsonl | {entry['rows']} | 2 | {entry['tokens']} | 5 |" in text
    assert entry["settings"]["learning_rate"] == 1e-2 and (entry["settings"].get("max_length") == 32) == (
        verb != "grpo"
    )
    assert entry["metrics"]["loss"] == trainer.state.log_history[-2]["loss"]
    assert str(tmp_path) not in text and str(tmp_path) not in json.dumps(entry)
    monkeypatch.chdir(tmp_path / "model")
    run_snippet(text)


def test_stages_follow_one_another(tmp_path):
    pretrainer = make("pretrain", tmp_path / "pretrain")
    pretrainer.train()
    pretrainer.save_model(tmp_path / "base")
    args = ConvertConfig(
        **settings(tmp_path / "convert", max_steps=10), attention="block_causal", block_size=4
    )
    converter = ConvertTrainer(str(tmp_path / "base"), args, train_dataset=TEXTS, eval_dataset=TEXTS[:2])
    converter.train()
    converter.save_model(tmp_path / "converted")
    lm = load(tmp_path / "converted")
    assert [entry["verb"] for entry in history(lm)] == ["pretrain", "convert", "convert", "convert"]
    assert [entry["steps"] for entry in history(lm)] == [2, 1, 6, 3]
    assert all("eval_loss" in entry["metrics"] for entry in history(lm)[1:])
    tuner = SFTTrainer(lm, SFTConfig(**settings(tmp_path / "sft")), train_dataset=PAIRS)
    tuner.train()
    tuner.save_model(tmp_path / "tuned")
    tuner.save_model(tmp_path / "tuned")  # no stage is recorded twice
    assert [entry["verb"] for entry in history(load(tmp_path / "tuned"))] == [
        "pretrain",
        *["convert"] * 3,
        "sft",
    ]
    assert "| convert 3 |" in (tmp_path / "tuned/README.md").read_text()


def test_adapters_are_merged_before_their_card_is_written(tmp_path):
    trainer = make(
        "sft", tmp_path, peft_config=peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    )
    trainer.train()
    trainer.save_model(tmp_path / "model")
    text = (tmp_path / "model/README.md").read_text()
    assert "LlamaForCausalLM" in text and "| sft |" in text and history(load(tmp_path / "model"))


def test_a_later_evaluation_is_told_and_an_earlier_one_is_not(tmp_path):
    trainer = make("sft", tmp_path, eval_dataset=PAIRS[:2])
    trainer.evaluate()
    assert history(trainer.lm) == []
    trainer.train()
    told = trainer.evaluate()
    (entry,) = history(trainer.lm)
    assert entry["metrics"]["eval_loss"] == told["eval_loss"]


def test_checkpoints_have_no_card_and_a_push_has_ours(tmp_path):
    trainer = make("sft", tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    assert not (tmp_path / "checkpoint-2/README.md").exists()
    trainer.create_model_card(model_name="mine")
    assert MARKER in (tmp_path / "README.md").read_text()


def test_what_is_chosen_is_told_and_defaults_are_not(tmp_path):
    trainer = make("sft", tmp_path, lm=llama_lm(), min_time=0.25, weight_decay=0.5, max_steps=1)
    trainer.train()
    (entry,) = history(trainer.lm)
    assert entry["settings"] == {
        **{"learning_rate": 1e-2, "per_device_train_batch_size": 4, "max_steps": 1},
        **{"min_time": 0.25, "weight_decay": 0.5, "max_length": 32},
    }


def test_the_last_value_of_each_measure():
    log = [
        {"loss": 3.0, "grad_norm": 1.0, "step": 1, "reward": 0.5},
        {"eval_loss": 2.5, "eval_runtime": 1.0, "eval_steps_per_second": 3.0, "step": 1},
        {"loss": 2.0, "learning_rate": 0.1, "epoch": 1.0, "step": 2},
        {"train_runtime": 1.0, "train_loss": 2.5, "step": 2},
    ]
    assert last_metrics(log) == {"loss": 2.0, "reward": 0.5, "eval_loss": 2.5}


def test_a_file_is_called_by_its_name_alone(tmp_path):
    (tmp_path / "tales.txt").write_text("once")
    file = str(tmp_path / "tales.txt")
    assert data_name(DataConfig(train=file)) == "tales.txt"
    assert (
        data_name(DataConfig(train=[{"path": file}, {"path": "owner/stories"}])) == "tales.txt, owner/stories"
    )
    assert (
        data_name(DataConfig(task="sudoku"), get_task("sudoku")) == "sudoku"
        and data_name(DataConfig()) is None
    )
