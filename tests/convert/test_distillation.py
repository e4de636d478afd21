"""Distillation from the causal model: of some or all of its predictions, of hidden states, and on rows that
the student samples."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.convert.test_trainer import convert
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, TEXTS, batch, equal, weights
from unmask.convert.distillation import compare, forward_kl
from unmask.convert.trainer import StageTrainer
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.views import MaskRNG, all_masked_views, exact_count_views
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.hooks import head
from unmask.models.load import with_pattern

IDS = torch.randint(3, 12, (2, 9), generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.tensor([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2])
MASKABLE = (DOCUMENTS > 0) & (torch.arange(9) > 0)
LONG = [
    {"text": "abcdefgh" * 3},
    {"text": "hgfedcba" * 2},
    {"text": "aabbccdd" * 3},
    {"text": "cafebabe" * 2},
]
DISTILLED = {
    "attention": "block_causal",
    "block_size": 4,
    "logit_shift": True,
    "complementary": True,
    "distillation": 1.0,
}


def sharp(lm: DiffusionLM) -> DiffusionLM:
    """Predictions that differ."""
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter.mul_(3.0)
    return lm


def pair(
    attention: str = "bidirectional", block_size: int | None = None, shift: bool = False
) -> tuple[DiffusionLM, DiffusionLM]:
    """A student and another model as its teacher."""
    lm, teacher = (
        sharp(llama_lm(attention, block_size, logit_shift=shift)),
        sharp(llama_lm("causal")).frozen_copy(),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return lm, teacher


def planned(lm: DiffusionLM) -> Any:
    return exact_count_views(noise_groups(lm, MASKABLE, DOCUMENTS), MaskRNG(0, torch.arange(2)), num_views=2)


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize(
    ("attention", "block_size", "shift"), [("bidirectional", None, False), ("block_causal", 3, True)]
)
def test_over_the_whole_vocabulary_the_divergence_is_that_of_torch(
    attention, block_size, shift, in_chunks, monkeypatch
):
    lm, teacher = pair(attention, block_size, shift)
    views = planned(lm)
    if in_chunks:
        monkeypatch.setattr(head, "LOGITS_AT_ONCE", 4 * lm.config.vocab_size)
    found = compare(lm, teacher, IDS, DOCUMENTS, views, top_k=10**6)
    taught = teacher.logits(IDS, DOCUMENTS).log_softmax(-1)[:, None].expand(-1, 2, -1, -1)[views.target_BMT]
    monkeypatch.undo()
    from_student = torch.cat([one_view(lm, views, view) for view in range(2)], 1)[views.target_BMT]
    real = torch.arange(taught.shape[1]) != lm.mask_token_id
    expected = F.kl_div(from_student[:, real], taught[:, real], log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found.divergence_N, expected, rtol=1e-4, atol=1e-5)
    target = IDS[:, None].expand(-1, 2, -1)[views.target_BMT]
    torch.testing.assert_close(
        found.log_prob_N, from_student.gather(1, target[:, None])[:, 0], rtol=1e-4, atol=1e-5
    )
    assert expected.min() > 0 and found.divergence_N.requires_grad and found.distance_N.requires_grad
    found.divergence_N.sum().backward()
    assert all(p.grad is None for p in teacher.model.parameters()) and any(
        p.grad.any() for p in lm.model.parameters()
    )


def one_view(lm: DiffusionLM, views: Any, view: int) -> torch.Tensor:
    """All log-probabilities [B, 1, T, V] of a view."""
    one, everything = views.select(slice(None), slice(view, view + 1)), torch.ones(2, 1, 9, dtype=torch.bool)
    if lm.attention == "bidirectional":
        logits = lm.logits(torch.where(one.hidden_BMT[:, 0], lm.mask_token_id, IDS), DOCUMENTS)
    else:
        logits = lm.forward(lm.stacked_inputs(IDS, one.hidden_BMT, DOCUMENTS, everything)).view(2, 9, -1)
    return logits.log_softmax(-1)[:, None]


def test_with_fewer_tokens_told_apart_it_is_a_lower_bound_that_grows():
    lm, teacher = pair()
    views, last = planned(lm), None
    for top_k in (1, 2, 4, 8, 11, 100):
        divergence = compare(lm, teacher, IDS, DOCUMENTS, views, top_k=top_k).divergence_N.detach()
        assert (divergence >= -1e-6).all()
        if last is not None:
            assert (divergence >= last - 1e-5).all() and (top_k > 11 or divergence.sum() > last.sum() + 1e-4)
        last = divergence


def test_equal_predictions_do_not_diverge_even_where_one_token_has_all():
    log_p = torch.tensor([[-1e-9, -25.0], [-0.1, -4.0]])
    assert forward_kl(log_p, log_p).abs().max() < 1e-6
    assert (forward_kl(log_p, log_p.flip(1)) > 1).all() and forward_kl(log_p, log_p.flip(1)).isfinite().all()


@pytest.mark.parametrize("context", [False, True])
def test_a_student_that_is_the_teacher_has_nothing_to_learn(context):
    causal = sharp(llama_lm("causal"))
    lm = with_pattern(causal, "block_causal", 1, True, causal_context=context)
    found = compare(lm, causal.frozen_copy(), IDS, DOCUMENTS, all_masked_views(MASKABLE), top_k=4)
    assert len(found.distance_N) == MASKABLE.sum()
    assert found.distance_N.abs().max() < 1e-5 and found.divergence_N.abs().max() < 1e-5
    other, teacher = pair("block_causal", 1, True)
    assert (
        compare(other, teacher, IDS, DOCUMENTS, all_masked_views(MASKABLE), top_k=4).distance_N.min() > 1e-3
    )


@pytest.mark.parametrize(
    ("attention", "block_size", "shift"), [("bidirectional", None, False), ("block_causal", 4, True)]
)
@pytest.mark.parametrize("hidden", [(1, 2), (2,), (1,)])
def test_where_it_teaches_the_divergence_is_in_expectation_the_cross_entropy(
    attention, block_size, shift, hidden
):
    """Over all texts of the teacher: x_0 and its continuations x_1, x_2."""
    lm, teacher = pair(attention, block_size, shift)
    real = [token for token in range(lm.config.vocab_size) if token != lm.mask_token_id]
    ids_BT = torch.cartesian_prod(torch.tensor([4]), *[torch.tensor(real)] * 2)
    documents = torch.ones_like(ids_BT)
    hidden_BT = torch.isin(torch.arange(3), torch.tensor(hidden)).expand_as(ids_BT)
    log_p_BTV = teacher.logits(ids_BT)[:, :, real].log_softmax(-1)
    place_BT = torch.tensor(
        [real.index(token) if token in real else 0 for token in range(lm.config.vocab_size)]
    )[ids_BT]
    p_B = log_p_BTV[:, 1:].gather(2, place_BT[:, 1:, None]).sum((1, 2)).exp()
    assert p_B.sum().item() == pytest.approx(1)
    views = all_masked_views(hidden_BT)
    found = compare(lm, teacher, ids_BT, documents, views, top_k=10**6)
    taught = hidden != (1,)  # else x_2 is shown, which the teacher does not see
    assert (found.taught_N == taught).all()
    p_N = p_B[:, None].expand_as(ids_BT)[hidden_BT]
    parameters = list(lm.model.parameters())
    gradients = [
        torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(
                    (p_N * values).sum(), parameters, retain_graph=True, materialize_grads=True
                )
            ]
        )
        for values in (-found.log_prob_N, found.divergence_N)
    ]
    difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert difference < 1e-3 if taught else difference > 0.05


@pytest.mark.parametrize("rows", [1, 3])
def test_the_teacher_reads_several_rows_at_once(rows, monkeypatch):
    lm, teacher = pair()
    views = planned(lm)
    one = compare(lm, teacher, IDS, DOCUMENTS, views, top_k=4).divergence_N
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", rows * 9 * lm.config.vocab_size)
    torch.testing.assert_close(
        compare(lm, teacher, IDS, DOCUMENTS, views, top_k=4).divergence_N, one, rtol=1e-5, atol=1e-6
    )


def test_where_nothing_is_scored_there_is_a_loss_of_0_with_gradients():
    lm, teacher = pair()
    nothing = torch.zeros_like(MASKABLE)
    found = compare(lm, teacher, IDS, DOCUMENTS, all_masked_views(nothing), top_k=4)
    (found.log_prob_N.sum() + found.divergence_N.sum() + found.distance_N.sum()).backward()
    assert all(not parameter.grad.any() for parameter in lm.model.parameters() if parameter.grad is not None)


def test_the_teacher_is_the_model_before_its_conversion_also_after_a_resume(tmp_path):
    lm = llama_lm("causal")
    run = {
        **DISTILLED,
        "alignment": 0.1,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        "packing": False,
        "lr_scheduler_type": "constant",
    }
    start = weights(lm)
    trainer = convert(tmp_path, lm, **run)
    trainer.train()
    assert equal(weights(trainer.teacher), start) and not equal(weights(trainer.lm), start)
    assert not any(parameter.requires_grad for parameter in trainer.teacher.model.parameters())
    assert trainer.teacher.autoregressive and not trainer.teacher.has_time_embedding
    shutil.rmtree(tmp_path / "stage-3")
    shutil.rmtree(max((tmp_path / "stage-2").glob("checkpoint-*")))
    resumed = convert(tmp_path, **run)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.teacher), start) and equal(weights(resumed.lm), weights(trainer.lm))


def test_distillation_is_a_share_of_the_loss_and_alignment_is_added(tmp_path):
    def first(**more: Any) -> dict[str, float]:
        trainer = convert(
            tmp_path,
            llama_lm("causal"),
            **DISTILLED | {"packing": False, "max_steps": 1, "stages": [{}]} | more,
        )
        trainer.train()
        return trainer.state.log_history[0]

    data, teacher, half = (first(distillation=share)["loss"] for share in (0.0, 1.0, 0.5))
    assert half == pytest.approx((data + teacher) / 2, rel=1e-4) and data != pytest.approx(teacher, rel=1e-2)
    aligned = first(alignment=0.7, distillation=0.0)
    assert aligned["loss"] > data and aligned["distance"] > 0 and "kl" in aligned


# Rows that the student writes.


def continuing(folder: Any, lm: DiffusionLM | None = None, **more: Any) -> StageTrainer:
    settings = {
        "attention": "block_causal",
        "lmbda": 0.5,
        "max_new_tokens": 6,
        "packing": False,
        "max_steps": 6,
        **more,
    }
    whole = convert(folder, lm or sharp(llama_lm("causal")), settings.pop("rows", LONG), **settings)
    return StageTrainer(
        whole.lm,
        whole.args,
        train_dataset=whole.train_rows,
        stage=whole.args.stages[1],
        teacher=whole.teacher,
        steps_before=0,
        total_steps=4,
    )


def test_chosen_rows_go_on_as_the_model_writes_them_and_only_that_is_learnt(tmp_path):
    trainer = continuing(tmp_path)
    before, chosen = batch(trainer, 0, 1, 2, 3), set()
    for step in range(8):
        trainer.state.global_step = step
        after = trainer.prepared([before])[0]
        assert after.pop("one_document") is False  # its continuation may end early, and padding follows
        again = trainer.prepared([before])[0]
        assert all(torch.equal(after[name], again[name]) for name in after)
        for row in range(4):
            if torch.equal(after["maskable"][row], before["maskable"][row]):
                assert all(torch.equal(after[name][row], before[name][row]) for name in after)
                continue
            chosen.add((step, row))
            trained = after["maskable"][row].nonzero().flatten()
            start, stop = trained[0].item(), trained[-1].item() + 1
            assert trained.tolist() == list(range(start, stop)) and start >= 1 and stop - start <= 6
            assert stop - start == 6 or after["input_ids"][row, stop - 1] == trainer.lm.eos_token_id
            assert torch.equal(after["input_ids"][row, :start], before["input_ids"][row, :start])
            assert after["documents"][row].tolist() == [1] * stop + [0] * (
                len(after["documents"][row]) - stop
            )
            assert not (after["input_ids"][row, :stop] == trainer.lm.mask_token_id).any()
    assert 8 <= len(chosen) <= 24 and len({row for _, row in chosen}) == 4  # about half
    trainer.state.global_step = 0
    alone = [trainer.prepared([batch(trainer, row)])[0] for row in range(4)]
    together = trainer.prepared([before])[0]
    for row, one in enumerate(alone):
        width = one["input_ids"].shape[1]
        assert torch.equal(one["maskable"][0], together["maskable"][row, :width])
        assert torch.equal(
            one["input_ids"][0][one["maskable"][0]], together["input_ids"][row][together["maskable"][row]]
        )


def test_what_is_written_changes_with_the_model(tmp_path):
    trainer = continuing(tmp_path, lmbda=1.0)
    before = batch(trainer, 0, 1, 2, 3)
    first = trainer.prepared([before])[0]["input_ids"]
    with torch.no_grad():
        trainer.lm.model.lm_head.weight.neg_()
    second = trainer.prepared([before])[0]["input_ids"]
    assert not torch.equal(first, second)


def test_the_loss_is_divided_by_what_is_left_to_learn(tmp_path):
    trainer = continuing(tmp_path, lmbda=1.0)
    trainer.state.max_steps, rows = 4, [batch(trainer, 0, 1), batch(trainer, 2, 3)]
    batches, items = trainer.get_batch_samples(iter(rows), 2, torch.device("cpu"))
    trained = sum(int(one["maskable"].sum()) for one in batches)
    assert items == trained <= 4 * 6 < sum(int(one["maskable"].sum()) for one in rows)


@pytest.mark.parametrize("rows", [LONG, TEXTS, PAIRS], ids=["long", "short", "pairs"])
def test_rows_too_short_to_go_on_are_left_as_they_are(rows, tmp_path):
    trainer = continuing(tmp_path, lmbda=1.0, max_new_tokens=100, rows=rows)
    before = batch(trainer, 0, 1)
    after = trainer.prepared([before])[0]
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - {"one_document"})
    assert after["one_document"] == before["one_document"]


def test_a_distilled_run_on_its_own_policy_resumes_bit_for_bit_in_the_middle(tmp_path):
    run = {
        **DISTILLED,
        "lmbda": 0.5,
        "max_new_tokens": 4,
        "packing": False,
        "stages": [{"train": ["attention", "mask_token"]}, {}],
    }
    run |= {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    straight = convert(tmp_path, rows=LONG, **run)
    straight.train()
    shutil.rmtree(tmp_path / "stage-2/checkpoint-3")
    shutil.rmtree(tmp_path / "stage-2/checkpoint-2")
    resumed = convert(tmp_path, rows=LONG, **run)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.lm), weights(straight.lm))
