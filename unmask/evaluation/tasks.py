"""Task accuracy: completions are generated and verified; metrics have confidence intervals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any

from unmask.config.run import SamplerConfig
from unmask.errors import DataError
from unmask.evaluation.statistics import Interval, mean_interval, paired_difference
from unmask.evaluation.text_metrics import GeneratedTexts, TextScores, check_text_metrics, text_metrics
from unmask.generation.requests import make_requests
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.tasks import Task, split_of


@dataclass(frozen=True)
class TaskResult:
    """The results of a model on the rows of a task. Rows that could not be verified are only in `statuses`."""

    task: str
    solved: list[float]  # 1.0 or 0.0 per row
    values: list[float]  # the shaped reward per row (Sudoku: the fraction of empty cells that is right)
    groups: list[str]  # one per row; rows of one group have the same solution, and intervals resample whole groups
    completions: list[str]
    statuses: dict[str, int] = field(default_factory=dict)  # number of rows by status
    of_texts: TextScores = field(default_factory=TextScores)  # overlap with reference texts, diversity, perplexity, if requested

    @cached_property
    def metrics(self) -> dict[str, Interval]:
        """Means with 95% intervals, over all rows and over those whose solution is not in the training split ("unseen"); and `of_texts`."""
        rows = {"solved": self.solved, "value": self.values}
        means = {name: mean_interval(values, self.groups) for name, values in rows.items()}
        unseen = [split_of(group) == "test" for group in self.groups]
        if 0 < (count := sum(unseen)) < len(unseen):
            groups = list(compress(self.groups, unseen))
            means |= {f"{name}, {count} unseen": mean_interval(list(compress(values, unseen)), groups) for name, values in rows.items()}
        return means | self.of_texts.values

    def gain_over(self, before: TaskResult) -> Interval:
        """The paired difference of the solved fraction from an earlier result on the same rows."""
        assert self.groups == before.groups, "results on different rows"
        return paired_difference(before.solved, self.solved, self.groups)

    def to_json(self) -> str:
        metrics = {name: asdict(interval) for name, interval in self.metrics.items()}
        summary = {"task": self.task, "rows": len(self.solved), "metrics": metrics, "statuses": self.statuses}
        summary |= {"judged": self.of_texts.judged} if self.of_texts.judged else {}
        return json.dumps({**summary, "completions": self.completions}, indent=1)


def _sampler_for(task: Task, rows: Sequence[Mapping[str, Any]], sampler: SamplerConfig | None) -> SamplerConfig:
    """The sampler with the task's answer length as the canvas length, unless prompts are conversations."""
    sampler = sampler or SamplerConfig(batch_size=256)
    if task.max_completion and rows and isinstance(rows[0]["prompt"], str):
        return sampler.model_copy(update={"max_new_tokens": task.max_completion})
    return sampler


def check_evaluation(lm: DiffusionLM, task: Task, rows: Sequence[Mapping[str, Any]], sampler: SamplerConfig | None = None) -> None:
    """Raise the errors of `evaluate_task` early: a prompt is too long, settings do not fit the model, or programs have no sandbox."""
    task.verify_all([""], rows[:1])
    make_requests(lm, [row["prompt"] for row in rows], _sampler_for(task, rows, sampler))


def evaluate_task(
    lm: DiffusionLM,
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    sampler: SamplerConfig | None = None,
    metrics: Sequence[str] = (),
    judge: DiffusionLM | None = None,
) -> TaskResult:
    """Complete every row's prompt (greedily unless the sampler says otherwise) and verify the completions.

    Rows that cannot be verified are counted by status and left out of the metrics.

    Args:
        metrics: of the texts, by their names in `text_metrics.METRICS`.
        judge: a causal model, for the metric "perplexity".

    Raises:
        ConfigError: as `check_text_metrics`.
        DataError: no row could be verified.
    """
    check_text_metrics(metrics, task.name, has_reference=task.reference is not None, has_judge=judge is not None)
    texts = generate(lm, [row["prompt"] for row in rows], _sampler_for(task, rows, sampler)).texts
    verdicts = task.verify_all(texts, rows)
    verified = [index for index, verdict in enumerate(verdicts) if verdict.value is not None]
    if not verified:
        why = verdicts[0].detail if verdicts else "there are no rows"
        raise DataError(f"no row could be verified: {why}", where=task.name, remedy="See `unmask sandbox probe`, or check the file.")
    groups = [rows[index]["group"] for index in verified]
    completions = [texts[index] for index in verified]
    written = GeneratedTexts(
        texts=completions,
        prompts=[rows[index]["prompt"] for index in verified],
        references=[rows[index][task.reference] for index in verified] if task.reference else None,
        groups=groups,
        tokenizer=lm.tokenizer,
        judge=judge,
    )
    return TaskResult(
        task=task.name,
        solved=[float(verdicts[index].solved) for index in verified],
        values=[verdict.value for verdict in verdicts if verdict.value is not None],
        groups=groups,
        completions=completions,
        statuses=dict(Counter(str(verdict.status) for verdict in verdicts)),
        of_texts=text_metrics(metrics, written) if metrics else TextScores(),
    )
