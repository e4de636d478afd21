"""What a reference gives to every response of a data set: scored once, before training, and kept on disk.

Shapes: E plans of views, I sample ids, B rows, R responses in a row, N responses (of all rows the first, then of all the second), M views,
T tokens.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unmask.data.rows import Row
from unmask.diffusion.views import Views
from unmask.errors import TrainingError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import fingerprint

REFERENCE_FILE = "reference_scores.safetensors"
Scorer = Callable[[Sequence[Row], int], tuple[Tensor, Tensor]]
"""Gives the scores [N] of the responses of rows under a plan, by its number, and the digests [B] of the rows."""


@dataclass(frozen=True)
class ScoreTable:
    """Scores by plan and sample id.

    Attributes:
        score_EIR: in nats.
        digest_EI: of the rows and the masks that they were scored with (`digests`).
    """

    score_EIR: Tensor
    digest_EI: Tensor

    def look_up(self, plan: int, sample_id_B: Tensor, digest_B: Tensor) -> Tensor:
        """The scores [N] of the responses of rows.

        Raises:
            TrainingError: other responses were scored, or under other masks.
        """
        at_B, (plans, count) = sample_id_B.cpu(), self.digest_EI.shape
        if plan >= plans or at_B.max() >= count or not torch.equal(self.digest_EI[plan, at_B], digest_B):
            what = f"the reference was scored on other responses, or other masks than those of plan {plan}"
            remedy = "Evaluate on the rows given as eval_dataset, or use reference frozen or adapter"
            raise TrainingError(what, where="reference", remedy=remedy)
        return self.score_EIR[plan, at_B].T.flatten().to(sample_id_B.device)


NO_SCORES = ScoreTable(torch.zeros(0, 0, 1), torch.zeros(0, 0, dtype=torch.long))


def digests(batch: Mapping[str, Tensor], views: Views) -> Tensor:
    """A hash [B] of every row and of what the views hide of it, int64, on the CPU; padding does not change it."""
    parts = (part.cpu() for part in (batch["input_ids"], views.hidden_BMT, batch["documents"] > 0))
    found = []
    for ids_T, hidden_MT, real_T in zip(*parts, strict=True):
        read = ids_T[real_T].numpy().tobytes() + hidden_MT[:, real_T].numpy().tobytes()
        found.append(int.from_bytes(hashlib.blake2b(read, digest_size=8).digest(), "little", signed=True))
    return torch.tensor(found)


def identity(lm: DiffusionLM) -> dict[str, str]:
    """A hash each of a model and of its tokenizer."""
    model = f"{fingerprint(lm.model)} {json.dumps(lm.pattern)}"
    tokenizer = json.dumps([sorted(lm.tokenizer.get_vocab().items()), lm.mask_token_id])
    return {"model": _hash(model), "tokenizer": _hash(tokenizer)}


def content(known: Mapping[str, str], rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, str]:
    """What stored scores belong to: the identity of a model, and a hash each of the data and the settings."""
    data = hashlib.sha256()
    for row in rows:
        data.update(json.dumps(row).encode())
    return {**known, "data": data.hexdigest(), "settings": _hash(json.dumps(settings))}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_scores(path: Path, wanted: Mapping[str, str], plans: int, *, replace: bool) -> ScoreTable | None:
    """The scores in a file, where it holds those wanted under so many plans at least; None where there is no such file, or it is to be
    replaced: that is told.

    Raises:
        TrainingError: it holds scores of other content, or cannot be read, and is not to be replaced.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            found = file.metadata() or {}
            others = [name for name in wanted if found.get(name) != wanted[name]]
            if not others:
                table = ScoreTable(file.get_tensor("scores"), file.get_tensor("digests"))
                return table if len(table.digest_EI) >= plans else None
        what = f"holds scores of another {' and another '.join(others)}"
    except SafetensorError as error:
        what = f"cannot be read ({error})"
    if not replace:
        remedy = "Use what it was made with, move it away, or set stale_reference to replace"
        raise TrainingError(what, where=str(path), remedy=remedy)
    warnings.warn(f"{path} {what}: the reference is scored again", RuntimeWarning, stacklevel=2)
    return None


def score_rows(
    rows: Sequence[Row],
    plans: int,
    score: Scorer,
    accelerator: Accelerator,
    *,
    batch: int,
    responses: int,
    dtype: torch.dtype,
    told: Callable[[float], None],
) -> ScoreTable:
    """Score all rows under every plan, each process a part of them, those of like length together.

    Args:
        responses: in each row.
        told: called with the share that is done.
    """
    ordered = sorted(rows, key=lambda row: len(row["input_ids"]))
    mine = ordered[accelerator.process_index :: accelerator.num_processes]
    count = 1 + max(row["sample_id"] for row in rows)
    score_EIR, digest_EI = torch.zeros(plans, count, responses, dtype=dtype), torch.zeros(plans, count, dtype=torch.int64)
    for start in range(0, len(mine), batch):
        part = mine[start : start + batch]
        ids = [row["sample_id"] for row in part]
        for plan in range(plans):
            score_N, digest_EI[plan, ids] = score(part, plan)
            score_EIR[plan, ids] = score_N.view(responses, -1).T.cpu().to(dtype)
        told(min(1.0, (start + batch) / len(mine)))
    whole: Any = [accelerator.reduce(part.to(accelerator.device), "sum").cpu() for part in (score_EIR, digest_EI)]
    return ScoreTable(*whole)


def write_scores(path: Path, table: ScoreTable, wanted: Mapping[str, str]) -> None:
    """Write the scores whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    save_file({"scores": table.score_EIR, "digests": table.digest_EI}, unfinished, metadata=dict(wanted))
    unfinished.replace(path)
