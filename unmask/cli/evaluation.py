"""What `unmask evaluate` does: tasks or the likelihood of a text, into a result file that can run itself
again."""

from __future__ import annotations

import contextlib
import glob
import io
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, TextIO, TypeVar

from accelerate import PartialState
from pydantic import BaseModel

from unmask.config.base import Config
from unmask.config.evaluation import EvaluationConfig
from unmask.config.run import ModelConfig, refuse_existing
from unmask.config.sampler import SamplerConfig
from unmask.console import Phase, Progress
from unmask.data.sources import load_examples, pose, read_problems
from unmask.errors import ConfigError, DataError, first_line
from unmask.evaluation.comparison import Named, by_label
from unmask.evaluation.curve import curve_samplers, curve_scores, with_speed
from unmask.evaluation.file_likelihood import LIKELIHOOD, Documents
from unmask.evaluation.item_log import ItemLog
from unmask.evaluation.protocols import Protocol, read_protocol
from unmask.evaluation.provenance import environment, model_identity
from unmask.evaluation.result_file import EvaluationResult, TaskScores, differing, read_result, with_settings
from unmask.evaluation.tasks import (
    check_attempts,
    check_evaluation,
    evaluate_task,
    protocol_of,
    sampler_for,
)
from unmask.evaluation.text_metrics import check_metrics
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.redaction import masked, masked_text
from unmask.tasks import Row, Task, get_task
from unmask.training.distributed import alone_with, check_processes, connected_processes


@dataclass(frozen=True)
class Processes:
    """The processes of a launcher, of which the first writes."""

    rank: int = 0
    count: int = 1

    @classmethod
    def of_launcher(cls, device: str) -> Processes:
        """The processes of torchrun or `accelerate launch`, connected. Unless `device` is the CPU, each has a
        GPU of its own as its current one."""
        found = cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
        check_processes(connected_processes(cpu=device == "cpu").num_processes if found.count > 1 else 1)
        return found

    def wait(self) -> None:
        if self.count > 1:
            PartialState().wait_for_everyone()


ALONE = Processes()


class EvaluationPart(NamedTuple):
    """What has scores of its own in a result: a task with one sampler."""

    task: Task
    rows: list[Row]
    sampler: SamplerConfig
    evaluation: EvaluationConfig
    source: str | None
    """Where the rows are from; None: the task's own."""
    protocol: Protocol | None = None
    authors: Mapping[str, Any] = MappingProxyType({})

    def fitted(self, lm: DiffusionLM) -> EvaluationPart:
        """With the sampler and the prompts of its protocol, if it has one; given settings win. Raises as
        `check_evaluation`."""
        part = self
        if self.protocol is not None:
            given = {name: getattr(self.sampler, name) for name in self.sampler.model_fields_set}
            rows = [{**row, "prompt": self.protocol.prompt_ids(lm, row["prompt"])} for row in self.rows]
            authors = {"authors": self.protocol.record(lm, given)}
            part = self._replace(rows=rows, sampler=self.protocol.sampler(lm, given), authors=authors)
        check_evaluation(lm, part.task, part.rows, part.sampler)
        check_attempts(self.evaluation.attempts, self.evaluation.ks, part.sampler, lm)
        return part


PROBLEM_FIELDS = ("rows_sha256", "task_sha256")
"""The parts of a protocol that the options do not say."""
Section = TypeVar("Section", bound=Config)
Measure = Callable[[Phase], list[TaskScores]]
"""Measures one or more tasks, and updates the phase."""
LM_EVAL = "lm-eval"
Harness = Callable[[], ModuleType]
"""Imports `unmask.evaluation.harness`, whose library is optional."""


def import_harness() -> ModuleType:
    import unmask.evaluation.harness as harness

    return harness


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
    expected: EvaluationResult | None = None,
) -> EvaluationResult:
    """Run an evaluation, and write its result to `output`. Items are kept beside it as they finish: a killed
    evaluation continues.

    Args:
        harness: for tasks of lm-eval.
        processes: that share the work; each has to call this.
        reuse: whether an existing output of the same model, options and problems is returned instead.
        replace: whether any other existing output is replaced.
        expected: a result that is to be of the same model.

    Raises:
        ConfigError: an unknown task, settings that do not fit one another, or an output that may not be
            replaced.
        DataError: a file is missing or malformed, items beside the output are of another evaluation, or
            `expected` is of another model.
        TrainingError: another evaluation writes the output.
    """
    if processes.count > 1 and output is None:
        raise ConfigError(
            "several processes share their items through files", where="--output", remedy="Give --output FILE"
        )
    with contextlib.nullcontext() if output is None else alone_with(output):
        begun, start = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
        parts = prepare(evaluation, sampler, harness)
        lm = load(model.path, **model.load_arguments())
        parts = {name: part.fitted(lm) for name, part in parts.items()}
        judge = None
        if evaluation.judge:
            judge = load(evaluation.judge, device=model.device, dtype=model.dtype)
        identity = model_identity(lm, model.path, model.revision)
        if expected is not None:
            _refuse_other_model(expected, identity)
        given = {"model": model, "evaluation": evaluation, "sampler": sampler}
        arguments = masked(
            {name: section.model_dump(mode="json", exclude_unset=True) for name, section in given.items()}
        )
        documents = _documents(lm, evaluation, sampler)
        whole = {"model": identity, **_protocols(lm, evaluation, parts, documents)}
        if output is not None and output.exists():
            if reuse and (there := _unchanged(output, identity, arguments, whole["protocols"])):
                return there
            refuse_existing(
                output, "Choose another --output, or replace it with --overwrite", overwrite=replace
            )
        processes.wait()  # before one of them writes the output
        log = None
        if output is not None and (parts or documents):
            log = ItemLog(output, whole, rank=processes.rank, processes=processes.count, wait=processes.wait)
        measures: dict[str, Measure] = {
            name: partial(_scores, lm, name, part, log, judge) for name, part in parts.items()
        }
        if documents:
            measures[LIKELIHOOD] = lambda phase: [documents.measure(lm, log, phase)]
        if harness is not None and evaluation.lm_eval:
            measures[LM_EVAL] = partial(_of_harness, harness(), lm, evaluation, sampler, output)
        scores, seconds = _measure_all(measures, None if processes.rank == 0 else io.StringIO())
        times = {"begun": begun, "seconds": time.perf_counter() - start, **_speeds(scores, seconds, log)}
        result = EvaluationResult(
            model=identity,
            arguments=arguments,
            tasks=[*scores.values(), *_areas(evaluation, parts, scores)],
            environment=environment(lm),
            times=times,
        )
        if output is not None and processes.rank == 0:
            result.write(output)
            if log is not None:
                log.remove()
            for path in output.parent.glob(f"{glob.escape(answers_beside(output).name)}_rank*.db"):
                path.unlink()
        return result


def _measure_all(
    measures: Mapping[str, Measure], stream: TextIO | None
) -> tuple[dict[str, TaskScores], dict[str, float]]:
    """The scores of each part, and the seconds that they took. `stream` shows the progress; None: stderr."""
    scores, seconds = dict[str, TaskScores](), dict[str, float]()
    with Progress([(name, 1.0) for name in measures], stream=stream) as progress:
        for name, measure in measures.items():
            started = time.perf_counter()
            with progress.phase(name) as phase:
                found = {each.task if name == LM_EVAL else name: each for each in measure(phase)}
            scores |= found
            seconds |= dict.fromkeys(found, time.perf_counter() - started)
    return scores, seconds


def _unchanged(
    output: Path, model: Mapping[str, Any], arguments: Mapping[str, Any], protocols: Mapping[str, Any]
) -> EvaluationResult | None:
    """The result that is there, if it is one of this model, these options and these problems."""
    try:
        there = read_result(output)
    except DataError:
        return None
    measured = {scores.task: scores.protocol for scores in there.tasks}
    same = all(
        measured.get(name, {}).get(key) == protocol.get(key)
        for name, protocol in protocols.items()
        for key in PROBLEM_FIELDS
    )
    return there if same and (there.model, there.arguments) == (model, arguments) else None


def refuse_unread(evaluation: EvaluationConfig, sampler: SamplerConfig) -> None:
    """Raise ConfigError for a setting of the sampler if only a text's likelihood is measured, and for a
    length if all tasks have others."""
    unread = sampler.of_texts
    if unread and not (evaluation.task or evaluation.lm_eval):
        where = f"--{unread[0].replace('_', '-')}"
        raise ConfigError(
            "a likelihood generates no text", where=where, remedy="Leave it out, or give --task or --lm-eval"
        )
    if (
        evaluation.lm_eval
        or evaluation.protocol
        or evaluation.style == "chat"
        or "max_new_tokens" not in sampler.model_fields_set
    ):
        return
    own = [get_task(name).max_completion for name in evaluation.tasks]
    if own and None not in own and sampler.max_new_tokens not in own:
        what = f"the answers of {', '.join(evaluation.tasks)} have a length of their own"
        raise ConfigError(what, where="--max-new-tokens", remedy="Leave it out")


def _protocols(
    lm: DiffusionLM,
    evaluation: EvaluationConfig,
    parts: Mapping[str, EvaluationPart],
    documents: Documents | None,
) -> dict[str, Any]:
    """What items depend on beside the model."""
    protocols = {
        name: protocol_of(part.task, part.rows, part.sampler, evaluation.attempts)
        for name, part in parts.items()
    }
    protocols |= {LIKELIHOOD: documents.protocol} if documents else {}
    templates = {"chat_template": lm.tokenizer.chat_template} if evaluation.style == "chat" else {}
    return {"protocols": protocols, "pass_at": evaluation.ks, **templates}


def answers_beside(output: Path) -> Path:
    """Where the answers to requests of lm-eval are kept until the result is written; lm-eval appends
    `_rank0.db`."""
    return output.with_name(f"{output.name}.answers")


def _documents(lm: DiffusionLM, evaluation: EvaluationConfig, sampler: SamplerConfig) -> Documents | None:
    """The documents whose likelihood is measured, if there are any."""
    if evaluation.likelihood is None:
        return None
    settings = evaluation.estimator, evaluation.samples, sampler.seed, evaluation.text_column
    split = evaluation.split or "train"
    return Documents.read(lm, evaluation.likelihood, evaluation.rows, *settings, split=split)


def _areas(
    evaluation: EvaluationConfig, parts: Mapping[str, EvaluationPart], scores: Mapping[str, TaskScores]
) -> list[TaskScores]:
    """The area under the curve of each task, if there are curves."""
    if not evaluation.curve:
        return []
    points: dict[str, list[TaskScores]] = {}
    for name, part in parts.items():
        points.setdefault(part.task.name, []).append(scores[name])
    return [area for of_task in points.values() if (area := curve_scores(evaluation.curve, of_task))]


def _speeds(
    scores: Mapping[str, TaskScores], seconds: Mapping[str, float], log: ItemLog | None
) -> dict[str, Any]:
    """How many items had been finished before; seconds and tokens per second by part, of all processes, with
    the time to verify: None if all of its items had been."""
    speeds = {}
    for name, part in scores.items():
        finished = log.finished(name) if log else {}
        tokens, spent = sum(item.tokens for item in part.items if item.id not in finished), seconds[name]
        speeds[name] = {"seconds": spent, "tokens_per_second": tokens / spent if tokens else None}
    return {"resumed_items": log.resumed if log else 0, "tasks": speeds}


def prepare(
    evaluation: EvaluationConfig, sampler: SamplerConfig, harness: Harness | None = None
) -> dict[str, EvaluationPart]:
    """What is measured: each task at each point of the curve, if there is one. The names are those of
    `comparison.labels`.

    Raises:
        ConfigError, DataError: those of `evaluate` that can be found without a model.
    """
    if evaluation.likelihood:
        split = evaluation.split or "train"
        list(load_examples(evaluation.likelihood, split=split, max_rows=evaluation.rows))
    if evaluation.lm_eval and harness is not None:
        harness().check_tasks(evaluation.harness_tasks, evaluation.include_path)
    sources = [*evaluation.sources.values(), *filter(None, [evaluation.likelihood])]
    if evaluation.split is not None and not sources:
        raise ConfigError("is of a dataset, and none is read", where="--split", remedy="Leave it out")
    points = curve_samplers(sampler, evaluation.curve) if evaluation.curve else [sampler]
    settings = [point.model_dump() for point in points]
    parts: dict[str, EvaluationPart] = {}
    for name in evaluation.tasks:
        task = get_task(name)
        if any(part.task.name == task.name for part in parts.values()):
            raise ConfigError(
                f"another task is named {task.name} too",
                where=f"--task {name}",
                remedy="Measure it in another evaluation",
            )
        protocol = read_protocol(evaluation.protocol, task.name) if evaluation.protocol else None
        wanted, source = evaluation, evaluation.sources.get(name)
        if protocol is not None:  # with its prompts, unless the user gave others
            prompts = {"style": "chat" if protocol.template else "plain", "shots": protocol.shots}
            given = evaluation.model_fields_set
            wanted = evaluation.model_copy(
                update={option: value for option, value in prompts.items() if option not in given}
            )
        rows = _problems(wanted, task, source, sampler)
        for point, own in zip(points, settings, strict=True):
            used = point if protocol else sampler_for(task, rows, point)
            parts[with_settings(task.name, own, settings)] = EvaluationPart(
                task, rows, used, wanted, source, protocol
            )
    return parts


def _problems(
    evaluation: EvaluationConfig, task: Task, source: str | None, sampler: SamplerConfig
) -> list[Row]:
    check_metrics(evaluation.metric or [], task, has_judge=evaluation.judge is not None)
    check_attempts(evaluation.attempts, evaluation.ks, sampler)
    problems = read_problems(
        task,
        source,
        evaluation.rows + evaluation.shots,
        split="test",
        hub_split=evaluation.split,
        seed=sampler.seed,
    )
    return pose(task, problems, evaluation.style, evaluation.shots)


def _scores(
    lm: DiffusionLM,
    name: str,
    part: EvaluationPart,
    log: ItemLog | None,
    judge: DiffusionLM | None,
    phase: Phase,
) -> list[TaskScores]:
    evaluation = part.evaluation
    result = evaluate_task(
        lm,
        part.task,
        part.rows,
        part.sampler,
        evaluation.metric or [],
        progress=phase,
        attempts=evaluation.attempts,
        pass_at=evaluation.ks,
        log=log,
        part=name,
        judge=judge,
        until=part.protocol.until if part.protocol else (),
    )
    judged = {"judge": model_identity(judge, str(evaluation.judge))} if judge else {}
    scores = result.to_scores(
        **part.authors,
        **judged,
        data=masked_text(part.source or "generated"),
        style=evaluation.style,
        shots=evaluation.shots,
        chat_template=lm.tokenizer.chat_template if evaluation.style == "chat" else None,
    )
    return [with_speed(scores)]


def _of_harness(
    harness: ModuleType,
    lm: DiffusionLM,
    evaluation: EvaluationConfig,
    sampler: SamplerConfig,
    output: Path | None,
    phase: Phase,
) -> list[TaskScores]:
    options: dict[str, Any] = {"limit": evaluation.rows, "num_fewshot": evaluation.shots or None}
    if evaluation.protocol is None or "style" in evaluation.model_fields_set:  # else as its authors did
        options["apply_chat_template"] = evaluation.style == "chat"
    return harness.evaluate_with_harness(
        lm,
        evaluation.harness_tasks,
        include_path=evaluation.include_path,
        samples=evaluation.samples,
        estimator=evaluation.estimator,
        sampler=sampler,
        protocol=evaluation.protocol,
        strict=not (evaluation.task or evaluation.likelihood),
        use_cache=None if output is None else str(answers_beside(output)),
        progress=phase,
        **options,
    )


def rerun(path: Path, harness: Harness | None = None) -> tuple[EvaluationResult, EvaluationResult]:
    """The result of a file, and that of the same evaluation today.

    Raises:
        DataError: the file is no result of `unmask evaluate`, or the model at its path is another one today.
        ConfigError: it asks for code of a model.
    """
    before = read_result(path)
    if not before.arguments:
        raise DataError(
            "was made by training, not by `unmask evaluate`",
            where=str(path),
            remedy="Evaluate the model that it was made of.",
        )
    model = _section(before, "model", ModelConfig, path)
    evaluation = _section(before, "evaluation", EvaluationConfig, path)
    sampler = _section(before, "sampler", SamplerConfig, path)
    if model.trust_remote_code:
        remedy = "Give the evaluation's own options, with --trust-remote-code if you trust the model's code"
        raise ConfigError("may not stand in a file", where=f"trust_remote_code ({path})", remedy=remedy)
    if code := [name for name in evaluation.tasks if ":" in name]:
        what, remedy = (
            "names code to run, which may not stand in a result",
            "Give the evaluation's own options, and compare the results",
        )
        raise ConfigError(what, where=f"task {code[0]} ({path})", remedy=remedy)
    return before, evaluate(model, evaluation, sampler, harness=harness, expected=before)


def _refuse_other_model(expected: EvaluationResult, now: Mapping[str, Any]) -> None:
    """Raise a DataError if a result is of a model with other weights."""
    if expected.model.get("fingerprint") == now["fingerprint"]:
        return
    values = {
        name: (str(expected.model.get(name))[:12], str(now[name])[:12]) for name in ("fingerprint", "dtype")
    }
    changed = [
        f"{name}: {there} there, {here} now" for name, (there, here) in values.items() if there != here
    ]
    remedy = "Give the path its former model again, or evaluate this one into another file"
    what = f"the result is of another model than there is now ({', '.join(changed)})"
    raise DataError(what, where=str(now["path"]), remedy=remedy)


def _section(result: EvaluationResult, name: str, kind: type[Section], path: Path) -> Section:
    """Options in a file. Raises DataError for those that this version does not have, or that are missing."""
    section = result.arguments.get(name, {})
    try:
        return kind(**section)
    except (ConfigError, TypeError) as error:
        remedy = "Give a file that `unmask evaluate --output FILE` of this version wrote"
        raise DataError(first_line(error), where=f"{path}, arguments.{name}", remedy=remedy) from error


def differences(
    before: EvaluationResult, after: EvaluationResult
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """How two results differ, in rows of a name and both values: in what was measured, and in what may
    explain it."""
    scores = []
    there, now = by_label(Named("the file", before)), by_label(Named("now", after))
    for label in {**there, **now}:
        if label not in there or label not in now:
            first, second = ("measured" if label in parts else "not measured" for parts in (there, now))
            scores.append((label, first, second))
        elif not _same(old := there[label], new := now[label]):
            for name in {**old.metrics, **new.metrics}:
                if not _same(old.metrics.get(name), new.metrics.get(name)):
                    scores.append((f"{label}: {name}", _mean(old, name), _mean(new, name)))
            items = [{item.id: item for item in part.items} for part in (old, new)]
            names = {**items[0], **items[1]}
            changed = sum(not _same(items[0].get(name), items[1].get(name)) for name in names)
            scores.append((f"{label}: items that differ", "", f"{changed} of {len(names)}"))
            scores += differing(old.protocol, new.protocol, f"{label}: ")
    return scores, [
        *differing(before.model, after.model, "model: "),
        *differing(before.environment, after.environment),
    ]


def _same(before: BaseModel | None, after: BaseModel | None) -> bool:
    """Whether they are written alike: NaN is NaN."""
    if before is None or after is None:
        return before is after
    return before.model_dump_json() == after.model_dump_json()


def _mean(scores: TaskScores, name: str) -> str:
    return f"{scores.metrics[name].mean:.6g}" if name in scores.metrics else "none"
