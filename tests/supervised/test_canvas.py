"""DiffusionGemma is fine-tuned with the loss and the gradients of TRL's script."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests import tiny
from tests.diffusion_gemma import CANVAS, exact, exact_models, loaded, published_model
from tests.errors import raises
from tests.helpers import examples, partly_slow
from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import MaskRNG
from unmask.errors import ConfigError
from unmask.supervised.canvas import CanvasObjective, answer_canvases
from unmask.supervised.sft import SFTConfig, SFTTrainer

EOS = 2
WINDOW = {"sliding_window": 64}
"""Longer than rows, as in the published recipe: of a longer row the script keeps the keys of its end, and not of
what comes before the canvas."""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A model in float64 as Unmask and as transformers read it."""
    return exact_models(tmp_path_factory.mktemp("model"), **WINDOW)


@pytest.fixture(scope="module")
def lm(both):
    return both[0]


def made_batch(prompts, answers, *, cut=()):
    """Rows of a prompt and an answer, which ends unless it is cut."""
    rows = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.randint(4, 36, (prompt + answer,), generator=torch.Generator().manual_seed(number))
        if number not in cut:
            ids[-1] = EOS
        rows.append((ids, torch.arange(len(ids)) >= prompt))
    width = max(len(ids) for ids, _ in rows)

    def padded(parts, value):
        return torch.stack([F.pad(part, (0, width - len(part)), value=value) for part in parts])

    return {
        "input_ids": padded([ids for ids, _ in rows], 3),
        "maskable": padded([learned for _, learned in rows], False),
        "documents": padded([torch.ones_like(ids) for ids, _ in rows], 0),
    }


def transcribed(model, batch, start_B, seen_BK, time_B, is_on_B, cut_B, *, loo):
    """The loss of TRL's script (`DiffusionGemmaSFTTrainer.compute_loss`), with its random numbers given."""
    ids_BT, real_BT = batch["input_ids"], batch["documents"]
    offset_K, end_B = (
        torch.arange(CANVAS),
        batch["maskable"].shape[1] - batch["maskable"].flip(1).int().argmax(1),
    )
    place_BK = start_B[:, None] + offset_K
    inside_BK = place_BK < end_B[:, None]
    clean_BK = torch.where(inside_BK, ids_BT.gather(1, place_BK.clamp_max(ids_BT.shape[1] - 1)), EOS)
    visible_BT = (torch.arange(ids_BT.shape[1]) < start_B[:, None]).long()
    arguments = {
        "input_ids": ids_BT,
        "attention_mask": real_BT,
        "decoder_input_ids": seen_BK,
        "decoder_attention_mask": torch.cat([visible_BT, torch.ones_like(seen_BK)], 1),
        "decoder_position_ids": place_BK,
    }
    with torch.no_grad():
        earlier_BKV = model(**arguments).logits
    out = model(**arguments, self_conditioning_logits=earlier_BKV, self_conditioning_mask=is_on_B)
    logits_BKV, target_BK = out.logits, clean_BK.masked_fill(cut_B[:, None] & ~inside_BK, -100)
    if loo:
        kept_B1 = 1 - time_B[:, None]
        more_BK = torch.log1p(logits_BKV.shape[-1] * kept_B1 / (1 - kept_B1)).float().expand_as(seen_BK)
        logits_BKV = logits_BKV.scatter_add(2, seen_BK[..., None], more_BK[..., None])
    canvas = F.cross_entropy(logits_BKV.flatten(0, 1), target_BK.flatten())
    cap = model.config.text_config.final_logit_softcapping
    encoder_BTV = torch.tanh(model.lm_head(out.encoder_last_hidden_state).float() / cap) * cap
    next_BT = torch.where(real_BT[:, 1:] * real_BT[:, :-1] > 0, ids_BT[:, 1:], -100)
    return canvas + F.cross_entropy(encoder_BTV[:, :-1].flatten(0, 1), next_BT.flatten())


@pytest.mark.parametrize("loo", [False, True])
@pytest.mark.parametrize(
    "prompts, answers, cut",
    [((5, 9, 3, 7), (4, 20, 16, 8), ()), ((11, 2), (13, 3), (0,))],
    ids=["whole", "cut"],
)
def test_loss_and_gradients_are_those_of_trl(prompts, answers, cut, loo, both):
    (lm, model), batch = both, made_batch(prompts, answers, cut=cut)
    kind = "mean_loo" if loo else "mean"
    objective = CanvasObjective(SFTConfig(output_dir="unused", model_prediction_type=kind))
    draw = MaskRNG(1, torch.arange(len(prompts)))
    canvases = objective.canvases(lm, batch, draw)
    seen_BMK, time_BM = objective.noised(lm, batch, canvases, draw)
    is_on_B = draw.per_sequence(1, RngStream.CONDITION)[:, 0] < 0.5
    assert is_on_B.any() and not is_on_B.all()
    cut_B = torch.tensor([number in cut for number in range(len(prompts))])

    chosen = canvases.start_BM[:, 0], seen_BMK[:, 0], time_BM[:, 0]
    for each in (model, lm.model):
        each.zero_grad()
    with exact():
        expected = transcribed(model, batch, *chosen, is_on_B, cut_B, loo=loo)
        expected.backward()
        found = objective.loss(lm, batch, draw, None).loss / objective.items(lm, batch, draw)
        found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    theirs = dict(model.named_parameters())
    compared = 0
    for name, weight in lm.model.named_parameters():
        if theirs[name].grad is not None:
            torch.testing.assert_close(weight.grad, theirs[name].grad, rtol=1e-6, atol=1e-9)
            compared += 1
    assert compared > 60


def expected_canvases(ids, learned, documents):
    """Start and tokens of each canvas of a row (None: not trained on), told in a loop."""
    found, column = [], 0
    while column < len(ids):
        if not learned[column]:
            column += 1
            continue
        stop = column
        while stop < len(ids) and learned[stop] and documents[stop] == documents[column]:
            stop += 1
        for start in range(column, stop, CANVAS):
            own = ids[start : min(start + CANVAS, stop)]
            rest = CANVAS - len(own)
            found.append((start, own + [EOS if own[-1] == EOS else None] * rest))
        column = stop
    return found


@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(2, 6), st.integers(0, 20), st.booleans()), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    )
)
@examples(30)
def test_canvases_begin_where_answers_do(rows, lm):
    """Rows of several documents, each with a prompt and an answer, which ends or is cut."""
    batch = {"input_ids": [], "maskable": [], "documents": []}
    for row in rows:
        ids, learned, documents = [1], [False], [1]
        for number, (prompt, answer, ends) in enumerate(row, start=1):
            ids += [5] * prompt + [7] * (answer - 1) + ([EOS if ends else 8] if answer else [])
            learned += [False] * prompt + [True] * answer
            documents += [number] * (prompt + answer)
        for name, values in zip(batch, (ids, learned, documents), strict=True):
            batch[name].append(torch.tensor(values))
    width = max(map(len, batch["input_ids"]))
    batch = {
        name: torch.stack([F.pad(each, (0, width - len(each))) for each in rows])
        for name, rows in batch.items()
    }
    draw = MaskRNG(0, torch.arange(len(rows)))
    every, one = (answer_canvases(lm, batch, draw, every=each) for each in (True, False))
    for row in range(len(rows)):
        expected = expected_canvases(*(batch[name][row].tolist() for name in batch))
        found = [
            (start, [token if wanted else None for token, wanted in zip(tokens, targets, strict=True)])
            for start, tokens, targets in zip(
                every.start_BM[row].tolist(),
                every.token_BMK[row].tolist(),
                every.target_BMK[row].tolist(),
                strict=True,
            )
            if any(targets)
        ]
        assert found == expected
        if expected:
            assert int(one.start_BM[row, 0]) in [start for start, _ in expected]
        else:
            assert not one.target_BMK[row].any()


def words(count):
    """Conversations in which an answer repeats its question."""
    letters = "abcdef"
    return [{"prompt": letters[n % 6] * 3, "completion": letters[n % 6] * (2 + n % 12)} for n in range(count)]


def trained(lm, folder, rows=24, **settings):
    given = {"learning_rate": 3e-3, "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1}
    args = SFTConfig(output_dir=str(folder), **given | {"save_strategy": "no", "seed": 3} | settings)
    trainer = SFTTrainer(lm, args, train_dataset=words(rows))
    trainer.train()
    return trainer


def weights_of(trainer):
    return {name: weight.detach().clone() for name, weight in trainer.lm.model.named_parameters()}


@pytest.fixture
def small(tmp_path):
    return loaded(tmp_path / "small")


@pytest.mark.slow
def test_a_model_learns_to_answer(small, tmp_path):
    trainer = trained(small, tmp_path / "run", max_steps=60, per_device_train_batch_size=12)
    losses = [entry["cross_entropy"] for entry in trainer.state.log_history if "cross_entropy" in entry]
    assert losses[-1] < losses[0] / 2
    assert {"lm_cross_entropy", "loss"} <= trainer.state.log_history[0].keys()
    towers = [name for name, weight in trainer.lm.model.named_parameters() if "vision" in name]
    fresh = published_model().state_dict()
    after = trainer.lm.model.state_dict()
    assert towers and all(torch.equal(after[name], fresh[name]) for name in after if "vision" in name)
    assert all(torch.equal(after[name], fresh[name]) for name in after if ".router." in name)
    assert not torch.equal(after["lm_head.weight"], fresh["lm_head.weight"])


@partly_slow("canvases", ["one", "all"], 1)
def test_a_held_out_loss_is_that_of_all_rows_whatever_the_batch(canvases, small, tmp_path):
    losses = []
    for size in (1, 3, 24):
        args = SFTConfig(output_dir=str(tmp_path), per_device_eval_batch_size=size, canvases=canvases)
        found = SFTTrainer(small, args, eval_dataset=words(24)).evaluate()
        assert found["eval_loss"] == pytest.approx(
            found["eval_cross_entropy"] + found["eval_lm_cross_entropy"], rel=1e-5
        )
        losses.append(found["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.slow  # it is compiled for every layout
@pytest.mark.usefixtures("dynamo_as_it_was")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("canvases", ["one", "all"])
def test_a_compiled_model_trains_alike(canvases, tmp_path):
    runs = []
    for more in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        lm = loaded(tmp_path / f"model{len(more)}")
        runs.append(trained(lm, tmp_path / f"run{len(more)}", canvases=canvases, optim="sgd", **more))
    plain, compiled = map(weights_of, runs)
    for name, weight in plain.items():
        torch.testing.assert_close(compiled[name], weight, rtol=0, atol=1e-5)


@partly_slow(
    "settings",
    [{}, {"canvases": "all"}, {"packing": True, "max_length": 32}, {"self_conditioning_p": 0.0}],
    2,
    ids=str,
)
def test_accumulated_micro_batches_are_one_batch(settings, tmp_path):
    """The loss is divided by the tokens of canvases, and by the next tokens, of the whole step."""
    runs = []
    for size, steps in ((4, 1), (2, 2), (1, 4)):
        lm = loaded(tmp_path / f"{size}")
        how = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "optim": "sgd"}
        runs.append(trained(lm, tmp_path / f"run{size}", **how | settings))
    first, *others = ([weights_of(run), run.state.log_history[0]["loss"]] for run in runs)
    for weights, loss in others:
        assert loss == pytest.approx(first[1], abs=1e-3)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, first[0][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"views": 2},
        {"weighting": "uniform"},
        {"exact_count": True},
        {"canvas_length": 32},
        {"noise": "masked"},
        {"quality_head": "alone"},
        {"max_gap": 4},
    ],
    ids=str,
)
def test_settings_of_masks_are_refused(settings, small, tmp_path):
    with raises(ConfigError, where=next(iter(settings))):
        trained(small, tmp_path / "run", **settings)


def test_settings_of_canvases_are_refused_for_other_models(tmp_path):
    for name, value in {"canvases": "all", "self_conditioning_p": 0.2, "encoder_loss_weight": 0.5}.items():
        with raises(ConfigError, where=name):
            trained(tiny.float64_lm(), tmp_path / "run", **{name: value})


def test_a_run_is_resumed_bit_for_bit(tmp_path):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trained(loaded(tmp_path / "base"), tmp_path / "whole", **saving)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", ignore=shutil.ignore_patterns("*-4", "model"))
    args = SFTConfig(**whole.args.to_dict() | {"output_dir": str(tmp_path / "cut")})
    again = SFTTrainer(loaded(tmp_path / "base"), args, train_dataset=words(24))
    again.train(resume_from_checkpoint=True)
    ours, theirs = weights_of(again), weights_of(whole)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
