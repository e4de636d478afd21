"""What `unmask evaluate` does: tasks or the likelihood of a text, into a result file that can run itself again."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate import PartialState

from unmask.config.evaluation import EvaluationConfig
from unmask.config.run import ModelConfig, SamplerConfig
from unmask.data.problems import pose, read_problems
from unmask.errors import ConfigError, DataError
from unmask.evaluation.item_log import ItemLog
from unmask.evaluation.likelihood import likelihood_of_file
from unmask.evaluation.protocols import Protocol, read_protocol
from unmask.evaluation.provenance import environment, model_identity
from unmask.evaluation.result_file import EvaluationResult, Metric, TaskScores, read_result
from unmask.evaluation.tasks import check_attempts, check_evaluation, check_metrics, evaluate_task, protocol_of, sampler_for
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.redaction import masked, masked_text
from unmask.tasks import Row, Task, get_task


@dataclass(frozen=True)
class Processes:
    """The processes of a launcher, of which the first writes."""

    rank: int = 0
    count: int = 1

    @classmethod
    def of_launcher(cls, device: str) -> Processes:
        """Those of torchrun or `accelerate launch`, connected. Unless `device` is the CPU, each has a GPU of its own as its current one."""
        found = cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
        if found.count > 1:
            PartialState(cpu=device == "cpu")
        return found

    def wait(self) -> None:
        if self.count > 1:
            PartialState().wait_for_everyone()

    def end(self) -> None:
        """A process aborts if it exits while others still communicate with it."""
        if self.count > 1:
            self.wait()
            PartialState().destroy_process_group()


def evaluate(model: ModelConfig, evaluation: EvaluationConfig, sampler: SamplerConfig, output: Path | None = None) -> EvaluationResult:
    """Run an evaluation, and write its result if there is an `output`. Items are kept as they finish, beside the output, so that a killed
    evaluation goes on.

    Raises:
        ConfigError: an unknown task, or settings that do not fit one another.
        DataError: a file is missing or malformed, or finished items beside the output are of another evaluation.
    """
    begun, start = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    processes = Processes.of_launcher(model.device)
    if processes.count > 1 and output is None:
        raise ConfigError("several processes share their items through files", where="--output", remedy="Give --output FILE")
    protocols = {name: read_protocol(evaluation.protocol, name) for name in evaluation.tasks if evaluation.protocol}
    wanted = {name: _as_authors(evaluation, protocols.get(name)) for name in evaluation.tasks}
    problems = {name: _problems(wanted[name], get_task(name), sampler) for name in evaluation.tasks}
    lm = load(model.path, **model.load_arguments())
    given = {name: getattr(sampler, name) for name in sampler.model_fields_set}
    samplers = {name: protocols[name].sampler(lm, given) if name in protocols else sampler for name in problems}
    for name, protocol in protocols.items():
        problems[name] = [{**row, "prompt": protocol.prompt_ids(lm, row["prompt"])} for row in problems[name]]
    for name, rows in problems.items():
        check_evaluation(lm, get_task(name), rows, samplers[name])
    identity = model_identity(lm, model.path, model.revision)
    sections = {"model": model, "evaluation": evaluation, "sampler": sampler}
    arguments = {name: section.model_dump(mode="json", exclude_unset=True) for name, section in sections.items()}
    log = None
    if output is not None and problems:
        chosen = {name: sampler_for(get_task(name), rows, samplers[name]) for name, rows in problems.items()}
        settings = {name: protocol_of(rows, chosen[name], evaluation.attempts) for name, rows in problems.items()}
        whole = {"model": identity, "protocols": settings, "pass_at": evaluation.ks}
        log = ItemLog(output, whole, rank=processes.rank, processes=processes.count, wait=processes.wait)
    parts, seconds = [], {}
    for name, rows in problems.items():
        part_start = time.perf_counter()
        authors = {"authors": protocols[name].record(lm, given)} if name in protocols else {}
        parts.append(_scores(lm, wanted[name], samplers[name], get_task(name), rows, log, authors))
        seconds[name] = time.perf_counter() - part_start
    if evaluation.likelihood:
        parts.append(_likelihood(lm, evaluation, sampler.seed))
        seconds["likelihood"] = time.perf_counter() - start
    spent = {"begun": begun, "seconds": time.perf_counter() - start, "resumed_items": log.resumed if log else 0}
    times = spent | {"tasks": _speeds(parts, seconds, log)}
    result = EvaluationResult(model=identity, arguments=masked(arguments), tasks=parts, environment=environment(lm), times=times)
    if output is not None and processes.rank == 0:
        result.write(output)
        if log is not None:
            log.remove()
    processes.end()
    return result


def _as_authors(evaluation: EvaluationConfig, protocol: Protocol | None) -> EvaluationConfig:
    """With the prompts of a protocol, unless the user gave others."""
    if protocol is None:
        return evaluation
    theirs = {"style": "chat" if protocol.template else "plain", "shots": protocol.shots}
    return evaluation.model_copy(update={name: value for name, value in theirs.items() if name not in evaluation.model_fields_set})


def _speeds(parts: list[TaskScores], seconds: Mapping[str, float], log: ItemLog | None) -> dict[str, Any]:
    """Seconds and tokens per second by task, of all processes, with the time to verify; None if all items had been finished before."""
    speeds = {}
    for part in parts:
        finished = log.finished(part.task) if log else {}
        tokens, spent = sum(item.tokens for item in part.items if item.id not in finished), seconds[part.task]
        speeds[part.task] = {"seconds": spent, "tokens_per_second": tokens / spent if tokens else None}
    return speeds


def _problems(evaluation: EvaluationConfig, task: Task, sampler: SamplerConfig) -> list[Row]:
    check_metrics(task, evaluation.metric or [])
    if evaluation.protocol is None:  # else its temperature counts
        check_attempts(evaluation.attempts, evaluation.ks, sampler)
    count, source = evaluation.rows + evaluation.shots, evaluation.sources.get(task.name)
    problems = read_problems(task, source, count, split="test", hub_split=evaluation.split, seed=sampler.seed)
    return pose(task, problems, evaluation.style, evaluation.shots)


def _scores(
    lm: DiffusionLM,
    evaluation: EvaluationConfig,
    sampler: SamplerConfig,
    task: Task,
    rows: list[Row],
    log: ItemLog | None,
    authors: dict[str, Any],
) -> TaskScores:
    attempts, ks = evaluation.attempts, evaluation.ks
    result = evaluate_task(lm, task, rows, sampler, evaluation.metric or [], attempts=attempts, pass_at=ks, log=log)
    template = lm.tokenizer.chat_template if evaluation.style == "chat" else None
    data = masked_text(evaluation.sources.get(task.name, "generated"))
    return result.to_scores(data=data, style=evaluation.style, shots=evaluation.shots, chat_template=template, **authors)


def _likelihood(lm: DiffusionLM, evaluation: EvaluationConfig, seed: int) -> TaskScores:
    data = str(evaluation.likelihood)
    found = likelihood_of_file(lm, data, evaluation.rows, evaluation.estimator, evaluation.samples, seed)
    metrics = {"nats per token": Metric(mean=found.pop("nats per token"), higher_is_better=False)}
    return TaskScores(task="likelihood", protocol={"data": data, "samples": evaluation.samples, "seed": seed, **found}, metrics=metrics)


def rerun(path: Path) -> tuple[EvaluationResult, EvaluationResult]:
    """The result of a file, and that of the same evaluation today."""
    before = read_result(path)
    if not before.arguments:
        raise DataError("was made by training, not by `unmask evaluate`", where=str(path), remedy="Evaluate the model that it was made of.")
    model, evaluation, sampler = (_section(before, name, path) for name in ("model", "evaluation", "sampler"))
    if model.get("trust_remote_code"):
        remedy = "Give the evaluation's own options, with --trust-remote-code if you trust the model's code"
        raise ConfigError("may not stand in a file", where=f"trust_remote_code ({path})", remedy=remedy)
    return before, evaluate(ModelConfig(**model), EvaluationConfig(**evaluation), SamplerConfig(**sampler))


def _section(result: EvaluationResult, name: str, path: Path) -> dict[str, Any]:
    section = result.arguments.get(name, {})
    if not isinstance(section, dict):
        raise DataError(f"arguments.{name} is no object", where=str(path), remedy="Give a file that `unmask evaluate --output FILE` wrote.")
    return section


def differences(before: EvaluationResult, after: EvaluationResult) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """How two results differ, in rows of a name and both values: in what was measured, and in what may explain it."""
    scores = []
    for one, other in zip(before.tasks, after.tasks, strict=True):
        if one == other:
            continue
        for name in {**one.metrics, **other.metrics}:
            if one.metrics.get(name) != other.metrics.get(name):
                scores.append((f"{one.task}: {name}", _mean(one, name), _mean(other, name)))
        items = {item.id: item for item in one.items}
        changed = sum(items.get(item.id) != item for item in other.items)
        scores.append((f"{one.task}: items that differ", "", f"{changed} of {len(other.items)}"))
        scores += _changed(f"{one.task}: ", one.protocol, other.protocol)
    return scores, _changed("model: ", before.model, after.model) + _changed("", before.environment, after.environment)


def _mean(scores: TaskScores, name: str) -> str:
    return f"{scores.metrics[name].mean:.6g}" if name in scores.metrics else "none"


def _changed(prefix: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for name in {**before, **after}:
        one, other = before.get(name), after.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            rows += _changed(f"{prefix}{name}.", one, other)
        elif one != other:
            rows.append((prefix + name, str(one), str(other)))
    return rows
