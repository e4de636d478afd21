"""The rows of preference data: batches as the loss reads them, and responses with a mismatched one (KTO).

Shapes: N responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.data.rows import Collator, Row
from unmask.diffusion.views import Views
from unmask.errors import DataError
from unmask.training.trainer import Batch, select_rows


@dataclass(frozen=True)
class PreferenceBatch:
    """Collated rows with the views of their responses.

    Attributes:
        rows: the output of the collator, on the device.
        views: the same for policy and reference.
        reference_N: log-probabilities of the responses under the reference, in nats; None before they are
            computed.
        baseline: for KTO, a scalar (`DPOTrainer.baseline`).
    """

    rows: Batch
    views: Views
    reference_N: Tensor | None = None
    baseline: Tensor | None = None

    def select_rows(self, rows: slice) -> PreferenceBatch:
        """These rows, with their views."""
        part = select_rows(self.rows, rows)
        reference_N = self.reference_N
        if reference_N is not None:  # the first response of every row, then the second
            count = len(self.rows["sample_id"])
            reference_N = reference_N.view(-1, count)[:, rows].flatten()
        return PreferenceBatch(part, self.views.select(rows, slice(None)), reference_N, self.baseline)


class UnpairedCollator(Collator):
    """Batches of responses; `mismatched` is the batch of mismatched responses."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().__call__([row["response"] for row in rows])
        batch["mismatched"] = super().__call__([row["mismatched"] for row in rows])
        return batch | {"desirable": torch.tensor([row["desirable"] for row in rows])}


def labeled(pairs: Sequence[Mapping[str, Row]]) -> list[Row]:
    """The responses of pairs with a label: all chosen ones, then all rejected ones."""
    return [pair[side] | {"label": side == "chosen"} for side in ("chosen", "rejected") for pair in pairs]


def with_mismatched(rows: Sequence[Row], max_length: int, where: str) -> list[dict[str, Any]]:
    """Each labeled response with its mismatched one: the same prompt, followed by the response of the
    nearest earlier row that has another prompt (the last row precedes the first), cut to `max_length` tokens.
    KTO's baseline is estimated on these, as in TRL (within batches).

    Raises:
        DataError: all rows of the dataset, called `where`, have the same prompt.
    """
    starts = [row["maskable"].index(True) for row in rows]
    prompts = [row["input_ids"][:start] for row, start in zip(rows, starts, strict=True)]
    others = [index for index, prompt in enumerate(prompts) if prompt != prompts[0]]
    if not others:
        raise DataError(
            "all rows have the same prompt, but kto compares responses to different ones",
            where=where,
            remedy="Give responses to at least two prompts, or use another loss_type",
        )
    names = ("input_ids", "documents", "maskable")
    examples, nearest = [], others[-1]
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        if prompts[index - 1] != prompts[index]:
            nearest = index - 1
        other, other_start = rows[nearest], starts[nearest]
        mismatched = {
            name: (row[name][:start] + other[name][other_start:])[:max_length] for name in names
        } | {"sample_id": len(rows) + index}
        response = {name: row[name] for name in names} | {"sample_id": index}
        examples.append({"response": response, "mismatched": mismatched, "desirable": row["label"]})
    return examples
