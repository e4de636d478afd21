"""Diversity of open-ended texts, and their perplexity under a causal model, which alone would reward
repetition.

Shapes: N texts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from unmask.data.encoding import Prompt, encode_completion, encode_prompt
from unmask.errors import ConfigError, DataError
from unmask.evaluation.likelihood import log_likelihood
from unmask.evaluation.statistics import Interval, group_interval, ratio
from unmask.models.diffusion_lm import DiffusionLM

ORDERS = (1, 2, 3)
"""The lengths of the n-grams that `distinct` counts."""


def token_entropy(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], groups: Sequence[str]
) -> Interval:
    """The mean entropy of each text's token frequencies, in nats: -sum_k n_k/n log n_k/n for a text of n
    tokens, n_k of them of kind k.

    0 for a text that repeats one token and for an empty one, log n for n different tokens. It grows with the
    length: compare texts of equal length.

    Source: K. Zheng et al., "Masked Diffusion Models are Secretly Time-Agnostic Masked Models and Exploit
    Inaccurate Categorical Sampling" (2024), which shows why generative perplexity needs it.
    """
    values_N2 = np.array(
        [(_entropy(Counter(encode_completion(tokenizer, "a", text))), 1.0) for text in texts]
    )
    return group_interval(values_N2, ratio, groups)


def _entropy(counts: Counter[int]) -> float:
    total = counts.total()
    return sum(count / total * math.log(total / count) for count in counts.values())


def distinct(texts: Sequence[str]) -> dict[str, Interval]:
    """`distinct-1` to `distinct-3`: the different n-grams of words in all texts, as a fraction of all their
    n-grams.

    Without bounds: each text counts in whether the n-grams of others are new. It falls as texts are added:
    compare equal amounts of text. 0 where no text has n words.

    Source: J. Li et al., "A Diversity-Promoting Objective Function for Neural Conversation Models" (2016).
    """
    words = [text.split() for text in texts]
    fractions = {}
    for order in ORDERS:
        ngrams = [
            tuple(each[start : start + order]) for each in words for start in range(len(each) - order + 1)
        ]
        fractions[f"distinct-{order}"] = Interval(len(set(ngrams)) / max(len(ngrams), 1), -math.inf, math.inf)
    return fractions


def self_bleu(texts: Sequence[str]) -> Interval:
    """The mean BLEU (0 to 1, by sacrebleu) of each text with all others as its references. Low for diverse
    texts, 1 for equal ones.

    Without bounds: each text is also a reference of all others, so that their scores are not independent. The
    time grows with the square of N.

    Source: Y. Zhu et al., "Texygen: A Benchmarking Platform for Text Generation Models" (2018).

    Raises:
        DataError: fewer than two texts.
    """
    from sacrebleu import BLEU

    if len(texts) < 2:
        raise DataError(
            "there is one text only",
            where="self-bleu",
            remedy="Give at least two texts, or leave the metric out",
        )
    bleu = BLEU(effective_order=True)
    scores = [
        bleu.sentence_score(text, [*texts[:index], *texts[index + 1 :]]).score / 100
        for index, text in enumerate(texts)
    ]
    # that of equal texts is rounded to more than 1
    mean = math.fsum(min(score, 1.0) for score in scores) / len(scores)
    return Interval(mean, -math.inf, math.inf)


class Perplexity(NamedTuple):
    """The perplexity of texts under a judge."""

    value: Interval
    texts: int  # that have a token to predict
    tokens: int  # the judge's, that were predicted


def generative_perplexity(
    judge: DiffusionLM, prompts: Sequence[Prompt], texts: Sequence[str], groups: Sequence[str]
) -> Perplexity:
    """The exponential of the mean negative log-likelihood of the judge's tokens of each text after its
    prompt, exact in one pass.

    After an empty prompt, a judge without BOS is given a text's first token. What exceeds the judge's context
    is left out.

    Args:
        judge: a causal model.
        prompts, groups: one per text; texts of one group are not independent.

    Raises:
        ConfigError: the judge is not causal.
        DataError: no text has a token to predict.
    """
    if not judge.autoregressive:
        remedy = "Give a causal model: the bound of a diffusion model is no perplexity"
        raise ConfigError(f"has {judge.attention} attention", where="judge", remedy=remedy)
    pairs = [_judged(judge, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    kept = [index for index, (_, ids) in enumerate(pairs) if ids]
    if not kept:
        raise DataError(
            "no text has a token to predict", where="perplexity", remedy="Evaluate a model that writes some"
        )
    log_probs = log_likelihood(
        judge, [pairs[index][0] for index in kept], [pairs[index][1] for index in kept], "exact"
    )
    sums_N2 = np.array(
        [(-log_prob, len(pairs[index][1])) for index, log_prob in zip(kept, log_probs.tolist(), strict=True)]
    )
    nats = group_interval(sums_N2, ratio, [groups[index] for index in kept])
    with np.errstate(over="ignore"):
        value, low, high = np.exp([nats.mean, nats.low, nats.high]).tolist()
    interval = Interval(value, low, high) if math.isfinite(nats.low) else Interval(value, -math.inf, math.inf)
    return Perplexity(interval, len(kept), int(sums_N2[:, 1].sum()))


def _judged(judge: DiffusionLM, prompt: Prompt, text: str) -> tuple[list[int], list[int]]:
    """The ids that are given, and those that are predicted."""
    given = encode_prompt(judge.tokenizer, prompt)
    ids = encode_completion(judge.tokenizer, given, text)
    if not given:
        given, ids = ids[:1], ids[1:]
    room = len(ids) if judge.context_length is None else max(judge.context_length - len(given), 0)
    return given, ids[:room]
