"""Decoding blocks cover all hidden positions in order; impossible requests are refused before anything is
computed."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.errors import raises
from tests.generation.cases import every_pattern
from tests.helpers import shared_path
from tests.tiny import FLOAT64_CONTEXT, float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, DataError, GenerationError
from unmask.generation.requests import make_infill_requests, make_requests, step_counts
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(sizes, st.none() | st.integers(1, 60))
def test_counts_are_even_with_the_larger_first(sizes, steps):
    counts = step_counts(sizes, SamplerConfig(steps=steps))
    assert [sum(block) for block in counts] == sizes
    for block in counts:
        assert block == sorted(block, reverse=True) and block[-1] >= 1 and block[0] - block[-1] <= 1
    if steps is None:
        assert all(block == [1] * size for block, size in zip(counts, sizes, strict=True))
        return
    total = sum(map(len, counts))
    assert total <= max(steps, len(sizes))
    shares = [max(1, steps // len(sizes) + (index < steps % len(sizes))) for index in range(len(sizes))]
    if all(share <= size for share, size in zip(shares, sizes, strict=True)):
        assert total == max(steps, len(sizes))
        assert (
            list(map(len, counts)) == sorted(map(len, counts), reverse=True)
            and len(counts[0]) - len(counts[-1]) <= 1
        )
    else:
        assert any(
            len(block) == size < share for block, size, share in zip(counts, sizes, shares, strict=True)
        )


@every_pattern
@given(
    start=st.integers(1, 9),
    blocks=st.integers(1, 5),
    decoding_block=st.none() | st.integers(1, 5),
    steps=st.none() | st.integers(1, 9),
)
def test_blocks_tile_the_completion(attention, block_size, start, blocks, decoding_block, steps):
    size = decoding_block if attention == "bidirectional" else None
    count = blocks * (decoding_block or 1)
    lm = float64_lm("phi", attention, block_size)
    fewest = math.ceil(
        count / {"causal": 1, "block_causal": block_size, "bidirectional": size or count}[attention]
    )
    config = SamplerConfig(
        max_new_tokens=count, block_size=size, steps=min(max(steps, fewest), count) if steps else None
    )
    (request,) = make_requests(lm, [[4] * start], config)
    assert request.length == start + count and request.prompt == [4] * start
    positions = [position for first, stop in request.blocks for position in range(first, stop)]
    assert positions == list(range(start, start + count))
    grid = {"causal": 1, "block_causal": block_size, "bidirectional": size or count}[attention]
    # blocks begin at the completion, or lie on the attention grid
    anchor = start if attention == "bidirectional" else 0
    assert all((first - anchor) % grid == 0 for first, _ in request.blocks[1:])
    assert all((first - anchor) // grid == (stop - 1 - anchor) // grid for first, stop in request.blocks)
    assert request.counts == step_counts([stop - first for first, stop in request.blocks], config)
    assert request.hidden == [False] * start + [True] * count


@pytest.mark.parametrize("logit_shift", [False, True])
@given(start=st.integers(1, 17), count=st.integers(1, 24), part=st.integers(1, 8))
def test_sub_blocks_are_aligned_to_their_block(logit_shift, start, count, part):
    """With a logit shift the first token of a block, which the clean text before it predicts, is its own
    sub-block."""
    lm = float64_lm("phi", "block_causal", 8, logit_shift)
    (request,) = make_requests(lm, [[4] * start], SamplerConfig(max_new_tokens=count, sub_block_size=part))
    spans = [range(first, stop) for first, stop in request.blocks]
    assert [at for span in spans for at in span] == list(range(start, start + count))

    def named(at):
        return (at // 8, -1 if logit_shift and at % 8 == 0 else at % 8 // part)

    assert all(len({named(at) for at in span}) == 1 for span in spans)
    assert len({named(span[0]) for span in spans}) == len(spans)


def test_the_context_may_be_filled_to_the_last_token():
    lm = float64_lm("phi", "bidirectional")
    assert (
        make_requests(lm, [[4] * 3], SamplerConfig(max_new_tokens=FLOAT64_CONTEXT - 3))[0].length
        == FLOAT64_CONTEXT
    )
    with raises(GenerationError, where="prompt 0"):
        make_requests(lm, [[4] * 4], SamplerConfig(max_new_tokens=FLOAT64_CONTEXT - 3))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 12))
def test_tokens_per_step_are_the_inverse_of_steps(sizes, tokens):
    counts = step_counts(sizes, SamplerConfig(tokens_per_step=tokens))
    assert [sum(block) for block in counts] == sizes
    assert all(
        max(block) <= tokens and len(block) == -(-size // tokens)
        for block, size in zip(counts, sizes, strict=True)
    )


@given(sizes, st.integers(1, 80), st.sampled_from(["dream", "ancestral"]), st.integers(0, 99))
def test_every_schedule_reveals_all_tokens_and_skips_empty_steps(sizes, steps, schedule, key):
    counts = step_counts(sizes, SamplerConfig(steps=steps, schedule=schedule), key)
    assert [sum(block) for block in counts] == sizes
    for index, block in enumerate(counts):
        assert min(block) >= 1 and len(block) <= max(1, steps // len(sizes) + (index < steps % len(sizes)))


@given(st.integers(1, 64), st.integers(1, 64))
def test_the_schedule_of_dream_rounds_down(size, steps):
    """Of the hidden tokens the fraction 1 - s / t, at equidistant times t > s from 1 to 0.001; the last step
    reveals the rest."""
    left, expected = size, []
    for step in range(steps - 1):
        time, later = (1 - (1 - Fraction(1, 1000)) * number / steps for number in (step, step + 1))
        exact = left * (1 - later / time)
        if abs(exact - round(exact)) < 1e-4:  # float32 may round to the other side here
            return
        expected.append(math.floor(exact))
        left -= expected[-1]
    (counts,) = step_counts([size], SamplerConfig(steps=steps, schedule="dream"))
    assert counts == [count for count in [*expected, left] if count]


@pytest.mark.slow
def test_the_ancestral_schedule_reveals_tokens_independently():
    """A token is still hidden after step i of n with probability 1 - 0.999 i / n (Sahoo et al. 2024),
    independently of other tokens."""
    steps, size, rounds = 4, 3, 4000
    config = SamplerConfig(steps=steps, schedule="ancestral")
    # all at one step
    first = sum(step_counts([size], config, key)[0] == [size] for key in range(rounds)) / rounds
    shares = [0.999 / 4] * 3 + [1 - 3 * 0.999 / 4]
    expected = sum(share**size for share in shares)
    assert abs(first - expected) < 4 * math.sqrt(expected * (1 - expected) / rounds)
    assert step_counts([5, 5], config, 7) == step_counts([5, 5], config, 7) != step_counts([5, 5], config, 8)


def test_more_steps_than_tokens_fit_a_schedule_that_skips():
    lm = float64_lm("phi", "bidirectional")
    assert (
        sum(
            make_requests(lm, [[4]], SamplerConfig(max_new_tokens=8, steps=40, schedule="dream"))[0].counts[0]
        )
        == 8
    )


@pytest.mark.parametrize(
    ("attention", "block_size", "settings", "fewest"),
    [
        ("bidirectional", None, {"block_size": 4}, 3),
        ("bidirectional", None, {"block_size": 4, "schedule": "dream"}, 3),
        ("block_causal", 4, {}, 3),
        ("block_causal", 4, {"sub_block_size": 2}, 6),
        ("causal", None, {}, 12),
    ],
)
def test_fewer_steps_than_blocks_are_refused(attention, block_size, settings, fewest):
    lm = float64_lm("phi", attention, block_size, False)
    sampler = SamplerConfig(max_new_tokens=12, steps=fewest, **settings)
    [request] = make_requests(lm, [[4] * 4], sampler)
    assert sum(map(len, request.counts)) == fewest
    few = sampler.model_copy(update={"steps": fewest - 1})
    for make, text, where in (
        (make_requests, [4] * 4, "steps"),
        (make_infill_requests, [4] * 4 + [lm.mask_token_id] * 12, "steps and text 0"),
    ):
        with pytest.raises(GenerationError) as raised:
            make(lm, [text], few)
        assert raised.value.where == where and str(fewest) in str(raised.value)


@every_pattern
@given(data=st.data())
def test_infilling_covers_every_hidden_position_once(attention, block_size, data):
    lm = float64_lm("phi", attention, block_size, False)
    ids = data.draw(
        st.lists(st.sampled_from([4, 5, lm.mask_token_id]), min_size=1, max_size=20).filter(
            lambda ids: lm.mask_token_id in ids
        )
    )
    size = data.draw(st.none() | st.integers(1, 6)) if attention == "bidirectional" else None
    (request,) = make_infill_requests(lm, [ids], SamplerConfig(block_size=size))
    assert request.ids == request.prompt == ids and request.start == 0 and not request.stop_at_eos
    hidden = [at for at, token in enumerate(ids) if token == lm.mask_token_id]
    planned = [at for first, stop in request.blocks for at in range(first, stop) if at in hidden]
    assert planned == hidden and all(
        any(first <= at < stop for at in hidden) for first, stop in request.blocks
    )
    assert [sum(block) for block in request.counts] == [
        sum(first <= at < stop for at in hidden) for first, stop in request.blocks
    ]


@pytest.mark.parametrize(
    "settings, where",
    [
        ({"steps": 3, "tokens_per_step": 2}, "tokens_per_step"),
        ({"steps": 3, "threshold": 0.9}, "threshold"),
        ({"threshold": 0.9, "factor": 1.0}, "factor"),
        ({"threshold": 0.9, "remask_fraction": 0.1}, "remask_fraction"),
        ({"threshold": 0.9, "remasking": "random"}, "threshold"),
        ({"entropy_bound": 0.9, "threshold": 0.9}, "entropy_bound"),
        ({"order_temperature": 1.0, "remasking": "random"}, "order_temperature"),
        ({"order_temperature": 1.0, "threshold": 0.5}, "order_temperature"),
        ({"filtered_confidence": True, "remasking": "random"}, "filtered_confidence"),
        ({"threshold": 0.9, "schedule": "dream"}, "schedule"),
        ({"refresh_interval": 3}, "refresh_interval"),
        ({"num_speculative_tokens": 2, "remask_fraction": 0.5}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2, "cfg_scale": 0.5}, "num_speculative_tokens"),
        ({"allowed_tokens": [1, 2], "forbidden_tokens": [2, 1]}, "allowed_tokens"),
        ({"temperature": 1e-40}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"order_temperature": 1e-39}, "order_temperature"),
        ({"cfg_scale": 1e39}, "cfg_scale"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty"),
        ({"early_commit": 0.5, "remask_fraction": 0.5}, "early_commit"),
        ({"revise": {}, "threshold": 0.9}, "revise"),
        ({"revise": {}, "remask_fraction": 0.5}, "revise"),
        ({"revise": {}, "num_speculative_tokens": 2}, "revise"),
        ({"revise": {}, "early_commit": 0.5}, "revise"),
        ({"revise": {"schedule": "loop"}, "schedule": "dream"}, "revise"),
        ({"revise": {"t_on": 0.5}}, "revise.t_on"),
        ({"revise": {"schedule": "loop", "t_off": 0.6}}, "revise.t_off"),
        ({"revise": {"temperature": 1e-9}}, "revise.temperature"),
        ({"revise": {"eta": 0.0}}, "revise.eta"),
        ({"steps": 0}, "steps"),
        ({"steps": -1}, "steps"),
        ({"tokens_per_step": 0}, "tokens_per_step"),
        ({"allowed_tokens": []}, "allowed_tokens"),
        ({"reveal_last": []}, "reveal_last"),
    ],
)
def test_settings_that_contradict_one_another(settings, where):
    with raises(ConfigError, where=where):
        SamplerConfig(**settings)


@pytest.mark.parametrize(
    "attention, block_size, settings, where",
    [
        ("bidirectional", None, {"steps": 9}, "steps"),
        ("bidirectional", None, {"block_size": 3}, "block_size 3"),
        ("bidirectional", None, {"block_size": 16}, "block_size 16"),
        ("bidirectional", None, {"allowed_tokens": [99]}, "allowed_tokens"),
        ("bidirectional", None, {"forbidden_tokens": [99]}, "forbidden_tokens"),
        ("bidirectional", None, {"forbidden_tokens": [-1]}, "forbidden_tokens"),
        ("bidirectional", None, {"reveal_last": [99]}, "reveal_last"),
        ("bidirectional", None, {"num_speculative_tokens": 2}, "num_speculative_tokens"),
        ("causal", None, {"num_speculative_tokens": 2}, "num_speculative_tokens"),
        ("causal", None, {"cfg_scale": 1.0}, "cfg_scale"),
        ("causal", None, {"revise": {}}, "revise"),
        ("causal", None, {"cache": "dual"}, "cache"),
        ("bidirectional", None, {"sub_block_size": 2}, "sub_block_size"),
        ("causal", None, {"sub_block_size": 2}, "sub_block_size"),
        ("block_causal", 4, {"block_size": 2}, "block_size"),
        ("block_causal", 4, {"block_size": 8}, "block_size"),
        ("block_causal", 4, {"sub_block_size": 5}, "sub_block_size"),
        ("block_causal", 4, {"cache": "prefix"}, "cache"),
    ],
)
def test_settings_that_do_not_fit_the_model(attention, block_size, settings, where):
    with raises(GenerationError, where=where):
        make_requests(
            float64_lm("phi", attention, block_size), [[4]], SamplerConfig(max_new_tokens=8, **settings)
        )


def test_tokens_that_cannot_be_produced():
    lm = float64_lm("phi", "bidirectional")
    with raises(GenerationError, where="allowed_tokens"):
        make_requests(lm, [[4]], SamplerConfig(allowed_tokens=[lm.mask_token_id], max_new_tokens=4))
    everything = [token for token in range(lm.mask_token_id)]
    with raises(GenerationError, where="forbidden_tokens"):
        make_requests(lm, [[4]], SamplerConfig(forbidden_tokens=everything, max_new_tokens=4))


def test_texts_that_cannot_be_filled_in():
    lm = float64_lm("phi", "bidirectional", None, True)
    mask = lm.mask_token_id
    config = SamplerConfig()
    with raises(GenerationError, where="text 1"):
        make_infill_requests(lm, [[4, mask], [4, 5]], config)
    with raises(GenerationError, where="text 0"):
        make_infill_requests(lm, [[mask] * 41], config)
    with raises(GenerationError, where="text 0"):
        make_infill_requests(lm, [[mask, 4]], config)
    with raises(GenerationError, where="text 0"):
        make_infill_requests(lm, [[4, mask, 999]], config)
    with raises(GenerationError, where="texts"):
        make_infill_requests(lm, "a<mask>", config)


def test_keys_and_prompts_of_other_types():
    lm, config = float64_lm(), SamplerConfig(max_new_tokens=4)
    for key in (2**63, "x", None, 1.5):
        with raises(GenerationError, where="keys"):
            make_requests(lm, ["ab"], config, [key])
    for prompts in (None, 5, b"ab", {"a": 1}):
        with raises(GenerationError, where="prompts"):
            make_requests(lm, prompts, config)
    with raises(DataError, where="text"):
        make_requests(lm, ["a\udcff"], config)


def test_special_tokens_in_prompts_and_texts_are_text_except_the_mask_to_fill():
    lm = float64_lm(attention="bidirectional")
    mask, end = lm.tokenizer.mask_token, lm.tokenizer.eos_token
    [request] = make_requests(lm, [f"a{mask}{end}"], SamplerConfig(max_new_tokens=2))
    assert lm.mask_token_id not in request.prompt and lm.tokenizer.eos_token_id not in request.prompt
    [filled] = make_infill_requests(lm, [f"a{mask}{end}b"], SamplerConfig())
    assert sum(filled.hidden) == 1 and lm.tokenizer.eos_token_id not in filled.ids
    lm.tokenizer.parse_special_tokens = True
    try:
        [asked] = make_requests(lm, [f"a{end}"], SamplerConfig(max_new_tokens=2))
    finally:
        lm.tokenizer.parse_special_tokens = False
    assert asked.prompt[-1] == lm.tokenizer.eos_token_id


@cache
def _stories() -> DiffusionLM:
    """A model with a SentencePiece tokenizer, which writes a space before a text."""
    return load(shared_path("models", "stories260K"), attention="bidirectional", logit_shift=False)


@given(
    words=st.lists(st.text("aeinorstyAT,.", min_size=1, max_size=8), min_size=1, max_size=9), data=st.data()
)
def test_masks_in_a_text_stand_for_its_tokens(words, data):
    """Wherever they are: also within words, where no space follows."""
    lm = _stories()
    bos, *whole = lm.tokenizer(" ".join(words))["input_ids"]
    masked = data.draw(st.sets(st.integers(0, len(whole) - 1), min_size=1))
    # a space that the tokenizer writes before nothing
    assume(whole[0] != lm.tokenizer.convert_tokens_to_ids("\u2581") or 1 not in masked)
    pieces = [piece.replace("\u2581", " ") for piece in lm.tokenizer.convert_ids_to_tokens(whole)]
    text = "".join(lm.tokenizer.mask_token if at in masked else piece for at, piece in enumerate(pieces))
    # the tokenizer writes the first space
    [request] = make_infill_requests(lm, [text.removeprefix(" ")], SamplerConfig())
    assert request.ids == [
        bos,
        *(lm.mask_token_id if at in masked else token for at, token in enumerate(whole)),
    ]
