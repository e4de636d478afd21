"""The model card: a README.md in every saved folder that says what the model is, how to load it and how it
was trained.

The config has the history of a model, one entry per training run (`HISTORY_KEY`), so that it passes from one
run to the next. `lm` is a `DiffusionLM`, whose module imports this one.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData, try_to_load_from_cache
from huggingface_hub.repocard import metadata_load

from unmask.artifacts import read_file, write_atomic
from unmask.errors import require_known

HISTORY_KEY = "unmask_history"
MARKER = "<!-- Written by Unmask at every save. Remove this line to keep what you change. -->"
FILE = "README.md"
CACHED = re.compile(r"/models--(.+?)/snapshots/(\w+)")
"""Where the cache of the hub holds a model: owner--name, and a commit."""
TEMPLATE = pathlib.Path(__file__).with_name("model_card.jinja")
Entry = Mapping[str, Any]

ATTENTION = {
    "causal": "causal (autoregressive)",
    "block_causal": "block-causal, in blocks of {} tokens",
    "bidirectional": "bidirectional",
}


@dataclass(frozen=True)
class CardFields:
    """What a card says besides what is known of the model. The fields have the names, and the meaning, of the
    arguments of `transformers.Trainer.create_model_card`; `dataset_name` is TRL's, `repo_id` the name on the
    hub."""

    language: str | list[str] | None = None
    license: str | None = None
    tags: str | list[str] | None = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: str | list[str] | None = None
    dataset_tags: str | list[str] | None = None
    dataset: str | list[str] | None = None
    dataset_args: str | list[str] | None = None
    dataset_name: str | None = None
    repo_id: str | None = None

    @property
    def datasets(self) -> list[str]:
        return [*_listed(self.dataset), *_listed(self.dataset_name), *_listed(self.dataset_tags)]


def card_fields(repo_id: str, given: Mapping[str, Any]) -> CardFields:
    """The fields of the card of a repository. Raises ConfigError for one that cards do not have."""
    for name in given:
        require_known(name, CardFields.__dataclass_fields__, "argument", where="push_to_hub")
    return CardFields(**{"model_name": repo_id.rpartition("/")[2], "repo_id": repo_id} | dict(given))


def write_card(lm: Any, folder: str | pathlib.Path, fields: CardFields | None = None) -> None:
    """Write the card of a model saved in `folder`, unless a README.md there was written by somebody else."""
    path = pathlib.Path(folder) / FILE
    if not path.exists() or MARKER in read_file(path):
        write_atomic(path, render_card(lm, fields))


def history(lm: Any) -> list[Entry]:
    """The training runs of a model, oldest first."""
    return list(getattr(lm.config, HISTORY_KEY, []))


def render_card(lm: Any, fields: CardFields | None = None) -> str:
    """The card's text."""
    fields = fields or CardFields()
    base = lm.model.get_base_model() if hasattr(lm.model, "merge_and_unload") else lm.model
    runs, dtype = history(lm), str(next(lm.model.parameters()).dtype).removeprefix("torch.")
    verbs = [run["verb"] for run in runs]
    mask_token, *end_tokens = (
        f"`{lm.tokenizer.convert_ids_to_tokens(token)}` ({token})"
        for token in (lm.mask_token_id, *lm.eos_token_ids)
    )
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["cell"] = _cell
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        lm=lm,
        metadata=_metadata(lm, runs, fields).to_yaml(),
        marker=MARKER,
        name=fields.model_name,
        repo_id=fields.repo_id,
        architecture=type(base).__name__,
        adapters=_adapters(lm),
        parameters=sum(weight.numel() for weight in lm.model.parameters()),
        attention=ATTENTION[lm.attention].format(lm.block_size),
        mask_token=mask_token,
        end_tokens=end_tokens,
        dtype="" if dtype == "float32" else f', dtype="{dtype}"',
        length=min(64, (lm.context_length or 128) // 2),
        runs=runs,
        # verbs that occur more than once are numbered
        names=[
            f"{verb} {verbs[: i + 1].count(verb)}" if verbs.count(verb) > 1 else verb
            for i, verb in enumerate(verbs)
        ],
        columns=[
            name for name in ("data", "rows", "steps", "tokens", "seed") if any(name in run for run in runs)
        ],
        losses=list(dict.fromkeys(name for run in runs for name in run["metrics"])),
        metrics=[run["metrics"] for run in runs],
        zip=zip,
    )


def _metadata(lm: Any, runs: Sequence[Entry], fields: CardFields) -> ModelCardData:
    """Front matter. Licence and languages are given, or those of the model that this one was loaded from."""
    source, adapters = str(lm.config._name_or_path), _adapters(lm)
    known = _source_metadata(source)
    named = [name for run in runs for name in str(run.get("data", "")).split(", ") if _on_hub(name)]
    tags = ["text-generation"] if lm.autoregressive else ["text-generation", "diffusion-language-model"]
    tasks = _listed(fields.tasks) or ["text-generation"]
    base = fields.finetuned_from or hub_id(source) or known.get("base_model")
    results = _results(runs, tasks[0], fields)
    return ModelCardData(
        library_name="unmask",
        pipeline_tag=tasks[0],
        tags=[*tags, *(run["verb"] for run in runs), *adapters, *_listed(fields.tags)],
        base_model=base,
        base_model_relation="adapter" if adapters and base else None,
        datasets=list(dict.fromkeys([*named, *filter(_is_id, fields.datasets)])) or None,
        license=fields.license or known.get("license"),
        language=fields.language or known.get("language"),
        model_name=fields.model_name or (runs[-1]["verb"] if results else None),
        eval_results=results or None,
    )


def _results(runs: Sequence[Entry], task: str, fields: CardFields) -> list[EvalResult]:
    """The results of the last run: on held-out rows, and on the tasks of `retention`."""
    last = runs[-1] if runs else {}
    name = next(iter(fields.datasets), last.get("data") or "held-out rows")
    of = {"args": fields.dataset_args} if fields.dataset_args else None
    found = [
        EvalResult(
            task, name, name, metric.removeprefix("eval_"), value, dataset_split="eval", dataset_args=of
        )
        for metric, value in last.get("metrics", {}).items()
        if metric.startswith("eval_")
    ]
    return found + [
        EvalResult(task, each["task"], each["task"], each["metric"], each["after"])
        for each in (last.get("retention") or {}).get("differences", ())
    ]


def _adapters(lm: Any) -> list[str]:
    """The kinds of a model's adapters, as tags."""
    if not hasattr(lm.model, "merge_and_unload"):
        return []
    return [
        "peft",
        *sorted({str(config.peft_type.value).lower() for config in lm.model.peft_config.values()}),
    ]


def _source_metadata(source: str) -> dict[str, Any]:
    """The front matter of a model's card, in its folder or downloaded from the hub."""
    path = pathlib.Path(source) / FILE
    if not path.is_file() and (name := hub_id(source)):
        cached = try_to_load_from_cache(name, FILE)
        path = pathlib.Path(cached) if isinstance(cached, str) else path
    return (metadata_load(path) or {}) if source and path.is_file() else {}


def hub_id(source: str) -> str | None:
    """The name on the hub of a model that was loaded from there, by its name or from the cache; None: it has
    none."""
    if cached := CACHED.search(source):
        return cached[1].replace("--", "/")
    known = _on_hub(source) or (
        _is_id(source) and isinstance(try_to_load_from_cache(source, "config.json"), str)
    )
    return source if known else None


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _is_id(name: str) -> bool:
    """Whether this may be the id of a data set: `squad`, or owner/name."""
    return _on_hub(name) or (re.fullmatch(r"[\w.-]+", name) is not None and not pathlib.Path(name).exists())


def _on_hub(name: str) -> bool:
    """Whether this may be the id of a model or data set on the hub: owner/name, and no local path."""
    return (
        re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
        and name[0] not in "./~"
        and not pathlib.Path(name).exists()
    )


def _cell(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value or "").replace("|", "\\|")
