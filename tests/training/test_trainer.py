"""The base trainer: the same training for any micro-batches, resume or checkpointing, and no silent
failure."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments

from tests.errors import raises
from tests.helpers import each_once, partly_slow
from tests.tiny import llama_causal, llama_lm
from tests.training.tiny_runs import (
    PAIRS,
    PREFERENCES,
    TEXTS,
    Before,
    batch,
    equal,
    low_ids,
    make,
    prepared,
    settings,
    weights,
)
from unmask.data.report import data_reports
from unmask.diffusion.views import Views
from unmask.errors import ConfigError, DataError, ModelError, TrainingError
from unmask.models.load import load
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer
from unmask.supervised.sft import SFTConfig, SFTTrainer
from unmask.training import metrics
from unmask.training.config_fields import NOT_READ
from unmask.training.metrics import measuring
from unmask.training.run.log import RunLog

VERBS = ["pretrain", "sft", "dpo", "grpo"]
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def trained(verb: str, folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    trainer = make(verb, folder, **more)
    trainer.train()
    return weights(trainer.lm)


# SGD, because Adam's first step amplifies rounding errors to the size of the learning rate.
ONE_STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0}


@pytest.mark.parametrize("verb", ["pretrain", "sft", "dpo"])
def test_accumulated_gradients_are_those_of_the_large_batch(verb, tmp_path):
    attention = "causal" if verb == "pretrain" else "bidirectional"
    large, *accumulated = [
        trained(
            verb,
            tmp_path,
            lm=llama_lm(attention, dtype=torch.float64),
            per_device_train_batch_size=8 // pieces,
            gradient_accumulation_steps=pieces,
            **ONE_STEP,
        )
        for pieces in (1, 2, 4)
    ]
    assert not equal(large, weights(llama_lm(attention, dtype=torch.float64)))
    for small in accumulated:
        # DPO stores float32 scores
        torch.testing.assert_close(small, large, rtol=0, atol=1e-6 if verb == "dpo" else 1e-12)


@pytest.mark.parametrize("verb", ["pretrain", "sft", "dpo", "grpo"])
def test_chunks_change_nothing_but_rounding(verb, tmp_path):
    attention = "causal" if verb == "pretrain" else "bidirectional"
    runs = [
        trained(
            verb, tmp_path, lm=llama_lm(attention, dtype=torch.float64), logprob_batch_size=chunk, **ONE_STEP
        )
        for chunk in (None, 1, 3)
    ]
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=0, atol=1e-6 if verb == "dpo" else 1e-12)


@pytest.mark.parametrize("attention", ["bidirectional", "block_causal"])
def test_a_batch_of_which_nothing_happens_to_be_hidden_is_a_step_like_any_other(
    attention, tmp_path, monkeypatch
):
    lm = llama_lm(attention, 2 if attention == "block_causal" else None)
    start = weights(lm)
    trainer = make("sft", tmp_path, lm, weight_decay=0.0)
    plan = trainer.plan
    monkeypatch.setattr(
        trainer,
        "plan",
        lambda rows, draw: Views(
            *(torch.zeros_like(part) for part in list(vars(plan(rows, draw)).values())[:3])
        ),
    )
    trainer.train()
    assert equal(weights(lm), start)


def test_masks_follow_from_sample_and_epoch_alone(tmp_path):
    trainer = make("sft", tmp_path, views=2)
    before = torch.get_rng_state()

    def masks(*rows: int) -> dict[int, list[list[bool]]]:
        made = batch(trainer, *rows)
        views = trainer.plan(made, trainer.draw(made))
        return {
            row: views.hidden_BMT[at, :, : len(trainer.train_dataset[row]["input_ids"])].tolist()
            for at, row in enumerate(rows)
        }

    together = masks(*range(8))
    assert masks(5, 2) == {row: together[row] for row in (5, 2)}
    assert masks(3) == {3: together[3]}
    assert torch.equal(torch.get_rng_state(), before)
    trainer.state.epoch = 1.75
    second = masks(*range(8))
    assert second != together
    trainer.state.epoch = 1.0
    assert masks(*range(8)) == second
    with measuring(trainer, "eval"):
        assert masks(*range(8)) == together  # evaluations always use the masks of epoch 0, to be comparable


@pytest.mark.parametrize("verb", VERBS)
def test_a_resumed_run_is_the_same_run_bit_for_bit(verb, tmp_path):
    # two steps an epoch: the cut is in the middle of the second
    run = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    run |= {"rows": PAIRS[:4]} if verb == "grpo" else {}
    straight = make(verb, tmp_path, **run)
    start = weights(straight.lm)
    straight.train()
    resumed = make(verb, tmp_path, **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert equal(weights(resumed.lm), weights(straight.lm))
    finished = make(verb, tmp_path, **run | {"max_steps": 3, "lr_scheduler_type": "constant"})
    finished.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert equal(weights(finished.lm), weights(load(tmp_path / "checkpoint-3")))  # nothing was left to do
    assert not equal(weights(straight.lm), start)


SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}


def logged(folder: Path) -> list[dict[str, float]]:
    """The log of a run, without its timings."""
    lines = [json.loads(line) for line in (folder / "training_logs.json").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.endswith(("_runtime", "_per_second"))}
        for line in lines
    ]


@pytest.mark.parametrize("torn", [None, '{"global_st'])
def test_a_run_killed_while_saving_goes_on_from_the_checkpoint_before(torn, tmp_path):
    straight = make("sft", tmp_path, **SAVING)
    straight.train()
    lines = logged(tmp_path)
    state = tmp_path / "checkpoint-6" / "trainer_state.json"
    state.unlink() if torn is None else state.write_text(torn)
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    resumed = make("sft", tmp_path, **SAVING)
    with pytest.warns(RuntimeWarning, match=r"checkpoint-6 \(.*: resuming from checkpoint-4") as warned:
        resumed.train(resume_from_checkpoint=True)
    assert len(warned) == 1
    assert equal(weights(resumed.lm), weights(straight.lm)) and logged(tmp_path) == lines


@partly_slow("verb", VERBS, 1)
def test_a_resumed_run_logs_what_was_recorded_before(verb, tmp_path):
    shape = {"max_steps": 6, "logging_steps": 3, "save_strategy": "steps", "save_steps": 1}
    shape |= {"num_iterations": 2, "reward": chatty} if verb == "grpo" else {}
    make(verb, tmp_path, **shape).train()
    straight = logged(tmp_path)
    for checkpoint in (1, 2, 4, 6):
        make(verb, tmp_path, **shape).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{checkpoint}"))
        assert logged(tmp_path) == straight, checkpoint
    first, second, summary = straight
    assert len(first) > 4 and summary["train_loss"] == pytest.approx((first["loss"] + second["loss"]) / 2)


def chatty(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
    log_metric("letters", sum(map(len, completions)))
    return [float(len(text)) for text in completions]


def test_without_a_whole_checkpoint_a_resumed_run_starts_anew(tmp_path):
    straight = make("sft", tmp_path, **SAVING)
    straight.train()
    lines = logged(tmp_path)
    for state in tmp_path.glob("checkpoint-*/trainer_state.json"):
        state.unlink()
    resumed = make("sft", tmp_path, **SAVING)
    with pytest.warns(
        RuntimeWarning, match="checkpoint-6 .*, checkpoint-4 .*, checkpoint-2 .*: resuming from the start"
    ):
        resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.lm), weights(straight.lm)) and logged(tmp_path) == lines


def test_weights_alone_are_not_gone_on_from(tmp_path):
    make("sft", tmp_path, **SAVING, save_only_model=True).train()
    with raises(TrainingError, where=str(tmp_path / "checkpoint-6/optimizer.pt")):
        make("sft", tmp_path, **SAVING, save_only_model=True).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("verb", VERBS)
def test_a_loss_that_is_not_finite_ends_the_run_and_spares_earlier_checkpoints(verb, tmp_path):
    lm = llama_lm("causal" if verb == "pretrain" else "bidirectional")

    def poison() -> None:
        with torch.no_grad():
            lm.model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan

    trainer = make(
        verb, tmp_path, lm, max_steps=6, save_strategy="steps", save_steps=2, callbacks=[Before(3, poison)]
    )
    with raises(TrainingError, where="step 3"):
        trainer.train()
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-2"]
    kept = load(tmp_path / "checkpoint-2")
    assert kept.settings == lm.settings
    assert all(weight.isfinite().all() for weight in kept.model.parameters())


def test_dropout_holds_in_training_and_never_in_evaluation(tmp_path):
    trainer = make("sft", tmp_path, llama_lm(attention_dropout=0.5), eval_dataset=PAIRS[:3])
    rows = batch(trainer, *range(8))
    torch.manual_seed(0)
    trainer.model.train()
    assert trainer.compute_loss(trainer.model, rows) != trainer.compute_loss(trainer.model, rows)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_loss"] == second["eval_loss"]


def test_evaluation_reports_the_loss_of_the_held_out_rows(tmp_path):
    trainer = make("sft", tmp_path, eval_dataset=PAIRS[:3], per_device_eval_batch_size=3)
    rows = trainer.data_collator([trainer.eval_dataset[row] for row in range(3)])
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.compute_loss(trainer.model, rows).item()
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert 0 < trainer.state.log_history[-1]["eval_cross_entropy"] < 2 * math.log(len(trainer.lm.tokenizer))
    assert not any("eval" in name for line in make_history(tmp_path / "b") for name in line)


def make_history(folder: Path, **more: Any) -> list[dict[str, float]]:
    trainer = make("sft", folder, **more)
    trainer.train()
    return trainer.state.log_history


def untimed(metrics: dict[str, float], prefix: str = "eval_") -> dict[str, float]:
    timed = ("_runtime", "_second", "_time", "epoch")
    return {name.removeprefix(prefix): value for name, value in metrics.items() if not name.endswith(timed)}


@pytest.mark.parametrize(("verb", "rows"), [("sft", PAIRS), ("dpo", PREFERENCES), ("grpo", PAIRS)])
def test_other_rows_can_be_evaluated_as_they_are_given(verb, rows, tmp_path):
    more = {"reference": "frozen"} if verb == "dpo" else {}
    trainer = make(verb, tmp_path, rows=rows[:4], eval_dataset=rows[4:], **more)
    other = make(verb, tmp_path, trainer.lm, rows=rows[:4], eval_dataset=rows[:4], **more)
    assert untimed(trainer.evaluate(rows[:4])) == untimed(other.evaluate())
    assert untimed(trainer.evaluate(trainer.eval_dataset)) == untimed(trainer.evaluate())
    with raises(ConfigError, where="eval_dataset"):
        make(verb, tmp_path, rows=rows).evaluate()


def test_what_a_run_logs_is_told_from_its_summary(tmp_path):
    """A resumed run recognizes the end of an earlier one by it, even if transformers writes the run time into
    every line."""
    trainer = make("sft", tmp_path, max_steps=4, include_num_input_tokens_seen="all")
    trainer.train()
    lines = (tmp_path / "training_logs.json").read_text().splitlines()
    trainer.rewind(3)
    assert (tmp_path / "training_logs.json").read_text().splitlines() == lines[:3]
    with raises(ConfigError, where="metric_key_prefix"):
        trainer.evaluate(PAIRS, metric_key_prefix="train")


@pytest.mark.parametrize(("verb", "mode"), [("sft", "min"), ("grpo", "max")])
def test_a_rate_that_follows_a_metric_knows_its_direction(verb, mode, tmp_path):
    run = {
        "eval_dataset": PAIRS,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "lr_scheduler_type": "reduce_lr_on_plateau",
    }
    trainer = make(verb, tmp_path, **run)
    trainer.train()
    assert trainer.lr_scheduler.mode == mode


@pytest.mark.parametrize("verb", ["sft", "dpo", "kto", "grpo"])
def test_an_evaluation_of_another_name_tells_all_and_changes_no_other(verb, tmp_path):
    rows = PREFERENCES if verb in ("dpo", "kto") else PAIRS
    run: dict[str, Any] = {
        "rows": rows[:4],
        "eval_dataset": rows[4:],
        "logging_steps": 2,
        "learning_rate": 0.0,
    }
    run |= (
        {"reference": "frozen"} if verb in ("dpo", "kto") else {"reward": low_ids} if verb == "grpo" else {}
    )
    trainer = make(verb, tmp_path / "a", **run)
    first, plain = trainer.evaluate(), make(verb, tmp_path / "b", **run)
    trainer.add_callback(Before(1, lambda: seen.append(trainer.evaluate(rows[:4], metric_key_prefix="test"))))
    seen: list[dict[str, float]] = []
    trainer.train()
    plain.train()
    assert untimed(trainer.evaluate()) == untimed(first)
    assert untimed(seen[0], "test_").keys() == untimed(first).keys() and untimed(seen[0], "test_") != untimed(
        first
    )
    lines = [
        next(untimed(line) for line in each.state.log_history if "loss" in line) for each in (trainer, plain)
    ]
    assert lines[0] == lines[1] and len(lines[0]) > 4


def test_the_best_model_is_that_of_a_metric_that_evaluations_have(tmp_path):
    run = {
        "eval_dataset": PAIRS,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    trainer = make("sft", tmp_path / "a", load_best_model_at_end=True, **run)
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert trainer.state.best_metric == min(losses) and trainer.evaluate()["eval_loss"] == min(losses)
    with raises(ConfigError, where="metric_for_best_model"):
        make("sft", tmp_path / "b", metric_for_best_model="f1", **run).train()


HELD_OUT = {
    "pretrain": {},
    "sft": {},
    "quality": {"quality_head": "joint"},
    "gaps": {"max_gap": 2},
    "dpo": {},
    "simpo": {"loss_type": "simpo"},
    "several": {"loss_type": ["sigmoid", "sft"]},
    "kto": {},
    "grpo": {},
}


@pytest.mark.parametrize("case", HELD_OUT)
@pytest.mark.parametrize("known", ["rewards/accuracies", "eval_rewards/margins"])
def test_a_metric_that_no_evaluation_has_is_refused_at_the_start_with_those_that_it_has(
    case, known, tmp_path
):
    verb = {"quality": "sft", "gaps": "sft", "simpo": "dpo", "several": "dpo"}.get(case, case)
    rows = {"pretrain": TEXTS, "dpo": PREFERENCES, "kto": PREFERENCES}.get(verb, PAIRS)
    trainer = make(
        verb,
        tmp_path,
        eval_dataset=rows,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model=known,
        **HELD_OUT[case],
    )
    with raises(ConfigError, where="metric_for_best_model") as caught:
        trainer.train()
    assert trainer.state.global_step == 0
    named = str(caught.value.remedy).removeprefix("Use one of ").split(", ")
    assert {*named} == trainer.evaluate().keys() - {"epoch", "eval_model_preparation_time"}


def test_a_rank_without_rows_has_a_loss_of_the_type_of_the_others(tmp_path):
    """Processes exchange losses without conversion."""
    trainer = make("sft", tmp_path, llama_lm(dtype=torch.float64))
    rows = batch(trainer, 0)
    parts = (
        rows,
        {name: value[:0] if isinstance(value, torch.Tensor) else value for name, value in rows.items()},
    )
    losses = [trainer.prediction_step(trainer.model, part, True)[0] for part in parts]
    assert losses[0].dtype == losses[1].dtype == torch.float64 and losses[1] == 0


def test_predictions_are_refused(tmp_path):
    with raises(TrainingError, where="predict"):
        make("sft", tmp_path).predict(PAIRS)


def test_metrics_are_kept_beside_the_checkpoints(tmp_path):
    history = make_history(tmp_path / "kept", save_strategy="steps", log_memory_usage=True)
    lines = [json.loads(line) for line in (tmp_path / "kept" / "training_logs.json").read_text().splitlines()]
    assert [(line["step"], line.get("loss")) for line in lines] == [
        (line["step"], line.get("loss")) for line in history
    ]
    assert all(0.05 < line["memory_gb"] < 64 for line in lines)
    assert not any("memory_gb" in line for line in make_history(tmp_path / "none"))


def test_the_metrics_of_a_part_of_a_run_go_where_the_run_says(tmp_path):
    make("pretrain", tmp_path / "stage-2", log=RunLog(folder=tmp_path, first_step=10, stage=2)).train()
    lines = [json.loads(line) for line in (tmp_path / "training_logs.json").read_text().splitlines()]
    assert [(line["step"], line["stage"]) for line in lines] == [(11, 2), (12, 2), (12, 2)]
    assert not (tmp_path / "stage-2" / "training_logs.json").exists()


class Recorder:
    """A progress stage that remembers."""

    def __init__(self) -> None:
        self.fractions: list[float] = []
        self.metrics: dict[str, float] = {}

    def update(self, fraction: float, **metrics: float) -> None:
        self.fractions.append(fraction)
        self.metrics |= metrics


def test_progress_rises_to_its_end_with_the_metrics(tmp_path, capsys):
    progress = Recorder()
    trainer = make("sft", tmp_path, max_steps=4, progress=progress, disable_tqdm=False)
    assert "tokens" in capsys.readouterr().out  # the report of the data, before training
    trainer.train()
    assert progress.fractions == sorted(progress.fractions)
    assert progress.fractions[-1] == 1.0 and 0.25 in progress.fractions
    assert set(progress.metrics) == {
        "loss",
        "cross_entropy",
        "learning_rate",
        "tokens_per_second",
        "memory_gb",
    }
    assert capsys.readouterr().out == ""


def test_tokens_per_second_are_those_since_the_last_line(tmp_path, monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    trainer = make("sft", tmp_path, max_steps=4, logging_steps=2)
    trainer.train()
    lines = [line["tokens_per_second"] for line in trainer.state.log_history if "loss" in line]
    tokens = sum(len(row["input_ids"]) for row in trainer.train_dataset)  # an epoch is two steps
    assert len(lines) == 2 and lines[0] * 10 == tokens == trainer.state.num_input_tokens_seen / 2


def test_float16_falls_back_where_it_cannot_work(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("float16 works on this machine")
    with pytest.warns(RuntimeWarning, match=r"fp16 is set.*float32"):
        trainer = make("sft", tmp_path, fp16=True)
    assert not trainer.args.fp16
    trainer.train()
    assert equal(weights(trainer.lm), trained("sft", tmp_path))


def test_bfloat16_trains_with_weights_in_float32(tmp_path):
    exact = make_history(tmp_path, max_steps=3)
    rounded = make_history(tmp_path, max_steps=3, bf16=True)
    assert [line["loss"] for line in rounded[:3]] == pytest.approx(
        [line["loss"] for line in exact[:3]], rel=0.05
    )
    assert rounded[0]["loss"] != exact[0]["loss"]


def test_data_workers_give_the_same_run(tmp_path):
    assert equal(trained("sft", tmp_path, dataloader_num_workers=1), trained("sft", tmp_path))


def test_data_workers_end_with_the_training(tmp_path):
    before = multiprocessing.active_children()
    trainer = make("sft", tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer.train()
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize(
    ("verb", "good", "columns"),
    [
        ("pretrain", TEXTS, ["text"]),
        ("sft", PAIRS, ["prompt", "completion"]),
        ("dpo", PREFERENCES, ["chosen", "rejected"]),
        ("grpo", PAIRS, ["prompt"]),
    ],
)
def test_a_row_without_a_column_is_named_with_it(verb, good, columns, tmp_path):
    for column in columns:
        broken = [dict(row) for row in good]
        del broken[5][column]
        with raises(DataError, where="train_dataset, row 5"):
            make(verb, tmp_path, rows=broken)
        with raises(DataError, where="eval_dataset, row 5"):
            make(verb, tmp_path, eval_dataset=broken)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("verb", "more"), [("pretrain", {}), ("sft", {}), ("sft", {"formatting_func": str})])
def test_a_stream_that_cannot_be_read_again_or_has_no_rows_is_refused(verb, more, tmp_path):
    for rows in (iter(TEXTS), Dataset.from_list(TEXTS).to_iterable_dataset().filter(lambda row: False)):
        with raises(DataError, where="train_dataset"):
            make(verb, tmp_path, rows=rows, max_steps=2, **more)


@pytest.mark.parametrize("verb", VERBS)
def test_an_empty_data_set_is_refused(verb, tmp_path):
    with raises(DataError, where="eval_dataset"):
        make(verb, tmp_path, eval_dataset=[])
    with raises(DataError, where="train_dataset"):
        SFTTrainer(llama_lm(), SFTConfig(**settings(tmp_path)), train_dataset=[])


@pytest.mark.parametrize("verb", VERBS)
def test_what_holds_no_rows_and_what_is_no_row_is_refused(verb, tmp_path):
    for rows in ("rows.jsonl", 5):
        with raises(DataError, where="train_dataset"):
            make(verb, tmp_path, rows=rows)
    with raises(DataError, where="eval_dataset"):
        make(verb, tmp_path, eval_dataset=5)
    with raises(DataError, where="train_dataset, row 0"):
        make(verb, tmp_path, rows=["abc", "de"] * 4)


def test_a_text_function_or_a_judge_that_is_no_function_is_refused(tmp_path):
    with raises(ConfigError, where="formatting_func"):
        make("sft", tmp_path, formatting_func="text")
    with raises(ConfigError, where="judge"):
        DPOTrainer(llama_lm(), args=DPOConfig(**settings(tmp_path)), train_dataset=PREFERENCES, judge=5)


@partly_slow("verb", VERBS, 1, 3)
def test_adapters_alone_are_trained_and_merge_into_a_plain_model(verb, tmp_path):
    lm = llama_lm("causal" if verb == "pretrain" else "bidirectional")
    before = weights(lm)
    trainer = make(
        verb, tmp_path / "run", lm, peft_config=peft.LoraConfig(**LORA), max_steps=4, learning_rate=0.1
    )
    trainer.train()
    after = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for name, value in weights(trainer.lm).items()
    }
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert any(value.abs().max() > 0 for name, value in after.items() if "lora_B" in name)

    trainer.save_model(str(tmp_path / "merged"))
    ids = torch.tensor([[1, 4, 5, 6, trainer.lm.mask_token_id, 7]])
    trainer.lm.model.eval()
    with torch.no_grad():
        merged = load(tmp_path / "merged")
        expected = trainer.lm.logits(ids)
        torch.testing.assert_close(merged.logits(ids), expected, atol=1e-5, rtol=1e-5)
        assert (
            llama_lm("causal" if verb == "pretrain" else "bidirectional").logits(ids) - expected
        ).nan_to_num().abs().max() > 1e-3
    assert merged.settings == lm.settings
    assert not any("lora" in name for name in merged.model.state_dict())


def test_a_resumed_run_of_adapters_is_the_same_run(tmp_path):
    def adapted() -> Any:
        torch.manual_seed(0)
        run = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        return make("sft", tmp_path, peft_config=peft.LoraConfig(**LORA, lora_dropout=0.2), **run)

    straight, resumed = adapted(), adapted()
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert equal(weights(resumed.lm), weights(straight.lm))


@each_once("lora, reentrant", [False, True], [False, True])
def test_activation_checkpointing_gives_the_same_gradients(lora, reentrant, tmp_path):
    def run(**more: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = peft.LoraConfig(**LORA, init_lora_weights=False) if lora else None
        return trained(
            "sft", tmp_path, lm=llama_lm(dtype=torch.float64), peft_config=config, **ONE_STEP, **more
        )

    checkpointed = run(
        activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    torch.testing.assert_close(checkpointed, run(), rtol=0, atol=1e-12)


def test_an_earlier_run_is_not_overwritten(tmp_path):
    make("sft", tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    before = (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes()
    with raises(TrainingError, where=str(tmp_path / "checkpoint-2")):
        make("sft", tmp_path, max_steps=4, save_strategy="steps", save_steps=1).train()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes() == before


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(tmp_path):
    lm = llama_lm()
    trainer = make("sft", tmp_path, lm, max_steps=2)
    start = weights(lm)
    next(iter(lm.model.parameters())).register_hook(lambda gradient: gradient * float("nan"))
    with raises(TrainingError, where="step 0"):
        trainer.train()
    assert equal(weights(lm), start)


def test_a_model_of_transformers_comes_with_its_tokenizer(tmp_path):
    model, tokenizer = llama_causal()
    trainer = SFTTrainer(
        model,
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, max_length=32),
        train_dataset=PAIRS,
        processing_class=tokenizer,
    )
    assert trainer.lm.attention == "causal" and trainer.lm.model is model
    with raises(ModelError, where="model"):
        SFTTrainer(
            model, SFTConfig(output_dir=str(tmp_path), use_cpu=True, max_length=32), train_dataset=PAIRS
        )


def test_batches_are_pinned_and_copied_asynchronously_where_there_is_a_gpu(tmp_path, monkeypatch):
    here = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    assert not here.dataloader_pin_memory and not here.accelerator_config.non_blocking
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)  # it would look for the GPU
    monkeypatch.setattr(TrainingArguments, "world_size", 1)
    there = SFTConfig(output_dir=str(tmp_path))
    assert there.dataloader_pin_memory and there.accelerator_config["non_blocking"]
    assert SFTConfig(
        output_dir=str(tmp_path), accelerator_config={"non_blocking": False}
    ).accelerator_config == {"non_blocking": False}
    assert not SFTConfig(output_dir=str(tmp_path), use_cpu=True).accelerator_config["non_blocking"]


@pytest.mark.parametrize("length", [1, 0, -1])
def test_rows_in_which_nothing_can_be_learnt_are_refused(length, tmp_path):
    with raises(ConfigError, where="max_length"):
        make("pretrain", tmp_path, max_length=length)


def test_adapters_for_which_there_is_no_place_are_refused_in_one_line(tmp_path):
    with raises(ConfigError, where="lora (peft_config), target_modules or modules_to_save") as refused:
        make(
            "sft", tmp_path, peft_config=peft.LoraConfig(r=2, target_modules=["nope"], task_type="CAUSAL_LM")
        )
    assert "'nope'" in refused.value.what and "\n" not in str(refused.value)


def test_the_loss_of_an_evaluation_is_that_of_all_its_tokens_however_they_are_batched(tmp_path):
    lm, rows = llama_lm(), [{"prompt": "a", "completion": "bc" * n} for n in (1, 9, 2, 7, 1)]
    told = {}
    for size in (1, 2, 5):
        trainer = make("sft", tmp_path, lm, rows=rows, eval_dataset=rows, per_device_eval_batch_size=size)
        told[size] = trainer.evaluate()["eval_loss"]
        assert trainer.state.log_history[-1]["eval_loss"] == told[size]
    assert told[1] == pytest.approx(told[5], rel=1e-5) and told[2] == pytest.approx(told[5], rel=1e-5)


@pytest.mark.parametrize(
    ("refused", "where"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_kwargs"),
        (
            {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": "a"}},
            "lr_scheduler_kwargs",
        ),
        ({"seed": -1}, "seed"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers"),
        ({"max_steps": 0}, "max_steps"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"logprob_batch_size": -1}, "logprob_batch_size"),
        ({"eval_strategy": "steps"}, "eval_strategy"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_first_step(refused, where, tmp_path):
    with raises(ConfigError, where=where):
        make("sft", tmp_path, **refused)


OTHER_VALUES = {
    "length_column_name": "size",
    "label_names": ["labels"],
    "include_for_metrics": ["loss"],
    "eval_accumulation_steps": 1,
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
}


@pytest.mark.parametrize("name", NOT_READ)
def test_a_setting_of_transformers_that_nothing_reads_is_refused(name):
    value, reason = NOT_READ[name]
    SFTConfig(output_dir="x", use_cpu=True, **{name: value})
    other = OTHER_VALUES.get(name, not value)
    with pytest.raises(ConfigError) as refused:
        SFTConfig(output_dir="x", use_cpu=True, **{name: other})
    assert refused.value.where == name and reason in refused.value.what


@pytest.mark.parametrize("verb", ["pretrain", "sft", "dpo", "grpo"])
def test_operations_are_counted_as_transformers_counts_them(verb, tmp_path):
    trainer = prepared(verb, tmp_path)
    trainer.train()
    weights = trainer.model.num_parameters(exclude_embeddings=True)
    tokens = trainer.state.num_input_tokens_seen
    assert trainer.state.total_flos == 6 * tokens * weights > 0


def test_an_optimizer_that_is_not_installed_is_named(tmp_path):
    with raises(ConfigError, where="optim"):
        make("sft", tmp_path, optim="galore_adamw", optim_target_modules=["mlp"]).train()


def test_rows_that_do_not_fill_a_batch_are_refused_where_such_batches_are_left_out(tmp_path):
    for verb in ("sft", "dpo"):
        make(verb, tmp_path, per_device_train_batch_size=8, dataloader_drop_last=True)
        with raises(ConfigError, where="dataloader_drop_last"):
            make(verb, tmp_path, per_device_train_batch_size=9, dataloader_drop_last=True)


def test_a_checkpoint_is_known_by_its_whole_name_and_is_of_a_run_with_or_without_adapters(tmp_path):
    run = {"save_strategy": "steps", "save_steps": 1}
    make("sft", tmp_path / "1", **run).train()
    # the folder of a run, whose name is a number
    make("sft", tmp_path / "2", **run).train(resume_from_checkpoint=tmp_path / "1")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    with raises(ConfigError, where="model.shapes and model.adapters and model.weights"):
        make("sft", tmp_path / "3", peft_config=lora, **run).train(resume_from_checkpoint=tmp_path / "1")
    make("sft", tmp_path / "4", peft_config=lora, **run).train()
    with raises(ConfigError, where="model.shapes and model.adapters and model.weights"):
        make("sft", tmp_path / "5", **run).train(resume_from_checkpoint=tmp_path / "4")


SHOWN = {
    "pretrain": ["<s>⟦abcab</s>⟧"],
    "sft": ["<s>ab⟦cab</s>⟧"],
    "dpo": ["<s>ab⟦cab</s>⟧", "<s>ab⟦bach</s>⟧"],
    "kto": ["<s>ab⟦cab</s>⟧"],
    "grpo": ["<s>ab⟦⟧"],
}


@pytest.mark.parametrize("verb", SHOWN)
def test_rows_are_shown_with_what_is_learnt_of_them(verb, tmp_path, capsys):
    trainer = make(verb, tmp_path, show_rows=2)
    shown = capsys.readouterr().out
    for part, text in enumerate(SHOWN[verb], start=1):
        where = "row 0" + f", part {part} of {len(SHOWN[verb])}" * (len(SHOWN[verb]) > 1)
        assert f"{where}, trained on between ⟦ and ⟧:\n{text}\n" in shown
    assert "row 1" in shown and "row 2" not in shown
    assert data_reports(trainer)["train"]["rows"][0] == SHOWN[verb]
    make(verb, tmp_path)
    assert "⟦" not in capsys.readouterr().out
