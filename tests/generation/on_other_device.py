"""Generation and likelihood on a device that is no CPU (`tests/other_device.py`), in a process of `test_other_device.py`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unmask
from tests import other_device
from tests.generation.test_sampler import assert_same
from tests.generation.test_variable_length import tiny as with_length_tokens
from tests.generation.tiny_models import configs, every_pattern, prompt_lists, tiny
from unmask.config.run import SamplerConfig
from unmask.generation import sampler
from unmask.models.diffusion_lm import DiffusionLM

LIBRARY = other_device.install()
PROMPTS = [[4, 5, 6], [7] * 5]


def there(lm: DiffusionLM) -> DiffusionLM:
    copy = lm.frozen_copy()
    other_device.moved(copy.model)
    assert copy.device.type == "other"
    return copy


@every_pattern
@pytest.mark.parametrize("logit_shift", [False, True])
@settings(max_examples=8)
@given(data=st.data())
def test_any_settings_give_the_same_tokens(attention, block_size, logit_shift, data):
    config, prompts = data.draw(configs(attention, block_size)), data.draw(prompt_lists(shortest=int(logit_shift)))
    lm = tiny("gpt2", attention, block_size, logit_shift)
    with other_device.active():
        found = sampler.generate(there(lm), prompts, config)
    assert_same(found, sampler.generate(lm, prompts, config))


CHOSEN = {
    "a regex": {"constraint": {"regex": "[abc]{3}d*"}, "temperature": 1.0},
    "a choice": {"constraint": {"choice": ["aba", "d"]}},
    "filtered": {"constraint": {"regex": "[abc]{3}d*"}, "temperature": 0.7, "top_k": 3, "top_p": 0.9},
    "best": {"repetition_penalty": 1.3},
    "revised": {"revise": {"eta": 0.5}, "block_size": None},
}


@pytest.mark.parametrize("chosen", CHOSEN)
@every_pattern
def test_what_must_fit_gives_the_same_tokens(attention, block_size, chosen):
    if chosen == "revised" and (attention == "causal" or block_size == 1):
        pytest.skip("blocks of one token have nothing to hide")
    config, lm = SamplerConfig(max_new_tokens=6, trace=True, **CHOSEN[chosen]), tiny("gpt2", attention, block_size)
    with other_device.active():
        found = sampler.generate(there(lm), PROMPTS, config)
    # Where only one token fits, rounding decides which position is revealed first.
    assert found.tokens == sampler.generate(lm, PROMPTS, config).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("verified", "candidates"), [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_drafts_that_are_verified_give_the_same_tokens(temperature, verified, candidates):
    lm = tiny("gpt2", "block_causal", 4, True, causal_context=True)
    settings = {"max_new_tokens": 8, "temperature": temperature, "candidates": candidates, "stop_at_eos": False}
    config = SamplerConfig(mode="self-speculative", **settings)
    with other_device.active():
        found = sampler.generate(there(lm), PROMPTS, config, verifier=there(tiny("gpt2")) if verified else None)
    assert found.tokens == sampler.generate(lm, PROMPTS, config, verifier=tiny("gpt2") if verified else None).tokens


def test_gaps_are_found_and_filled_as_on_a_cpu():
    lm, config = tiny("gpt2", "bidirectional"), SamplerConfig(temperature=1.0)
    texts = [[[4, 5, 6], [7, 4]], [[5, 5], [6, 7, 4, 5]]]
    with other_device.active():
        found = unmask.infill(there(lm), texts, config, length="auto", max_gap=4)
    assert found.tokens == unmask.infill(lm, texts, config, length="auto", max_gap=4).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_finds_the_lengths_fills_gaps_as_on_a_cpu(temperature):
    lm, config = with_length_tokens(expand=2.0, delete=1.0, family="gpt2"), SamplerConfig(temperature=temperature, tokens_per_step=2)
    texts = [[[1, 4, 5, 6], [7, 4]], [[1, 5, 5], [6, 7], [4, 5]]]
    with other_device.active():
        found = unmask.infill(there(lm), texts, config, length="auto", max_gap=6)
    expected = unmask.infill(lm, texts, config, length="auto", max_gap=6)
    assert found.tokens == expected.tokens and found.gaps == expected.gaps


@every_pattern
def test_likelihoods_are_those_of_a_cpu(attention, block_size):
    lm = tiny("gpt2", attention, block_size)
    estimator = "exact" if lm.autoregressive else "elbo"
    with other_device.active():
        found = unmask.log_likelihood(there(lm), PROMPTS, PROMPTS[::-1], estimator=estimator)
    assert found.tolist() == pytest.approx(unmask.log_likelihood(lm, PROMPTS, PROMPTS[::-1], estimator=estimator).tolist(), abs=1e-9)
