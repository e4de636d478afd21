"""Rounds of mode self-speculative: batched and cached, they are those of the naive sampler, beside sequences
of any other mode."""

from __future__ import annotations

import copy
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.generation.cases import PROMPTS, Watch, prompt_lists
from tests.helpers import each_once, examples, partly_slow
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.errors import GenerationError
from unmask.generation import naive, sampler
from unmask.generation.engine.cached_forward import cache_clean_tokens
from unmask.generation.engine.engine import Engine
from unmask.generation.engine.slots import BatchEntry, BatchState
from unmask.generation.requests import make_requests

MODE = "self-speculative"


def speculating(draw) -> SamplerConfig:
    """Any settings of the mode."""
    return SamplerConfig(
        mode=MODE,
        max_new_tokens=draw(st.integers(1, 9)),
        num_speculative_tokens=draw(st.integers(0, 9)),
        num_branches=draw(st.sampled_from([1, 1, 2, 3, 7])),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_k=draw(st.sampled_from([0, 4])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        forbidden_tokens=draw(st.sampled_from([None, [0, 4]])),
        stop_at_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 2)),
        batch_size=draw(st.integers(1, 4)),
        deterministic=draw(st.booleans()),
        trace=True,
    )


def assert_equal(trace, expected) -> None:
    """Tokens and counts exactly, numbers up to rounding."""
    for one, other in zip(astuple(trace), astuple(expected), strict=True):
        if isinstance(other, list) and other and isinstance(other[0], float):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
        else:
            assert one == other


@each_once("logit_shift, family", [False, True], ["phi", "gpt2"])
@examples(4)
@given(data=st.data())
def test_rounds_are_those_of_the_naive_sampler(logit_shift, family, data):
    block_size, bias = data.draw(st.integers(2, 8)), data.draw(st.sampled_from([-9.0, 1.0]))
    lm = float64_lm(
        family,
        "block_causal",
        block_size,
        logit_shift,
        causal_context=True,
        eos_bias=bias,
        time_embedding=data.draw(st.booleans()),
    )
    prompts, config = data.draw(prompt_lists(1)), speculating(data.draw)
    generation, expected = sampler.generate(lm, prompts, config), naive.generate(lm, prompts, config)
    assert generation.accepted_drafts == expected.accepted_drafts
    for trace, other in zip(generation.trace, expected.trace, strict=True):
        assert_equal(trace, other)


@examples(4)
@given(data=st.data())
def test_other_modes_share_the_engine(data):
    """Requests of several settings, some submitted later, one canceled."""
    lm = float64_lm(
        "phi", "block_causal", 4, True, causal_context=True, eos_bias=data.draw(st.sampled_from([-9.0, 1.0]))
    )
    engine, expected, results = (
        Engine(lm, batch_size=5, max_batch_tokens=data.draw(st.sampled_from([None, 120]))),
        {},
        {},
    )
    modes = [
        speculating(data.draw),
        SamplerConfig(max_new_tokens=7, cfg_scale=0.5),
        speculating(data.draw),
        SamplerConfig(num_speculative_tokens=1, max_new_tokens=6),
    ]
    for config in modes:
        config = config.model_copy(
            update={
                "num_speculative_tokens": min(config.num_speculative_tokens, 2),
                "num_branches": min(config.num_branches, 2),
            }
        )
        requests = make_requests(lm, PROMPTS[:4], config)
        tickets = [engine.submit(request, config) for request in requests]
        traces = naive.complete(lm, requests, config.model_copy(update={"trace": True})).trace
        expected |= {ticket: trace.canvas for ticket, trace in zip(tickets, traces, strict=True)}
        results |= dict(engine.step())
    canceled = data.draw(st.sampled_from(sorted(expected.keys() - results.keys()) or [99]))
    if engine.cancel(canceled):
        del expected[canceled]
    results |= dict(engine.run())
    assert {ticket: trace.canvas for ticket, trace in results.items()} == expected
    assert engine.slots.count == 0 and not engine.running


def test_a_round_is_one_forward_pass_of_few_positions():
    lm = float64_lm("phi", "block_causal", 4, True, causal_context=True, eos_bias=-9.0)
    config = SamplerConfig(mode=MODE, max_new_tokens=9)
    with Watch(lm) as watch:
        generation = sampler.generate(lm, [[4, 5, 6]], config)
    rounds = generation.forward_passes[0]
    assert watch.rows == rounds + 1  # and that of the prompt
    assert watch.heads <= 1 + rounds * (4 + 4 * 3)


def test_the_cache_holds_the_kept_drafts_at_their_positions():
    """The keys of the decided tokens are those of a plain pass over the text, while a tree is verified."""
    lm = float64_lm("phi", "block_causal", 4, True, causal_context=True, eos_bias=-9.0)
    for config in (
        SamplerConfig(mode=MODE, max_new_tokens=24, num_branches=candidates) for candidates in (1, 4)
    ):
        engine = Engine(lm)
        for request in make_requests(lm, PROMPTS, config):
            engine.submit(request, config)
        moved = 0
        while True:
            engine.step()
            if not engine.running:
                break
            for sequence in engine.running:
                slot, count = sequence.slots[0], sequence.num_cached
                plain = BatchState(lm.device, lm.mask_token_id)
                plain.reserve(1, count + 1)
                plain.create_cache()
                plain.add_all([(engine.slots.ids_SC[slot, :count].tolist(), [False] * count)])
                with torch.no_grad():
                    cache_clean_tokens(lm.as_causal(), plain, [BatchEntry(0, count, count, count)])
                for pair, others in zip(engine.slots.cache.stored, plain.cache.stored, strict=True):
                    for stored, other in zip(pair, others, strict=True):
                        torch.testing.assert_close(stored[slot, :, :count], other[0, :, :count])
                moved += sequence.speculation.num_accepted
        assert moved > 0


def test_a_shared_prompt_is_computed_once():
    lm = float64_lm("phi", "block_causal", 4, True, causal_context=True, eos_bias=-9.0)
    generation = sampler.generate(
        lm, [[4, 5, 6, 7, 8] * 4] * 6, SamplerConfig(mode=MODE, max_new_tokens=4, temperature=1.0)
    )
    assert generation.prompt_reuse == pytest.approx(5 / 6)


def test_memory_is_bounded_by_the_configuration():
    lm = float64_lm("phi", "block_causal", 4, True, causal_context=True, eos_bias=-9.0)
    # 2 * 3 drafts in place of 3, and 4 masks after each of 1 + 6 nodes
    for candidates, more in ((1, 16), (2, 31)):
        config = SamplerConfig(mode=MODE, max_new_tokens=8, num_branches=candidates)
        engine = Engine(lm, batch_size=9, max_batch_tokens=60 + 2 * more)
        for request in make_requests(lm, [[4], [4] * 20, [4] * 5, [4] * 22], config):
            engine.submit(request, config)
        while engine.waiting or engine.running:
            engine.step()
            assert engine.slots.ids_SC.numel() <= 60 + 2 * more
    config, engine = SamplerConfig(mode=MODE, max_new_tokens=8), Engine(lm, max_batch_tokens=30)
    with raises(GenerationError, where="max_batch_tokens"):
        engine.submit(make_requests(lm, [[4] * 22], config)[0], config)


def small_verifier(logit_shift: bool):
    """A model that drafts for another one, which has the same tokenizer and other weights."""
    lm = float64_lm("phi", "block_causal", 4, logit_shift, causal_context=True, time_embedding=True)
    return lm, float64_lm("gpt2", "causal", eos_bias=-1.0)


@partly_slow("logit_shift", [False, True], 1)
@partly_slow("temperature", [0.0, 1.0], 0)
@pytest.mark.parametrize("candidates", [1, 3])
def test_another_causal_model_verifies(logit_shift, temperature, candidates):
    lm, verifier = small_verifier(logit_shift)
    config = SamplerConfig(
        mode=MODE,
        max_new_tokens=9,
        temperature=temperature,
        num_branches=candidates,
        batch_size=3,
        trace=True,
    )
    generation, expected = (
        make(lm, PROMPTS, config, verifier=verifier) for make in (sampler.generate, naive.generate)
    )
    for trace, other in zip(generation.trace, expected.trace, strict=True):
        assert_equal(trace, other)
    if temperature == 0:
        assert (
            generation.tokens == sampler.generate(verifier, PROMPTS, SamplerConfig(max_new_tokens=9)).tokens
        )
    assert 0 < generation.accepted_drafts < 1


def test_a_model_verifies_its_own_causal_reading_with_more_kept_drafts():
    """The verifier that the model is itself: the text of the mode, drafted with the last token known."""
    lm = float64_lm("phi", "block_causal", 4, True, causal_context=True)
    config = SamplerConfig(mode=MODE, max_new_tokens=12)
    one, two = (
        sampler.generate(lm, PROMPTS, config),
        sampler.generate(lm, PROMPTS, config, verifier=lm.as_causal()),
    )
    assert one.tokens == two.tokens and two.accepted_drafts > one.accepted_drafts


def test_verifiers_that_do_not_fit_are_refused():
    lm, verifier = small_verifier(True)
    config = SamplerConfig(mode=MODE, max_new_tokens=4)
    with raises(GenerationError, where="verifier"):
        sampler.generate(lm, ["a"], config, verifier=lm)
    with raises(GenerationError, where="verifier"):
        sampler.generate(lm, ["a"], SamplerConfig(max_new_tokens=4), verifier=verifier)
    other = copy.copy(verifier)
    other.tokenizer = character_tokenizer("abcdeg")
    with raises(GenerationError, where="verifier"):
        sampler.generate(lm, ["a"], config, verifier=other)
