"""Evaluation of a DiffusionLM on tasks of lm-eval."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jinja2
import lm_eval
import lm_eval.evaluator
import yaml
from lm_eval.tasks import TaskManager

from unmask.config.sampler import SamplerConfig
from unmask.console import Phase
from unmask.errors import ConfigError, DataError, UnmaskError, did_you_mean, first_line
from unmask.evaluation.harness.model import HarnessLM
from unmask.evaluation.harness.scores import group_scores, task_scores
from unmask.evaluation.likelihood import LikelihoodEstimator, chosen_estimator
from unmask.evaluation.result_file import TaskScores
from unmask.models.diffusion_lm import DiffusionLM

OPTIONS = {
    "limit": None,
    "num_fewshot": None,
    "system_instruction": None,
    "apply_chat_template": False,
    "fewshot_as_multiturn": True,
    "gen_kwargs": None,
    "use_cache": None,
    "cache_requests": False,
}
"""Options of `lm_eval.simple_evaluate`, with their defaults."""


@contextmanager
def _naming_templates(tasks: Sequence[Any]) -> Iterator[None]:
    """Raise a DataError for the templates of tasks that do not fit their data."""
    try:
        yield
    except jinja2.TemplateError as error:
        what = f"a template of the task does not fit its data: {first_line(error)}"
        remedy = "Check the task's `doc_to_text`, `doc_to_choice` and `doc_to_target`"
        raise DataError(what, where=", ".join(map(str, tasks)), remedy=remedy) from error


class _Tasks(TaskManager):
    """The tasks of lm-eval and of a folder, with clear errors; they stay at hand after `simple_evaluate`."""

    def __init__(self, names: Sequence[str], include_path: str | Path | None):
        if include_path is not None and not Path(include_path).is_dir():
            remedy = "Give the folder of the task files"
            raise DataError("is not a folder", where=f"include_path {include_path}", remedy=remedy)
        folder = None if include_path is None else str(include_path)
        super().__init__(include_path=folder, include_defaults=False)
        if not set(names) <= set(self.all_tasks):
            super().__init__(include_path=folder)  # thousands of files
        for name in names:
            if name not in self.all_tasks and not Path(name).is_file():
                remedy = did_you_mean(name, self.all_tasks, "`lm_eval ls tasks` lists them")
                raise ConfigError(f"lm-eval has no task {name!r}", where="lm-eval", remedy=remedy)
        self.found: dict[str, Any] = {}

    def load(self, task_list: Any) -> Any:
        if self.found:
            return self.found
        try:
            with _naming_templates(task_list):
                self.found = super().load(task_list)
        except UnmaskError:
            raise
        # of files that are missing or malformed
        except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
            what = f"the task cannot be loaded: {type(error).__name__}: {first_line(error)}"
            data = "its data (`dataset_path`, `data_files`, `test_split`)"
            remedy = f"Check the task's file, {data}, or the network"
            raise DataError(what, where=", ".join(map(str, task_list)), remedy=remedy) from error
        return self.found


def check_tasks(names: Sequence[str], include_path: str | Path | None = None) -> None:
    """Raise ConfigError for a name that is no task, group, tag or task file of lm-eval, and DataError if
    there is no such folder."""
    _Tasks(names, include_path)


def evaluate_with_harness(
    lm: DiffusionLM,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    samples: int | None = None,
    estimator: LikelihoodEstimator | None = None,
    sampler: SamplerConfig | None = None,
    protocol: str | None = None,
    strict: bool = True,
    progress: Phase | None = None,
    **options: Any,
) -> list[TaskScores]:
    """Evaluate on tasks of lm-eval.

    Args:
        tasks: names of tasks, groups and tags, or task files.
        include_path: a folder with more task files.
        samples, estimator: as of `HarnessLM`.
        sampler: what is set in it is used for generated texts, where a task does not say otherwise; its seed
            is also that of the masks.
        protocol: as of `HarnessLM`; also sets each task's number of examples and the chat template, where
            `options` do not.
        strict: whether a setting that none of these tasks reads is an error; other measurements may share
            them.
        progress: as of `HarnessLM`.
        options: of `OPTIONS`, as in `lm_eval.simple_evaluate`.

    Returns:
        Each task in turn, then the groups; in a process other than the first, nothing.

    Raises:
        ConfigError: an unknown task or option, or an option that none of the tasks obeys.
        DataError: missing data, a task's template that does not fit them, or a chat template is asked for
            where there is none.
    """
    for name in options:
        if name not in OPTIONS:
            raise ConfigError(f"unknown option {name!r}", where="lm-eval", remedy=did_you_mean(name, OPTIONS))
    given = OPTIONS | options
    manager = _Tasks(tasks, include_path)
    sampler = sampler or SamplerConfig()
    settings = {name: getattr(sampler, name) for name in sampler.model_fields_set}
    model = HarnessLM(lm, samples=samples, estimator=estimator, protocol=protocol, **settings)
    model.progress = progress
    loaded = manager.load(list(tasks))
    if protocol is not None:
        given |= _prompts_of(model, loaded["tasks"], options)
    if strict:
        _refuse_unread(loaded["tasks"], model, samples, estimator, sampler, given)
    # Where the current folder is in no repository, git would write an error to the terminal. The commit is
    # not read here.
    with _naming_templates(tasks), mock.patch.object(lm_eval.evaluator, "get_git_commit_hash", lambda: None):
        found = lm_eval.simple_evaluate(
            model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, log_samples=True, **given
        )
    if found is None:
        return []
    shown = {name: value for name, value in given.items() if name not in ("use_cache", "cache_requests")}
    used = {"harness": f"lm-eval {importlib.metadata.version('lm_eval')}", **model.protocol, **shown}
    scores = [
        task_scores(name, task, found, used | model.record_of(name)) for name, task in loaded["tasks"].items()
    ]
    return scores + [
        group_scores(loaded["groups"][name], scores, found, used) for name in found.get("groups", {})
    ]


def _prompts_of(model: HarnessLM, tasks: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Set each task's number of examples as its protocol has it, unless `options` do. The template and its
    turns, as options of lm-eval."""
    protocols = {name: protocol for name in tasks if (protocol := model.protocol_of(name))}
    if options.get("num_fewshot") is None:
        for name, protocol in protocols.items():
            tasks[name].set_config("num_fewshot", protocol.shots)
    turns = {protocol.multiturn for protocol in protocols.values() if protocol.template and protocol.shots}
    if len(turns) > 1 and "fewshot_as_multiturn" not in options:
        what = "examples are turns of the conversation in some of these tasks only"
        raise ConfigError(
            what,
            where=f"protocol {model.authors}",
            remedy="Evaluate the others by themselves, or set fewshot_as_multiturn",
        )
    found = {
        "apply_chat_template": any(protocol.template for protocol in protocols.values()),
        "fewshot_as_multiturn": True in turns,
    }
    return {name: value for name, value in found.items() if name not in options}


def _refuse_unread(
    tasks: dict[str, Any],
    model: HarnessLM,
    samples: int | None,
    estimator: str | None,
    sampler: SamplerConfig,
    options: dict[str, Any],
) -> None:
    """Raise a ConfigError for an option that no request of these tasks reads."""
    generates = [name for name, task in tasks.items() if task.OUTPUT_TYPE == "generate_until"]
    measures = [name for name in tasks if name not in generates]
    of_texts = sampler.of_texts + ["gen_kwargs"] * bool(options["gen_kwargs"])
    given = {"samples": samples, "estimator": estimator}
    of_likelihoods = [name for name, value in given.items() if value is not None]
    for unread, readers, others, what in (
        (of_texts, generates, measures, "no task generates text"),
        (of_likelihoods, measures, generates, "no task measures likelihoods"),
    ):
        if unread and not readers:
            raise ConfigError(what, where=unread[0], remedy=f"Leave it out for {', '.join(others)}")
    chosen_estimator(model.lm, model.estimator, samples)
    for name in measures:
        model.samples_of(name)
