"""Short runs of the command line, and their logs without what differs between two equal runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unmask.evaluation.result_file import read_result

MODEL = "model/model.safetensors"
COMMON = [
    "training.per_device_train_batch_size=4",
    "training.logging_steps=1",
    "training.use_cpu=true",
    "data.max_rows=16",
    "data.eval_rows=4",
]


def command(verb: str, model: Path, output: Path, *more: str) -> list[str]:
    """A run of six steps without regular checkpoints."""
    data = ["--task", "sudoku"] if verb in ("sft", "dpo", "grpo") else []
    own = {
        "grpo": [
            *("training.num_generations=4", "training.max_completion_length=17", "training.num_iterations=2"),
            # which differ: a model that is not trained solves no puzzle
            'rewards=["tests.training.tiny_runs:ranks"]',
        ],
        "dpo": ["model.attention=bidirectional", "training.samples=2"],
        "convert": ["training.attention=bidirectional"],
    }
    settings = [*COMMON, "training.max_steps=6", *own.get(verb, []), *more]
    return [verb, "--model", str(model), *data, "--output", str(output), *settings]


def logged(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "training_logs.json").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if not name.endswith(("_runtime", "_per_second", "_preparation_time"))
        }
        for line in lines
    ]


def ends(folder: Path) -> list[Any]:
    """What two runs have in common if none of their steps differs: the bytes of the weights, the log, the
    completions, the evaluation."""
    texts = [path.read_text()] if (path := folder / "completions.jsonl").exists() else []
    scores = read_result(path).tasks if (path := folder / "evaluation.json").exists() else []
    return [(folder / MODEL).read_bytes(), logged(folder), *texts, *scores]
