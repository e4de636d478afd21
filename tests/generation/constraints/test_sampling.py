"""Sampling with a constraint: never invalid, never stuck, exact; and the engine gives the naive sampler's
tokens."""

from __future__ import annotations

import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.generation.cases import configs, every_pattern
from tests.helpers import each_once, examples, partly_slow
from tests.models.configurations import tiny_lm
from tests.tiny import FLOAT64_ALPHABET, float64_lm, lm_of_tokenizer
from tests.tokenizers import tokenizer as every_kind
from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.data.decoding import text_after
from unmask.errors import ConfigError, GenerationError
from unmask.generation import naive, sampler
from unmask.generation.requests import make_infill_requests

pytest.importorskip("outlines_core")

PATTERNS = [
    "(ab|c)*d",
    "[abc]*(de)?f",
    "(?s:.*)",
    "a{2,5}|b",
    "((a|bc)(d|e)?)+",
    "[^a]*a[^a]*",
    "f?(ab){0,2}",
]
PROMPTS = [[4, 5, 6], [9], [4, 5, 6]]


@st.composite
def regexes(draw, depth: int = 3) -> str:
    """Regular expressions over the alphabet."""
    kind = draw(
        st.sampled_from(
            ["character", "class", "sequence", "choice", "repeat"] if depth else ["character", "class"]
        )
    )
    if kind == "character":
        return draw(st.sampled_from(FLOAT64_ALPHABET))
    if kind == "class":
        return draw(st.sampled_from(["[abc]", "[^ab]", "[d-f]", "(?s:.)"]))
    if kind == "repeat":
        return f"(?:{draw(regexes(depth=depth - 1))}){draw(st.sampled_from(['*', '+', '?', '{2}', '{1,3}']))}"
    parts = draw(st.lists(regexes(depth=depth - 1), min_size=2, max_size=3))
    return f"(?:{('|' if kind == 'choice' else '').join(parts)})"


def check(lm, generation, pattern: str) -> None:
    for text, tokens in zip(generation.texts, generation.tokens, strict=True):
        assert re.fullmatch(pattern, text), text
        assert lm.mask_token_id not in tokens


def valid(config: SamplerConfig, pattern: str) -> SamplerConfig:
    """The config with a constraint, without the bans that may contradict it."""
    return config.model_copy(
        update={
            "constraint": ConstraintConfig(regex=pattern),
            "allowed_tokens": None,
            "forbidden_tokens": None,
            "num_speculative_tokens": 0,
        }
    )


@every_pattern
@examples(5)
@given(data=st.data())
def test_every_completion_matches_and_the_engine_gives_the_tokens_of_the_naive_sampler(
    attention, block_size, data
):
    lm = float64_lm("phi", attention, block_size, eos_bias=1.0)
    pattern = data.draw(st.sampled_from(PATTERNS))
    config = valid(data.draw(configs(attention, block_size)), pattern)
    try:
        expected = naive.generate(lm, PROMPTS, config)
    except GenerationError as error:
        assert "no text that meets it has" in str(error)
        with pytest.raises(GenerationError, match="no text that meets it has"):
            sampler.generate(lm, PROMPTS, config)
        return
    generation = sampler.generate(lm, PROMPTS, config)
    assert generation.tokens == expected.tokens and generation.steps == expected.steps
    assert generation.log_probs == [pytest.approx(each) for each in expected.log_probs]
    for one, other in zip(generation.trace, expected.trace, strict=True):
        assert one.sampled_log_probs == pytest.approx(
            other.sampled_log_probs
        ) and one.entropies == pytest.approx(other.entropies)
    check(lm, generation, pattern)


def complete_all(pattern: str, rounds: int, seed: int) -> int:
    """Completions of one pattern with many settings; the number of those that fit its shortest length."""
    done = 0
    for number, (attention, block_size) in enumerate(
        [("bidirectional", None), ("block_causal", 4), ("causal", None)]
    ):
        lm = float64_lm("phi", attention, block_size, eos_bias=1.0)
        choices = [
            {"remasking": remasking, "temperature": temperature, **rule}
            for remasking in ("low_confidence", "margin", "entropy", "random", "left_to_right")
            for temperature in (0.0, 0.5, 1.0, 1.3)
            for rule in ({}, {"tokens_per_step": 3}, {"tokens_per_step": 12})
        ]
        choices += [{"threshold": 0.3, "temperature": t} for t in (0.0, 1.0)] + [
            {"remask_fraction": 0.4, "temperature": 1.0, "top_p": 0.5}
        ]
        for turn in range(rounds):
            chosen = choices[(seed * 7 + turn * 11 + number * 5) % len(choices)]
            config = SamplerConfig(
                max_new_tokens=12, constraint=ConstraintConfig(regex=pattern), seed=seed + turn, **chosen
            )
            try:
                generation = sampler.generate(lm, [[4, 5], [6], [9, 8, 7], [5]], config)
            except GenerationError as error:
                assert "no text that meets it has" in str(error)
                return done
            check(lm, generation, pattern)
            done += len(generation.tokens)
    return done


@examples(10)
@given(pattern=regexes())
def test_random_patterns_are_always_met(pattern):
    complete_all(pattern, 1, 0)


@pytest.mark.nightly
def test_ten_thousand_completions_are_valid():
    found: list[str] = []

    @settings(deadline=None, max_examples=400, database=None, derandomize=True)
    @given(pattern=regexes())
    def collect(pattern):
        found.append(pattern)

    collect()
    patterns = list(dict.fromkeys(found))[:230]
    done = sum(complete_all(pattern, 5, seed) for seed, pattern in enumerate(patterns))
    assert done >= 10_000 and len(patterns) >= 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention, block_size, width", [("bidirectional", None, 3), ("block_causal", 4, 3), ("causal", None, 1)]
)
@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.nightly)])
def test_tokens_are_drawn_from_the_distribution_given_the_constraint(
    attention, block_size, width, temperature
):
    """All tokens in one step: a chi-square test over all texts that match."""
    lm, count, pattern = (
        float64_lm("phi", attention, block_size),
        3000,
        "(a|bc|[d-f]a?)+" if width > 1 else "a|[d-f]",
    )
    config = SamplerConfig(
        max_new_tokens=width, steps=1, temperature=temperature, constraint=ConstraintConfig(regex=pattern)
    )
    config = config.model_copy(update={"stop_at_eos": False, "batch_size": 256})
    prompt = [4, 5, 6, 7]
    generation = sampler.generate(lm, [prompt] * count, config)
    logits_WV = lm.logits(torch.tensor([[*prompt, *[lm.mask_token_id] * width]]))[0, -width:] / temperature
    expected = given_texts(lm, logits_WV.log_softmax(-1), pattern, width)
    drawn = dict.fromkeys(expected, 0)
    for tokens in generation.tokens:
        drawn[tuple(tokens)] += 1
    often = [text for text, p in expected.items() if count * p > 3]
    rest = [
        count * sum(p for text, p in expected.items() if text not in often),
        sum(drawn[text] for text in expected if text not in often),
    ]
    pairs = [(drawn[text], count * expected[text]) for text in often] + (
        [(rest[1], rest[0])] if rest[0] > 3 else []
    )
    chi_square = sum((one - other) ** 2 / other for one, other in pairs)
    assert len(pairs) > 2 and abs(chi_square - (len(pairs) - 1)) < 5 * math.sqrt(2 * (len(pairs) - 1))


def given_texts(lm, log_prob_WV, pattern: str, width: int) -> dict[tuple[int, ...], float]:
    """The probability of every canvas that matches, given that it does."""
    names = lm.tokenizer.convert_ids_to_tokens(list(range(lm.config.vocab_size)))
    texts = {}
    for tokens in itertools.product([2, 0, *range(4, 4 + len(FLOAT64_ALPHABET))], repeat=width):
        end = next((at for at, token in enumerate(tokens) if token == 2), width)
        if (
            re.fullmatch(pattern, "".join(names[token] for token in tokens[:end]))
            and set(tokens[end:]) <= {0, 2}
            and 0 not in tokens[:end]
        ):
            texts[tokens] = sum(float(log_prob_WV[at, token].detach()) for at, token in enumerate(tokens))
    total = np.logaddexp.reduce(list(texts.values()))
    return {tokens: math.exp(log_prob - total) for tokens, log_prob in texts.items()}


@pytest.mark.parametrize("generate", [naive.generate, sampler.generate])
@pytest.mark.parametrize("pattern", ["(a|bc|[d-f]a?)+", "[^a]*a[^a]*", "(ab){1,2}"])
def test_at_temperature_0_the_best_text_is_found(generate, pattern):
    lm, width = float64_lm("phi", "bidirectional"), 4
    for prompt in ([4, 5], [7], [9, 8, 4]):
        logits_WV = lm.logits(torch.tensor([[*prompt, *[lm.mask_token_id] * width]]))[0, -width:]
        expected = given_texts(lm, logits_WV.log_softmax(-1), pattern, width)
        config = SamplerConfig(
            max_new_tokens=width, steps=1, constraint=ConstraintConfig(regex=pattern), stop_at_eos=False
        )
        assert tuple(generate(lm, [prompt], config).tokens[0]) == max(expected, key=expected.__getitem__)


@every_pattern
@examples(8)
@given(data=st.data())
def test_a_constraint_that_allows_everything_changes_no_token(attention, block_size, data):
    """A model that gives other special tokens than EOS no probability."""
    lm = float64_lm(
        "phi", attention, block_size, eos_bias=data.draw(st.sampled_from([-9.0, 1.0])), mask_bias=-torch.inf
    )
    lm.model.get_output_embeddings().bias.data[[0, 1, 3]] = -torch.inf
    config = data.draw(configs(attention, block_size))
    config = config.model_copy(update={"allowed_tokens": None, "forbidden_tokens": None, "stop_at_eos": True})
    free = sampler.generate(lm, PROMPTS, config)
    generation = sampler.generate(lm, PROMPTS, valid(config, "(?s:.*)"))
    assert (
        generation.tokens == free.tokens
        and generation.steps == free.steps
        and generation.log_probs == free.log_probs
    )
    assert [trace.sampled_log_probs for trace in generation.trace] == [
        trace.sampled_log_probs for trace in free.trace
    ]


@pytest.mark.parametrize(
    "lm",
    [
        float64_lm("phi", "bidirectional"),
        float64_lm("phi", "block_causal", 4),
        tiny_lm("qwen3_5_text", "block_causal", 4, shift=True),
    ],
    ids=["bidirectional", "blocks", "recurrent"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_gap_of_a_text_meets_the_constraint(lm, temperature):
    hidden = lm.mask_token_id
    texts = [[4, hidden, hidden, 5, hidden, hidden, hidden, 6], [5, 5, hidden, hidden]]
    config = SamplerConfig(
        constraint=ConstraintConfig(regex="a(b|cd?)|ccc"), temperature=temperature, tokens_per_step=2
    )
    expected = naive.complete(lm, make_infill_requests(lm, texts, config), config)
    generation = sampler.infill(lm, texts, config)
    assert generation.tokens == expected.tokens
    for text, tokens in zip(texts, generation.tokens, strict=True):
        written = "".join(lm.tokenizer.convert_ids_to_tokens(tokens))
        marked = "".join("." if token == hidden else "x" for token in text)
        for gap in re.finditer(r"\.+", marked):
            assert re.fullmatch("a(b|cd?)|ccc", written[gap.start() : gap.end()])


def test_a_canvas_in_which_nothing_fits_is_refused_with_the_shortest_length():
    lm = float64_lm("phi", "bidirectional")
    config = SamplerConfig(max_new_tokens=4, constraint=ConstraintConfig(choice=["abcdef", "fffff"]))
    with raises(GenerationError, where="constraint for prompt 0"):
        sampler.generate(lm, [[4]], config)
    hidden = lm.mask_token_id
    with raises(GenerationError, where="constraint for text 0"):
        sampler.infill(lm, [[4, *[hidden] * 7]], config)
    with raises(GenerationError, where="constraint for prompt 0"):
        sampler.generate(lm, [[4]], config.model_copy(update={"allowed_tokens": [4, 5]}))
    with raises(ConfigError, where="num_speculative_tokens"):
        SamplerConfig(num_speculative_tokens=2, constraint=ConstraintConfig(regex="a"))


def test_a_text_without_any_probability_is_an_error():
    lm = float64_lm("phi", "bidirectional", mask_bias=-torch.inf, eos_bias=0.5)
    lm.model.get_output_embeddings().bias.data[4] = -torch.inf
    with raises(GenerationError, where="constraint"):
        sampler.generate(lm, [[5]], SamplerConfig(max_new_tokens=3, constraint=ConstraintConfig(regex="a+")))


@pytest.mark.parametrize("remasking", ["low_confidence", "entropy", "margin"])
def test_a_position_of_whose_tokens_the_filter_leaves_none_is_revealed_last(remasking):
    """top_p leaves the end token alone, which `reveal_last` leaves out, and the constraint demands another
    one."""
    lm = float64_lm("phi", "bidirectional", None, False, eos_bias=-2.0)
    own = {
        "top_p": 0.3,
        "filtered_confidence": True,
        "reveal_last": [2],
        "remasking": remasking,
        "stop_at_eos": False,
    }
    config = SamplerConfig(max_new_tokens=2, constraint=ConstraintConfig(regex="c*"), **own)
    generation = sampler.generate(lm, PROMPTS, config)
    check(lm, generation, "c*")
    assert generation.tokens == naive.generate(lm, PROMPTS, config).tokens
    traced = sampler.generate(lm, PROMPTS, config.model_copy(update={"trace": True}))
    assert min(step for trace in traced.trace for step in trace.steps) >= 0


@partly_slow("dtype", [torch.float64, torch.float32, torch.bfloat16], 1)
@pytest.mark.parametrize("remasking", ["low_confidence", "entropy", "margin"])
@partly_slow("generate", [naive.generate, sampler.generate], 1)
def test_positions_that_have_one_token_left_are_equally_certain(dtype, remasking, generate):
    """Rounding differs by machine, and must not say which of them is revealed first, nor keep one below a
    threshold of 1."""
    lm, prompts = float64_lm("phi", "bidirectional").frozen_copy(), [[token] for token in range(4, 10)]
    lm.model.to(dtype)
    for temperature in (0.0, 0.7):
        settings = {
            "max_new_tokens": 12,
            "constraint": {"regex": "(abcdef){2}"},
            "temperature": temperature,
            "seed": 3,
        }
        assert (
            generate(lm, prompts, SamplerConfig(remasking=remasking, **settings)).steps == [[*range(12)]] * 6
        )
        if remasking == "low_confidence":
            assert generate(lm, prompts, SamplerConfig(threshold=1.0, **settings)).forward_passes == [1] * 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_constraint_that_allows_everything_changes_no_order_of_a_model_that_is_sure(dtype):
    """Its confidences are less than 2**-24 apart."""
    lm, prompts = (
        float64_lm("phi", "bidirectional", eos_bias=-torch.inf, mask_bias=-torch.inf).frozen_copy(),
        [[token] for token in range(4, 10)],
    )
    head = lm.model.to(dtype).get_output_embeddings()
    head.weight *= 60
    head.bias[[0, 1, 3]] = -torch.inf
    plain, allowing = (
        SamplerConfig(max_new_tokens=8),
        SamplerConfig(max_new_tokens=8, constraint={"regex": "(?s:.*)"}),
    )
    one, other = (sampler.generate(lm, prompts, config) for config in (plain, allowing))
    assert one.steps == other.steps and one.tokens == other.tokens


def test_sequences_of_different_constraints_share_a_batch():
    lm = float64_lm("phi", "bidirectional", eos_bias=1.0)
    alone = {}
    for pattern in (None, "a+b", "[cd]*"):
        constraint = None if pattern is None else ConstraintConfig(regex=pattern)
        alone[pattern] = SamplerConfig(
            max_new_tokens=6, temperature=1.0, constraint=constraint, deterministic=pattern == "a+b"
        )
    expected = {pattern: naive.generate(lm, PROMPTS, config).tokens for pattern, config in alone.items()}
    from unmask.generation.engine.engine import Engine
    from unmask.generation.requests import make_requests

    engine, tickets = Engine(lm, batch_size=9), {}
    for pattern, config in alone.items():
        for index, request in enumerate(make_requests(lm, PROMPTS, config)):
            tickets[engine.submit(request, config)] = pattern, index
    for ticket, trace in engine.run():
        pattern, index = tickets[ticket]
        tokens = expected[pattern][index]
        assert trace.canvas[: len(tokens)] == tokens
    assert (
        json.loads(SamplerConfig(constraint=ConstraintConfig(regex="a")).model_dump_json())["constraint"][
            "regex"
        ]
        == "a"
    )


@each_once("kind, pattern", ["bytes", "llama"], [" there.*", "[a-z ]*", "[a-z][a-z ]*", "  a.*"])
def test_a_space_counts_wherever_a_text_has_one(kind, pattern):
    """After text, where no decoder drops it, and at the beginning, where some do."""
    tokenizer = every_kind(kind)
    word = tokenizer("the")["input_ids"][-1]
    config = SamplerConfig(max_new_tokens=12, temperature=1.0, constraint=ConstraintConfig(regex=pattern))
    for attention, size in (("block_causal", 4), ("bidirectional", None)):
        lm = lm_of_tokenizer(tokenizer, attention, size)
        check(lm, sampler.generate(lm, ["Once upon", "", [1], [1, 2], [1, word]], config), pattern)
    mask = tokenizer.mask_token_id
    texts = [
        [1, *[mask] * 12],
        [1, word, *[mask] * 12],
        [*tokenizer("Once")["input_ids"], *[mask] * 12, word],
    ]
    filled = sampler.infill(lm, texts, config)
    for text, whole in zip(texts, filled.tokens, strict=True):
        start = text.index(mask)
        assert re.fullmatch(pattern, text_after(tokenizer, whole[:start], whole[start : start + 12])), whole
