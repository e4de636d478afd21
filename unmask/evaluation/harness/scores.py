"""The results of lm-eval as `TaskScores`: each metric with its interval over items and its standard error
over the random masks.

Shapes: N items, C columns of a metric's values.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.group import Group
from lm_eval.utils import handle_non_serializable

from unmask.evaluation.harness.answers import AnswerText, LogLikelihood
from unmask.evaluation.result_file import Item, Metric, TaskScores
from unmask.evaluation.statistics import group_interval, mean_interval, ratio

FLIPS = 50
"""Draws by which the standard error of a metric is estimated, to about a tenth of it."""

Aggregate = Callable[[list[Any]], float]
Sample = Mapping[str, Any]


def task_scores(name: str, task: Any, results: Mapping[str, Any], protocol: Mapping[str, Any]) -> TaskScores:
    """The scores of one task, from the results of `simple_evaluate` with its samples."""
    by_filter: dict[str, list[Sample]] = {}
    for sample in sorted(results["samples"][name], key=lambda sample: sample["doc_id"]):
        by_filter.setdefault(sample["filter"], []).append(sample)
    metrics, scores = {}, dict[int, dict[str, float]]()
    for filter_name, samples in by_filter.items():
        errors = _mask_errors(task, samples)
        for metric in dict.fromkeys(metric for sample in samples for metric in sample["metrics"]):
            title = _title(metric, filter_name)
            found = [sample for sample in samples if metric in sample["metrics"]]
            aggregate = _aggregate(task, metric)
            values = [sample[metric] for sample in found]
            low, high = _interval(aggregate, values, [_group(sample) for sample in found])
            metrics[title] = Metric(
                # lm-eval's own has the last bits of the order in which processes answered
                mean=_value(aggregate, values),
                low=low,
                high=high,
                standard_error=errors.get(metric),
                higher_is_better=bool(results["higher_is_better"][name].get(metric, True)),
            )
            for sample in found:
                scores.setdefault(sample["doc_id"], {})[title] = _value(aggregate, [sample[metric]])
    first = next(iter(by_filter.values()))
    repeats = results["configs"][name].get("repeats") or 1
    items = [_item(sample, scores.get(sample["doc_id"], {}), repeats) for sample in first]
    digest = hashlib.sha256("".join(sample["doc_hash"] for sample in first).encode()).hexdigest()
    config = json.loads(json.dumps(results["configs"][name], default=handle_non_serializable))
    own = {
        "harness_task": config,
        "version": results["versions"][name],
        "shots": results["n-shot"][name],
        "data": digest,
    }
    return TaskScores(
        task=name, protocol={**protocol, **own}, metrics=metrics, statuses={"ok": len(items)}, items=items
    )


def group_scores(
    group: Group, tasks: Sequence[TaskScores], results: Mapping[str, Any], protocol: Mapping[str, Any]
) -> TaskScores:
    """The scores that lm-eval aggregates over the tasks of a group, here from the means of `task_scores`."""
    scores_of_tasks = {name: dict(scores) for name, scores in results["results"].items()}
    for task in tasks:
        for key in scores_of_tasks[task.task]:
            if "," in key and (title := _title(*key.split(",", 1))) in task.metrics:
                scores_of_tasks[task.task][key] = task.metrics[title].mean
    metrics = {
        _title(*key.split(",", 1)): Metric(mean=value)
        for key, value in group.aggregate(scores_of_tasks).items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float)
    }
    own = {"tasks": list(results["group_subtasks"].get(group.name, []))}
    return TaskScores(task=group.name, protocol={**protocol, **own}, metrics=metrics)


def _title(metric: str, filter_name: str) -> str:
    return metric if filter_name == "none" else f"{metric}, {filter_name}"


def _aggregate(task: Any, metric: str) -> Aggregate:
    found: Aggregate = task.aggregation().get(metric, np.mean)
    return found


def _value(aggregate: Aggregate, values: list[Any]) -> float:
    """The metric of some values; infinite where it is too large for a float, as the perplexity of a text that
    is nearly impossible."""
    try:
        return float(aggregate(values))
    except OverflowError:
        return math.inf


def _group(sample: Sample) -> str:
    """Equal documents are not independent."""
    return str(sample["doc_hash"])[:16]


def _interval(
    aggregate: Aggregate, values: list[Any], groups: list[str]
) -> tuple[float | None, float | None]:
    """The bounds of a metric that is a monotone function of the mean of its values, or of a ratio of means
    (perplexity per word: of the log-likelihood and the words), at those of the mean or ratio; None for any
    other metric."""
    try:
        values_NC = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    except (TypeError, ValueError):  # texts, or values of different lengths
        return None, None

    def of_means(*means: float) -> float:
        return _value(aggregate, [means if len(means) > 1 else means[0]])

    with np.errstate(all="ignore"):
        mean_C = values_NC.mean(0).tolist()
        try:
            whole = _value(aggregate, list(values))
            same = [of_means(*mean_C)] + ([of_means(mean_C[0] / mean_C[1], 1.0)] if len(mean_C) == 2 else [])
        # one that refuses a mean is no function of it
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
            return None, None
        if len(mean_C) > 2 or not all(
            math.isclose(value, whole, rel_tol=1e-9, abs_tol=1e-12) for value in same
        ):
            return None, None
        if len(mean_C) == 1:
            interval = mean_interval(values_NC[:, 0], groups)
            bounds = [of_means(end) for end in (interval.low, interval.high)]
        else:
            interval = group_interval(values_NC, ratio, groups)
            bounds = [of_means(end, 1.0) for end in (interval.low, interval.high)]
    low, high = sorted(bounds)
    return (low, high) if math.isfinite(interval.low) and all(map(math.isfinite, bounds)) else (None, None)


def _mask_errors(task: Any, samples: Sequence[Sample]) -> dict[str, float | None]:
    """The standard error of each metric over the random masks; none if likelihoods are exact or if texts are
    generated.

    The differences of which a log-likelihood's error is known are added to it with random signs, the same for
    all choices of a question, whose masks are the same: its mean, its variance, and its covariance with other
    choices are then those of the estimate. The task scores each of these draws; the standard deviation of a
    metric over them is its standard error.
    """
    differences = [[_differences(response) for response in sample["filtered_resps"]] for sample in samples]
    widths = [max(map(len, of_sample), default=0) for of_sample in differences]
    if not any(widths):
        return {}
    names = dict.fromkeys(metric for sample in samples for metric in sample["metrics"])
    if not all(math.isfinite(x) for of_sample in differences for each in of_sample for x in each):
        return dict.fromkeys(names)
    rng, drawn = np.random.default_rng(0), {name: list[float]() for name in names}
    for _ in range(FLIPS):
        values: dict[str, list[Any]] = {name: [] for name in names}
        for sample, width in zip(samples, widths, strict=True):
            scored: Mapping[str, Any] = sample
            if width:
                signs = rng.choice((-1.0, 1.0), size=width)
                moved = [_moved(response, signs) for response in sample["filtered_resps"]]
                scored = task.process_results(sample["doc"], moved)
            for name in sample["metrics"]:
                values[name].append(scored[name])
        for name in names:
            drawn[name].append(_value(_aggregate(task, name), values[name]))
    return {
        name: float(np.std(numbers, ddof=1)) if np.isfinite(numbers).all() else None
        for name, numbers in drawn.items()
    }


def _differences(response: Any) -> tuple[float, ...]:
    """The differences of an answer to `loglikelihood` (a pair) or `loglikelihood_rolling` (a number); none of
    an answer to `generate_until` (a text)."""
    value = response[0] if isinstance(response, tuple | list) and response else response
    return value.differences if isinstance(value, LogLikelihood) else ()


def _moved(response: Any, signs: np.ndarray) -> Any:
    if isinstance(response, tuple | list):
        return response[0].moved(signs), *response[1:]
    return response.moved(signs)


def _item(sample: Sample, scores: dict[str, float], repeats: int) -> Item:
    # Among several processes some answer their last request again, so that all have equally many.
    arguments, answers = (
        sample["arguments"],
        [answer for responses in sample["resps"] for answer in responses[:repeats]],
    )
    texts = [answer for answer in answers if isinstance(answer, str)]
    work = [text for text in texts if isinstance(text, AnswerText)]
    details: dict[str, Any] = {
        "target": json.loads(json.dumps(sample["target"], default=handle_non_serializable))
    }
    if not texts:
        details["log_likelihoods"] = [
            _likelihood(own, responses[0]) for own, responses in zip(arguments, sample["resps"], strict=True)
        ]
    return Item(
        id=str(sample["doc_id"]),
        group=_group(sample),
        scores=scores,
        prompt=arguments[0][0],
        completions=[str(text) for text in texts],
        tokens=sum(text.tokens for text in work),
        steps=sum(text.steps for text in work),
        passes=sum(text.passes for text in work),
        details=details,
    )


def _likelihood(arguments: Sequence[Any], response: Any) -> dict[str, Any]:
    value, *rest = response if isinstance(response, tuple | list) else (response,)
    error = value.standard_error if isinstance(value, LogLikelihood) else 0.0
    found = {"log_likelihood": float(value), "standard_error": error if math.isfinite(error) else None}
    continuation = {"continuation": arguments[1]} if len(arguments) > 1 else {}
    return found | continuation | ({"greedy": bool(rest[0])} if rest else {})
