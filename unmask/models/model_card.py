"""The model card: a README.md in every saved folder that says what the model is, how to load it and how it
was trained.

The config has the history of a model, one entry per training run (`HISTORY_KEY`), so that it passes from one
run to the next.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from huggingface_hub import ModelCardData, try_to_load_from_cache
from huggingface_hub.repocard import metadata_load
from transformers import PreTrainedTokenizerBase

from unmask.artifacts import read_file, write_atomic
from unmask.config.run import AttentionName

HISTORY_KEY = "unmask_history"
MARKER = "<!-- Written by Unmask at every save. Remove this line to keep what you change. -->"
FILE = "README.md"
Entry = Mapping[str, Any]

NAMES = {
    "causal": "causal (autoregressive)",
    "block_causal": "block-causal, in blocks of {} tokens",
    "bidirectional": "bidirectional",
}


RETAINED = "`{}` and the model after {}, on the same items, with the 95% interval of the difference (paired)."


class DescribedModel(Protocol):
    """The attributes of a `DiffusionLM` that a card reads."""

    model: Any
    config: Any
    tokenizer: PreTrainedTokenizerBase
    attention: AttentionName
    block_size: int | None
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    logit_shift: bool
    causal_context: bool
    quality_head: Any
    expand_token_id: int | None
    max_gap: int | None

    @property
    def autoregressive(self) -> bool: ...
    @property
    def has_time_embedding(self) -> bool: ...
    @property
    def context_length(self) -> int | None: ...


def write_card(lm: DescribedModel, folder: str | pathlib.Path) -> None:
    """Write the card of a model saved in `folder`, unless a README.md there was written by somebody else."""
    path = pathlib.Path(folder) / FILE
    if not path.exists() or MARKER in read_file(path):
        write_atomic(path, render_card(lm))


def history(lm: DescribedModel) -> list[Entry]:
    """The training runs of a model, oldest first."""
    return list(getattr(lm.config, HISTORY_KEY, []))


def render_card(lm: DescribedModel) -> str:
    """The card's text."""
    runs = history(lm)
    diffusion = "" if lm.autoregressive else "diffusion "
    sections = [
        f"---\n{_metadata(lm, runs).to_yaml()}\n---",
        MARKER,
        f"# A {lm.attention.replace('_', '-')} {diffusion}language model",
        _table(("", ""), _facts(lm)),
        "## How to load it",
        _snippet(lm),
    ]
    if runs:
        names = _run_names(runs)
        losses = [run["metrics"] for run in runs]
        columns = [
            column
            for column in ("data", "rows", "steps", "tokens", "seed")
            if any(column in run for run in runs)
        ]
        sections += [
            "## How it was made",
            _run_table(names, columns, runs),
            "\n".join(map(_settings, names, runs)),
        ]
        for name, run in zip(names, runs, strict=True):
            if run.get("retention"):
                kept = run["retention"]
                sections += [
                    "## What it kept",
                    RETAINED.format(kept["of"], name),
                    _retention(kept["differences"]),
                ]
        sections += [
            "## Losses",
            "The last values that each run logged.",
            _run_table(names, dict.fromkeys(chain(*losses)), losses),
        ]
    return "\n\n".join(sections) + "\n"


def _metadata(lm: DescribedModel, runs: Sequence[Entry]) -> ModelCardData:
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


def _facts(lm: DescribedModel) -> list[tuple[str, str]]:
    longest = f"of up to {lm.max_gap} tokens, " if lm.max_gap else ""
    mask, *ends = (
        f"`{lm.tokenizer.convert_ids_to_tokens(token)}` ({token})"
        for token in (lm.mask_token_id, *lm.eos_token_ids)
    )
    return [
        ("architecture", type(lm.model).__name__),
        ("parameters", f"{sum(weight.numel() for weight in lm.model.parameters()):,}"),
        ("attention", NAMES[lm.attention].format(lm.block_size)),
        *([("context", "read from left to right, except the current block")] if lm.causal_context else []),
        ("logit shift", "output i predicts token i + 1" if lm.logit_shift else "output i predicts token i"),
        *([("time embedding", "of the fraction of hidden tokens")] if lm.has_time_embedding else []),
        *(
            [
                (
                    "gaps of unknown length",
                    f"{longest}filled with tokens that expand and delete hidden positions",
                )
            ]
            if lm.expand_token_id is not None
            else []
        ),
        *(
            [("quality head", "estimates whether visible tokens are right")]
            if lm.quality_head is not None
            else []
        ),
        ("mask token", mask),
        *([("end tokens", ", ".join(ends))] if ends else []),
        *([("longest text", f"{lm.context_length:,} tokens")] if lm.context_length else []),
    ]


def _snippet(lm: DescribedModel) -> str:
    """Python that runs in the model's folder."""
    dtype = str(next(lm.model.parameters()).dtype).removeprefix("torch.")
    length = min(64, (lm.context_length or 128) // 2)
    given = "" if dtype == "float32" else f', dtype="{dtype}"'
    return f"""```python
import unmask

lm = unmask.load("."{given})  # this folder, or its name on the Hugging Face hub
out = unmask.generate(lm, ["Once"], unmask.SamplerConfig(max_new_tokens={length}))
print(out.texts[0])
```"""


def _run_names(runs: Sequence[Entry]) -> list[str]:
    """Verbs that occur more than once are numbered."""
    verbs = [run["verb"] for run in runs]
    return [
        f"{verb} {verbs[: i + 1].count(verb)}" if verbs.count(verb) > 1 else verb
        for i, verb in enumerate(verbs)
    ]


def _run_table(names: Sequence[str], columns: Iterable[str], values: Sequence[Mapping[str, Any]]) -> str:
    head = ("run", *columns)
    return _table(
        head,
        [
            [name, *(_cell(row.get(column)) for column in head[1:])]
            for name, row in zip(names, values, strict=True)
        ],
    )


def _settings(name: str, run: Entry) -> str:
    settings = ", ".join(f"`{key}={value}`" for key, value in run["settings"].items())
    versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
    earlier = "".join(
        f"; `{each['setting']}={each['old']}` until step {each['step']}" for each in run.get("changes", ())
    )
    return f"- {name}: {settings}{earlier}" + (f" ({versions})" if versions else "")


def _retention(differences: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in differences:
        spec = ".1%" if each["fraction"] else ".4g"
        change = f"{each['after'] - each['before']:+{spec}}"
        if each["low"] is not None:
            change += f" [{each['low']:+{spec}}, {each['high']:+{spec}}]"
        values = (f"{each['before']:{spec}}", f"{each['after']:{spec}}", change, _cell(each["items"]))
        rows.append([f"{each['task']}: {each['metric']}", *values])
    return _table(("", "before", "after", "difference", "items"), rows)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
