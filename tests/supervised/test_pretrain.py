"""Pre-training is the next-token training of any causal model."""

from __future__ import annotations

import math
import shutil
from itertools import chain

import pytest
import torch
from datasets import Dataset, IterableDataset

import unmask
from tests.errors import raises
from tests.helpers import each_once
from tests.tiny import llama_causal, llama_lm
from tests.training.tiny_runs import TEXTS, batch, equal, make, weights
from unmask.errors import ConfigError, DataError, ModelError


@pytest.mark.parametrize("texts", [["abcdef", "hgfeda", "aaabbb"], ["abcdefgh", "a", "cafe"]])
def test_the_loss_is_that_of_transformers_and_at_first_that_of_guessing(texts, tmp_path):
    trainer = make("pretrain", tmp_path, rows=[{"text": text} for text in texts])
    rows = batch(trainer, *range(len(texts)))
    model, tokenizer = llama_causal()
    expected = model(
        input_ids=rows["input_ids"],
        attention_mask=rows["documents"],
        labels=torch.where(rows["documents"] > 0, rows["input_ids"], -100),
    ).loss.item()
    trainer.model.eval()
    assert trainer.compute_loss(trainer.model, rows).item() == pytest.approx(expected, abs=1e-5)
    assert expected == pytest.approx(math.log(len(tokenizer) - 1), abs=0.15)  # every token but <unk>


def test_packed_documents_are_learnt_as_if_alone(tmp_path):
    texts = [{"text": text} for text in ("abc", "hg", "cafe")]
    packed = make("pretrain", tmp_path, rows=texts, packing=True)
    apart = make("pretrain", tmp_path, rows=texts)
    assert len(packed.train_dataset) == 1 and len(apart.train_dataset) == 3
    with torch.no_grad():
        one, three = (
            packed.compute_loss(packed.model, batch(packed, 0)),
            apart.compute_loss(apart.model, batch(apart, 0, 1, 2)),
        )
    assert one.item() == pytest.approx(three.item(), abs=1e-5)


def test_it_learns(tmp_path):
    trainer = make("pretrain", tmp_path, rows=[{"text": "abcdefgh"}] * 4, max_steps=30, text_column="text")
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[0] > 2 and losses[-1] < 0.5


def test_the_column_has_the_name_that_it_is_given(tmp_path):
    rows = [{"story": "abc"}, {"story": "hg"}]
    assert len(make("pretrain", tmp_path, rows=rows, text_column="story").train_dataset) == 2
    with raises(DataError, where="train_dataset, row 0"):
        make("pretrain", tmp_path, rows=rows)


@pytest.mark.parametrize("text", [None, 5])
def test_what_is_not_text_is_refused_with_its_row(text, tmp_path):
    with raises(DataError, where="train_dataset, row 1"):
        make("pretrain", tmp_path, rows=[{"text": "a"}, {"text": text}])


def test_only_causal_models_are_pretrained(tmp_path):
    for lm in (llama_lm(), llama_lm("block_causal", 4), llama_lm("causal", logit_shift=False)):
        with raises(ModelError, where="model"):
            make("pretrain", tmp_path, lm)


# Streams


def stream():
    return IterableDataset.from_generator(lambda: iter(TEXTS)).shuffle(seed=0, buffer_size=5)


@each_once("workers, packing", [0, 1], [True, False])
def test_a_streamed_run_resumed_is_the_same_bit_for_bit(packing, workers, tmp_path):
    # Seven steps of two batches of three rows: several passes over the stream, which ends in the middle of a
    # batch.
    run = {
        "packing": packing,
        "max_length": 7,
        "max_steps": 7,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
    }
    run |= {
        "dataloader_num_workers": workers,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 4,
    }

    straight = make("pretrain", tmp_path, rows=stream(), **run)
    seen = batches_of(straight)
    straight.train()
    assert list(chain(*seen)) == list(range(42))  # every row once, in order
    shutil.rmtree(tmp_path / "checkpoint-7")
    resumed = make("pretrain", tmp_path, rows=stream(), **run)
    seen_again = batches_of(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.lm), weights(straight.lm))
    assert seen_again == seen[8:]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_other_rows_of_a_stream_are_refused_if_the_run_has_read_them(workers, tmp_path):
    texts = [
        {"text": f"{text}{text[::-1]}"[: 1 + n % 7]}
        for n, text in enumerate(row["text"] for row in TEXTS * 16)
    ]
    run = {
        "max_steps": 6,
        "per_device_train_batch_size": 20,
        "dataloader_num_workers": workers,
        "lr_scheduler_type": "constant",
    }
    run |= {"save_strategy": "steps", "save_steps": 4}
    straight = make("pretrain", tmp_path, rows=Dataset.from_list(texts).to_iterable_dataset(), **run)
    straight.train()

    def resume(changed):
        shutil.rmtree(tmp_path / "checkpoint-6", ignore_errors=True)
        rows = [row if n != changed else {"text": "abcabc"} for n, row in enumerate(texts)]
        resumed = make("pretrain", tmp_path, rows=Dataset.from_list(rows).to_iterable_dataset(), **run)
        resumed.train(resume_from_checkpoint=True)
        return weights(resumed.lm)

    message = "train_dataset: the first 80 rows of the stream are not those that the run read"
    with pytest.raises(DataError, match=message):  # which torch quotes where a worker has raised it
        resume(70)
    assert equal(resume(None), weights(straight.lm))
    assert not equal(resume(90), weights(straight.lm))


def batches_of(trainer):
    """The sample ids of each training batch."""
    seen = []
    step = trainer.training_step

    def recorded(model, inputs, *rest):
        seen.append(inputs["sample_id"].tolist())
        return step(model, inputs, *rest)

    trainer.training_step = recorded
    return seen


def test_a_stream_trains_as_its_rows_do(tmp_path):
    """Compared with the same rows in a list that is not shuffled."""
    run = {"packing": True, "max_length": 7, "max_steps": 2, "train_sampling_strategy": "sequential"}
    ends = []
    for rows in (TEXTS, Dataset.from_list(TEXTS), Dataset.from_list(TEXTS).to_iterable_dataset()):
        trainer = make("pretrain", tmp_path, rows=rows, **run)
        trainer.train()
        ends.append(weights(trainer.lm))
    assert equal(ends[0], ends[1]) and equal(ends[0], ends[2])


def test_what_a_stream_cannot_do_is_refused(tmp_path):
    with raises(ConfigError, where="max_steps"):
        make("pretrain", tmp_path, rows=stream(), max_steps=-1)
    with raises(ConfigError, where="dataloader_num_workers"):
        make("pretrain", tmp_path, rows=stream(), dataloader_num_workers=2)
    with raises(DataError, where="train_dataset, row 0"):
        make("pretrain", tmp_path, rows=stream(), text_column="story")


@each_once("noise, attention", ["masked", "uniform", "hybrid"], ["bidirectional", "block_causal"])
def test_a_diffusion_model_can_be_trained_from_the_start(attention, noise, tmp_path):
    rows = [{"text": "abcdefgh"}] * 8
    trainer = make("pretrain", tmp_path, rows=rows, noise=noise, attention=attention, max_steps=60)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    kept = unmask.load(tmp_path / "model")
    assert (kept.attention, kept.noise) == (attention, noise)
    bound = unmask.log_likelihood(kept, ["a"], ["bcdefgh"], estimator="elbo", samples=64).item()
    assert bound > 0.9 * -7 * math.log(len(kept.tokenizer) - 1)  # better than guessing


def test_noise_of_a_causal_model_is_refused(tmp_path):
    for given in ({"noise": "uniform"}, {"schedule": "cosine"}):
        with raises(ConfigError, where=next(iter(given))):
            make("pretrain", tmp_path, **given)
