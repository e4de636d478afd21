"""On a GPU: tokens, likelihoods and the bits of noise are those of a CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unmask
from tests.generation.cases import configs, every_pattern, prompt_lists
from tests.generation.test_sampler import assert_same
from tests.generation.test_variable_length import filling_lm
from tests.helpers import GPU, needs_cuda, needs_gpu
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import RngStream, uniform
from unmask.generation import naive, sampler
from unmask.generation.engine.recorded_passes import passes_of
from unmask.models.diffusion_lm import DiffusionLM

pytestmark = needs_gpu
PROMPTS = [[4, 5, 6], [7] * 5]


# GPT-2 has no rotary embeddings, whose sines and cosines are of float32 and differ between devices in their
# last bits.


def there(lm: DiffusionLM) -> DiffusionLM:
    copy = lm.frozen_copy()
    copy.model.to(GPU)
    assert copy.device.type == GPU
    return copy


@cache
def on_gpu(*pattern: str | int | bool | None) -> DiffusionLM:
    return there(float64_lm("gpt2", *pattern))


@pytest.mark.slow
@every_pattern
@pytest.mark.parametrize("logit_shift", [False, True])
@settings(max_examples=8)
@given(data=st.data())
def test_any_settings_give_the_tokens_of_a_cpu(attention, block_size, logit_shift, data):
    config, prompts = (
        data.draw(configs(attention, block_size)),
        data.draw(prompt_lists(shortest=int(logit_shift))),
    )
    pattern = (attention, block_size, logit_shift)
    assert_same(
        sampler.generate(on_gpu(*pattern), prompts, config),
        sampler.generate(float64_lm("gpt2", *pattern), prompts, config),
    )


EACH: dict[str, dict[str, Any]] = {
    **{
        remasking: {"remasking": remasking, "steps": 4}
        for remasking in ("low_confidence", "margin", "entropy", "random", "left_to_right")
    },
    "threshold": {"threshold": 0.2},
    "factor": {"factor": 0.5},
    "entropy bound": {"remasking": "entropy", "entropy_bound": 2.0},
    "remask": {"remask_fraction": 0.3, "steps": 6},
    "revise": {"revise": {"eta": 0.5}, "steps": 6},
    "guidance": {"cfg_scale": 0.7},
    "filters": {"top_k": 4, "top_p": 0.9, "repetition_penalty": 1.3, "forbidden_tokens": [3]},
    "prefix cache": {"cache": "prefix"},
    "dual cache": {"cache": "dual"},
}
"""One setting at a time."""


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize(
    "attention, block_size, temperature",
    [("block_causal", 4, 1.0), pytest.param("bidirectional", None, 0.0, marks=pytest.mark.slow)],
)
def test_each_setting_gives_the_tokens_of_a_cpu(attention, block_size, temperature, each):
    config = SamplerConfig(
        max_new_tokens=8, block_size=4, temperature=temperature, stop_at_eos=False, trace=True, **EACH[each]
    )
    if config.cache != "exact" and attention != "bidirectional":
        pytest.skip("models by blocks have their own cache")
    pattern = (attention, block_size)
    assert_same(
        sampler.generate(on_gpu(*pattern), PROMPTS, config),
        sampler.generate(float64_lm("gpt2", *pattern), PROMPTS, config),
    )


CHOSEN = {
    "a regex": {"constraint": {"regex": "[abc]{3}d*"}, "temperature": 1.0},
    "a choice": {"constraint": {"choice": ["aba", "d"]}},
    "filtered": {"constraint": {"regex": "[abc]{3}d*"}, "temperature": 0.7, "top_k": 3, "top_p": 0.9},
    "best": {"repetition_penalty": 1.3},
    "revised": {"revise": {"eta": 0.5}, "block_size": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", CHOSEN)
@every_pattern
def test_what_must_fit_gives_the_same_tokens(attention, block_size, chosen):
    if chosen == "revised" and (attention == "causal" or block_size == 1):
        pytest.skip("blocks of one token have nothing to hide")
    config, lm = (
        SamplerConfig(max_new_tokens=6, trace=True, **CHOSEN[chosen]),
        float64_lm("gpt2", attention, block_size),
    )
    found = sampler.generate(there(lm), PROMPTS, config)
    # Where only one token fits, rounding decides which position is revealed first.
    assert found.tokens == sampler.generate(lm, PROMPTS, config).tokens


@pytest.mark.parametrize("constraint", [{"regex": "[abc]{3}d*"}, {"choice": ["aba", "d"]}])
def test_constraints_give_the_tokens_of_a_cpu(constraint):
    config, pattern = (
        SamplerConfig(max_new_tokens=6, temperature=1.0, constraint=constraint),
        ("block_causal", 4),
    )
    assert (
        sampler.generate(on_gpu(*pattern), PROMPTS, config).tokens
        == sampler.generate(float64_lm("gpt2", *pattern), PROMPTS, config).tokens
    )


FORMS: dict[str, dict[str, Any]] = {
    "free": {},
    "a regex": {"constraint": {"regex": "[abc]{3}d*"}},
    "filtered": {"constraint": {"regex": "[abc]{3}d*"}, "top_k": 3, "top_p": 0.9},
    "a penalty": {"repetition_penalty": 1.3, "forbidden_tokens": [3]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "pattern", [("block_causal", 4), pytest.param(("bidirectional", None), marks=pytest.mark.slow)]
)
def test_canvases_of_random_tokens_have_the_tokens_of_a_cpu(pattern, form):
    lm = float64_lm("gpt2", *pattern).with_noise("uniform")
    settings = {"max_denoising_steps": 6, "entropy_bound": 1.0, "confidence_threshold": 0.5}
    config = SamplerConfig(max_new_tokens=7, trace=True, **settings, **FORMS[form])
    found = sampler.generate(there(lm), PROMPTS, config)
    assert_same(found, sampler.generate(lm, PROMPTS, config))
    assert naive.generate(there(lm), PROMPTS, config).tokens == found.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("verified", "candidates"), [(False, 1), (True, 1), pytest.param(True, 3, marks=pytest.mark.slow)]
)
def test_drafts_that_are_verified_give_the_same_tokens(temperature, verified, candidates):
    lm = float64_lm("gpt2", "block_causal", 4, True, causal_context=True)
    settings = {
        "max_new_tokens": 8,
        "temperature": temperature,
        "num_branches": candidates,
        "stop_at_eos": False,
    }
    config = SamplerConfig(mode="self-speculative", **settings)
    found = sampler.generate(
        there(lm), PROMPTS, config, verifier=there(float64_lm("gpt2")) if verified else None
    )
    assert (
        found.tokens
        == sampler.generate(lm, PROMPTS, config, verifier=float64_lm("gpt2") if verified else None).tokens
    )


def test_gaps_are_found_and_filled_as_on_a_cpu():
    lm, config = float64_lm("gpt2", "bidirectional"), SamplerConfig(temperature=1.0)
    texts = [[[4, 5, 6], [7, 4]], [[5, 5], [6, 7, 4, 5]]]
    found = unmask.infill(there(lm), texts, config, length="auto", max_gap=4)
    assert found.tokens == unmask.infill(lm, texts, config, length="auto", max_gap=4).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_finds_the_lengths_fills_gaps_as_on_a_cpu(temperature):
    lm, config = (
        filling_lm(expand=2.0, delete=1.0, family="gpt2"),
        SamplerConfig(temperature=temperature, tokens_per_step=2),
    )
    texts = [[[1, 4, 5, 6], [7, 4]], [[1, 5, 5], [6, 7], [4, 5]]]
    found = unmask.infill(there(lm), texts, config, length="auto", max_gap=6)
    expected = unmask.infill(lm, texts, config, length="auto", max_gap=6)
    assert found.tokens == expected.tokens and found.gaps == expected.gaps


@pytest.mark.slow
@every_pattern
def test_likelihoods_are_those_of_a_cpu(attention, block_size):
    lm = float64_lm("gpt2", attention, block_size)
    estimator = "exact" if lm.autoregressive else "elbo"
    found = unmask.log_likelihood(there(lm), PROMPTS, PROMPTS[::-1], estimator=estimator)
    assert found.tolist() == pytest.approx(
        unmask.log_likelihood(lm, PROMPTS, PROMPTS[::-1], estimator=estimator).tolist(), abs=1e-9
    )


@needs_cuda
@every_pattern
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cuda_graphs_give_the_same_tokens(attention, block_size, temperature):
    lm, graphs = float64_lm("gpt2", attention, block_size), there(float64_lm("gpt2", attention, block_size))
    graphs.cuda_graphs = True
    block = 4 if attention == "bidirectional" else None
    config = SamplerConfig(
        max_new_tokens=16, block_size=block, temperature=temperature, stop_at_eos=False, trace=True
    )
    for _ in range(3):
        for prompts in (PROMPTS, PROMPTS[:1]):
            assert_same(sampler.generate(graphs, prompts, config), sampler.generate(lm, prompts, config))
    assert len(passes_of(graphs)) > 0


def test_noise_has_the_same_bits():
    key_B1, position_T = torch.arange(5)[:, None] * 0x1234567890ABCDE, torch.arange(300)
    here, there = (
        uniform(3, key_B1.to(device), position=position_T.to(device), step=2, stream=RngStream.TOKEN).cpu()
        for device in ("cpu", GPU)
    )
    assert torch.equal(here, there)
