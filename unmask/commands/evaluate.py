"""What `unmask evaluate` does: tasks or the likelihood of a text, into a result file that can run itself again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from accelerate import PartialState

from unmask.config.evaluation import EvaluationConfig
from unmask.config.run import ModelConfig, SamplerConfig, refuse_existing
from unmask.data.problems import pose, read_problems
from unmask.data.sources import load_rows
from unmask.errors import ConfigError, DataError
from unmask.evaluation.comparison import Named, by_label
from unmask.evaluation.curve import curve_samplers, with_speed
from unmask.evaluation.file_likelihood import documents_fingerprint, file_likelihood, read_documents
from unmask.evaluation.item_log import ItemLog
from unmask.evaluation.protocols import Protocol, read_protocol
from unmask.evaluation.provenance import environment, model_identity
from unmask.evaluation.result_file import EvaluationResult, TaskScores, read_result
from unmask.evaluation.tasks import (
    check_attempts,
    check_evaluation,
    check_metrics,
    evaluate_task,
    protocol_of,
    rows_fingerprint,
    sampler_for,
)
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.redaction import masked, masked_text
from unmask.tasks import Row, Task, get_task
from unmask.training.durable.launchers import check_processes


class Part(NamedTuple):
    """What has scores of its own in a result: a task with one sampler."""

    task: Task
    rows: list[Row]
    sampler: SamplerConfig
    evaluation: EvaluationConfig
    protocol: Protocol | None = None
    authors: Mapping[str, Any] = MappingProxyType({})

    def fitted(self, lm: DiffusionLM) -> Part:
        """With the sampler and the prompts of its protocol, if it has one; given settings win. Raises as `check_evaluation`."""
        part = self
        if self.protocol is not None:
            given = {name: getattr(self.sampler, name) for name in self.sampler.model_fields_set}
            rows = [{**row, "prompt": self.protocol.prompt_ids(lm, row["prompt"])} for row in self.rows]
            authors = {"authors": self.protocol.record(lm, given)}
            part = self._replace(rows=rows, sampler=self.protocol.sampler(lm, given), authors=authors)
        check_evaluation(lm, part.task, part.rows, part.sampler)
        return part


@dataclass(frozen=True)
class Processes:
    """The processes of a launcher, of which the first writes."""

    rank: int = 0
    count: int = 1

    @classmethod
    def of_launcher(cls, device: str) -> Processes:
        """Those of torchrun or `accelerate launch`, connected. Unless `device` is the CPU, each has a GPU of its own as its current one."""
        found = cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
        check_processes(PartialState(cpu=device == "cpu").num_processes if found.count > 1 else 1)
        return found

    def wait(self) -> None:
        if self.count > 1:
            PartialState().wait_for_everyone()

    def end(self) -> None:
        """A process aborts if it exits while others still communicate with it."""
        if self.count > 1:
            self.wait()
            PartialState().destroy_process_group()


ALONE = Processes()
Harness = Callable[[], ModuleType]
"""Imports `unmask.evaluation.harness`, whose library is optional."""


def evaluate(
    model: ModelConfig,
    evaluation: EvaluationConfig,
    sampler: SamplerConfig,
    output: Path | None = None,
    harness: Harness | None = None,
    processes: Processes = ALONE,
    *,
    reuse: bool = False,
    replace: bool = True,
) -> EvaluationResult:
    """Run an evaluation, and write its result if there is an `output`. Items are kept as they finish, beside the output, so that a killed
    evaluation goes on.

    Args:
        harness: for tasks of lm-eval.
        processes: that share the work; each has to call this.
        reuse: whether an output that is there is returned if it is of the same model, options and problems.
        replace: whether any other output that is there is replaced.

    Raises:
        ConfigError: an unknown task, settings that do not fit one another, or an output that may not be replaced.
        DataError: a file is missing or malformed, or finished items beside the output are of another evaluation.
    """
    begun, start = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    if processes.count > 1 and output is None:
        raise ConfigError("several processes share their items through files", where="--output", remedy="Give --output FILE")
    parts = prepare(evaluation, sampler, harness)
    lm = load(model.path, **model.load_arguments())
    parts = {name: part.fitted(lm) for name, part in parts.items()}
    judge = load(evaluation.judge, device=model.device, dtype=model.dtype) if evaluation.judge else None
    identity = model_identity(lm, model.path, model.revision)
    arguments = _arguments(model, evaluation, sampler)
    if output is not None and output.exists():
        if reuse and (there := _same(output, identity, arguments, _fingerprints(lm, parts, evaluation))):
            return there
        refuse_existing(output, "Choose another --output, or replace it with --overwrite", overwrite=replace)
    processes.wait()  # before one of them writes the output
    log = _log(lm, parts, evaluation, identity, output, processes) if output is not None and parts else None
    scores: dict[str, TaskScores] = {}
    seconds: dict[str, float] = {}
    for name, part in parts.items():
        with _timed(scores, seconds):
            scores[name] = _scores(lm, name, part, log, judge)
    if evaluation.likelihood:
        samples = evaluation.samples or 32
        with _timed(scores, seconds):
            found = file_likelihood(lm, evaluation.likelihood, evaluation.rows, evaluation.estimator, samples, sampler.seed)
            scores["likelihood"] = found
    if harness is not None and evaluation.lm_eval:
        with _timed(scores, seconds):
            scores |= {found.task: found for found in _of_harness(harness(), lm, evaluation, sampler)}
    spent = {"begun": begun, "seconds": time.perf_counter() - start, "resumed_items": log.resumed if log else 0}
    times = spent | {"tasks": _speeds(scores, seconds, log)}
    result = EvaluationResult(model=identity, arguments=arguments, tasks=list(scores.values()), environment=environment(lm), times=times)
    if output is not None and processes.rank == 0:
        result.write(output)
        if log is not None:
            log.remove()
    return result


def _arguments(model: ModelConfig, evaluation: EvaluationConfig, sampler: SamplerConfig) -> dict[str, Any]:
    """The given settings by section, without secrets."""
    sections = {"model": model, "evaluation": evaluation, "sampler": sampler}
    return {name: masked(section.model_dump(mode="json", exclude_unset=True)) for name, section in sections.items()}


def _same(output: Path, model: Mapping[str, Any], arguments: Mapping[str, Any], problems: Mapping[str, str]) -> EvaluationResult | None:
    """The result in a file, if it is one of this model with these arguments, on these problems."""
    try:
        there = read_result(output)
    except DataError:
        return None
    found = {scores.task: scores.protocol.get("rows_sha256") for scores in there.tasks}
    same = all(found.get(name) == fingerprint for name, fingerprint in problems.items())
    return there if same and (there.model, there.arguments) == (model, arguments) else None


def _fingerprints(lm: DiffusionLM, parts: Mapping[str, Part], evaluation: EvaluationConfig) -> dict[str, str]:
    """The hash of the problems that Unmask reads, by the task's name."""
    found = {name: rows_fingerprint(part.rows) for name, part in parts.items()}
    if evaluation.likelihood:
        found["likelihood"] = documents_fingerprint(read_documents(lm, evaluation.likelihood, evaluation.rows))
    return found


@contextmanager
def _timed(scores: Mapping[str, TaskScores], seconds: dict[str, float]) -> Iterator[None]:
    """Note the seconds inside for all scores that are added there."""
    before, start = set(scores), time.perf_counter()
    yield
    seconds.update(dict.fromkeys(scores.keys() - before, time.perf_counter() - start))


def _log(
    lm: DiffusionLM,
    parts: Mapping[str, Part],
    evaluation: EvaluationConfig,
    model: Mapping[str, Any],
    output: Path,
    processes: Processes,
) -> ItemLog:
    protocols = {name: protocol_of(part.rows, part.sampler, evaluation.attempts) for name, part in parts.items()}
    templates = {"chat_template": lm.tokenizer.chat_template} if evaluation.style == "chat" else {}
    whole = {"model": model, "protocols": protocols, "pass_at": evaluation.ks, **templates}
    return ItemLog(output, whole, rank=processes.rank, processes=processes.count, wait=processes.wait)


def refuse_unread(evaluation: EvaluationConfig, sampler: SamplerConfig) -> None:
    """Raise ConfigError for a setting of the sampler if only a text's likelihood is measured."""
    unread = sorted(sampler.model_dump(exclude_defaults=True, exclude={"seed"}))
    if unread and not (evaluation.task or evaluation.lm_eval):
        raise ConfigError("a likelihood has no sampler", where=unread[0], remedy="Leave it out, or give --task or --lm-eval")


def _as_authors(evaluation: EvaluationConfig, protocol: Protocol | None) -> EvaluationConfig:
    """With the prompts of a protocol, unless the user gave others."""
    if protocol is None:
        return evaluation
    theirs = {"style": "chat" if protocol.template else "plain", "shots": protocol.shots}
    return evaluation.model_copy(update={name: value for name, value in theirs.items() if name not in evaluation.model_fields_set})


def _speeds(scores: Mapping[str, TaskScores], seconds: Mapping[str, float], log: ItemLog | None) -> dict[str, Any]:
    """Seconds and tokens per second by part, of all processes, with the time to verify; None if all items had been finished before."""
    speeds = {}
    for name, part in scores.items():
        finished = log.finished(name) if log else {}
        tokens, spent = sum(item.tokens for item in part.items if item.id not in finished), seconds[name]
        speeds[name] = {"seconds": spent, "tokens_per_second": tokens / spent if tokens else None}
    return speeds


def prepare(evaluation: EvaluationConfig, sampler: SamplerConfig, harness: Harness | None = None) -> dict[str, Part]:
    """What is measured: each task at each point of the curve, if there is one. The names are those of `labels`.

    Raises:
        ConfigError, DataError: as `evaluate`, of all that needs no model.
    """
    if evaluation.likelihood:
        load_rows(evaluation.likelihood, max_rows=evaluation.rows)
    if evaluation.lm_eval and harness is not None:
        harness().check_tasks(evaluation.harness_tasks, evaluation.include_path)
    if "split" in evaluation.model_fields_set and all(map(os.path.isfile, evaluation.sources.values())):
        raise ConfigError("is of a dataset on the hub, and none is read", where="--split", remedy="Leave it out")
    points = {"": sampler}
    if evaluation.curve:
        setting = evaluation.curve.partition("=")[0]
        samplers = curve_samplers(sampler, evaluation.curve)
        points = {f", {setting} {getattr(point, setting)}": point for point in samplers}
    parts: dict[str, Part] = {}
    for name in evaluation.tasks:
        task = get_task(name)
        protocol = read_protocol(evaluation.protocol, name) if evaluation.protocol else None
        wanted = _as_authors(evaluation, protocol)
        rows = _problems(wanted, task, sampler)
        for at, point in points.items():
            parts[name + at] = Part(task, rows, point if protocol else sampler_for(task, rows, point), wanted, protocol)
    return parts


def _problems(evaluation: EvaluationConfig, task: Task, sampler: SamplerConfig) -> list[Row]:
    check_metrics(task, evaluation.metric or [], has_judge=evaluation.judge is not None)
    if evaluation.protocol is None:  # else its temperature counts
        check_attempts(evaluation.attempts, evaluation.ks, sampler)
    count, source = evaluation.rows + evaluation.shots, evaluation.sources.get(task.name)
    problems = read_problems(task, source, count, split="test", hub_split=evaluation.split, seed=sampler.seed)
    return pose(task, problems, evaluation.style, evaluation.shots)


def _scores(lm: DiffusionLM, name: str, part: Part, log: ItemLog | None, judge: DiffusionLM | None) -> TaskScores:
    evaluation = part.evaluation
    options: dict[str, Any] = {"attempts": evaluation.attempts, "pass_at": evaluation.ks, "log": log, "part": name, "judge": judge}
    result = evaluate_task(lm, part.task, part.rows, part.sampler, evaluation.metric or [], **options)
    template = lm.tokenizer.chat_template if evaluation.style == "chat" else None
    data = masked_text(evaluation.sources.get(part.task.name, "generated"))
    more = {**part.authors} | ({"judge": model_identity(judge, str(evaluation.judge))} if judge else {})
    scores = result.to_scores(**more, data=data, style=evaluation.style, shots=evaluation.shots, chat_template=template)
    return with_speed(scores)


def _of_harness(harness: ModuleType, lm: DiffusionLM, evaluation: EvaluationConfig, sampler: SamplerConfig) -> list[TaskScores]:
    options: dict[str, Any] = {"limit": evaluation.rows, "num_fewshot": evaluation.shots or None}
    if evaluation.protocol is None or "style" in evaluation.model_fields_set:  # else as its authors did
        options["apply_chat_template"] = evaluation.style == "chat"
    found: list[TaskScores] = harness.evaluate_with_harness(
        lm,
        evaluation.harness_tasks,
        include_path=evaluation.include_path,
        samples=evaluation.samples,
        estimator=evaluation.estimator,
        sampler=sampler,
        protocol=evaluation.protocol,
        strict=not (evaluation.task or evaluation.likelihood),
        **options,
    )
    return found


def rerun(path: Path, harness: Harness | None = None) -> tuple[EvaluationResult, EvaluationResult]:
    """The result of a file, and that of the same evaluation today."""
    before = read_result(path)
    if not before.arguments:
        raise DataError("was made by training, not by `unmask evaluate`", where=str(path), remedy="Evaluate the model that it was made of.")
    model, evaluation, sampler = (_section(before, name, path) for name in ("model", "evaluation", "sampler"))
    if model.get("trust_remote_code"):
        remedy = "Give the evaluation's own options, with --trust-remote-code if you trust the model's code"
        raise ConfigError("may not stand in a file", where=f"trust_remote_code ({path})", remedy=remedy)
    return before, evaluate(ModelConfig(**model), EvaluationConfig(**evaluation), SamplerConfig(**sampler), harness=harness)


def _section(result: EvaluationResult, name: str, path: Path) -> dict[str, Any]:
    section = result.arguments.get(name, {})
    if not isinstance(section, dict):
        raise DataError(f"arguments.{name} is no object", where=str(path), remedy="Give a file that `unmask evaluate --output FILE` wrote.")
    return section


def differences(before: EvaluationResult, after: EvaluationResult) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """How two results differ, in rows of a name and both values: in what was measured, and in what may explain it."""
    scores = []
    parts, now = by_label(Named("the file", before)), by_label(Named("now", after))
    for name in {**parts, **now}:
        if name not in parts or name not in now:
            scores.append((name, *("measured" if name in there else "not measured" for there in (parts, now))))
        elif parts[name] != now[name]:
            scores += _changed_scores(name, parts[name], now[name])
    return scores, _changed("model: ", before.model, after.model) + _changed("", before.environment, after.environment)


def _changed_scores(label: str, before: TaskScores, after: TaskScores) -> list[tuple[str, str, str]]:
    names = {**before.metrics, **after.metrics}
    rows = [
        (f"{label}: {name}", _mean(before, name), _mean(after, name))
        for name in names
        if before.metrics.get(name) != after.metrics.get(name)
    ]
    old, new = ({item.id: item for item in part.items} for part in (before, after))
    changed = sum(old.get(name) != new.get(name) for name in {**old, **new})
    rows.append((f"{label}: items that differ", "", f"{changed} of {len({**old, **new})}"))
    return rows + _changed(f"{label}: ", before.protocol, after.protocol)


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
