"""Task accuracy: completions are generated and verified; metrics have confidence intervals."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

from unmask.config.sampler import SamplerConfig
from unmask.config.user_code import failing_as
from unmask.console import Phase
from unmask.data.decoding import text_after, token_texts
from unmask.data.encoding import encode_row
from unmask.data.formats import is_ids, read_prompt
from unmask.diffusion.rng import sequence_key
from unmask.errors import ConfigError, DataError
from unmask.evaluation.item_log import ItemLog, finished_items
from unmask.evaluation.protocols import cut
from unmask.evaluation.result_file import Item, ItemTrace, Metric, TaskScores
from unmask.evaluation.statistics import Interval, mean_interval, paired_difference
from unmask.evaluation.text_metrics import (
    LOWER_IS_BETTER,
    GeneratedTexts,
    TextScores,
    check_metrics,
    text_metrics,
)
from unmask.generation.output import Generation
from unmask.generation.requests import make_requests
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_card import HISTORY_KEY
from unmask.records import RowSequence
from unmask.rewards.verdict import Verdict
from unmask.tasks import Puzzle, Task, split_of
from unmask.training.run.fingerprints import code_fingerprint

SPEED_ONLY = {"batch_size", "max_batch_tokens", "agreement_prompts"}
"""Settings of a sampler that change no completion."""
UNCOMPARED = {"agreement_prompts": 0}
"""No batch is sampled a second time: what a lossy setting costs shows in the scores."""


@dataclass(frozen=True)
class TaskResult:
    """The results of a model on the rows of a task."""

    task: str
    items: list[Item]  # in the order of the rows
    # overlap with reference texts, diversity, perplexity, if requested
    of_texts: TextScores = field(default_factory=TextScores)
    protocol: dict[str, Any] = field(default_factory=dict)  # what the scores depend on beside the model
    # whether the model was trained on the training split of this task, so that the rest is unseen
    knows_split: bool = False

    @property
    def scored(self) -> list[Item]:
        """Without those that could not be verified, which are only in `statuses`."""
        return [item for item in self.items if item.scores]

    @property
    def solved(self) -> list[float]:
        """The fraction of each row's completions that is right: 1.0 or 0.0 for one completion."""
        return [item.scores["solved"] for item in self.scored]

    @property
    def values(self) -> list[float]:
        """The shaped reward per row (Sudoku: the fraction of empty cells that is right)."""
        return [item.scores["value"] for item in self.scored]

    @property
    def groups(self) -> list[str]:
        """One per row; rows of one group have the same solution, and intervals are over whole groups."""
        return [item.group for item in self.scored]

    @property
    def completions(self) -> list[str]:
        return [text for item in self.scored for text in item.completions]

    @property
    def statuses(self) -> dict[str, int]:
        """The number of completions by status."""
        return dict(Counter(status for item in self.items for status in item.status.split(", ")))

    @cached_property
    def metrics(self) -> dict[str, Interval]:
        """Means with 95% intervals: over all rows; over those whose solution is not in the training split, if
        the model was trained on that ("unseen"); and `of_texts`."""
        names = self.scored[0].scores if self.scored else ()
        rows = {name: [item.scores[name] for item in self.scored] for name in names}
        means = {name: mean_interval(values, self.groups) for name, values in rows.items()}
        unseen = [self.knows_split and split_of(group) == "test" for group in self.groups]
        if 0 < (count := sum(unseen)) < len(unseen):
            groups = list(compress(self.groups, unseen))
            means |= {
                f"{name}, {count} unseen": mean_interval(list(compress(values, unseen)), groups)
                for name, values in rows.items()
            }
        return means | self.of_texts.values

    def gain_over(self, before: TaskResult) -> Interval:
        """The paired difference of the solved fraction from an earlier result on the same rows."""
        assert self.groups == before.groups, "results on different rows"
        return paired_difference(before.solved, self.solved, self.groups)

    def to_scores(self, **chosen: Any) -> TaskScores:
        """The part of a result file; `chosen`: what its protocol says besides."""
        metrics = {name: as_metric(name, interval) for name, interval in self.metrics.items()}
        chosen |= {"judged": self.of_texts.judged} if self.of_texts.judged else {}
        return TaskScores(
            task=self.task,
            protocol=chosen | self.protocol,
            metrics=metrics,
            statuses=self.statuses,
            items=self.items,
        )


def as_metric(name: str, interval: Interval) -> Metric:
    """The metric `name` in a result file."""
    return Metric.of(interval, higher_is_better=name not in LOWER_IS_BETTER)


def sampler_for(task: Task, rows: RowSequence, sampler: SamplerConfig | None) -> SamplerConfig:
    """The sampler with the task's answer length as the canvas length, unless prompts are conversations."""
    sampler = sampler or SamplerConfig(batch_size=256)
    if task.max_completion and rows and isinstance(rows[0]["prompt"], str):
        return sampler.model_copy(update={"max_new_tokens": task.max_completion})
    return sampler


def protocol_of(task: Task, rows: RowSequence, sampler: SamplerConfig, attempts: int = 1) -> dict[str, Any]:
    """What the scores depend on beside the model: the rows with their prompts, the sampler, the attempts, the
    code of a user's task."""
    code = code_fingerprint(task)
    return {
        "rows": len(rows),
        "rows_sha256": rows_fingerprint(rows),
        "attempts": attempts,
        "sampler": sampler.model_dump(mode="json", exclude=SPEED_ONLY),
        **({"task_sha256": code["sha256"]} if code else {}),
    }


def rows_fingerprint(rows: RowSequence) -> str:
    """A hash of the content of rows."""
    return hashlib.sha256(
        json.dumps([dict(row) for row in rows], sort_keys=True, default=str).encode()
    ).hexdigest()


def check_evaluation(
    lm: DiffusionLM, task: Task, rows: RowSequence, sampler: SamplerConfig | None = None
) -> None:
    """Raise the errors of `evaluate_task` early: a prompt is too long, settings do not fit the model, or
    programs have no sandbox."""
    _verify(task, [""], rows[:1])
    make_requests(lm, prompt_ids(lm, rows), sampler_for(task, rows, sampler))


def prompt_ids(lm: DiffusionLM, rows: RowSequence) -> list[list[int]]:
    """The token ids of the prompts, as in training."""
    return [encode_row(lm.tokenizer, read_prompt(row)) for row in rows]


def _verify(task: Task, completions: Sequence[str], rows: RowSequence) -> list[Verdict]:
    """The verdict on each completion. ConfigError if the task's own code fails."""
    what = f"{type(task).__name__}.verify"
    with failing_as(ConfigError, what, where=task.name, remedy="Correct it: it has to accept any text"):
        return task.verify_all(completions, rows)


def check_attempts(
    attempts: int, pass_at: Sequence[int], sampler: SamplerConfig, lm: DiffusionLM | None = None
) -> None:
    """Raise a ConfigError if pass@k needs more attempts than there are, or all attempts would be the same,
    which depends on the model's noise."""
    for k in pass_at:
        if not 1 <= k <= attempts:
            remedy = "Give at least as many attempts as the largest k"
            raise ConfigError(f"{k} of {attempts} attempts", where="pass_at", remedy=remedy)
    if attempts > 1 and sampler.temperature == 0 and lm is not None and lm.noise != "uniform":
        what = f"{attempts} attempts at temperature 0 are all the same"
        raise ConfigError(what, where="attempts", remedy="Set a temperature")


def evaluate_task(
    lm: DiffusionLM,
    task: Task,
    rows: RowSequence,
    sampler: SamplerConfig | None = None,
    metrics: Sequence[str] = (),
    *,
    attempts: int = 1,
    pass_at: Sequence[int] = (),
    until: Sequence[str] = (),
    log: ItemLog | None = None,
    part: str | None = None,
    judge: DiffusionLM | None = None,
    progress: Phase | None = None,
) -> TaskResult:
    """Complete every row's prompt (greedily unless the sampler says otherwise) and verify the completions.

    A completion depends on the model, its row and the sampler alone: not on other rows, their order, batches
    or processes. Rows that cannot be verified are counted by status and left out of the metrics.

    Args:
        metrics: of the texts, by their names in `text_metrics.METRICS`.
        judge: a causal model, for the metric "perplexity".
        attempts: completions per row; "solved" and "value" are means over them.
        pass_at: values of k for pass@k: the probability that at least one of k attempts is right, without
            bias.
        until: strings before which completions are cut.
        log: keeps items as they finish. Those that it has are not computed again, and of several processes
            each computes a part.
        part: the name under which the log keeps them; None: that of the task.
        progress: a phase of a progress display to update.

    Raises:
        ConfigError: as `check_metrics` and `check_attempts`.
        DataError: no row could be verified.
    """
    sampler = sampler_for(task, rows, sampler)
    check_metrics(metrics, task, has_judge=judge is not None)
    check_attempts(attempts, pass_at, sampler, lm)
    problems = {problem.id: problem for problem in _problems(lm, rows)}

    def answer(ids: Sequence[str]) -> list[Item]:
        return _answer(lm, task, [problems[name] for name in ids], sampler, attempts, pass_at, until)

    items = finished_items(log, part or task.name, list(problems), answer, sampler.batch_size, progress)
    verified = [(row, item) for row, item in zip(rows, items, strict=True) if item.scores]
    if not verified:
        why = items[0].details.get("reason", items[0].status) if items else "there are no rows"
        remedy = "See `unmask sandbox probe`, or check the file."
        raise DataError(f"no row could be verified: {why}", where=task.name, remedy=remedy)
    return TaskResult(
        task.name,
        items,
        _text_scores(lm, task, verified, metrics, judge) if metrics else TextScores(),
        protocol_of(task, rows, sampler, attempts),
        knows_split=_trained_on(lm, task),
    )


def _text_scores(
    lm: DiffusionLM,
    task: Task,
    verified: Sequence[tuple[Mapping[str, Any], Item]],
    metrics: Sequence[str],
    judge: DiffusionLM | None,
) -> TextScores:
    pairs = [(text, row) for row, item in verified for text in item.completions]
    written = GeneratedTexts(
        texts=[text for text, _ in pairs],
        # token ids of a protocol are text for the judge, whose tokenizer is another
        prompts=[
            text_after(lm.tokenizer, [], row["prompt"]) if is_ids(row["prompt"]) else row["prompt"]
            for _, row in pairs
        ],
        references=[row[task.reference] for _, row in pairs] if task.reference else None,
        groups=[row["group"] for _, row in pairs],
        tokenizer=lm.tokenizer,
        judge=judge,
    )
    return text_metrics(metrics, written)


class _Problem(NamedTuple):
    """A row as it is asked."""

    id: str
    row: Mapping[str, Any]
    prompt: list[int]
    """Its token ids."""
    number: int
    """Among rows of the same prompt."""


def _problems(lm: DiffusionLM, rows: RowSequence) -> list[_Problem]:
    """Rows of the same prompt are numbered in the order of their ids, so that the order of rows does not
    matter."""
    ids, prompts = item_ids(rows), prompt_ids(lm, rows)
    seen: Counter[tuple[int, ...]] = Counter()
    numbers: dict[int, int] = {}
    for n in sorted(range(len(rows)), key=lambda n: ids[n]):
        numbers[n] = seen[tuple(prompts[n])]
        seen[tuple(prompts[n])] += 1
    return [_Problem(ids[n], row, prompts[n], numbers[n]) for n, row in enumerate(rows)]


def item_ids(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The identity of each problem, whatever the style of its prompt and what stands before it. Equal
    problems are numbered."""
    seen: Counter[str] = Counter()
    ids = []
    for row in rows:
        problem = {
            name: value for name, value in row.items() if name not in ("prompt", "completion")
        } or dict(row)
        digest = hashlib.sha256(json.dumps(problem, sort_keys=True, default=str).encode()).hexdigest()[:16]
        ids.append(f"{digest}-{seen[digest]}" if seen[digest] else digest)
        seen[digest] += 1
    return ids


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """The probability that at least one of `k` attempts is right, estimated without bias from `right` of
    `attempts`: 1 - C(n - c, k) / C(n, k).

    Source: M. Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1.
    """
    return 1.0 - math.comb(attempts - right, k) / math.comb(attempts, k)


def _trained_on(lm: DiffusionLM, task: Task) -> bool:
    """Whether the model's history says that all that it was trained on is problems that this task generated:
    a file may hold any."""
    history = getattr(lm.config, HISTORY_KEY, None) or []
    return (
        isinstance(task, Puzzle)
        and bool(history)
        and all(entry.get("data") == task.name for entry in history)
    )


def _answer(
    lm: DiffusionLM,
    task: Task,
    problems: Sequence[_Problem],
    sampler: SamplerConfig,
    attempts: int,
    pass_at: Sequence[int],
    until: Sequence[str],
) -> list[Item]:
    """The items of these problems."""
    prompts = [problem.prompt for problem in problems for _ in range(attempts)]
    keys = [
        sequence_key(problem.prompt, problem.number * attempts + n)
        for problem in problems
        for n in range(attempts)
    ]
    made = generate(lm, prompts, sampler.model_copy(update=UNCOMPARED), keys)
    made = replace(made, texts=[cut(text, until) for text in made.texts])
    verdicts = _verify(task, made.texts, [problem.row for problem in problems for _ in range(attempts)])
    items = []
    for n, problem in enumerate(problems):
        own = slice(n * attempts, (n + 1) * attempts)
        items.append(_item(lm, problem, made, own, verdicts[own], pass_at, traced=sampler.trace))
    return items


def _item(
    lm: DiffusionLM,
    problem: _Problem,
    made: Generation,
    own: slice,
    verdicts: Sequence[Verdict],
    pass_at: Sequence[int],
    *,
    traced: bool,
) -> Item:
    """The item of a problem, whose completions are `made[own]`."""
    values = [verdict.value for verdict in verdicts if verdict.value is not None]
    scores: dict[str, float] = {}
    if len(values) == len(verdicts):
        right = sum(verdict.solved for verdict in verdicts)
        scores = {"solved": right / len(verdicts), "value": math.fsum(values) / len(values)}
        scores |= {f"pass@{k}": pass_at_k(len(verdicts), right, k) for k in pass_at}
    prompt, tokens, steps = problem.row["prompt"], made.tokens[own], made.steps[own]
    reason = next((verdict.detail for verdict in verdicts if verdict.value is None), "")
    traces = []
    for ids, at in zip(tokens, steps, strict=True) if traced else []:
        traces.append(ItemTrace(tokens=token_texts(lm.tokenizer, problem.prompt, ids, named=True), steps=at))
    return Item(
        id=problem.id,
        group=problem.row["group"],
        status=", ".join(str(verdict.status) for verdict in verdicts),
        scores=scores,
        prompt=lm.tokenizer.decode(prompt) if is_ids(prompt) else prompt,
        completions=made.texts[own],
        tokens=sum(map(len, tokens)),
        steps=sum((made.denoising_steps or [])[own]),
        passes=sum(made.forward_passes[own]),
        traces=traces,
        details={"reason": reason} if reason else {},
    )
