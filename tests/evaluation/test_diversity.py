"""Diversity and generative perplexity: hand calculations, the library's figures, and why none of them is
enough alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.helpers import shared_path
from tests.tiny import toy_lm
from unmask import log_likelihood
from unmask.errors import ConfigError, DataError
from unmask.evaluation.diversity import distinct, generative_perplexity, self_bleu, token_entropy
from unmask.evaluation.statistics import group_interval, ratio
from unmask.models.load import load

CAUSAL = ("causal", None, True)
TEXTS = [
    "the cat sat on the mat",
    "the cat sat on a chair",
    "rain fell all night long",
    "a dog barked at the cat",
]
GROUPS = ["a", "b", "b", "c"]


def test_entropy_by_hand():
    """aab: 2/3 log 3/2 + 1/3 log 3; abab: log 2; b: 0; an empty text: 0."""
    lm = toy_lm(attention=CAUSAL)
    found = token_entropy(lm.tokenizer, ["aab", "abab", "b", ""], ["1", "2", "3", "4"])
    assert found.mean == pytest.approx((2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(3) + math.log(2)) / 4)
    assert found.low < found.mean < found.high


def test_distinct_by_hand():
    """Words: a b a | a b; 5 words of 2 kinds; ab, ba, ab of 2 kinds; aba."""
    found = distinct(["a b a", "a b"])
    assert {name: interval.mean for name, interval in found.items()} == {
        "distinct-1": 2 / 5,
        "distinct-2": 2 / 3,
        "distinct-3": 1.0,
    }
    assert all((interval.low, interval.high) == (-math.inf, math.inf) for interval in found.values())
    assert [interval.mean for interval in distinct(["a", ""]).values()] == [1.0, 0.0, 0.0]


def test_self_bleu_is_the_mean_of_the_library():
    others = [[*TEXTS[:index], *TEXTS[index + 1 :]] for index in range(4)]
    each = [sacrebleu.sentence_bleu(text, rest).score / 100 for text, rest in zip(TEXTS, others, strict=True)]
    found = self_bleu(TEXTS)
    assert found.mean == pytest.approx(sum(each) / 4) and (found.low, found.high) == (-math.inf, math.inf)
    assert self_bleu(["the same five words here"] * 3).mean == 1.0  # not more: it is shown in percent
    assert self_bleu(["one two three", "four five six"]).mean == 0


def test_perplexity_is_that_of_the_likelihoods_of_all_tokens():
    judge = toy_lm(attention=CAUSAL)
    prompts, texts = ["ab", "b", "ba", "ab", "b"], ["ab", "abab", "", "ba", "bb"]
    found = generative_perplexity(judge, prompts, texts, list("12345"))
    log_probs = log_likelihood(judge, prompts, texts, "exact")
    assert found.value.mean == pytest.approx(math.exp(-float(log_probs.sum()) / 10), rel=1e-12)
    assert (found.texts, found.tokens) == (4, 10)
    sums_N2 = np.array(
        [(-float(log_prob), len(text)) for log_prob, text in zip(log_probs, texts, strict=True) if text]
    )
    nats = group_interval(sums_N2, ratio, range(4))
    assert (found.value.low, found.value.high) == pytest.approx((math.exp(nats.low), math.exp(nats.high)))


def test_without_a_prompt_the_first_token_is_given_and_the_context_bounds_the_text():
    judge = toy_lm(attention=CAUSAL)
    given_bos = judge.tokenizer("")["input_ids"]
    found = generative_perplexity(judge, [""], ["ab" * 40], ["1"])
    assert found.tokens == judge.context_length - max(len(given_bos), 1)


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(4)))
def test_the_order_of_texts_does_not_matter(order):
    judge, texts, prompts = toy_lm(attention=CAUSAL), ["abb", "bbab", "a", "ab"], ["a", "b", "ab", "a"]
    shuffled = [[column[index] for index in order] for column in (texts, prompts, GROUPS, TEXTS)]

    def figures(texts, prompts, groups, words):
        perplexity = generative_perplexity(judge, prompts, texts, groups).value
        intervals = [
            token_entropy(judge.tokenizer, texts, groups),
            *distinct(words).values(),
            self_bleu(words),
            perplexity,
        ]
        return [figure for interval in intervals for figure in (interval.mean, interval.low, interval.high)]

    assert figures(*shuffled) == pytest.approx(figures(texts, prompts, GROUPS, TEXTS))


def test_repetition_lowers_perplexity_and_every_measure_of_diversity():
    """Stories of a real model: three texts against one sentence again and again."""
    judge = load(shared_path("models", "stories260K"))
    varied = [
        "Once upon a time there was a little girl named Lily. She loved to play outside.",
        "Tom had a big red ball. One day he went to the park with his mom and saw a dog.",
        "The sun was hot and the bird wanted some water, so it flew to the old tree.",
    ]
    repeated = [
        "Once upon a time, there was a girl. " * 12,
        "Tim and his mom went to the park. " * 12,
        "She was very happy. " * 20,
    ]
    groups = ["a", "b", "c"]
    perplexity = [
        generative_perplexity(judge, [""] * 3, texts, groups).value.mean for texts in (varied, repeated)
    ]
    entropy = [token_entropy(judge.tokenizer, texts, groups).mean for texts in (varied, repeated)]
    assert perplexity[1] < perplexity[0] and entropy[1] < entropy[0]
    for before, after in zip(distinct(varied).values(), distinct(repeated).values(), strict=True):
        assert after.mean < before.mean / 2


def test_what_cannot_be_measured_is_refused():
    lm = toy_lm()
    with raises(ConfigError, where="judge"):
        generative_perplexity(lm, ["a"], ["b"], ["1"])
    judge = toy_lm(attention=CAUSAL)
    with raises(DataError, where="perplexity"):
        generative_perplexity(judge, ["a"], [""], ["1"])
    with raises(DataError, where="self-bleu"):
        self_bleu(["a"])


def test_the_judge_may_compute_in_float64_or_float32():
    judge = toy_lm(attention=CAUSAL)
    exact = generative_perplexity(judge, ["a"], ["abba"], ["1"]).value.mean
    judge.model.to(torch.float32)
    assert generative_perplexity(judge, ["a"], ["abba"], ["1"]).value.mean == pytest.approx(exact, rel=1e-4)
