"""The time embedding is zero at first, then a function of the fraction of hidden tokens; every way of saving
a model keeps it."""

from __future__ import annotations

import copy

import pytest
import torch

from tests import enumeration
from tests.errors import raises
from tests.helpers import each_once, partly_slow
from tests.models.configurations import CONFIGURATIONS, VOCABULARY, WINDOW, random_ids, tiny_lm
from tests.tiny import float64_causal, toy_lm
from unmask import log_likelihood
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.log_probs import view_log_probs
from unmask.diffusion.views import MaskRNG, Views, exact_count_views
from unmask.errors import ModelError
from unmask.generation import naive, sampler
from unmask.models.hooks.time_embedding import TimeEmbedding
from unmask.models.load import load, make_diffusion, with_pattern

CLOSE = {"rtol": 0, "atol": 5e-6}
NAMES = ["gpt2", "llama", "gemma", "phi", "gpt_neox"]
DOCUMENTS = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]])


def awake(lm, scale=0.5):
    """The same model with a trained time embedding."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in lm.model.unmask_time.out.parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return lm


def some(*shape, share=0.5, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@pytest.fixture(autouse=True)
def no_gradients(request):
    with torch.set_grad_enabled("gradients" in request.node.name):
        yield


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_at_first_it_changes_nothing_then_all_that_hides_something(name):
    plain, lm = (tiny_lm(name, "bidirectional", time_embedding=time) for time in (False, True))
    ids, hidden = random_ids(2, 8), some(2, 8)
    hidden[1] = False
    ids = torch.where(hidden, lm.mask_token_id, ids)
    before = lm.logits(ids, hidden_BT=hidden)
    assert torch.equal(before, plain.logits(ids))
    changed = (awake(lm).logits(ids, hidden_BT=hidden) != before).any(-1)
    assert changed[0].all() and not changed[1].any()
    assert torch.equal(lm.logits(ids, hidden_BT=torch.zeros_like(hidden)), before)
    with raises(ModelError, where="hidden_BT"):
        lm.logits(ids)
    assert torch.equal(lm.as_causal().logits(ids, hidden_BT=hidden), plain.as_causal().logits(ids))


def told(lm, monkeypatch):
    """A list of the fractions that the embedding gets."""
    shares, forward = [], TimeEmbedding.forward
    monkeypatch.setattr(
        TimeEmbedding, "forward", lambda self, share_BT: (shares.append(share_BT), forward(self, share_BT))[1]
    )
    return shares


@pytest.mark.parametrize(("attention", "block_size"), [("bidirectional", None), ("block_causal", 3)])
def test_the_share_is_that_of_the_document_or_block_and_of_the_copy(attention, block_size, monkeypatch):
    lm = tiny_lm("llama", attention, block_size, time_embedding=True)
    shares, hidden = told(lm, monkeypatch), some(2, 3, 10) & (DOCUMENTS > 0)[:, None]

    def expected(row, hidden_T):
        documents = DOCUMENTS[row].tolist()
        place = [sum(d == documents[i] for d in documents[:i]) // (block_size or 10) for i in range(10)]
        groups = list(zip(documents, place, strict=True))
        members = [[j for j in range(10) if groups[j] == groups[i] and documents[j]] for i in range(10)]
        return [sum(hidden_T[j].item() for j in member) / max(len(member), 1) for member in members]

    ids = random_ids(2, 10)
    lm.logits(torch.where(hidden[:, 0], lm.mask_token_id, ids), DOCUMENTS, hidden_BT=hidden[:, 0])
    torch.testing.assert_close(
        shares.pop(), torch.tensor([expected(row, hidden[row, 0]) for row in range(2)])
    )
    if attention == "block_causal":
        lm.forward(lm.stacked_inputs(ids, hidden, DOCUMENTS, hidden))
        copies = [
            [share for copy in range(3) for share in expected(row, hidden[row, copy])] + [0.0] * 10
            for row in range(2)
        ]
        torch.testing.assert_close(shares.pop(), torch.tensor(copies))


@pytest.mark.parametrize("name", NAMES)
def test_the_noised_layout_is_inference_block_by_block(name):
    for context in (False, True):
        lm = awake(tiny_lm(name, "block_causal", 3, time_embedding=True, causal_context=context))
        clean, hidden = random_ids(2, 9), some(2, 9)
        noisy, expected = (
            torch.where(hidden, lm.mask_token_id, clean),
            torch.zeros(2, 9, VOCABULARY + 1, dtype=torch.float64),
        )
        for start in range(0, 9, 3):
            ids = torch.cat([clean[:, :start], noisy[:, start : start + 3]], 1)
            seen = torch.cat([torch.zeros_like(hidden[:, :start]), hidden[:, start : start + 3]], 1)
            expected[:, start : start + 3] = lm.logits(ids, hidden_BT=seen)[:, start:]
        logits = lm.forward(lm.stacked_inputs(clean, hidden[:, None], None, hidden[:, None]))
        torch.testing.assert_close(logits, expected[hidden], **CLOSE)


@each_once("name, max_shard_size", ["gpt2", "llama"], ["5GB", "5KB"])
def test_it_is_saved_and_loaded_bit_for_bit(name, max_shard_size, tmp_path):
    lm = awake(
        tiny_lm(name, "block_causal", 3, dtype=torch.float32, time_embedding=True, causal_context=True)
    )
    ids, hidden = random_ids(2, 8), some(2, 8)
    lm.save(tmp_path)
    if max_shard_size == "5KB":
        (tmp_path / "model.safetensors").unlink()
        lm.model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load(tmp_path)
    assert loaded.settings == lm.settings and loaded.has_time_embedding and loaded.causal_context
    assert torch.equal(loaded.logits(ids, hidden_BT=hidden), lm.logits(ids, hidden_BT=hidden))
    weights = loaded.model.state_dict()
    assert weights.keys() == lm.model.state_dict().keys()
    assert all(torch.equal(weights[key], weight) for key, weight in lm.model.state_dict().items())
    other = load(tmp_path, attention="bidirectional")
    assert other.has_time_embedding and not other.causal_context


def test_weights_without_it_are_refused(tmp_path):
    lm = tiny_lm("llama", "bidirectional", dtype=torch.float32, time_embedding=True)
    lm.save(tmp_path)
    without = {name: weight for name, weight in lm.model.state_dict().items() if "unmask_time" not in name}
    lm.model.save_pretrained(tmp_path, state_dict=without)
    with raises(ModelError, where=str(tmp_path)):
        load(tmp_path)


def test_another_pattern_and_a_frozen_copy_keep_it():
    lm = awake(tiny_lm("llama", "bidirectional", time_embedding=True))
    ids, hidden = random_ids(2, 8), some(2, 8)
    expected, other = lm.logits(ids, hidden_BT=hidden), with_pattern(lm, "block_causal", 8)
    assert other.has_time_embedding and torch.equal(other.logits(ids, hidden_BT=hidden), expected)
    without = with_pattern(lm, "bidirectional", time_embedding=False)
    assert not without.has_time_embedding and not torch.equal(without.logits(ids, hidden_BT=hidden), expected)
    frozen = lm.frozen_copy()
    awake(lm)
    assert torch.equal(frozen.logits(ids, hidden_BT=hidden), expected)
    assert not torch.equal(lm.logits(ids, hidden_BT=hidden), expected)
    assert torch.equal(
        lm.bind(copy.deepcopy(lm.model)).logits(ids, hidden_BT=hidden), lm.logits(ids, hidden_BT=hidden)
    )


def test_it_begins_as_the_same_function_whatever_was_drawn_before():
    lms, states = [tiny_lm("gpt2") for _ in range(2)], []
    for lm in lms:
        states.append(torch.get_rng_state())
        with_pattern(lm, "bidirectional", time_embedding=True)
        assert torch.equal(torch.get_rng_state(), states[-1])
        torch.rand(3)
    assert not torch.equal(*states)
    one, other = (lm.model.unmask_time.state_dict() for lm in lms)
    assert all(torch.equal(one[name], other[name]) for name in one) and one["into.weight"].std() > 0.01


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_it(checkpointing):
    lm = awake(tiny_lm("phi", "bidirectional", time_embedding=True))
    if checkpointing:
        lm.model.train()
        lm.model.activation_checkpointing_enable()
    ids, hidden = random_ids(2, 8), some(2, 8)
    lm.logits(ids, hidden_BT=hidden)[..., 4].sum().backward()
    parameters = dict(lm.model.unmask_time.named_parameters())
    assert len(parameters) == 4 and all(parameter.grad.any() for parameter in parameters.values())
    at = (0, 3)
    expected, step = parameters["out.weight"].grad[at].item(), 1e-4
    with torch.no_grad():
        sums = []
        for change in (step, -2 * step):
            parameters["out.weight"][at] += change
            sums.append(lm.logits(ids, hidden_BT=hidden)[..., 4].sum().item())
    assert (sums[0] - sums[1]) / (2 * step) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("context", [False, True])
@partly_slow("shift", [False, True], 1)
@pytest.mark.parametrize("family", ["phi", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "attention, block_size", [("bidirectional", None), ("block_causal", 3), ("block_causal", 4)]
)
def test_the_sampler_gives_the_tokens_of_the_reference(attention, block_size, family, shift, context):
    context &= attention == "block_causal"
    pattern = {
        "attention": attention,
        "block_size": block_size,
        "logit_shift": shift,
        "causal_context": context,
    }
    prompts, plain = ["abc", "f", "abc", "fedcba", "dd"], make_diffusion(*float64_causal(family), **pattern)
    lm = awake(make_diffusion(*float64_causal(family), **pattern, time_embedding=True), 1.0)
    outcomes = []
    for config in (
        SamplerConfig(max_new_tokens=6, steps=4),
        SamplerConfig(max_new_tokens=4, temperature=1.0, remasking="random", batch_size=2),
    ):
        fast, slow = sampler.generate(lm, prompts, config), naive.generate(lm, prompts, config)
        assert fast.tokens == slow.tokens and fast.steps == slow.steps
        for one, other in zip(fast.log_probs, slow.log_probs, strict=True):
            assert one == pytest.approx(other, abs=1e-10)
        outcomes.append(fast.log_probs != sampler.generate(plain, prompts, config).log_probs)
    assert all(outcomes)


CONTEXTS = [("bidirectional", None, False), ("block_causal", 3, False), ("block_causal", 3, True)]


@pytest.mark.parametrize(("attention", "block_size", "context"), CONTEXTS)
@partly_slow("shift", [False, True], 1)
def test_likelihoods_are_those_of_all_orders(attention, block_size, context, shift):
    lm = awake(
        toy_lm(attention=(attention, block_size, shift), time_embedding=True, causal_context=context), 1.0
    )
    prompts, completions = [[1, 4], [5, 5, 4]], [[4, 5, 5, 2], [5, 4, 4]]
    tables = [
        [
            enumeration.conditionals(lm, torch.tensor(p + c), positions)
            for positions in enumeration.groups(lm, len(p), len(p + c))
        ]
        for p, c in zip(prompts, completions, strict=True)
    ]
    exact = log_likelihood(lm, prompts, completions, estimator="exact")
    assert exact.tolist() == pytest.approx([sum(map(enumeration.any_order, own)) for own in tables], abs=1e-9)
    estimates = torch.stack(
        [log_likelihood(lm, prompts, completions, "elbo", samples=3, seed=seed) for seed in range(40)]
    )
    bounds, errors = [sum(map(enumeration.lower_bound, own)) for own in tables], estimates.std(0) / 40**0.5
    for mean, bound, error in zip(estimates.mean(0).tolist(), bounds, errors.tolist(), strict=True):
        assert mean == pytest.approx(bound, abs=5 * error + 1e-5)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_blocks_of_one_with_a_shift_are_the_causal_model_before_training(name, context):
    lm = tiny_lm(name, "block_causal", 1, shift=True, causal_context=context, time_embedding=True)
    ids, rows = random_ids(2, WINDOW), torch.ones(2, WINDOW, dtype=torch.bool)
    rows[:, 0] = False
    expected = lm.as_causal().logits(ids)
    assert torch.equal(lm.logits(ids), expected)
    noised = lm.forward(lm.stacked_inputs(ids, rows[:, None], None, rows[:, None]))
    torch.testing.assert_close(noised, expected[rows], **CLOSE)


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("shift", [False, True])
def test_with_a_causal_context_the_causal_view_takes_no_pass_of_its_own(shift, chunk):
    lm = awake(toy_lm(attention=("block_causal", 3, shift), causal_context=True, time_embedding=True), 1.0)
    ids, passes = torch.stack([enumeration.random_row(8, seed) for seed in range(3)]), []
    documents = torch.tensor([[1] * 5 + [2] * 3, [1] * 8, [1] * 6 + [0] * 2])
    maskable = (documents > 0) & (torch.arange(8) > 0)
    views = exact_count_views(torch.where(maskable, 0, -1), MaskRNG(0, torch.arange(3)), num_views=2)
    lm.model.register_forward_hook(lambda *_: passes.append(1))
    scores = view_log_probs(lm, ids, documents, views.with_causal(maskable, 0.1), chunk=chunk)
    assert len(passes) == {None: 1, 1: 6, 3: 3}[chunk]
    noised = view_log_probs(lm, ids, documents, views)
    nothing = torch.zeros_like(maskable)[:, None]
    causal = view_log_probs(
        lm.as_causal(), ids, documents, Views(nothing, maskable[:, None], maskable[:, None].float())
    )
    torch.testing.assert_close(scores, torch.cat([noised, causal], 1), rtol=0, atol=1e-12)
    assert (causal[maskable[:, None]] < 0).all()
    other = toy_lm(attention=("block_causal", 3, shift))  # without the context it is the same in two passes
    two = view_log_probs(other, ids, documents, views.with_causal(maskable, 0.1))
    torch.testing.assert_close(two[:, 2:], causal, rtol=0, atol=1e-12)
    assert (two[:, :2] - noised).abs().max() > 1e-3
