"""Lossy settings are exact if nothing is stale, and report their agreement with the exact sampler."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.generation.cases import PATTERNS, PROMPTS
from tests.helpers import each_once, partly_slow
from tests.tiny import float64_lm
from unmask.config.revise import ReviseConfig
from unmask.config.sampler import SamplerConfig
from unmask.generation import naive, sampler
from unmask.generation.engine.engine import Engine
from unmask.generation.requests import make_requests
from unmask.generation.sampler import agreement


@each_once("revise, cache, logit_shift", [None, "probability", "quality"], ["prefix", "dual"], [False, True])
@partly_slow("family", ["phi", "gpt2"], 0)
def test_a_cache_refreshed_at_every_step_is_exact(family, revise, cache, logit_shift):
    lm = float64_lm(family, "bidirectional", None, logit_shift, quality_head=True)
    chosen = {"revise": revise and ReviseConfig(by=revise, eta=0.5), "refresh_interval": 1}
    config = SamplerConfig(max_new_tokens=12, block_size=4, temperature=1.0, cache=cache, **chosen)
    generation = sampler.generate(lm, PROMPTS, config)
    assert generation.tokens == naive.generate(lm, PROMPTS, config).tokens and generation.agreement == 1.0


@partly_slow("logit_shift", [False, True], 1)
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("refresh_interval", [None, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_stale_keys_of_one_layer_are_exact(refresh_interval, cache, logit_shift):
    """A key of the first layer depends on its own token only, so any difference is a wrong position."""
    lm = float64_lm("phi", "bidirectional", None, logit_shift, layers=1, eos_bias=-9.0)
    shared = {
        "block_size": 4,
        "temperature": 1.0,
        "cache": cache,
        "cfg_scale": 0.5,
        "revise": {"eta": 0.5} if logit_shift else None,
    }
    config = SamplerConfig(max_new_tokens=12, refresh_interval=refresh_interval, **shared)
    generation = sampler.generate(lm, PROMPTS, config)
    assert generation.tokens == naive.generate(lm, PROMPTS, config).tokens and generation.agreement == 1.0


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_is_refreshed_at_its_interval(cache):
    lm, seen = float64_lm("phi", "bidirectional", eos_bias=-9.0), []
    config = SamplerConfig(max_new_tokens=8, cache=cache, refresh_interval=3, agreement_prompts=0)
    hook = lm.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    sampler.generate(lm, [[4, 5, 6]], config)
    hook.remove()
    assert [width == 11 for width in seen] == [step % 3 == 0 for step in range(8)]


def test_an_empty_prefix_is_exact():
    lm = float64_lm("phi", "bidirectional", None, False)
    config = SamplerConfig(max_new_tokens=8, cache="prefix")
    assert sampler.generate(lm, [[]], config).tokens == naive.generate(lm, [[]], config).tokens


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_stale_keys_cost_agreement_and_save_work(cache):
    lm = float64_lm("phi", "bidirectional", eos_bias=-9.0)
    config = SamplerConfig(max_new_tokens=16, block_size=4, cache=cache, agreement_prompts=8)
    seen = []
    hook = lm.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    generation = sampler.generate(lm, PROMPTS, config.model_copy(update={"agreement_prompts": 0}))
    hook.remove()
    assert generation.agreement is None and len(seen) == 16
    whole = [width for width in seen if width == max(seen)]
    assert len(whole) == 4 and sum(seen) < 0.75 * 16 * max(seen)
    exact = naive.generate(lm, PROMPTS, config)
    measured = sampler.generate(lm, PROMPTS, config)
    assert measured.tokens == generation.tokens
    assert measured.agreement == agreement(exact.tokens, generation.tokens) < 1


def test_agreement_counts_positions():
    assert agreement([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == 0.75
    assert agreement([[1, 2]], [[1, 2, 3, 4], [5]]) == 0.5
    assert agreement([[], []], [[], []]) == 1.0


def test_agreement_of_infilling_counts_hidden_positions(monkeypatch):
    lm = float64_lm("phi", "bidirectional", eos_bias=-9.0)
    text, config = [4, lm.mask_token_id, 5, 6, lm.mask_token_id, 4, 5], SamplerConfig(cache="dual")
    seen = []
    monkeypatch.setattr(sampler, "agreement", lambda exact, lossy: seen.append((exact, lossy)) or 0.5)
    generation = sampler.infill(lm, [text], config)
    (((exact,), (lossy,)),) = seen
    assert (
        generation.agreement == 0.5
        and lossy == [generation.tokens[0][1], generation.tokens[0][4]]
        and len(exact) == 2
    )


@pytest.mark.parametrize("attention, block_size", PATTERNS[2:])
def test_an_early_commit_ends_a_block_with_confident_predictions(attention, block_size):
    lm = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    generation = sampler.generate(lm, PROMPTS, SamplerConfig(max_new_tokens=12, early_commit=1e-9))
    blocks = {"bidirectional": 1}.get(attention, 12 // (block_size or 12))
    assert (
        all(passes <= blocks + 1 for passes in generation.forward_passes) and generation.agreement is not None
    )
    never = sampler.generate(lm, PROMPTS, SamplerConfig(max_new_tokens=12, early_commit=1.0))
    assert (
        never.agreement == 1.0
        and never.tokens == naive.generate(lm, PROMPTS, SamplerConfig(max_new_tokens=12)).tokens
    )


@torch.no_grad()
def test_an_early_commit_waits_for_the_least_confident_position():
    lm = float64_lm("phi", "bidirectional", eos_bias=-9.0)
    (request,) = make_requests(lm, [[4, 5, 6]], SamplerConfig(max_new_tokens=6))
    ids, hidden = torch.tensor([request.ids]), torch.tensor([request.hidden])
    margins = []
    for _ in range(6):  # of the least sure position at each step of the exact sampler
        prob_NV = lm.logits(ids, rows_BT=hidden).softmax(-1)
        best_N2 = prob_NV.topk(2).values
        margins.append(float((best_N2[:, 0] - best_N2[:, 1]).min()))
        at = hidden[0].nonzero()[prob_NV.amax(-1).float().argmax()]
        ids[0, at], hidden[0, at] = prob_NV[prob_NV.amax(-1).float().argmax()].argmax(), False
    for bar in sorted(margins)[1:]:
        generation = sampler.generate(
            lm, [[4, 5, 6]], SamplerConfig(max_new_tokens=6, early_commit=bar - 1e-9)
        )
        assert generation.forward_passes == [
            1 + next(step for step, margin in enumerate(margins) if margin >= bar - 1e-9)
        ]


def test_lossy_and_exact_requests_share_an_engine():
    lm = float64_lm("phi", "bidirectional", eos_bias=-9.0)

    lossy = SamplerConfig(max_new_tokens=8, block_size=4, cache="dual")
    exact = SamplerConfig(max_new_tokens=8, block_size=4)
    engine = Engine(lm)
    tickets = {}
    for config in (exact, lossy, exact):
        for request in make_requests(lm, ["abc", "fe"], config):
            tickets[engine.submit(request, config)] = config
    found = dict(engine.run())
    alone = {id(config): sampler.generate(lm, ["abc", "fe"], config).tokens for config in (lossy, exact)}
    for ticket, config in tickets.items():
        assert found[ticket].canvas == alone[id(config)][ticket % 2]


def test_a_deterministic_run_computes_every_sequence_on_its_own():
    """In float32, where the batch shape changes rounding: the log-probabilities are those of each sequence
    alone, bit for bit."""
    exact = float64_lm("phi", "block_causal", 4, eos_bias=-9.0)
    lm, rows = exact.bind(copy.deepcopy(exact.model).float()), []
    config = SamplerConfig(max_new_tokens=6, deterministic=True)
    keys = list(range(len(PROMPTS)))
    hook = lm.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    generation = sampler.generate(lm, PROMPTS, config, keys)
    hook.remove()
    assert set(rows) == {1}
    alone = [sampler.generate(lm, [prompt], config, [key]) for prompt, key in zip(PROMPTS, keys, strict=True)]
    assert generation.tokens == [one.tokens[0] for one in alone] and generation.log_probs == [
        one.log_probs[0] for one in alone
    ]
