"""What a denoising step costs beside its forward pass: reads by the host, which stall a GPU, and
operations."""

from __future__ import annotations

import pytest
import torch

from tests.dispatch_counts import Counts
from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import build_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation import naive, sampler
from unmask.generation.engine.engine import Engine
from unmask.generation.requests import make_requests
from unmask.models.diffusion_lm import DiffusionLM

LENGTHS = (16, 24, 20, 31, 9, 16, 40, 12)
SETTINGS = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"remasking": "random", "remask_fraction": 0.3},
    {"revise": {"eta": 0.5}},
    {"cfg_scale": 1.0},
    {"repetition_penalty": 1.2, "trace": True, "top_log_probs": 3},
]


def lm_of(attention: str, block_size: int | None) -> DiffusionLM:
    """A Qwen3 of four layers."""
    sizes = {"width": 64, "intermediate_size": 128, "layers": 4, "context": 512, "vocab_size": 502}
    heads = {"heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return build_lm("qwen3", "abcdef", attention, block_size, seed=1, ids=(), **sizes, **heads)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(20, 499, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize(
    ("attention", "block_size", "temperature", "most"),
    [
        ("bidirectional", None, 0.0, 420),
        ("bidirectional", None, 1.0, 480),
        ("block_causal", 8, 0.0, 460),
        ("block_causal", 8, 1.0, 520),
    ],
)
def test_a_step_reads_nothing_and_has_few_operations(attention, block_size, temperature, most):
    lm = lm_of(attention, block_size)
    config = SamplerConfig(max_new_tokens=32, steps=16, temperature=temperature, stop_at_eos=False)
    with Counts() as counts:
        passes = max(sampler.generate(lm, prompts(), config).forward_passes)
    assert counts.reads == 0 and counts.operations / passes <= most


@partly_slow("settings", SETTINGS, 0, 4)
@pytest.mark.parametrize(("attention", "block_size"), [("bidirectional", None), ("block_causal", 8)])
def test_fixed_schedules_need_no_reads(attention, block_size, settings):
    lm, config = lm_of(attention, block_size), SamplerConfig(max_new_tokens=16, stop_at_eos=False, **settings)
    with Counts() as counts:
        sampler.generate(lm, prompts(), config)
    assert counts.reads == 0


def test_noise_is_made_for_many_steps_at_once():
    lm, few, many = (
        lm_of("block_causal", 8),
        SamplerConfig(max_new_tokens=8, temperature=1.0),
        SamplerConfig(max_new_tokens=64),
    )
    many = many.model_copy(update={"temperature": 1.0})
    per_step = []
    for config in (few, many):
        config = config.model_copy(update={"stop_at_eos": False})
        greedy = config.model_copy(update={"temperature": 0.0})
        with Counts() as drawn:
            sampler.generate(lm, prompts(), config)
        with Counts() as best:
            steps = max(sampler.generate(lm, prompts(), greedy).forward_passes)
        per_step.append((drawn.operations - best.operations) / steps)
    assert per_step[1] < 60 and per_step[1] < per_step[0]


def test_noise_of_parts_is_that_of_the_whole(monkeypatch):
    lm, config = (
        lm_of("block_causal", 8),
        SamplerConfig(max_new_tokens=24, temperature=1.0, order_temperature=0.5, stop_at_eos=False),
    )
    requests = make_requests(lm, prompts()[:3], config)
    whole = sampler.complete(lm, requests, config)
    monkeypatch.setattr("unmask.generation.engine.noise.NUMBERS", 40)  # two steps
    parts = sampler.complete(lm, requests, config)
    assert whole.tokens == parts.tokens == naive.complete(lm, requests, config).tokens
    assert whole.steps == parts.steps


@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
def test_only_the_sequence_with_nan_predictions_fails(remasking):
    lm, config = (
        lm_of("bidirectional", None),
        SamplerConfig(max_new_tokens=8, remasking=remasking, stop_at_eos=False),
    )
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[3] = torch.nan
    config = config.model_copy(update={"forbidden_tokens": [3]})
    expected = sampler.generate(lm, [[20, 21], [22] * 5], config).tokens
    engine = Engine(lm)
    good, bad, other = (
        engine.submit(request, config)
        for request in make_requests(lm, [[20, 21], [20, 3, 21], [22] * 5], config)
    )
    results = {}
    with raises(GenerationError, where="model"):
        for ticket, trace in engine.run():
            results[ticket] = trace.canvas
    assert engine.cancel(bad)
    results |= {ticket: trace.canvas for ticket, trace in engine.run()}
    assert [results[good], results[other]] == expected and results.keys() == {good, other}


def test_nan_predictions_are_an_error_at_the_end_of_a_block():
    lm, config = lm_of("block_causal", 8), SamplerConfig(max_new_tokens=64)
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[3] = torch.nan
    engine = Engine(lm)
    engine.submit(make_requests(lm, [[20, 3, 21]], config)[0], config)
    with raises(GenerationError, where="model"):
        list(engine.run())
    assert engine.num_forward_passes <= 1 + 8
