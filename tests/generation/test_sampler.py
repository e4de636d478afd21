"""The batched sampler gives the tokens of the naive one; they depend on prompt, repeat number and settings
only."""

from __future__ import annotations

import copy
import random
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.generation.cases import PATTERNS, PROMPTS, Watch, configs, every_pattern, prompt_lists
from tests.helpers import each_once, examples, partly_slow
from tests.models.configurations import HYBRIDS, InFloat64, tiny_lm
from tests.tiny import FLOAT64_ALPHABET, float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import sequence_keys
from unmask.errors import GenerationError
from unmask.generation import naive, sampler
from unmask.generation.requests import make_infill_requests, make_requests


def assert_same(one, other):
    for name in ("prompts", "texts", "tokens", "steps", "forward_passes"):
        assert getattr(one, name) == getattr(other, name), name
    for got, expected in zip(one.log_probs, other.log_probs, strict=True):
        assert got == pytest.approx(expected, abs=1e-10)
    for got, expected in zip(one.trace or [], other.trace or [], strict=True):
        assert (got.canvas, got.steps, got.forward_passes) == (
            expected.canvas,
            expected.steps,
            expected.forward_passes,
        )
        for name in ("log_probs", "sampled_log_probs", "entropies"):
            assert getattr(got, name) == pytest.approx(getattr(expected, name), abs=1e-10), name


@every_pattern
@pytest.mark.parametrize(
    "family, logit_shift",
    [("phi", False), ("phi", True), ("gpt2", False), pytest.param("gpt2", True, marks=pytest.mark.slow)],
)
@examples(5)
@given(data=st.data())
def test_the_tokens_are_those_of_the_naive_sampler(family, attention, block_size, logit_shift, data):
    lm = float64_lm(
        family, attention, block_size, logit_shift, eos_bias=data.draw(st.sampled_from([-9.0, 0.0, 2.0]))
    )
    prompts = data.draw(prompt_lists(shortest=int(logit_shift)))
    config = data.draw(configs(attention, block_size))
    fast = sampler.generate(lm, prompts, config)
    assert_same(fast, naive.generate(lm, prompts, config))
    assert fast.prompts == prompts
    assert all(0 <= token < lm.mask_token_id for tokens in fast.tokens for token in tokens)


@partly_slow("name", list(HYBRIDS), 3)
@partly_slow("block_size, logit_shift", [(4, False), (3, True)], 1)
@examples(20)
@given(data=st.data())
def test_the_tokens_of_recurrent_layers_are_those_of_the_naive_sampler(name, block_size, logit_shift, data):
    lm = tiny_lm(name, "block_causal", block_size, shift=logit_shift)
    ids = st.integers(0, lm.mask_token_id)
    prompts = data.draw(st.lists(st.lists(ids, min_size=1, max_size=9), min_size=1, max_size=4))
    prompts += data.draw(st.permutations(prompts))  # shared ones
    config = data.draw(configs("block_causal", block_size))
    with InFloat64():
        fast, slow = sampler.generate(lm, prompts, config), naive.generate(lm, prompts, config)
    assert (fast.tokens, fast.steps) == (slow.tokens, slow.steps)
    for got, expected in zip(fast.log_probs, slow.log_probs, strict=True):
        assert got == pytest.approx(expected, abs=1e-10)


@partly_slow("attention, block_size", PATTERNS, 2, 4)
@partly_slow("temperature", [0.0, 1.0], 1)
def test_a_completion_depends_on_its_prompt_and_repeat_number_alone(attention, block_size, temperature):
    lm = float64_lm("phi", attention, block_size)
    steps = 7 if block_size == 1 or attention == "causal" else 4

    def by_prompt(prompts, **change):
        config = SamplerConfig(
            max_new_tokens=7, steps=steps, temperature=temperature, remasking="margin", **change
        )
        found = defaultdict(list)
        for prompt, tokens in zip(prompts, sampler.generate(lm, prompts, config).tokens, strict=True):
            found[prompt].append(tokens)
        return found

    expected = by_prompt(PROMPTS)
    for order in range(3):
        shuffled = random.Random(order).sample(PROMPTS, len(PROMPTS))
        assert by_prompt(shuffled, batch_size=order + 1) == expected
    for prompt, completions in expected.items():
        assert by_prompt([prompt])[prompt] == completions[:1]
        assert by_prompt([prompt] * len(completions))[prompt] == completions


@every_pattern
def test_repeated_prompts_are_computed_once_in_any_order(attention, block_size):
    """Four of twelve sequences run at a time."""
    lm = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    config = SamplerConfig(max_new_tokens=4, temperature=1.0, batch_size=4)
    prompts = [[4] * 7, [5] * 7, [6] * 7] * 4
    whole = 7 - 7 % (block_size or 1)
    reuse = None if attention == "bidirectional" else 9 * whole / (12 * 7)
    assert sampler.generate(lm, prompts, config).prompt_reuse == reuse
    assert naive.generate(lm, prompts, config).prompt_reuse is None
    assert sampler.generate(lm, [], config).prompt_reuse is None


@every_pattern
def test_equal_prompts_are_sampled_independently_and_decoded_alike(attention, block_size):
    lm = float64_lm("gpt2", attention, block_size)
    for temperature, different in ((1.0, 6), (0.0, 1)):
        generation = sampler.generate(
            lm, ["abc"] * 6, SamplerConfig(max_new_tokens=12, temperature=temperature, stop_at_eos=False)
        )
        assert len(set(map(tuple, generation.tokens))) == different


def test_keys_and_seeds_name_the_noise():
    lm = float64_lm("phi", "bidirectional")
    prompts = [[4, 5], [6], [4, 5]]
    config = SamplerConfig(max_new_tokens=12, temperature=1.0, remasking="random")
    tokens = sampler.generate(lm, prompts, config).tokens
    assert sampler.generate(lm, prompts, config, sequence_keys(prompts)).tokens == tokens
    same_key = sampler.generate(lm, prompts, config, [8, 8, 8]).tokens
    assert same_key[0] == same_key[2] != same_key[1]
    assert naive.generate(lm, prompts, config, [8, 8, 8]).tokens == same_key
    assert sampler.generate(lm, prompts, config.model_copy(update={"seed": 1})).tokens != tokens


def test_neither_the_global_generator_nor_dropout_matters():
    lm = copy.deepcopy(float64_lm("gpt2", "bidirectional"))
    config = SamplerConfig(max_new_tokens=6, temperature=1.0, remasking="random")
    expected = sampler.generate(lm, PROMPTS, config)
    lm.model.train()
    assert any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in lm.model.modules())
    for generate in (sampler.generate, naive.generate):
        torch.manual_seed(1)
        state = torch.get_rng_state()
        assert_same(generate(lm, PROMPTS, config), expected)
        assert torch.equal(torch.get_rng_state(), state)
        assert lm.model.training


@each_once(
    "remasking, attention, block_size",
    ["low_confidence", "margin", "entropy", "random", "left_to_right"],
    PATTERNS,
)
def test_the_mask_token_is_never_produced(attention, block_size, remasking):
    lm = float64_lm("phi", attention, block_size, mask_bias=50.0)
    for temperature in (0.0, 1.0):
        config = SamplerConfig(
            max_new_tokens=8, temperature=temperature, remasking=remasking, stop_at_eos=False
        )
        generation = sampler.generate(lm, PROMPTS, config)
        assert all(len(tokens) == 8 and lm.mask_token_id not in tokens for tokens in generation.tokens)


@every_pattern
def test_a_completion_ends_with_its_first_eos_and_leaves_the_batch(attention, block_size):
    lm = float64_lm("phi", attention, block_size)
    decoding_block = 3 if attention == "bidirectional" else None
    steps = 12 if block_size == 1 or attention == "causal" else 7
    config = SamplerConfig(
        max_new_tokens=12, steps=steps, block_size=decoding_block, temperature=5.0, trace=True
    )
    prompts = PROMPTS * 3
    with Watch(lm) as watch:
        generation = sampler.generate(lm, prompts, config)
    lengths, heads = set(), 0
    for request, tokens, trace in zip(
        make_requests(lm, prompts, config), generation.tokens, generation.trace, strict=True
    ):
        lengths.add(len(tokens))
        assert lm.eos_token_id not in tokens[:-1]
        assert tokens[-1] == lm.eos_token_id or len(tokens) == 12
        # the block that holds the first EOS is completed, and is the last
        last = len(request.prompt) + len(tokens)
        done = [
            counts for (start, _), counts in zip(request.blocks, request.counts, strict=True) if start < last
        ]
        assert trace.forward_passes == sum(map(len, done))
        assert sum(step >= 0 for step in trace.steps) == sum(map(sum, done))
        heads += sum(sum(counts[index:]) for counts in done for index in range(len(counts)))
    assert len(lengths) > 4 and 12 in lengths
    # at most: short ones lie within the first block
    prompts_read = 0 if attention == "bidirectional" else len(set(prompts))
    assert watch.rows <= sum(generation.forward_passes) + prompts_read
    # logits are computed at the hidden rows of the current block and nowhere else
    assert watch.heads <= heads + prompts_read


@every_pattern
def test_without_the_stop_every_token_is_returned(attention, block_size):
    lm = float64_lm("phi", attention, block_size, eos_bias=2.0)
    generation = sampler.generate(
        lm, PROMPTS, SamplerConfig(max_new_tokens=6, stop_at_eos=False, temperature=1.0)
    )
    assert any(lm.eos_token_id in tokens[:-1] for tokens in generation.tokens)
    assert [len(tokens) for tokens in generation.tokens] == generation.forward_passes == [6] * len(PROMPTS)
    assert set("".join(generation.texts)) <= set(FLOAT64_ALPHABET)


@pytest.mark.parametrize("generate", [sampler.generate, naive.generate])
def test_a_model_without_end_tokens_never_stops(generate):
    lm = copy.copy(float64_lm("phi", eos_bias=9.0))
    eos, lm.eos_token_ids = lm.eos_token_id, ()
    assert generate(lm, [[4], [5, 6]], SamplerConfig(max_new_tokens=3)).tokens == [[eos] * 3] * 2


@each_once("family, temperature", ["phi", "gpt2"], [0.0, 1.0])
def test_blocks_of_one_with_a_shift_are_the_causal_model(family, temperature):
    config = SamplerConfig(max_new_tokens=9, temperature=temperature, trace=True)
    causal, blocks = (
        sampler.generate(float64_lm(family, *pattern, True), PROMPTS, config) for pattern in PATTERNS[:2]
    )
    assert_same(blocks, causal)
    without = sampler.generate(float64_lm(family, *PATTERNS[1], False), PROMPTS, config)
    assert without.tokens != causal.tokens


@pytest.mark.parametrize("generate", [sampler.generate, naive.generate])
def test_prompts_are_strings_ids_or_messages(generate):
    lm = copy.copy(float64_lm("phi", "bidirectional"))
    lm.tokenizer = copy.deepcopy(lm.tokenizer)
    lm.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = SamplerConfig(max_new_tokens=5)
    ids = lm.tokenizer("abc")["input_ids"]
    text, given, message = generate(lm, ["abc", ids, [{"role": "user", "content": "abc"}]], config).prompts
    assert text == given == ids and message == ids[1:]  # the template says whether BOS begins it
    assert generate(lm, ["abc"], config).tokens == generate(lm, [ids], config).tokens


@pytest.mark.parametrize("generate", [sampler.generate, naive.generate])
def test_no_prompts_and_no_settings(generate):
    assert generate(float64_lm(), []).texts == []
    short = copy.copy(float64_lm("phi", eos_bias=99.0))
    short.config = copy.deepcopy(short.config)
    del short.config.max_position_embeddings  # it does not tell its context length
    assert generate(short, ["abc"]).forward_passes == [1]


@pytest.mark.parametrize("generate", [sampler.generate, naive.generate])
def test_requests_that_cannot_be_served(generate):
    fitting = SamplerConfig(max_new_tokens=30)
    with raises(GenerationError, where="prompts"):
        generate(float64_lm(), "abc", fitting)
    with raises(GenerationError, where="prompt 1"):
        generate(float64_lm(), [[4] * 10, [4] * 11], fitting)
    with raises(GenerationError, where="prompt 2"):
        generate(float64_lm(), [[4], [5], []], fitting)
    with raises(GenerationError, where="block_size"):
        generate(float64_lm("phi", "block_causal", 4), ["abc"], SamplerConfig(block_size=2, max_new_tokens=4))
    with raises(GenerationError, where="block_size"):
        generate(float64_lm(), ["abc"], SamplerConfig(block_size=2, max_new_tokens=4))


@st.composite
def texts_with_holes(draw, lm):
    """Lists of token ids, each with at least one mask token."""
    ids = st.lists(st.sampled_from([4, 5, 6, 7, lm.mask_token_id, lm.mask_token_id]), min_size=1, max_size=14)
    texts = draw(st.lists(ids.filter(lambda ids: lm.mask_token_id in ids), min_size=1, max_size=5))
    return [[4, *text] for text in texts] if lm.logit_shift else texts


@each_once("logit_shift, attention, block_size", [False, True], PATTERNS)
@examples(5)
@given(data=st.data())
def test_infilling_is_that_of_the_naive_sampler(logit_shift, attention, block_size, data):
    lm = float64_lm("phi", attention, block_size, logit_shift, eos_bias=2.0)
    texts = data.draw(texts_with_holes(lm))
    config = data.draw(configs(attention, block_size))
    steps = config.steps and config.steps + max(map(len, texts))  # at least one for each block
    config = config.model_copy(
        update={"forbidden_tokens": [lm.eos_token_id], "allowed_tokens": None, "steps": steps}
    )
    filled = sampler.infill(lm, texts, config)
    assert_same(filled, naive.complete(lm, make_infill_requests(lm, texts, config), config))
    for ids, tokens in zip(texts, filled.tokens, strict=True):
        assert len(tokens) == len(ids) and not {lm.mask_token_id, lm.eos_token_id} & set(tokens)
        assert all(
            token in (given, *[token] * (given == lm.mask_token_id))
            for given, token in zip(ids, tokens, strict=True)
        )


def test_remasked_tokens_do_not_depend_on_rounding():
    """After an empty prompt all positions are equal up to rounding."""
    lm = float64_lm("phi", "bidirectional", None, False, eos_bias=-9.0)
    for seed in range(12):
        config = SamplerConfig(
            max_new_tokens=7, tokens_per_step=2, remask_fraction=0.6, stop_at_eos=False, seed=seed
        )
        alone = sampler.generate(lm, [[]], config).tokens[0]
        assert (
            alone
            == sampler.generate(lm, [[], [5]], config).tokens[0]
            == naive.generate(lm, [[]], config).tokens[0]
        )


@every_pattern
def test_infilling_reads_up_to_the_end_of_the_block(attention, block_size):
    lm = float64_lm("phi", attention, block_size)
    mask, at = lm.mask_token_id, 5
    block = {"causal": 1, "bidirectional": 9}.get(attention, block_size)
    for changed in (6, 7, 8):
        texts = [[4, 5, 6, 7, 8, mask, 4, 5, 6], [4, 5, 6, 7, 8, mask, 4, 5, 6]]
        texts[1][changed] = 8
        one, other = sampler.infill(lm, texts, keys=[0, 0]).log_probs
        assert (abs(one[at] - other[at]) > 1e-9) == (
            changed // block == at // block or attention == "bidirectional"
        ), changed


def test_infilling_reads_text_with_mask_tokens():
    lm = float64_lm("phi", "bidirectional", eos_bias=9.0)
    mark = lm.tokenizer.mask_token
    filled = sampler.infill(lm, [f"ab{mark}{mark}cd"])
    assert filled.texts[0].startswith("ab") and filled.texts[0].endswith("cd") and len(filled.texts[0]) == 6
    assert filled.forward_passes == [2]
    allowing = sampler.infill(lm, [f"ab{mark}{mark}cd"], SamplerConfig(allowed_tokens=[lm.eos_token_id, 4]))
    assert allowing.tokens[0].count(lm.eos_token_id) == 2
