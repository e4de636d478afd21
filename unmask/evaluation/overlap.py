"""ROUGE and BLEU of generated texts against references, computed by rouge-score and sacrebleu.

Shapes: N texts, C counts that BLEU sums (n-gram matches and totals by n, and two lengths).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unmask.evaluation.statistics import Interval, group_interval, mean_interval

ROUGE = ("rouge1", "rouge2", "rougeL")


def rouge(texts: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, Interval]:
    """The F1 of ROUGE-1, ROUGE-2 and ROUGE-L without stemming, averaged over texts.

    Source: C.-Y. Lin, "ROUGE: A Package for Automatic Evaluation of Summaries" (2004).
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: mean_interval([score[name].fmeasure for score in scores], groups) for name in ROUGE}


def bleu(texts: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, Interval]:
    """The BLEU of the corpus, with the defaults of sacrebleu (cased, 13a tokens, exponential smoothing):
    n-gram matches and lengths are summed over the texts.

    Source: M. Post, "A Call for Clarity in Reporting BLEU Scores" (2018).
    """
    from sacrebleu import BLEU

    sentence_bleu = BLEU(effective_order=True)  # avoids a warning; the counts are the same
    scores = [
        sentence_bleu.sentence_score(text, [reference])
        for text, reference in zip(texts, references, strict=True)
    ]
    counts_NC = np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores])
    order = len(scores[0].counts)

    def corpus_bleu(sum_C: np.ndarray) -> float:
        sums: list[Any] = sum_C.tolist()
        correct, total, (length, reference_length) = sums[:order], sums[order : 2 * order], sums[2 * order :]
        return (
            float(
                BLEU.compute_bleu(
                    correct, total, int(length), int(reference_length), smooth_method="exp"
                ).score
            )
            / 100
        )

    found = group_interval(counts_NC, functools.partial(np.apply_along_axis, corpus_bleu, 1), groups)
    return {
        "bleu": Interval(found.mean, max(found.low, 0.0), min(found.high, 1.0))
        if math.isfinite(found.low)
        else found
    }
