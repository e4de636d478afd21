"""With many seeds of every pattern and remasking: the naive sampler's tokens at any batch size, and the exact
distribution."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks import published
from tests.helpers import chi_square_is_likely, partly_slow
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import RngStream, uniform
from unmask.generation import naive, sampler
from unmask.generation.policies import keep_likely
from unmask.generation.requests import make_requests

MANY, SOME = pytest.param(1000, marks=pytest.mark.nightly), 16
"""Seeds: a thousand take half an hour in all."""
PATTERNS = [("bidirectional", None), ("block_causal", 4), ("causal", None)]
ORDERS = {
    "confidence": {},
    "margin": {"remasking": "margin", "tokens_per_step": 2},
    "entropy": {"remasking": "entropy", "steps": 3},
    "random": {"remasking": "random"},
    "left to right": {"remasking": "left_to_right", "tokens_per_step": 3},
    "threshold": {"threshold": 0.3},
    "factor": {"factor": 0.8},
    "entropy bound": {"remasking": "entropy", "entropy_bound": 1.5},
    "remasking": {"remask_fraction": 0.5},
    "revising": {"tokens_per_step": 2, "revise": {"eta": 0.5}},
    "revising in a loop": {
        "steps": 14,
        "revise": {"schedule": "loop", "eta": 0.5, "temperature": 1.0, "below": 0.4},
    },
    "schedule of Dream": {
        "remasking": "entropy",
        "schedule": "dream",
        "steps": 5,
        "filtered_confidence": True,
        "top_p": 0.9,
    },
    "ancestral schedule": {"remasking": "random", "schedule": "ancestral", "steps": 5},
}
CASES = [
    (remasking, *pattern)
    for remasking in ORDERS
    for pattern in PATTERNS
    if "revis" not in remasking or pattern[0] != "causal"
]
PROMPTS = [[4, 5, 6], [7], [8, 9, 4, 5, 6], [5, 5]]
WIDTH = 8


def prompts_and_keys(seeds: int) -> tuple[list[list[int]], list[int]]:
    return [PROMPTS[seed % len(PROMPTS)] for seed in range(seeds)], list(range(seeds))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [SOME, MANY])
@pytest.mark.parametrize("remasking, attention, block_size", CASES)
def test_the_engine_gives_the_tokens_of_the_naive_sampler(remasking, attention, block_size, seeds):
    lm = float64_lm("phi", attention, block_size)
    settings = ORDERS[remasking] | (
        {"steps": WIDTH} if attention == "causal" and "steps" in ORDERS[remasking] else {}
    )
    config = SamplerConfig(max_new_tokens=WIDTH, temperature=0.8, batch_size=64, **settings)
    prompts, keys = prompts_and_keys(seeds)
    expected = naive.generate(lm, prompts, config, keys)
    for batch_size in (64, 1):
        generation = sampler.generate(lm, prompts, config.model_copy(update={"batch_size": batch_size}), keys)
        assert generation.tokens == expected.tokens and generation.steps == expected.steps
    assert len({tuple(tokens) for tokens in generation.tokens}) > seeds / 4


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [SOME, MANY])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("attention, block_size", PATTERNS)
def test_in_float32_sequences_differ_at_near_ties_only(attention, block_size, temperature, seeds, capsys):
    exact = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    lm = exact.bind(copy.deepcopy(exact.model).float())
    config = SamplerConfig(max_new_tokens=WIDTH, temperature=temperature, trace=True)
    prompts, keys = prompts_and_keys(seeds)
    generation, expected = (
        generate(lm, prompts, config, keys) for generate in (sampler.generate, naive.generate)
    )
    parted = [index for index in range(seeds) if generation.tokens[index] != expected.tokens[index]]
    for index in parted:
        assert (
            tie(lm, prompts[index], keys[index], config, generation.trace[index], expected.trace[index])
            < 1e-5
        )
    with capsys.disabled():
        print(
            f"\n{attention}, temperature {temperature}: {len(parted)} of {seeds} sequences part at a near-tie"
        )


def tie(lm, prompt, key, config, one, other) -> float:
    """The relative difference between the two choices at the first step in which two traces differ."""
    (request,) = make_requests(lm, [prompt], config, [key])
    different = [
        at for at in range(WIDTH) if (one.canvas[at], one.steps[at]) != (other.canvas[at], other.steps[at])
    ]
    step = min(min(one.steps[at], other.steps[at]) for at in different)
    hidden = [False] * len(prompt) + [other.steps[at] >= step for at in range(WIDTH)]
    ids = prompt + [
        lm.mask_token_id if gone else token
        for token, gone in zip(other.canvas, hidden[len(prompt) :], strict=True)
    ]
    visible = (
        request.length
        if lm.attention == "bidirectional"
        else next(stop for start, stop in request.blocks if any(hidden[start:stop]))
    )
    logits_TV = lm.logits(torch.tensor([ids[:visible]]))[0].double()
    chosen = [next(at for at in range(WIDTH) if trace.steps[at] == step) for trace in (one, other)]
    rows = [logits_TV[len(prompt) + at] for at in chosen]
    tokens = [trace.canvas[at] for trace, at in zip((one, other), chosen, strict=True)]
    if chosen[0] != chosen[1]:
        scores = [float(row.log_softmax(-1)[token]) for row, token in zip(rows, tokens, strict=True)]
        return abs(scores[0] - scores[1]) / max(map(abs, scores))
    if config.temperature == 0:
        best = rows[0].topk(2).values
        return float((best[0] - best[1]) / best.abs().max())
    edges = (rows[0] / config.temperature).softmax(-1).cumsum(-1)
    noise = uniform(
        config.seed, torch.tensor([key]), step=step, position=len(prompt) + chosen[0], stream=RngStream.TOKEN
    )
    return float((edges - noise).abs().min())


@pytest.mark.parametrize("steps", [2, 6, 8])
def test_the_published_sampler_gives_the_same_tokens(steps):
    """At temperature 0; the benchmark compares with this sampler."""
    lm, prompt_BP = (
        float64_lm("phi", "bidirectional"),
        torch.randint(4, 9, (16, 5), generator=torch.Generator().manual_seed(0)),
    )
    config = SamplerConfig(max_new_tokens=WIDTH, block_size=4, steps=steps, stop_at_eos=False)
    generation = sampler.generate(lm, prompt_BP.tolist(), config)
    assert generation.tokens == published.generate(lm, prompt_BP, WIDTH, 4, steps, 0.0)[:, 5:].tolist()
    assert len({tuple(tokens) for tokens in generation.tokens}) > 8


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_the_published_noise_draws_from_the_same_distribution(temperature):
    torch.manual_seed(0)
    logits_V, count = torch.tensor([0.0, 1.0, -1.0, 2.5, 0.5]), 4000
    drawn_V = torch.bincount(
        published.noisy(logits_V.expand(count, 1, 5), temperature).argmax(-1)[:, 0], minlength=5
    )
    assert chi_square_is_likely(drawn_V, (logits_V / temperature).softmax(-1).double())


@partly_slow("filters", [{}, {"top_p": 0.8}, {"top_k": 4}, {"top_p": 0.9, "top_k": 6}], 3)
@partly_slow("temperature", [0.5, 1.0, 1.3], 2)
@pytest.mark.parametrize(
    "attention, block_size",
    [PATTERNS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in PATTERNS[1:])],
)
def test_tokens_are_drawn_from_the_exact_distribution(attention, block_size, temperature, filters):
    """A chi-square test of the first revealed token."""
    lm, count = float64_lm("gpt2", attention, block_size), 2000
    config = SamplerConfig(
        max_new_tokens=1, temperature=temperature, stop_at_eos=False, batch_size=count, **filters
    )
    generation = sampler.generate(lm, [[4, 5]] * count, config)
    drawn_V = torch.bincount(torch.tensor(generation.tokens)[:, 0], minlength=lm.mask_token_id + 1).double()
    logits_1V = lm.logits(torch.tensor([[4, 5, lm.mask_token_id]]))[0, -1:]
    prob_V = keep_likely((logits_1V / temperature).softmax(-1), config.top_k, config.top_p)[0].double()
    prob_V = prob_V / prob_V.sum()
    assert chi_square_is_likely(drawn_V, prob_V)
