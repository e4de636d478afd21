"""Gaps of unknown length: the canvases, the loss by hand, what is trained, saved and refused."""

from __future__ import annotations

from collections import Counter

import peft
import pytest
import torch
from scipy.stats import chisquare

import unmask
from tests.errors import raises
from tests.tiny import llama_lm
from tests.training.tiny_runs import batch, make
from unmask.data.rows import Collator, make_row
from unmask.diffusion.views import MaskRNG
from unmask.errors import ConfigError, GenerationError, ModelError
from unmask.models.export import export
from unmask.models.length_tokens import add_length_tokens, predicting_lengths
from unmask.supervised.variable_length import canvas_log_probs, canvas_loss, make_canvases


def with_tokens(**more):
    return add_length_tokens(llama_lm(dtype=torch.float64, vocab_size=60, **more))


def rows_of(count: int, length: int, prompt: int = 3, first: int = 0) -> dict:
    """Rows whose tokens are all different: BOS, a prompt, and trained tokens with EOS."""
    ids = [1, *range(20, 18 + length), 2]
    return Collator(0)(
        [
            make_row(ids, [1] * length, [place >= prompt for place in range(length)], first + n)
            for n in range(count)
        ]
    )


def runs_of(canvases, rows, row: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Each run of hidden positions of a row of different tokens: the tokens that it stands for, the ids that
    it shows, and its targets."""
    ids, targets, hidden = (
        each[row].tolist() for each in (canvases.ids_BT, canvases.target_BT, canvases.hidden_BT)
    )
    clean, found, stop = rows["input_ids"][row].tolist(), [], 0
    for start, is_hidden in enumerate(hidden):
        if is_hidden and start >= stop:
            stop = hidden.index(False, start)
            between = clean[clean.index(ids[start - 1]) + 1 : clean.index(ids[stop])]
            found.append((between, ids[start:stop], targets[start:stop]))
    return found


def test_hidden_positions_have_the_targets_that_a_sampler_needs():
    lm, seen = with_tokens(), Counter()
    for iteration in range(60):
        rows = rows_of(8, 24)
        canvases = make_canvases(lm, rows, MaskRNG(0, rows["sample_id"], iteration), 5)
        for tokens, shown, targets in (run for row in range(8) for run in runs_of(canvases, rows, row)):
            if set(shown) == {lm.mask_token_id}:
                assert targets == tokens
            else:
                assert set(shown) == {lm.expand_token_id} and len(shown) <= 5
                expected = [*tokens, *[lm.delete_token_id] * len(shown)][: len(shown)]
                if len(tokens) > len(shown):
                    expected[-1] = lm.expand_token_id
                assert targets == expected
                seen[len(tokens), len(shown)] += 1
    assert {(length, positions) for length in range(6) for positions in range(1, 6)} - {
        (0, 5)
    } <= seen.keys()  # also one for all, and all for one


def test_what_is_visible_is_the_text():
    lm, rows = with_tokens(), rows_of(16, 24)
    canvases, ended = make_canvases(lm, rows, MaskRNG(3, rows["sample_id"]), 4), set()
    for ids, targets, hidden, documents, clean in zip(
        *(
            each.tolist()
            for each in (
                canvases.ids_BT,
                canvases.target_BT,
                canvases.hidden_BT,
                canvases.document_BT,
                rows["input_ids"],
            )
        ),
        strict=True,
    ):
        text = [
            token for token, was, document in zip(ids, hidden, documents, strict=True) if document and not was
        ]
        assert text == [token for token in clean if token in text] and text[:3] == clean[:3]
        ended.add(text[-1] == 2)
        assert sum(hidden) > 0 and all(
            target == token for token, target, was in zip(ids, targets, hidden, strict=True) if not was
        )
    assert ended == {True, False}


def test_no_number_of_missing_tokens_is_favoured_and_the_number_of_positions_says_nothing_about_it():
    lm, rows, seen = with_tokens(), rows_of(4000, 16, prompt=5), Counter()
    canvases = make_canvases(lm, rows, MaskRNG(1, rows["sample_id"]), 5)
    for tokens, shown, _ in (run for row in range(4000) for run in runs_of(canvases, rows, row)):
        seen[len(tokens), len(shown)] += set(shown) == {lm.expand_token_id}
    assert (
        chisquare([seen[missing, positions] for missing in range(6) for positions in range(1, 6)]).pvalue
        > 1e-3
    ), seen


def test_a_canvas_does_not_depend_on_other_rows():
    lm, rows = with_tokens(), rows_of(6, 24)
    together = make_canvases(lm, rows, MaskRNG(0, rows["sample_id"]), 5)
    for row in range(6):
        alone = rows_of(1, 24, first=row)
        one = make_canvases(lm, alone, MaskRNG(0, alone["sample_id"]), 5)
        width = one.ids_BT.shape[1]
        assert (
            torch.equal(one.ids_BT[0], together.ids_BT[row, :width])
            and not together.hidden_BT[row, width:].any()
        )


def test_documents_that_are_packed_into_a_row_have_no_gap_in_common():
    lm = with_tokens()
    row = make_row([1, *range(20, 28), 1, *range(30, 38)], [1] * 9 + [2] * 9, [False] + [True] * 17, 0)
    for seed in range(40):
        rows = Collator(0)([row])
        canvases = make_canvases(lm, rows, MaskRNG(seed, rows["sample_id"]), 17)
        ids, documents = canvases.ids_BT[0].tolist(), canvases.document_BT[0].tolist()
        assert documents == sorted(documents) and set(documents) == {1, 2}
        for token, document in zip(ids, documents, strict=True):
            assert not 20 <= token < 28 or document == 1
            assert not 30 <= token < 38 or document == 2


def test_canvases_stay_within_the_context():
    lm, rows = with_tokens(max_position_embeddings=26), rows_of(50, 24)
    canvases = make_canvases(lm, rows, MaskRNG(0, rows["sample_id"]), 8)
    assert (canvases.document_BT > 0).sum(1).max() == 26


def test_the_loss_is_the_mean_over_hidden_positions():
    lm, rows = with_tokens(), rows_of(5, 14)
    canvases, items_B = make_canvases(lm, rows, MaskRNG(0, rows["sample_id"]), 4), rows["maskable"].sum(1)
    log_prob_N = canvas_log_probs(lm, canvases)
    expected = 0.0
    for row in range(5):
        real_T = canvases.document_BT[row] > 0
        ids_1T, hidden_1T = canvases.ids_BT[row][real_T][None], canvases.hidden_BT[row][real_T][None]
        log_prob_TV = predicting_lengths(lm).logits(ids_1T, hidden_BT=hidden_1T)[0].log_softmax(-1)
        own = log_prob_TV.gather(1, canvases.target_BT[row][real_T][:, None])[:, 0][hidden_1T[0]]
        expected -= float(own.mean().detach()) * int(items_B[row])
    assert float(canvas_loss(log_prob_N, canvases, items_B).detach()) == pytest.approx(expected, rel=1e-7)


def test_accumulated_gradients_are_those_of_the_large_batch(tmp_path):
    found = []
    for pieces in (1, 2, 4):
        step = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_gap": 3}
        rows = {"per_device_train_batch_size": 8 // pieces, "gradient_accumulation_steps": pieces}
        trainer = make("sft", tmp_path / str(pieces), llama_lm(dtype=torch.float64), **step, **rows)
        trainer.train()
        found.append({name: weight.clone() for name, weight in trainer.lm.model.state_dict().items()})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("logit_shift", [True, False])
def test_a_trained_model_is_saved_with_its_tokens_and_fills_gaps(logit_shift, tmp_path):
    trainer = make(
        "sft",
        tmp_path / "run",
        llama_lm(logit_shift=logit_shift),
        max_gap=3,
        max_steps=3,
        eval_dataset=[{"text": "abcd"}],
    )
    trainer.train()
    assert {"cross_entropy", "loss"} <= trainer.state.log_history[0].keys() and trainer.evaluate()[
        "eval_loss"
    ] > 0
    trainer.save_model(str(tmp_path / "model"))
    loaded = unmask.load(tmp_path / "model")
    one, other = (unmask.infill(lm, ["ab<gap>cd"], length="auto", max_gap=3) for lm in (loaded, trainer.lm))
    assert one == other and 1 <= one.gaps[0][0].length <= 3
    assert loaded.max_gap == 3 and unmask.infill(loaded, ["ab<gap>cd"], length="auto") == one
    assert (
        "of up to 3 tokens, filled with tokens that expand" in (tmp_path / "model" / "README.md").read_text()
    )
    with raises(GenerationError, where="max_gap"):
        unmask.infill(loaded, ["ab<gap>cd"], length="auto", max_gap=4)
    assert unmask.infill(loaded, ["ab<gap>cd"], length="search", max_gap=4).gaps[0][0].forward_passes


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    def run(folder, **more):
        return make("sft", folder, max_gap=3, max_steps=4, save_strategy="steps", save_steps=2, **more)

    whole = run(tmp_path)
    whole.train()
    again = run(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, weight in whole.lm.model.state_dict().items():
        assert torch.equal(weight, again.lm.model.state_dict()[name]), name


@pytest.mark.slow
def test_lengths_that_the_text_determines_are_learnt(tmp_path):
    """The first letter says how many letters stand between it and the last one."""
    texts = ["abcde"[n] + "gh"[m] * (n + 2) for n in range(5) for m in range(2)]
    steps = {
        "max_gap": 6,
        "max_steps": 600,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 10,
        "logging_steps": 600,
    }
    trainer = make("sft", tmp_path, rows=[{"text": text} for text in texts], **steps)
    trainer.train()
    found = unmask.infill(
        trainer.lm, [f"{text[0]}<gap>{text[-1]}" for text in texts], length="auto", max_gap=6
    )
    right = sum(gap.length == len(text) - 2 for (gap,), text in zip(found.gaps, texts, strict=True))
    assert right >= 7, found.texts


def test_what_cannot_be_trained_is_refused(tmp_path):
    for attention, block_size in (("causal", None), ("block_causal", 4)):
        with raises(ModelError, where="max_gap"):
            make("sft", tmp_path, llama_lm(attention, block_size), max_gap=3)
    with raises(ConfigError, where="max_gap"):
        make("sft", tmp_path, max_gap=3, peft_config=peft.LoraConfig(target_modules=["q_proj"]))
    for name, value in (
        ("views", 2),
        ("weighting", "uniform"),
        ("quality_head", "joint"),
        ("exact_count", True),
        ("logprob_batch_size", 2),
    ):
        with raises(ConfigError, where=f"{name} and max_gap"):
            make("sft", tmp_path, max_gap=3, **{name: value})
    with raises(ConfigError, where="max_gap"):
        make("sft", tmp_path, max_gap=0)


def test_such_a_model_is_not_exported(tmp_path):
    with raises(ModelError, where="layout"):
        export(with_tokens(), tmp_path / "out", "llada")
    assert not (tmp_path / "out").exists()


def test_rows_without_a_learnt_token_but_the_end_have_no_gap(tmp_path):
    trainer = make("sft", tmp_path, max_gap=3)
    rows = batch(trainer, 0, 1)
    rows["maskable"] &= rows["input_ids"] == trainer.lm.eos_token_id
    canvases = make_canvases(trainer.lm, rows, MaskRNG(0, rows["sample_id"]), 3)
    assert not canvases.hidden_BT.any() and canvas_log_probs(trainer.lm, canvases).shape == (0,)
