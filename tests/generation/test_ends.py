"""Models with several end tokens: in every sampler the first of them ends the completion."""

from __future__ import annotations

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.generation.cases import PATTERNS, PROMPTS, every_pattern
from tests.helpers import each_once
from tests.models.test_chat_template import EOS, IM_END, A, write
from tests.tiny import FLOAT64_ALPHABET, float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.data.decoding import text_after
from unmask.generation import naive, sampler
from unmask.generation.output import end_of
from unmask.models.load import load

ENDS = (2, 5, 8)  # EOS and two letters


def ending(attention: str = "causal", block_size: int | None = None):
    """A model with three end tokens: EOS and two letters."""
    lm = copy.copy(float64_lm("phi", attention, block_size, eos_bias=0.5))
    lm.eos_token_ids = ENDS
    return lm


def test_a_model_whose_generation_config_names_two_ends_stops_at_both(tmp_path):
    """As in SDAR-Chat, whose tokenizer names only one of them: text after the other must be cut."""
    folder = write(tmp_path, [IM_END, EOS])
    lm = load(folder, "block_causal", 4, dtype="float64")
    with torch.no_grad():
        lm.model.get_output_embeddings().bias[IM_END] = 2.0
    config = SamplerConfig(max_new_tokens=12, temperature=1.0, seed=3)
    generation = sampler.generate(lm, [[A, A, 5 + number] for number in range(4)] * 2, config)
    assert generation.tokens == naive.generate(lm, generation.prompts, config).tokens
    assert sum(tokens[-1] == IM_END for tokens in generation.tokens) > 3
    assert not any(IM_END in tokens[:-1] or EOS in tokens[:-1] for tokens in generation.tokens)
    assert sum(generation.forward_passes) < 8 * 12 / 2  # the blocks after it are not decoded
    assert set("".join(generation.texts)) <= set(FLOAT64_ALPHABET)


@each_once("seed, attention, block_size", [0, 1], PATTERNS)
def test_stopping_changes_no_token_before_the_first_end(attention, block_size, seed):
    lm, prompts, length = ending(attention, block_size), PROMPTS[:5], 8
    config = SamplerConfig(max_new_tokens=length, temperature=1.5, seed=seed, trace=True)
    if attention == "bidirectional":
        config = config.model_copy(update={"block_size": 2})
    generation, slow = sampler.generate(lm, prompts, config), naive.generate(lm, prompts, config)
    whole = sampler.generate(lm, prompts, config.model_copy(update={"stop_at_eos": False}))
    assert generation.tokens == slow.tokens == [tokens[: end_of(tokens, ENDS)] for tokens in whole.tokens]
    assert generation.forward_passes == slow.forward_passes and generation.texts == slow.texts
    for prompt, trace, tokens in zip(generation.prompts, generation.trace, generation.tokens, strict=True):
        size = config.block_size or block_size or 1
        # of the first block, which the prompt begins
        before = 0 if attention == "bidirectional" else len(prompt) % size
        # to the end of the block that ends the text
        decoded = -(-(before + len(tokens)) // size) * size - before
        assert [step >= 0 for step in trace.steps] == [at < decoded for at in range(length)]


@every_pattern
def test_no_end_is_filled_in_unless_it_is_allowed(attention, block_size):
    lm = ending(attention, block_size)
    text = f"ac{lm.tokenizer.mask_token * 8}ac"
    plain = sampler.infill(lm, [text] * 4, SamplerConfig(temperature=2.0))
    assert not any(set(ENDS) & set(tokens) for tokens in plain.tokens)
    allowed = sampler.infill(lm, [text], SamplerConfig(allowed_tokens=[5]))
    assert allowed.tokens[0].count(5) == 8


@given(tokens=st.lists(st.integers(4, 9), max_size=8))
def test_a_text_has_no_end_token(tokens):
    lm = ending()
    end = end_of(tokens, ENDS)
    assert not set(ENDS) & set(tokens[: end - 1]) and (end == len(tokens) or tokens[end - 1] in ENDS)
    kept = [token for token in tokens[:end] if token not in ENDS]
    assert text_after(lm.tokenizer, [], tokens[:end], ENDS) == lm.tokenizer.decode(kept)
