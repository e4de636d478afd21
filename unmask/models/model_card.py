"""The model card: a README.md in every saved folder that says what the model is, how to load it and how it
was trained.

The config has the history of a model, one entry per training run (`HISTORY_KEY`), so that it passes from one
run to the next. `lm` is a `DiffusionLM`, whose module imports this one.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from huggingface_hub import ModelCardData, try_to_load_from_cache
from huggingface_hub.repocard import metadata_load

from unmask.artifacts import read_file, write_atomic

HISTORY_KEY = "unmask_history"
MARKER = "<!-- Written by Unmask at every save. Remove this line to keep what you change. -->"
FILE = "README.md"
TEMPLATE = pathlib.Path(__file__).with_name("model_card.jinja")
Entry = Mapping[str, Any]

ATTENTION = {
    "causal": "causal (autoregressive)",
    "block_causal": "block-causal, in blocks of {} tokens",
    "bidirectional": "bidirectional",
}


def write_card(lm: Any, folder: str | pathlib.Path) -> None:
    """Write the card of a model saved in `folder`, unless a README.md there was written by somebody else."""
    path = pathlib.Path(folder) / FILE
    if not path.exists() or MARKER in read_file(path):
        write_atomic(path, render_card(lm))


def history(lm: Any) -> list[Entry]:
    """The training runs of a model, oldest first."""
    return list(getattr(lm.config, HISTORY_KEY, []))


def render_card(lm: Any) -> str:
    """The card's text."""
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
        metadata=_metadata(lm, runs).to_yaml(),
        marker=MARKER,
        architecture=type(lm.model).__name__,
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


def _metadata(lm: Any, runs: Sequence[Entry]) -> ModelCardData:
    """Front matter. Licence and languages are those of the model that this one was loaded from."""
    source = str(lm.config._name_or_path)
    known = _source_metadata(source)
    data_sets = dict.fromkeys(run["data"] for run in runs if _on_hub(run.get("data", "")))
    return ModelCardData(
        library_name="unmask",
        pipeline_tag="text-generation",
        tags=["text-generation"] if lm.autoregressive else ["text-generation", "diffusion-language-model"],
        base_model=source if _on_hub(source) else known.get("base_model"),
        datasets=list(data_sets) or None,
        license=known.get("license"),
        language=known.get("language"),
    )


def _source_metadata(source: str) -> dict[str, Any]:
    """The front matter of a model's card, in its folder or downloaded from the hub."""
    path = pathlib.Path(source) / FILE
    if _on_hub(source):
        cached = try_to_load_from_cache(source, FILE)
        path = pathlib.Path(cached) if isinstance(cached, str) else path
    return (metadata_load(path) or {}) if source and path.is_file() else {}


def _on_hub(name: str) -> bool:
    """Whether this may be the id of a model or data set on the hub: owner/name, and no local path."""
    return (
        name.count("/") == 1
        and name[0] not in "./~"
        and "" not in name.split("/")
        and not pathlib.Path(name).exists()
    )


def _cell(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value or "").replace("|", "\\|")
