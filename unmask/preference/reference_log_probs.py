"""The reference's log-probabilities of the responses that a run visits, computed once before training and
stored on disk.

Shapes: E view plans, I sample ids, B rows, S responses of a row, N responses (the first of every row, then
the second of every row), M views, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from unmask.artifacts import default_mode
from unmask.data.row_store import content_of, rows_hash
from unmask.data.rows import TokenRow
from unmask.diffusion.views import Views
from unmask.errors import TrainingError, UnmaskWarning
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import fingerprint

REFERENCE_FILE = "reference_scores.safetensors"
CONTENT = "content"
"""The name of the table's own hash among those of the file."""
PART = 64
"""Batches of each process that are computed before the processes exchange them."""
LogProbsOfRows = Callable[[Sequence[TokenRow], int], tuple[Tensor, Tensor]]
"""Called with rows and the number of a view plan; returns the log-probabilities [N] of the responses and the
digests [B] of the rows."""


@dataclass(frozen=True)
class ReferenceTable:
    """Log-probabilities of responses by view plan and sample id.

    Attributes:
        log_prob_EIS: the log-probabilities, in nats.
        digest_EI: the `digests` of the rows and masks; 0: not computed, because the run does not visit the
            row.
    """

    log_prob_EIS: Tensor
    digest_EI: Tensor

    def look_up(self, plan: int, sample_id_B: Tensor, digest_B: Tensor) -> Tensor:
        """The log-probabilities [N] of the responses of rows, on the device of the sample ids.

        Raises:
            TrainingError: the table was computed on other rows or other masks.
        """
        index_B, (num_plans, count) = sample_id_B.cpu().numpy(), self.digest_EI.shape
        known = plan < num_plans and index_B.max() < count
        if not known or not np.array_equal(self.digest_EI.numpy()[plan, index_B], digest_B.numpy()):
            what = (
                "the stored log-probabilities are of other responses, or of other masks than those of "
                f"view plan {plan}"
            )
            raise TrainingError(
                what,
                where="reference",
                remedy="Evaluate on the rows given as eval_dataset, or use reference frozen or adapter",
            )
        log_prob_N = torch.from_numpy(self.log_prob_EIS.numpy()[plan, index_B].T.flatten())
        return log_prob_N.to(sample_id_B.device, non_blocking=True)

    @classmethod
    def read(cls, path: Path, hashes: Mapping[str, str], *, replace: bool) -> ReferenceTable | None:
        """The table in a file, or None if there is none to be used: the file is missing, or is stale and
        `replace` is set.

        Raises:
            TrainingError: the file has other hashes, is damaged or cannot be read, and `replace` is not set.
        """
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                stored = file.metadata() or {}
                table = cls(file.get_tensor("scores"), file.get_tensor("digests"))
            stale = [name for name in hashes if stored.get(name) != hashes[name]]
            if not stale and stored.get(CONTENT) == table.content_hash():
                return table
            what = (
                f"holds log-probabilities of another {' and another '.join(stale)}" if stale else "is damaged"
            )
        except SafetensorError as error:
            what = f"cannot be read ({error})"
        if not replace:
            remedy = (
                "Use the inputs that it was computed from, move the file, or set stale_reference to replace"
            )
            raise TrainingError(what, where=str(path), remedy=remedy)
        warnings.warn(
            f"{path} {what}: the reference's log-probabilities are recomputed", UnmaskWarning, stacklevel=2
        )
        return None

    def extended(self, num_plans: int) -> ReferenceTable:
        """The table with at least this many view plans; the new ones hold nothing."""
        more = max(0, num_plans - len(self.digest_EI))
        return ReferenceTable(
            pad(self.log_prob_EIS, (0, 0, 0, 0, 0, more)), pad(self.digest_EI, (0, 0, 0, more))
        )

    def complete(
        self,
        rows: Sequence[TokenRow],
        visited: Sequence[Sequence[int]],
        log_probs_of: LogProbsOfRows,
        accelerator: Accelerator,
        batch_size: int,
        report: Callable[[float], None],
    ) -> Iterator[None]:
        """Compute what the table lacks of the rows that each view plan visits; yields after every part, when
        it can be saved. The processes divide the rows; a batch has rows of similar length. A collective.

        Args:
            rows, visited: the rows, and their indices under each view plan.
            report: called with the finished fraction after every batch.
        """
        total, finished = sum(map(len, visited)), 0
        for plan, indices in enumerate(visited):
            ordered = sorted((len(rows[index]["input_ids"]), index) for index in indices)
            size = PART * batch_size * accelerator.num_processes
            for start in range(0, len(ordered), size):
                part = [rows[index] for _, index in ordered[start : start + size]]
                ids = [row["sample_id"] for row in part]
                if not self.digest_EI[plan, ids].all():
                    mine, found = part[accelerator.process_index :: accelerator.num_processes], []
                    for first in range(0, len(mine), batch_size):
                        batch = mine[first : first + batch_size]
                        log_prob_N, digest_B = log_probs_of(batch, plan)
                        found.append(([row["sample_id"] for row in batch], log_prob_N.cpu(), digest_B))
                        done = finished + (first + len(batch)) * accelerator.num_processes
                        report(min(1.0, done / total))
                    for sample_ids, log_prob_N, digest_B in gather_object(found):
                        self.log_prob_EIS[plan, sample_ids] = log_prob_N.view(-1, len(sample_ids)).T
                        self.digest_EI[plan, sample_ids] = digest_B
                    yield
                finished += len(part)

    def content_hash(self) -> str:
        """A hash of the whole table."""
        digest = hashlib.sha256()
        for each in (self.log_prob_EIS, self.digest_EI):
            digest.update(each.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @classmethod
    def empty(cls, count: int, num_responses: int, dtype: torch.dtype) -> ReferenceTable:
        """A table of `count` sample ids that holds nothing: no view plan."""
        return cls(
            torch.zeros(0, count, num_responses, dtype=dtype), torch.zeros(0, count, dtype=torch.int64)
        )

    def write(self, path: Path, hashes: Mapping[str, str]) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        metadata = {**hashes, CONTENT: self.content_hash()}
        save_file({"scores": self.log_prob_EIS, "digests": self.digest_EI}, unfinished, metadata=metadata)
        unfinished.chmod(default_mode())
        unfinished.replace(path)


EMPTY_TABLE = ReferenceTable.empty(0, 1, torch.float32)


def digests(batch: Mapping[str, Tensor], views: Views) -> Tensor:
    """A hash of every row and its masks, regardless of padding: int64 [B], on the CPU."""
    ids_BT, documents_BT = (batch[name].cpu().numpy() for name in ("input_ids", "documents"))
    hashes = []
    for ids_T, hidden_MT, real_T in zip(ids_BT, views.hidden_on_host, documents_BT > 0, strict=True):
        data = ids_T[real_T].tobytes() + hidden_MT[:, real_T].tobytes()
        hashes.append(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True))
    return torch.from_numpy(np.array(hashes, dtype=np.int64))


def model_hashes(lm: DiffusionLM) -> dict[str, str]:
    """A hash of the model and one of its tokenizer."""
    model = f"{fingerprint(lm.model)} {json.dumps(lm.pattern)}"
    tokenizer = json.dumps([sorted(lm.tokenizer.get_vocab().items()), lm.mask_token_id])
    return {"model": _hash(model), "tokenizer": _hash(tokenizer)}


def data_hashes(rows: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """A hash of the rows and one of the settings."""
    return {
        "data": content_of(rows) or rows_hash(rows),
        "settings": _hash(json.dumps(settings)),
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
