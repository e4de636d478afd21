"""The log-probabilities of hidden tokens equal those of inference, in any chunks and with any padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import enumeration
from tests.tiny import KINDS, toy_lm
from unmask.diffusion.log_probs import entropies, noise_groups, view_log_probs, weighted_cross_entropy
from unmask.diffusion.views import MaskRNG, Views, all_masked_views, exact_count_views

PROMPT, LENGTH = 2, 5
TOTAL = PROMPT + LENGTH
EXACT = {"rtol": 0, "atol": 1e-12}
kinds = pytest.mark.parametrize("kind", KINDS)


def batch(rows=3):
    ids = torch.stack([enumeration.random_row(TOTAL, seed) for seed in range(rows)])
    return ids, (torch.arange(TOTAL) >= PROMPT).expand(rows, -1)


def planned(lm, ids, maskable, padding=None, views=4):
    return exact_count_views(
        noise_groups(lm, maskable, padding), MaskRNG(0, torch.arange(len(ids))), num_views=views
    )


def every_set_of(positions):
    """One view for every set of hidden tokens."""
    hidden = torch.zeros(1, 2 ** len(positions), TOTAL, dtype=torch.bool)
    hidden[0, :, positions] = (
        torch.arange(2 ** len(positions))[:, None] >> torch.arange(len(positions)) & 1 == 1
    )
    return Views(hidden, hidden, hidden.float())


@kinds
def test_scores_are_the_conditionals_of_inference(kind):
    lm = toy_lm(kind)
    ids, _ = batch(1)
    for positions in enumeration.groups(lm, PROMPT, TOTAL):
        scores = view_log_probs(lm, ids, None, every_set_of(positions))
        torch.testing.assert_close(
            scores[0, :, positions], enumeration.conditionals(lm, ids[0], positions), **EXACT
        )
        assert scores.count_nonzero() == 2 ** (len(positions) - 1) * len(positions)


def test_a_causal_model_is_scored_on_the_clean_row():
    lm = toy_lm(attention=("causal", None, True))
    ids, maskable = batch()
    expected = lm.logits(ids).log_softmax(-1).gather(2, ids[..., None]).squeeze(2)
    scores = view_log_probs(lm, ids, None, all_masked_views(maskable))
    torch.testing.assert_close(scores[:, 0], torch.where(maskable, expected, 0), **EXACT)


def test_what_is_hidden_and_not_scored_is_hidden_all_the_same():
    lm = toy_lm()
    ids, maskable = batch()
    prompt = ~maskable
    hidden = torch.ones_like(maskable)[:, None]
    scores = view_log_probs(lm, ids, None, Views(hidden, maskable[:, None], maskable[:, None].float()))
    logits = lm.logits(torch.full_like(ids, lm.mask_token_id))
    expected = logits.log_softmax(-1).gather(2, ids[..., None]).squeeze(2)
    torch.testing.assert_close(scores[:, 0], torch.where(maskable, expected, 0), **EXACT)
    assert (scores[:, 0] - view_log_probs(lm, ids, None, all_masked_views(maskable))[:, 0])[
        maskable
    ].abs().max() > 1e-3
    assert (scores[:, 0][prompt] == 0).all()


@kinds
def test_chunks_change_neither_scores_nor_gradients(kind):
    lm = toy_lm(kind)
    ids, maskable = batch()
    views = planned(lm, ids, maskable)
    scores, gradients = [], []
    for chunk in (None, 1, 2, 5, 12, 100):
        lm.model.zero_grad()
        scores.append(view_log_probs(lm, ids, None, views, chunk=chunk))
        (views.weight_BMT * scores[-1]).sum().backward()
        gradients.append([weight.grad.clone() for weight in lm.model.parameters()])
    assert max(gradient.abs().max() for gradient in gradients[0]) > 0.1
    for one, other in zip(scores[1:], gradients[1:], strict=True):
        torch.testing.assert_close(one, scores[0], **EXACT)
        torch.testing.assert_close(other, gradients[0], rtol=1e-12, atol=1e-12)


@kinds
def test_only_scored_rows_reach_the_head(kind):
    lm = toy_lm(kind)
    computed = []
    lm.model.get_output_embeddings().register_forward_hook(
        lambda head, args, out: computed.append(out.shape[:-1].numel())
    )
    ids, maskable = batch()
    views = planned(lm, ids, maskable)
    view_log_probs(lm, ids, None, views)
    assert sum(computed) == int(views.target_BMT.sum())
    computed.clear()
    view_log_probs(lm, ids, None, views, chunk=1)
    assert computed == views.target_BMT.sum(-1).flatten().tolist()


def test_where_nothing_is_scored_no_pass_is_made_unless_it_takes_gradients():
    lm = toy_lm()
    calls = []
    lm.model.register_forward_hook(lambda *_: calls.append(1))
    ids, maskable = batch()
    nothing = torch.zeros(3, 2, TOTAL, dtype=torch.bool)
    views = planned(lm, ids, maskable)
    only_last = Views(
        views.hidden_BMT, views.target_BMT & (torch.arange(3) == 2)[:, None, None], views.weight_BMT
    )
    with torch.no_grad():
        scores = view_log_probs(lm, ids, None, Views(nothing, nothing, nothing.float()))
        assert scores.shape == (3, 2, TOTAL) and not scores.any() and not calls
        view_log_probs(lm, ids, None, only_last, chunk=4)
        assert len(calls) == 1
    view_log_probs(lm, ids, None, Views(nothing, nothing, nothing.float())).sum().backward()
    assert len(calls) == 2 and all(not weight.grad.any() for weight in lm.model.parameters())


@pytest.mark.parametrize("kind", [*KINDS, "causal"])
def test_padding_changes_nothing(kind):
    lm = toy_lm(attention=("causal", None, True)) if kind == "causal" else toy_lm(kind)
    ids, maskable = batch(2)
    views = planned(lm, ids, maskable)
    expected = view_log_probs(lm, ids, None, views)
    extra = torch.zeros(2, 3, dtype=torch.long)
    blank = torch.zeros(2, views.count, 3)
    real = torch.ones_like(ids)

    def beside(left, tensors):
        return torch.cat(tensors if left else tensors[::-1], -1)

    for left in (True, False):
        padded = [
            beside(left, [blank.to(part.dtype), part])
            for part in (views.hidden_BMT, views.target_BMT, views.weight_BMT)
        ]
        scores = view_log_probs(lm, beside(left, [extra, ids]), beside(left, [extra, real]), Views(*padded))
        torch.testing.assert_close(scores, beside(left, [blank.double(), expected]), **EXACT)


@kinds
def test_packed_documents_are_scored_as_they_are_alone(kind):
    lm = toy_lm(kind)
    ids, maskable = batch(2)
    views = planned(lm, ids, maskable)
    packed = Views(
        *(
            torch.cat(list(part[:, None]), -1)
            for part in (views.hidden_BMT, views.target_BMT, views.weight_BMT)
        )
    )
    documents = torch.tensor([[1] * TOTAL + [2] * TOTAL])
    scores = view_log_probs(lm, ids.reshape(1, -1), documents, packed)
    torch.testing.assert_close(scores[0], torch.cat(list(view_log_probs(lm, ids, None, views)), -1), **EXACT)


def test_a_temperature_divides_the_logits():
    lm = toy_lm()
    ids, maskable = batch()
    logits = lm.logits(torch.where(maskable, lm.mask_token_id, ids))
    expected = (logits / 0.7).log_softmax(-1).gather(2, ids[..., None]).squeeze(2)
    scores = view_log_probs(lm, ids, None, all_masked_views(maskable), temperature=0.7)
    torch.testing.assert_close(scores[:, 0], torch.where(maskable, expected, 0), **EXACT)


@kinds
def test_entropies_are_of_the_distributions_that_scores_are_of(kind):
    lm = toy_lm(kind)
    ids, maskable = batch()
    views = planned(lm, ids, maskable)
    found = view_log_probs(lm, ids, None, views, temperature=0.7, measure=entropies, chunk=2)
    expected = torch.zeros_like(found)
    for position in range(PROMPT, TOTAL):
        here = torch.arange(TOTAL) == position
        for token in range(lm.config.vocab_size):
            other = torch.where(here, token, ids)  # a token's prediction does not depend on itself
            log_prob = view_log_probs(lm, other, None, views, temperature=0.7)
            expected -= torch.where(views.target_BMT & here, (log_prob.exp() * log_prob).nan_to_num(), 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_scores_have_the_precision_of_the_model():
    lm = toy_lm()
    ids, maskable = batch()
    assert view_log_probs(lm, ids, None, all_masked_views(maskable)).dtype == torch.float64
    lm.model.float()
    assert view_log_probs(lm, ids, None, all_masked_views(maskable)).dtype == torch.float32
    lm.model.bfloat16()
    assert view_log_probs(lm, ids, None, all_masked_views(maskable)).dtype == torch.float32


@pytest.mark.parametrize(
    ("attention", "documents", "expected"),
    [
        (("bidirectional", None, False), None, [[-1, 0, 0, 0, 0, 0, 0, 0, 0]]),
        (("causal", None, True), None, [[-1, 1, 2, 3, 4, 5, 6, 7, 8]]),
        (("block_causal", 3, False), None, [[-1, 0, 0, 1, 1, 1, 2, 2, 2]]),
        (("bidirectional", None, False), [1, 1, 1, 1, 2, 2, 2, 2, 0], [[-1, 0, 0, 0, 1, 1, 1, 1, -1]]),
        (("block_causal", 3, False), [1, 1, 1, 1, 2, 2, 2, 2, 0], [[-1, 0, 0, 1, 2, 2, 2, 3, -1]]),
        # the grid begins with the document
        (("block_causal", 3, False), [0, 0, 1, 1, 1, 1, 1, 1, 1], [[-1, -1, 1, 1, 1, 2, 2, 2, 3]]),
    ],
)
def test_tokens_are_noised_together_by_document_and_block(attention, documents, expected):
    lm = toy_lm(attention=attention)
    documents = documents and torch.tensor([documents])
    maskable = torch.arange(9)[None] > 0
    if documents is not None:
        maskable &= documents > 0
    assert noise_groups(lm, maskable, documents).tolist() == expected


def a_case(seed: int) -> tuple[torch.Tensor, Views]:
    generator = torch.Generator().manual_seed(seed)
    log_prob_BMT = -torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
    hidden_BMT = torch.rand(2, 3, 4, generator=generator) < 0.7
    target_BMT = hidden_BMT & (torch.rand(2, 3, 4, generator=generator) < 0.8)
    weight_BMT = torch.where(target_BMT, 5 * torch.rand(2, 3, 4, generator=generator), 0)
    return log_prob_BMT.requires_grad_(), Views(hidden_BMT, target_BMT, weight_BMT)


@given(st.integers(0, 10**6))
def test_the_loss_and_its_gradient(seed):
    log_prob_BMT, views = a_case(seed)
    loss = weighted_cross_entropy(log_prob_BMT, views)
    cells = [(b, v, t) for b in range(2) for v in range(3) for t in range(4) if views.target_BMT[b, v, t]]
    assert loss.item() == pytest.approx(
        -sum(views.weight_BMT[cell].item() * log_prob_BMT[cell].item() for cell in cells)
    )
    loss.backward()
    torch.testing.assert_close(log_prob_BMT.grad, -views.weight_BMT.double())


@given(st.integers(0, 10**6))
def test_losses_of_single_views_and_rows_add_up(seed):
    log_prob_BMT, views = a_case(seed)
    whole = weighted_cross_entropy(log_prob_BMT, views)
    by_view = [
        weighted_cross_entropy(log_prob_BMT[:, v : v + 1], views.select(slice(None), slice(v, v + 1)))
        for v in range(3)
    ]
    by_row = [
        weighted_cross_entropy(log_prob_BMT[b : b + 1], views.select(slice(b, b + 1))) for b in range(2)
    ]
    torch.testing.assert_close(sum(by_view), whole)
    torch.testing.assert_close(sum(by_row), whole)


def test_nothing_scored_is_no_loss():
    nothing_BMT = torch.zeros(2, 1, 3, dtype=torch.bool)
    loss = weighted_cross_entropy(torch.zeros(2, 1, 3), Views(nothing_BMT, nothing_BMT, nothing_BMT.float()))
    assert loss == 0
