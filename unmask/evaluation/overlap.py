"""ROUGE and BLEU of generated texts against references, by the libraries that papers quote (rouge-score and sacrebleu)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unmask.errors import ConfigError, DataError, did_you_mean
from unmask.evaluation.statistics import Interval, cluster_bootstrap, share

ROUGE = ("rouge1", "rouge2", "rougeL")


def check_overlap(metrics: Sequence[str]) -> None:
    """Raise ConfigError for a metric that is unknown, or whose library is missing."""
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
    """Each metric with its 95% interval, whose resamples draw whole groups; as shares (BLEU of 31.4 is 0.314).

    Args:
        metrics: "rouge" (F1 of ROUGE-1, ROUGE-2 and ROUGE-L without stemming, averaged over texts), "bleu" (of the corpus: cased, 13a
            tokens, exponential smoothing, the defaults of sacrebleu), or both.
        texts: what the model wrote [N].
        references: one for each text [N].
        groups: texts of one group are not independent [N].

    Raises:
        ConfigError: an unknown metric, or a library that is missing.
        DataError: no texts, or not one reference and one group for each.
    """
    check_overlap(metrics)
    if not texts or not len(texts) == len(references) == len(groups):
        what = f"{len(texts)} texts, {len(references)} references and {len(groups)} groups"
        raise DataError(what, remedy="Give one reference and one group for each text, and at least one text")
    found: dict[str, Interval] = {}
    for name in dict.fromkeys(metrics):
        found |= METRICS[name][1](texts, references, groups)
    return found


def rouge(texts: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, Interval]:
    """Source: C.-Y. Lin, "ROUGE: A Package for Automatic Evaluation of Summaries" (2004)."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: share([score[name].fmeasure for score in scores], groups) for name in ROUGE}


def bleu(texts: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, Interval]:
    """BLEU is of a corpus: n-gram matches and lengths are added up over the texts, and over those of each resample.

    Source: M. Post, "A Call for Clarity in Reporting BLEU Scores" (2018).
    """
    from sacrebleu import BLEU

    segment = BLEU(effective_order=True)  # counts are the same without it, but it would warn
    parts = [segment.sentence_score(text, [reference]) for text, reference in zip(texts, references, strict=True)]
    counts_NC = np.array([[*part.counts, *part.totals, part.sys_len, part.ref_len] for part in parts])
    order = len(parts[0].counts)

    def of_sum(sum_C: np.ndarray) -> float:
        numbers: list[Any] = sum_C.tolist()
        correct, total, (written, wanted) = numbers[:order], numbers[order : 2 * order], numbers[2 * order :]
        return float(BLEU.compute_bleu(correct, total, int(written), int(wanted), smooth_method="exp").score) / 100

    return {"bleu": cluster_bootstrap(counts_NC, functools.partial(np.apply_along_axis, of_sum, 1), groups, samples=2_000)}


METRICS: dict[str, tuple[str, Callable[[Sequence[str], Sequence[str], Sequence[str]], dict[str, Interval]]]] = {
    "rouge": ("rouge_score.rouge_scorer", rouge),
    "bleu": ("sacrebleu", bleu),
}
"""By name: the module that must be there, and what computes the metric."""
