"""What a result file says about its origin: the model, and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unmask.artifacts import run_manifest
from unmask.evaluation.result_file import EvaluationResult
from unmask.evaluation.tasks import TaskResult
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import fingerprint
from unmask.redaction import masked_text

EVALUATION = "evaluation.json"
"""The result of a training run's model, in the run's folder."""


def model_identity(lm: DiffusionLM, path: str, revision: str | None = None) -> dict[str, Any]:
    """A model by its path, revision, a hash of its weights, their dtype, and its attention pattern."""
    dtype = str(lm.dtype).removeprefix("torch.")
    return {
        "path": masked_text(path),
        "revision": revision,
        "fingerprint": fingerprint(lm.model),
        "dtype": dtype,
        **lm.settings,
    }


def environment(lm: DiffusionLM) -> dict[str, Any]:
    """Versions, machine, device and command; the settings are elsewhere in the file."""
    manifest = run_manifest({})
    del manifest["config"], manifest["date"]
    return manifest | {"device": str(lm.device)}


def write_result_of_run(folder: Path, lm: DiffusionLM, model: Path, result: TaskResult) -> EvaluationResult:
    """Write the result of a training run's model on its task as `evaluation.json` in the run's folder.
    Returns what was written."""
    parts = [result.to_scores()]
    whole = EvaluationResult(
        model=model_identity(lm, str(model)), arguments={}, tasks=parts, environment=environment(lm)
    )
    whole.write(folder / EVALUATION)
    return whole
