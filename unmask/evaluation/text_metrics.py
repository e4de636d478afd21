"""The metrics of generated texts that `--metric` names: overlap with reference texts (by rouge-score and
sacrebleu), diversity, perplexity under another model.

Shapes: N texts, C counts that BLEU sums (n-gram matches and totals by n, and two lengths).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from unmask.data.encoding import Prompt
from unmask.errors import ConfigError, did_you_mean, require
from unmask.evaluation import diversity
from unmask.evaluation.statistics import Interval, group_interval, mean_interval
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rewards.parsing import answer_of
from unmask.tasks import Task

LOWER_IS_BETTER = {"perplexity", "self-bleu"}


@dataclass(frozen=True, kw_only=True)
class GeneratedTexts:
    """The texts that are measured, one entry of each list per text.

    Attributes:
        references: what the texts are compared with, if there is something.
        groups: texts of one group are not independent: intervals are over whole groups.
        tokenizer: of the model that wrote the texts; token entropy counts its tokens.
        judge: a causal model, for the perplexity.
    """

    texts: Sequence[str]
    prompts: Sequence[Prompt]
    references: Sequence[str] | None
    groups: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    judge: DiffusionLM | None = None

    @property
    def answers(self) -> list[str]:
        """What is compared with the references: the part in answer tags, or else the whole text."""
        return [answer_of(text) or text for text in self.texts]


@dataclass(frozen=True)
class TextScores:
    """Values by metric, and with a judge the number of `texts` and of its `tokens` that were predicted."""

    values: dict[str, Interval] = field(default_factory=dict)
    judged: dict[str, int] = field(default_factory=dict)


class TextMetric(NamedTuple):
    """A metric: how it is measured, and what it needs."""

    measure: Callable[[GeneratedTexts], TextScores]
    library: str | None = None
    needs_reference: bool = False
    needs_judge: bool = False


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
        correct, total, (length, reference_length) = np.split(sum_C, [order, 2 * order])
        lengths = int(length), int(reference_length)
        score = BLEU.compute_bleu(correct.tolist(), total.tolist(), *lengths, smooth_method="exp")
        return float(score.score) / 100

    found = group_interval(counts_NC, partial(np.apply_along_axis, corpus_bleu, 1), groups)
    if not math.isfinite(found.low):
        return {"bleu": found}
    return {"bleu": Interval(found.mean, max(found.low, 0.0), min(found.high, 1.0))}


def _perplexity(of: GeneratedTexts) -> TextScores:
    assert of.judge is not None
    found = diversity.generative_perplexity(of.judge, of.prompts, of.texts, of.groups)
    return TextScores({"perplexity": found.value}, {"texts": found.texts, "tokens": found.tokens})


METRICS = {
    "rouge": TextMetric(
        lambda of: TextScores(rouge(of.answers, of.references or (), of.groups)),
        "rouge_score",
        needs_reference=True,
    ),
    "bleu": TextMetric(
        lambda of: TextScores(bleu(of.answers, of.references or (), of.groups)),
        "sacrebleu",
        needs_reference=True,
    ),
    "entropy": TextMetric(
        lambda of: TextScores({"entropy": diversity.token_entropy(of.tokenizer, of.texts, of.groups)})
    ),
    "distinct": TextMetric(lambda of: TextScores(diversity.distinct(of.texts))),
    "self-bleu": TextMetric(lambda of: TextScores({"self-bleu": diversity.self_bleu(of.texts)}), "sacrebleu"),
    "perplexity": TextMetric(_perplexity, needs_judge=True),
}


def check_metrics(metrics: Sequence[str], task: Task, *, has_judge: bool) -> None:
    """Raise a ConfigError for a metric that is unknown, or whose library, reference texts or judge is
    missing, and for a judge that no metric needs."""
    for name in metrics:
        if name not in METRICS:
            raise ConfigError(f"unknown metric {name!r}", where="metric", remedy=did_you_mean(name, METRICS))
        metric, where = METRICS[name], f"metric {name}"
        if metric.needs_reference and task.reference is None:
            remedy = "Leave it out, or evaluate on --task text"
            what = f"{task.name} has no reference texts to compare with"
            raise ConfigError(what, where=where, remedy=remedy)
        if metric.needs_judge and not has_judge:
            what = "needs a causal model that judges the texts"
            raise ConfigError(what, where=where, remedy="Give --judge MODEL")
        if metric.library:
            require(metric.library, where=where)
    if has_judge and not any(METRICS[name].needs_judge for name in metrics):
        remedy = "Leave it out, or give --metric perplexity"
        raise ConfigError("no metric needs a judge", where="judge", remedy=remedy)


def text_metrics(metrics: Sequence[str], of: GeneratedTexts) -> TextScores:
    """Each metric, with its 95% interval over groups if it has one. ROUGE, BLEU and distinct-n are from 0 to
    1 (a BLEU of 31.4 is 0.314), the entropy is in nats. The caller has passed `check_metrics`."""
    scores = TextScores()
    for name in dict.fromkeys(metrics):
        found = METRICS[name].measure(of)
        scores = TextScores(scores.values | found.values, scores.judged | found.judged)
    return scores
