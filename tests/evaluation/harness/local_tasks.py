"""lm-eval tasks over local files, without a network."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import yaml

from tests.helpers import shared_path

MEAN = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{query}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{gold}}",
    "metric_list": MEAN,
}
TASKS: dict[str, dict[str, Any]] = {
    "local_lambada": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{' ' + continuation}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            MEAN[0],
        ],
    },
    "local_piqa": CHOICES,
    "local_arc_easy": CHOICES,
    "local_hellaswag": CHOICES
    | {
        "doc_to_text": "{{activity_label}}: {{ctx}}",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "{{label}}",
    },
    "local_wikitext": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "local_stories": {
        "output_type": "generate_until",
        "doc_to_text": "{{start}}",
        "doc_to_target": "{{rest}}",
        "generation_kwargs": {"until": [".", "\n\n"], "max_gen_toks": 40, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}
FILES = {
    "local_lambada": "lambada_openai",
    "local_piqa": "piqa",
    "local_arc_easy": "arc_easy",
    "local_hellaswag": "hellaswag_val1000",
}


def write_tasks(folder: pathlib.Path, rows: int, names: Sequence[str] = tuple(TASKS)) -> pathlib.Path:
    """A folder with the files of tasks over the first rows of the shared data."""
    for name in names:
        write_task(folder, name, TASKS[name], _documents(name, rows))
    return folder


def write_task(
    folder: pathlib.Path,
    name: str,
    task: dict[str, Any],
    documents: Sequence[dict[str, Any]],
    **settings: Any,
) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
    }
    text = yaml.safe_dump({"task": name, "test_split": "test", **source, **task, **settings})
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def _documents(name: str, rows: int) -> list[dict[str, Any]]:
    if name in FILES:
        lines = (
            shared_path("data", "commonsense", f"{FILES[name]}.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        )
        return [json.loads(line) for line in lines[:rows]]
    if name == "local_wikitext":
        text = shared_path("data", "text", "wikitext2_valid.txt").read_text(encoding="utf-8")
        articles = ["".join(part) for part in _articles(text)]
        return [
            {"page": article[: 1500 * (number + 1)]}
            for number, article in enumerate(articles[: max(1, rows // 20)])
        ]
    stories = (
        shared_path("data", "text", "tinystories_val_800k.txt").read_text(encoding="utf-8").split("\n\n")[1:]
    )
    return [{"start": story.strip()[:60], "rest": story.strip()[60:100]} for story in stories[:rows]]


def _articles(text: str) -> list[list[str]]:
    """The articles of wikitext: each begins with a line ` = Title = `."""
    articles: list[list[str]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(" = ") and not line.startswith(" = = "):
            articles.append([])
        if articles:
            articles[-1].append(line)
    return articles
