"""What a conversion kept: a model and the one that it was made of, evaluated alike and compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import PartialState
from transformers.utils import CONFIG_NAME

from unmask.artifacts import read_file, write_atomic
from unmask.cli.evaluation import ALONE, EvaluationPart, Harness, Processes, evaluate, import_harness, prepare
from unmask.cli.inputs import read_pattern, without_folder
from unmask.config.evaluation import EvaluationConfig
from unmask.config.run import ModelConfig, RunConfig
from unmask.config.sampler import DENOISING_FIELDS, SamplerConfig
from unmask.console import show_line
from unmask.errors import ConfigError
from unmask.evaluation.comparison import Comparison, Difference, Named, compare
from unmask.evaluation.likelihood import EXACT_BLOCK, LikelihoodEstimator
from unmask.evaluation.result_file import EvaluationResult
from unmask.models.load import load
from unmask.models.model_card import HISTORY_KEY, write_card

BEFORE, AFTER = "before", "after"
RESULT = "retention.json"
SHARED = {"device", "device_map", "dtype", "trust_remote_code", "parse_special_tokens"}
"""The settings by which both models are read."""
NOT_FOR_CAUSAL_MODELS = {*DENOISING_FIELDS, "num_speculative_tokens", "mode"} - {"constraint"}
"""The settings of a sampler that say nothing to a causal model, which writes one token a step."""
ESTIMATE_FIELDS = {"samples", "estimator"}
"""The settings of likelihoods that are estimates, which those of a causal model are not."""


class Retention(NamedTuple):
    """Both results, and the differences of the second from the first."""

    before: EvaluationResult
    after: EvaluationResult
    comparison: Comparison


def result_before(output: Path) -> Path:
    """The file of the earlier model's result, beside that of the later one."""
    return output.with_name(f"{output.stem}.{BEFORE}{output.suffix}")


def model_against(model: ModelConfig, path: str) -> ModelConfig:
    """The model of `path`, read as `model` is."""
    given = model.model_dump(include=SHARED, exclude_unset=True)
    return ModelConfig(**given | {"path": path, "dtype": model.dtype})  # which has another default in a run


def measure_retention(
    earlier: ModelConfig,
    model: ModelConfig,
    evaluation: EvaluationConfig,
    sampler: SamplerConfig,
    output: Path | None = None,
    harness: Harness | None = None,
    processes: Processes = ALONE,
    *,
    reuse: bool = True,
    replace: bool = True,
) -> Retention | None:
    """Evaluate the earlier model, then `model`, and compare them.

    A causal model is sampled token by token, and its likelihoods are exact: it gets only the settings that it
    has.

    Args:
        output: the file of the result of `model`; that of the other one is `result_before(output)`. A killed
            evaluation continues.
        reuse: whether an existing result of the earlier model is used, and the model not measured again.
        replace: whether any other file in its place is replaced.

    Returns:
        None in a process other than the first.

    Raises:
        UnmaskError: as `evaluate` and `compare`.
    """
    exact = [
        each.path
        for each in (earlier, model)
        if has_exact_likelihoods(read_pattern(each), evaluation.estimator)
    ]
    if evaluation.samples is not None and len(exact) == 1 and not processes.rank:
        show_line(
            f"note: the likelihoods of {exact[0]} are exact, and --samples is of those of the other model"
        )
    results = []
    for each in (earlier, model):
        causal = each is earlier and is_causal(read_pattern(earlier))
        without = {"against"} | (ESTIMATE_FIELDS if causal else set())
        if exact == [each.path]:
            without.add("samples")
        unread = NOT_FOR_CAUSAL_MODELS if causal else None
        result = evaluate(
            each,
            EvaluationConfig(**evaluation.model_dump(exclude_unset=True, exclude=without)),
            SamplerConfig(**sampler.model_dump(exclude_unset=True, exclude=unread)),
            result_before(output) if output is not None and each is earlier else output,
            harness,
            processes,
            reuse=reuse and each is earlier,
            replace=replace,
        )
        results.append(result)
    if processes.rank:
        return None
    before, after = results
    return Retention(before, after, compare([Named(BEFORE, before), Named(AFTER, after)]))


def is_causal(pattern: Mapping[str, Any]) -> bool:
    """Whether a model of this pattern writes one token a step."""
    return pattern["attention"] == "causal" and pattern["logit_shift"] is not False


def has_exact_likelihoods(pattern: Mapping[str, Any], estimator: LikelihoodEstimator | None) -> bool:
    """Whether the likelihoods of a model of this pattern are no estimates."""
    orders = pattern["noise"] == "masked" and (pattern["block_size"] or math.inf) <= EXACT_BLOCK
    return is_causal(pattern) or (orders if estimator is None else estimator == "exact")


def speed_rows(found: Retention) -> list[list[str]]:
    """A row of the table for the tokens per second of each task that wrote text."""
    speeds = [
        {name: part["tokens_per_second"] for name, part in result.times["tasks"].items()}
        for result in (found.before, found.after)
    ]
    both = [name for name, speed in speeds[0].items() if speed and speeds[1].get(name)]
    return [
        [f"{name}: tokens per second", *(f"{speed[name]:,.4g}" for speed in speeds), "", "", ""]
        for name in both
    ]


def check_retention(config: RunConfig) -> dict[str, EvaluationPart]:
    """The tasks that a run is to evaluate at its end. Raises those errors of `measure_retention` that can be
    found without weights."""
    evaluation = config.retention
    if evaluation is None:
        return {}
    if config.model.from_scratch and not evaluation.against:
        what = "a model from scratch was made of no other"
        raise ConfigError(what, where="retention and model.from_scratch", remedy="Leave one of them out")
    evaluation.refuse_of_one_model()
    for path in filter(None, (evaluation.against, evaluation.judge)):
        read_pattern(model_against(config.model, path))
    return prepare(evaluation, config.sampler, import_harness)


def retention_of_run(config: RunConfig, folder: Path) -> Retention | None:
    """Evaluate the model in `folder`, which a run has made, and the one that it was made of. The results are
    written beside the folder (`retention.json`), and the differences into its config and its card.

    Returns, Raises:
        as `measure_retention`.
    """
    assert config.retention is not None
    state = PartialState()
    start = config.model.model_copy(update={"device": str(state.device)})
    other = config.retention.against
    earlier, trained = model_against(start, other) if other else start, model_against(start, str(folder))
    processes = Processes(state.process_index, state.num_processes)
    found = measure_retention(
        earlier,
        trained,
        config.retention,
        config.sampler,
        folder.with_name(RESULT),
        import_harness,
        processes,
    )
    if found is not None:
        path = folder / CONFIG_NAME
        content = json.loads(read_file(path))
        content[HISTORY_KEY][-1]["retention"] = {
            "of": without_folder(other or start.path),
            "differences": [_in_card(each) for each in found.comparison.differences],
        }
        write_atomic(path, json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")
        write_card(load(folder, **trained.load_arguments()), folder)
    return found


def _in_card(difference: Difference) -> dict[str, Any]:
    """What the history of a model holds of a difference, in JSON types."""
    names = ("task", "metric", "items", "before", "after", "fraction")
    bounds = {"low": difference.change.low, "high": difference.change.high}
    return {name: getattr(difference, name) for name in names} | {
        name: bound if math.isfinite(bound) else None for name, bound in bounds.items()
    }
