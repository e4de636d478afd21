"""What is lossy says so, is exact where it cannot matter, and tells how far it agrees with the exact sampler."""

from __future__ import annotations

import pytest

from tests.generation.conftest import PATTERNS, tiny
from tests.generation.test_sampler import PROMPTS, Watch
from unmask.config import SamplerConfig
from unmask.generation import reference, sampler
from unmask.generation.engine import Engine
from unmask.generation.requests import make_requests
from unmask.generation.sampler import agreement


@pytest.mark.parametrize("logit_shift", [False, True])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("family", ["phi", "gpt2"])
def test_a_cache_that_is_always_fresh_is_exact(family, cache, logit_shift):
    lm = tiny(family, "bidirectional", None, logit_shift)
    config = SamplerConfig(max_new_tokens=12, block_size=4, temperature=1.0, cache=cache, refresh_interval=1)
    made = sampler.generate(lm, PROMPTS, config)
    assert made.tokens == reference.generate(lm, PROMPTS, config).tokens and made.agreement == 1.0


def test_a_prefix_of_nothing_is_exact():
    lm = tiny("phi", "bidirectional", None, False)
    config = SamplerConfig(max_new_tokens=8, cache="prefix")
    assert sampler.generate(lm, [[]], config).tokens == reference.generate(lm, [[]], config).tokens


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_stale_keys_cost_agreement_and_save_work(cache):
    lm = tiny("phi", "bidirectional", eos_bias=-9.0)
    config = SamplerConfig(max_new_tokens=16, block_size=4, cache=cache, agreement_prompts=8)
    seen = []
    hook = lm.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    made = sampler.generate(lm, PROMPTS, config.model_copy(update={"agreement_prompts": 0}))
    hook.remove()
    assert made.agreement is None and len(seen) == 16
    whole = [width for width in seen if width == max(seen)]
    assert len(whole) == 4 and sum(seen) < 0.75 * 16 * max(seen)
    exact = reference.generate(lm, PROMPTS, config)
    measured = sampler.generate(lm, PROMPTS, config)
    assert measured.tokens == made.tokens
    assert measured.agreement == agreement(exact.tokens, made.tokens) < 1


def test_agreement_counts_positions():
    assert agreement([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == 0.75
    assert agreement([[1, 2]], [[1, 2, 3, 4], [5]]) == 0.5


@pytest.mark.parametrize("attention, block_size", PATTERNS[2:])
def test_an_early_commit_ends_a_block_that_is_sure(attention, block_size):
    lm = tiny("phi", attention, block_size, eos_bias=-9.0)
    made = sampler.generate(lm, PROMPTS, SamplerConfig(max_new_tokens=12, early_commit=1e-9))
    blocks = {"bidirectional": 1}.get(attention, 12 // (block_size or 12))
    assert all(passes <= blocks + 1 for passes in made.forward_passes) and made.agreement is not None
    never = sampler.generate(lm, PROMPTS, SamplerConfig(max_new_tokens=12, early_commit=1.0))
    assert never.agreement == 1.0 and never.tokens == reference.generate(lm, PROMPTS, SamplerConfig(max_new_tokens=12)).tokens


def test_both_kinds_share_an_engine():
    lm = tiny("phi", "bidirectional", eos_bias=-9.0)

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
    lm = tiny("phi", "block_causal", 4, eos_bias=-9.0)
    with Watch(lm) as watch:
        rows = []
        hook = lm.model.register_forward_pre_hook(lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
        made = sampler.generate(lm, PROMPTS, SamplerConfig(max_new_tokens=6, deterministic=True))
        hook.remove()
    assert set(rows) == {1} and watch.rows == len(rows)
    assert made.tokens == sampler.generate(lm, PROMPTS, SamplerConfig(max_new_tokens=6)).tokens
