"""Rows for losses of single responses (KTO): desirable ones and others, each beside a response that belongs to another prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unmask.data.rows import Collator, Row
from unmask.errors import DataError


class UnpairedCollator(Collator):
    """Batches of responses, and within them of the responses to other prompts."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().__call__([row["response"] for row in rows])
        batch["mismatched"] = super().__call__([row["mismatched"] for row in rows])
        return batch | {"desirable": torch.tensor([row["desirable"] for row in rows])}


def labelled(pairs: Sequence[Mapping[str, Row]]) -> list[Row]:
    """The responses of pairs with a label, all chosen ones before the rejected."""
    return [pair[side] | {"label": side == "chosen"} for side in ("chosen", "rejected") for pair in pairs]


def beside_others(rows: Sequence[Row], max_length: int, where: str) -> list[dict[str, Any]]:
    """Each response with its label, and its prompt before the response of the nearest row before it (before the first comes the last) that
    has another prompt, cut where that would be too long.

    How far the policy has moved from the reference is estimated on these, as TRL does it (within batches).

    Raises:
        DataError: all rows of the data set, which is called `where`, have the same prompt.
    """
    starts = [row["maskable"].index(True) for row in rows]
    prompts = [row["input_ids"][:start] for row, start in zip(rows, starts, strict=True)]
    unlike = [number for number, prompt in enumerate(prompts) if prompt != prompts[0]]
    if not unlike:
        remedy = "Give responses to two prompts or more, or use another loss_type"
        raise DataError("all rows have the same prompt, but kto compares with responses to others", where=where, remedy=remedy)
    made, nearest = [], max(unlike)
    for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
        if prompts[number - 1] != prompts[number]:
            nearest = number - 1
        other, begin = rows[nearest], starts[nearest]
        parts = {name: (row[name][:start] + other[name][begin:])[:max_length] for name in ("input_ids", "documents", "maskable")}
        mismatched = {**parts, "sample_id": len(rows) + number}
        response = {name: row[name] for name in parts} | {"sample_id": number}
        made.append({"response": response, "mismatched": mismatched, "desirable": row["label"]})
    return made
