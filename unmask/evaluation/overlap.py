"""ROUGE and BLEU of generated texts against references, computed by rouge-score and sacrebleu.

Shapes: N texts, C counts that BLEU sums (n-gram matches and totals by n, and two lengths).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unmask.errors import ConfigError, DataError, did_you_mean
from unmask.evaluation.statistics import Interval, group_bootstrap, mean_interval

ROUGE = ("rouge1", "rouge2", "rougeL")


def check_overlap(metrics: Sequence[str]) -> None:
    """Raise a ConfigError for a metric that is unknown or whose library is missing."""
    for name in metrics:
        if name not in METRICS:
            raise ConfigError(f"unknown metric {name!r}", where="metric", remedy=did_you_mean(name, METRICS))
        library = METRICS[name][0]
        try:
            importlib.import_module(library)
        except ImportError as error:
            package, remedy = library.partition(".")[0].replace("_", "-"), "Install it with pip install 'unmask[eval]'"
            raise ConfigError(f"needs {package}, which cannot be imported ({error})", where=f"metric {name}", remedy=remedy) from error


def overlap(metrics: Sequence[str], texts: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, Interval]:
    """Each metric with its 95% interval over resampled groups, from 0 to 1 (a BLEU of 31.4 is 0.314).

    Args:
        metrics: "rouge" (F1 of ROUGE-1, ROUGE-2 and ROUGE-L without stemming, averaged over texts), "bleu" (of the corpus, with the
            defaults of sacrebleu: cased, 13a tokens, exponential smoothing), or both.
        references, groups: one per text; texts of one group are not independent.

    Raises:
        ConfigError: an unknown metric, or a library that is missing.
        DataError: no texts, or not one reference and one group per text.
    """
    check_overlap(metrics)
    if not texts or not len(texts) == len(references) == len(groups):
        what = f"{len(texts)} texts, {len(references)} references and {len(groups)} groups"
        raise DataError(what, remedy="Give one reference and one group for each text, and at least one text")
    intervals: dict[str, Interval] = {}
    for name in dict.fromkeys(metrics):
        intervals |= METRICS[name][1](texts, references, groups)
    return intervals


def rouge(texts: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, Interval]:
    """Source: C.-Y. Lin, "ROUGE: A Package for Automatic Evaluation of Summaries" (2004)."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: mean_interval([score[name].fmeasure for score in scores], groups) for name in ROUGE}


def bleu(texts: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, Interval]:
    """Corpus BLEU: n-gram matches and lengths are summed over the texts (of each resample).

    Source: M. Post, "A Call for Clarity in Reporting BLEU Scores" (2018).
    """
    from sacrebleu import BLEU

    sentence_bleu = BLEU(effective_order=True)  # avoids a warning; the counts are the same
    scores = [sentence_bleu.sentence_score(text, [reference]) for text, reference in zip(texts, references, strict=True)]
    counts_NC = np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores])
    order = len(scores[0].counts)

    def corpus_bleu(sum_C: np.ndarray) -> float:
        sums: list[Any] = sum_C.tolist()
        correct, total, (length, reference_length) = sums[:order], sums[order : 2 * order], sums[2 * order :]
        return float(BLEU.compute_bleu(correct, total, int(length), int(reference_length), smooth_method="exp").score) / 100

    return {"bleu": group_bootstrap(counts_NC, functools.partial(np.apply_along_axis, corpus_bleu, 1), groups, samples=2_000)}


METRICS: dict[str, tuple[str, Callable[[Sequence[str], Sequence[str], Sequence[str]], dict[str, Interval]]]] = {
    "rouge": ("rouge_score.rouge_scorer", rouge),
    "bleu": ("sacrebleu", bleu),
}
"""The required module and the function of each metric."""
