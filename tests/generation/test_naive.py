"""The naive sampler: greedy decoding of a causal model is that of transformers, and each step is one forward
pass."""

from __future__ import annotations

import inspect
import math
from typing import get_args

import pytest
import torch

from tests.generation.cases import PATTERNS
from tests.helpers import each_once
from tests.tiny import add_to_logits, float64_causal, float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.generation import naive, sampler
from unmask.models.load import make_diffusion

PROMPTS = [[1, 4, 5, 6], [7], [9, 8, 7, 6, 5, 4, 4], [1, 9]]


def test_the_signature_is_that_of_the_sampler():
    here, there = (inspect.signature(each).parameters.values() for each in (naive.generate, sampler.generate))
    assert [(each.name, each.default, each.kind) for each in here] == [
        (each.name, each.default, each.kind) for each in there
    ]


@pytest.mark.parametrize("generate", [naive.generate, sampler.generate])
@pytest.mark.parametrize("family", ["phi", "gpt2"])
def test_causal_decoding_is_that_of_transformers(family, generate):
    model, _ = float64_causal(family)
    assert model.config._attn_implementation != "unmask"
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
        expected.append(out[0, len(prompt) :].tolist())
    lm = make_diffusion(*float64_causal(family))
    generation = generate(lm, PROMPTS, SamplerConfig(max_new_tokens=20))
    assert generation.tokens == expected
    assert generation.forward_passes == list(map(len, expected))
    assert generation.steps == [list(range(len(tokens))) for tokens in expected]


@each_once("steps, attention, block_size", [None, 1, 4, 7], PATTERNS)
def test_each_step_is_one_forward_pass(attention, block_size, steps, monkeypatch):
    lm, seen = float64_lm("phi", attention, block_size), []
    blocks = 1 if attention == "bidirectional" else -(-7 // (block_size or 1))
    steps = steps and max(steps, blocks)
    logits = lm.logits
    monkeypatch.setattr(
        lm, "logits", lambda ids_BT, **rest: (seen.append(tuple(ids_BT.shape)), logits(ids_BT, **rest))[1]
    )
    config = SamplerConfig(max_new_tokens=7, steps=steps, temperature=1.0, stop_at_eos=False)
    generation = naive.generate(lm, PROMPTS, config)
    assert len(seen) == sum(generation.forward_passes) and {batch for batch, _ in seen} == {1}
    if attention == "bidirectional":
        assert generation.forward_passes == [steps or 7] * 4
        assert {length for _, length in seen} == {len(prompt) + 7 for prompt in PROMPTS}


@pytest.mark.parametrize("generate", [naive.generate, sampler.generate])
@pytest.mark.parametrize("attention, block_size", PATTERNS[2:])
def test_the_first_of_equals_below_a_threshold_is_revealed_alone(generate, attention, block_size):
    """Every position predicts the same, so all are as probable as the best (Wu et al. 2025: reveal one)."""
    stock_model, tokenizer = float64_causal()
    stock_model.get_output_embeddings().weight.data.zero_()
    lm = make_diffusion(stock_model, tokenizer, attention=attention, block_size=block_size)
    generation = generate(
        lm, PROMPTS, SamplerConfig(max_new_tokens=7, threshold=0.9, forbidden_tokens=[lm.eos_token_id])
    )
    assert generation.steps == [list(range(7))] * 4 and generation.forward_passes == [7] * 4


@pytest.mark.parametrize("generate", [naive.generate, sampler.generate])
@pytest.mark.parametrize("factor, together", [(0.5, 1), (1.0, 2), (1.3, 3), (9.0, 7)])
def test_a_factor_reveals_equals_while_they_are_probable_enough(generate, factor, together):
    """Of n revealed together the n-th must be at least 1 - factor / (n + 1) probable; here all are at 0.7."""
    stock_model, tokenizer = float64_causal()
    stock_model.get_output_embeddings().weight.data.zero_()
    lm = make_diffusion(stock_model, tokenizer, attention="bidirectional")
    others = len(stock_model.get_output_embeddings().weight) - 2  # neither this token nor the mask token
    add_to_logits(lm, {5: math.log(others * 0.7 / 0.3)})
    generation = generate(lm, PROMPTS, SamplerConfig(max_new_tokens=7, factor=factor))
    assert generation.tokens == [[5] * 7] * 4
    assert generation.log_probs == [pytest.approx([math.log(0.7)] * 7)] * 4
    assert generation.steps == [[place // together for place in range(7)]] * 4


@pytest.mark.parametrize("logit_shift", [False, True])
def test_drafts_are_those_of_a_block_of_one_mask_more(logit_shift):
    """Here a further mask would change which are kept."""
    lm = float64_lm("gpt2", "block_causal", 4, logit_shift, causal_context=True, eos_bias=-9.0)
    config = SamplerConfig(mode="self-speculative", max_new_tokens=8, num_speculative_tokens=1)
    generation, expected = (make(lm, PROMPTS, config) for make in (naive.generate, sampler.generate))
    assert generation.tokens == expected.tokens and generation.steps == expected.steps
    assert 0 < generation.accepted_drafts == expected.accepted_drafts < 1


def test_the_policies_differ():
    """Otherwise other tests would not notice a remasking without effect."""
    lm = float64_lm("phi", "bidirectional")
    orders = set()
    for remasking in get_args(SamplerConfig.model_fields["remasking"].annotation):
        generation = naive.generate(
            lm, PROMPTS, SamplerConfig(max_new_tokens=12, remasking=remasking, stop_at_eos=False)
        )
        orders.add(str(generation.steps))
    assert len(orders) == 5
