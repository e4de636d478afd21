"""Constraints over a text as a whole: its gaps are filled with what fits together, and with the text between
them."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.generation.cases import PATTERNS, configs
from tests.helpers import chi_square_is_likely, examples, partly_slow
from tests.tiny import float64_lm
from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation import naive, sampler
from unmask.generation.constraints.decide import windows_of
from unmask.generation.constraints.gaps import constrained_gaps
from unmask.generation.requests import make_infill_requests

pytest.importorskip("outlines_core")

PATTERN = "a(b|cc)?d*(bda|c[ef]c)f*"
BOS, EOS, UNK, A, B, C, D, E, F = 1, 2, 3, *range(4, 10)


def texts_of(hidden: int) -> list[list[int]]:
    """Texts that fit only if gaps apart from one another agree."""
    return [
        [BOS, A, hidden, hidden, D, hidden, hidden, C, hidden],
        [hidden, hidden, D, hidden, D, A, hidden],
        [BOS, A, *[hidden] * 6, EOS],
    ]


def over_text(config: SamplerConfig, pattern: str = PATTERN) -> SamplerConfig:
    kept = {
        "allowed_tokens": None,
        "forbidden_tokens": None,
        "num_speculative_tokens": 0,
        "stop_at_eos": False,
    }
    return config.model_copy(update=kept | {"constraint": ConstraintConfig(regex=pattern, over="text")})


def written(lm, tokens) -> str:
    return lm.tokenizer.decode(tokens, skip_special_tokens=True)


@partly_slow("attention, block_size", PATTERNS, 0, 2, 4)
@examples(10)
@given(data=st.data())
def test_every_text_matches_and_the_engine_gives_the_tokens_of_the_naive_sampler(attention, block_size, data):
    lm = float64_lm("phi", attention, block_size)
    texts = texts_of(lm.mask_token_id)[: 3 if not lm.logit_shift else 1]
    config = over_text(data.draw(configs(attention, block_size)))
    # at least one for each block
    config = config.model_copy(update={"steps": config.steps and config.steps + max(map(len, texts))})
    expected = naive.complete(lm, make_infill_requests(lm, texts, config), config)
    generation = sampler.infill(lm, texts, config)
    assert generation.tokens == expected.tokens
    for text, tokens in zip(texts, generation.tokens, strict=True):
        assert re.fullmatch(PATTERN, written(lm, tokens)), tokens
        assert all(given in (token, lm.mask_token_id) for given, token in zip(text, tokens, strict=True))


def probabilities(lm, text: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """The probability of each way to fill the gaps that matches, given that it does."""
    at = [index for index, token in enumerate(text) if token == lm.mask_token_id]
    log_prob_WV = (lm.logits(torch.tensor([text]))[0, at].detach() / temperature).log_softmax(-1)
    found = {}
    for tokens in itertools.product(range(A, F + 1), repeat=len(at)):
        filled = list(text)
        for index, token in zip(at, tokens, strict=True):
            filled[index] = token
        if re.fullmatch(PATTERN, written(lm, filled)):
            found[tuple(filled)] = math.exp(
                sum(float(log_prob_WV[row, token]) for row, token in enumerate(tokens))
            )
    return {tokens: value / sum(found.values()) for tokens, value in found.items()}


@pytest.mark.parametrize("index", range(3))
def test_at_temperature_0_the_best_text_is_found(index):
    lm = float64_lm("phi", "bidirectional", logit_shift=False)
    text = texts_of(lm.mask_token_id)[index]
    expected = probabilities(lm, text, 1.0)
    generation = sampler.infill(lm, [text], over_text(SamplerConfig(steps=1)))
    assert len(expected) > 1 and tuple(generation.tokens[0]) == max(expected, key=expected.__getitem__)


@pytest.mark.slow
def test_texts_are_drawn_from_the_distribution_given_the_constraint():
    lm, count = float64_lm("phi", "bidirectional", logit_shift=False), 3000
    text = texts_of(lm.mask_token_id)[0]
    expected = probabilities(lm, text, 0.7)
    generation = sampler.infill(
        lm, [text] * count, over_text(SamplerConfig(steps=1, temperature=0.7, batch_size=256))
    )
    drawn = Counter(map(tuple, generation.tokens))
    assert len(expected) > 4 and set(drawn) <= set(expected)
    counts, probs = (
        torch.tensor([values[text] for text in expected], dtype=torch.float64) for values in (drawn, expected)
    )
    assert chi_square_is_likely(counts, probs)


@pytest.mark.parametrize("text", [[A, EOS, None, D], [UNK, A, None]])
def test_a_token_that_is_no_text_is_named(text):
    lm = float64_lm("phi", "bidirectional")
    text = [lm.mask_token_id if token is None else token for token in text]
    with raises(GenerationError, where="constraint.over for text 0"):
        sampler.infill(lm, [text], over_text(SamplerConfig()))


def test_sums_run_over_hidden_positions_alone():
    """However long the text is, of which a step sees what is hidden."""
    lm, config = float64_lm("phi", "bidirectional"), over_text(SamplerConfig(), "(ab|cd)*")
    ids = [*[A, B] * 500, lm.mask_token_id, B, C, lm.mask_token_id, *[C, D] * 500]
    hidden = [token == lm.mask_token_id for token in ids]
    gaps = constrained_gaps(lm, ids, hidden, config, "text", completion=False)
    [window] = windows_of(gaps, (0, len(ids)), ids, hidden, lm.device)
    paths = window.possible(np.zeros((2, gaps[0].automaton.next_SC.shape[1])))
    assert len(paths.to_end) == len(paths.from_start) == 3
    classes = paths.draw(lambda at, rest_C: int(rest_C.argmax()))
    assert classes.tolist() == gaps[0].automaton.class_V[[A, D]].tolist()


def test_a_text_whose_sums_would_take_too_much_memory_is_refused(monkeypatch):
    lm = float64_lm("phi", "bidirectional")
    monkeypatch.setattr("unmask.generation.constraints.gaps.MOST_EDGES", 50)
    with raises(GenerationError, where="constraint.over for text 0"):
        sampler.infill(lm, [[A, *[lm.mask_token_id] * 6]], over_text(SamplerConfig()))


def test_what_cannot_fit_is_refused():
    lm = float64_lm("phi", "bidirectional")
    hidden, config = lm.mask_token_id, over_text(SamplerConfig())
    with raises(GenerationError, where="constraint for text 1"):
        sampler.infill(lm, [[A, hidden, B, D, A], [A, hidden, D, D]], config)
    with raises(GenerationError, where="constraint.over"):
        sampler.generate(lm, [[A]], config.model_copy(update={"max_new_tokens": 4}))
    with raises(GenerationError, where="constraint.over"):
        sampler.infill(lm, ["a<gap>d"], config, length="auto", gap_mark="<gap>", max_gap=3)
