"""Constraints with lossy caches: whatever stale keys predict, texts match and nothing is stuck."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.generation.cases import configs
from tests.generation.constraints.test_sampling import PROMPTS, check, regexes, valid
from tests.helpers import examples
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, GenerationError
from unmask.generation import naive, sampler

pytest.importorskip("outlines_core")

every_cache = pytest.mark.parametrize("cache", ["prefix", "dual"])


@st.composite
def lossy_configs(draw, cache: str, pattern: str) -> SamplerConfig:
    """Any settings that are valid together with this cache."""
    config = valid(draw(configs("bidirectional", None)), pattern)
    early_commit = draw(st.sampled_from([None, None, 0.05, 0.3]))
    own = {
        "cache": cache,
        "refresh_interval": draw(st.sampled_from([None, 1, 2, 3])),
        "early_commit": early_commit,
    }
    try:
        return SamplerConfig(**config.model_dump(exclude_unset=True) | own | {"agreement_prompts": 0})
    except ConfigError:  # early_commit with what hides tokens again
        return SamplerConfig(
            **config.model_dump(exclude_unset=True) | own | {"agreement_prompts": 0, "early_commit": None}
        )


def check_lossy(cache: str, data: st.DataObject) -> None:
    """Completions with any settings match, in no more passes than there may be steps. With a cache that is
    fresh at every step they are those of the naive sampler."""
    pattern = data.draw(regexes())
    config = data.draw(lossy_configs(cache, pattern))
    lm = float64_lm(
        "phi",
        "bidirectional",
        None,
        data.draw(st.booleans()),
        eos_bias=data.draw(st.sampled_from([-2.0, 1.0])),
    )
    try:
        generation = sampler.generate(lm, PROMPTS, config)
    except GenerationError as error:
        assert "no text that meets it has" in str(error)
        assume(False)
    check(lm, generation, pattern)
    steps = config.max_new_tokens if config.revise is None else sum(generation.denoising_steps)
    assert all(1 <= passes <= steps for passes in generation.forward_passes)
    if config.refresh_interval == 1 and config.early_commit is None:
        assert generation.tokens == naive.generate(lm, PROMPTS, config).tokens


@every_cache
@examples(25)
@given(data=st.data())
def test_completions_match(cache, data):
    check_lossy(cache, data)


@pytest.mark.nightly
@every_cache
@settings(deadline=None, max_examples=1500)
@given(data=st.data())
def test_completions_match_with_many_more_settings(cache, data):
    check_lossy(cache, data)


@every_cache
@examples(25)
@given(data=st.data())
def test_gaps_match(cache, data):
    lm, pattern = float64_lm("phi", "bidirectional"), "a(b|cd?)|[c-e]{3}|f"
    config = data.draw(lossy_configs(cache, pattern))
    widths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    text = [4]
    for width in widths:
        text += [*[lm.mask_token_id] * width, 5]
    config = config.model_copy(
        update={"block_size": data.draw(st.sampled_from([None, 1, 2, 3])), "steps": None, "revise": None}
    )
    [tokens] = sampler.infill(lm, [text], config).tokens
    written, place = "".join(lm.tokenizer.convert_ids_to_tokens(tokens)), 1
    for width in widths:
        assert re.fullmatch(pattern, written[place : place + width]), written
        place += width + 1
    assert [token for token, was in zip(tokens, text, strict=True) if was != lm.mask_token_id] == [
        4,
        *[5] * len(widths),
    ]
