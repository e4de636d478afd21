"""On a GPU: the tokens of the sampler are those of a CPU, and its noise has the same bits."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation.test_sampler import assert_same
from tests.generation.tiny_models import configs, every_pattern, prompt_lists, tiny
from unmask.config.run import SamplerConfig
from unmask.diffusion.rng import Stream, uniform
from unmask.generation import sampler
from unmask.models.diffusion_lm import DiffusionLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


# GPT-2 has no rotary embeddings, whose sines and cosines are of float32 and differ between devices in their last bits.


@cache
def on_gpu(*pattern: str | int | bool | None) -> DiffusionLM:
    lm = tiny("gpt2", *pattern).frozen_copy()
    lm.model.to("cuda")
    return lm


@every_pattern
@pytest.mark.parametrize("logit_shift", [False, True])
@settings(max_examples=8)
@given(data=st.data())
def test_any_settings_give_the_tokens_of_a_cpu(attention, block_size, logit_shift, data):
    config, prompts = data.draw(configs(attention, block_size)), data.draw(prompt_lists(shortest=int(logit_shift)))
    pattern = (attention, block_size, logit_shift)
    assert_same(sampler.generate(on_gpu(*pattern), prompts, config), sampler.generate(tiny("gpt2", *pattern), prompts, config))


@every_pattern
@pytest.mark.parametrize("constraint", [{"regex": "[abc]{3}d*"}, {"choice": ["aba", "d"]}])
def test_constraints_give_the_tokens_of_a_cpu(attention, block_size, constraint):
    config = SamplerConfig(max_new_tokens=6, temperature=1.0, constraint=constraint)
    found, expected = (
        sampler.generate(lm, [[4, 5, 6], [7] * 5], config)
        for lm in (on_gpu(attention, block_size, None), tiny("gpt2", attention, block_size))
    )
    assert found.tokens == expected.tokens


def test_noise_has_the_same_bits():
    key_B1, position_T = torch.arange(5)[:, None] * 0x1234567890ABCDE, torch.arange(300)
    here, there = (
        uniform(3, key_B1.to(device), position=position_T.to(device), step=2, stream=Stream.TOKEN).cpu() for device in ("cpu", "cuda")
    )
    assert torch.equal(here, there)
