"""The metrics of generated texts that `--metric` names: overlap with reference texts, diversity, perplexity
under another model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from unmask.data.encoding import Prompt
from unmask.errors import ConfigError, did_you_mean, require
from unmask.evaluation import diversity, overlap
from unmask.evaluation.statistics import Interval
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rewards.parsing import answer_of

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


def _overlap(
    measure: Callable[[Sequence[str], Sequence[str], Sequence[str]], dict[str, Interval]],
) -> Callable[[GeneratedTexts], TextScores]:
    return lambda of: TextScores(measure(of.answers, of.references or (), of.groups))


def _perplexity(of: GeneratedTexts) -> TextScores:
    assert of.judge is not None
    found = diversity.generative_perplexity(of.judge, of.prompts, of.texts, of.groups)
    return TextScores({"perplexity": found.value}, {"texts": found.texts, "tokens": found.tokens})


METRICS = {
    "rouge": TextMetric(_overlap(overlap.rouge), "rouge_score", needs_reference=True),
    "bleu": TextMetric(_overlap(overlap.bleu), "sacrebleu", needs_reference=True),
    "entropy": TextMetric(
        lambda of: TextScores({"entropy": diversity.token_entropy(of.tokenizer, of.texts, of.groups)})
    ),
    "distinct": TextMetric(lambda of: TextScores(diversity.distinct(of.texts))),
    "self-bleu": TextMetric(lambda of: TextScores({"self-bleu": diversity.self_bleu(of.texts)}), "sacrebleu"),
    "perplexity": TextMetric(_perplexity, needs_judge=True),
}


def check_text_metrics(metrics: Sequence[str], task: str, *, has_reference: bool, has_judge: bool) -> None:
    """Raise a ConfigError for a metric that is unknown, or whose library, reference texts or judge is
    missing, and for a judge that no metric needs. `task` is the name that errors give."""
    for name in metrics:
        if name not in METRICS:
            raise ConfigError(f"unknown metric {name!r}", where="metric", remedy=did_you_mean(name, METRICS))
        metric, where = METRICS[name], f"metric {name}"
        if metric.needs_reference and not has_reference:
            what, remedy = (
                f"{task} has no reference texts to compare with",
                "Leave it out, or evaluate on --task text",
            )
            raise ConfigError(what, where=where, remedy=remedy)
        if metric.needs_judge and not has_judge:
            raise ConfigError(
                "needs a causal model that judges the texts", where=where, remedy="Give --judge MODEL"
            )
        if metric.library:
            require(metric.library, "eval", where=where)
    if has_judge and not any(METRICS[name].needs_judge for name in metrics):
        raise ConfigError(
            "no metric needs a judge", where="judge", remedy="Leave it out, or give --metric perplexity"
        )


def text_metrics(metrics: Sequence[str], of: GeneratedTexts) -> TextScores:
    """Each metric, with its 95% interval over groups if it has one. ROUGE, BLEU and distinct-n are from 0 to
    1 (a BLEU of 31.4 is 0.314), the entropy is in nats. The caller has passed `check_text_metrics`."""
    scores = TextScores()
    for name in dict.fromkeys(metrics):
        found = METRICS[name].measure(of)
        scores = TextScores(scores.values | found.values, scores.judged | found.judged)
    return scores
