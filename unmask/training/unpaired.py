"""Rows for losses of single responses (KTO): desirable ones and others, each beside a response that belongs to another prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unmask.data.rows import Collator, Row


class UnpairedCollator(Collator):
    """Batches of responses, and within them of the responses to other prompts."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().__call__([row["response"] for row in rows])
        batch["mismatched"] = super().__call__([row["mismatched"] for row in rows])
        return batch | {"desirable": torch.tensor([row["desirable"] for row in rows])}


def labelled(pairs: Sequence[Mapping[str, Row]]) -> list[Row]:
    """The responses of pairs with a label, all chosen ones before the rejected, so that neighbours have other prompts."""
    return [pair[side] | {"label": side == "chosen"} for side in ("chosen", "rejected") for pair in pairs]


def beside_others(rows: Sequence[Row], max_length: int) -> list[dict[str, Any]]:
    """Each response with its label, and its prompt before the response of the row before it, cut where that would be too long.

    How far the policy has moved from the reference is estimated on these, as TRL does it (within batches).
    """
    made = []
    for number, row in enumerate(rows):
        other = rows[number - 1]
        start, begin = row["maskable"].index(True), other["maskable"].index(True)
        parts = {name: (row[name][:start] + other[name][begin:])[:max_length] for name in ("input_ids", "documents", "maskable")}
        mismatched = {**parts, "sample_id": len(rows) + number}
        response = {name: row[name] for name in parts} | {"sample_id": number}
        made.append({"response": response, "mismatched": mismatched, "desirable": row["label"]})
    return made
