"""Integers that the host knows before a step, such as slots and counts: made with NumPy and moved to the
device without waiting for it.

Shapes: B sequences, N their rows, M the most rows of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Counts = Sequence[int] | np.ndarray


def moved(values: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device."""
    host = torch.from_numpy(values)
    if device.type == "cpu":
        return host
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def moved_together(device: torch.device, *values: np.ndarray) -> tuple[Tensor, ...]:
    """Integer arrays of one shape on the device, by one transfer."""
    return moved(np.stack(values), device).unbind(0)


def members(count_B: Counts) -> np.ndarray:
    """The number of the sequence of each row [N], by the number of rows of each."""
    return np.repeat(np.arange(len(count_B)), count_B)


def starts(count_B: Counts) -> np.ndarray:
    """The first row of each sequence [B]."""
    return np.cumsum(count_B) - count_B


def ranks(count_B: Counts) -> np.ndarray:
    """The number of each row in its sequence [N]."""
    return np.arange(np.sum(count_B, dtype=int)) - np.repeat(starts(count_B), count_B)


def padded(value_N: Tensor, count_B: Counts, fill: float) -> Tensor:
    """The values [B, M] of each sequence, by the number of rows of each."""
    width = int(max(count_B))
    if min(count_B) == width:
        return value_N.view(len(count_B), width)
    value_BM = value_N.new_full((len(count_B), width), fill)
    value_BM[moved_together(value_N.device, members(count_B), ranks(count_B))] = value_N
    return value_BM


def first_by_order(order_BM: Tensor, start_B: np.ndarray, chosen_B: Counts) -> Tensor:
    """The first `chosen_B` entries of each sequence's order, counted from its start."""
    if (most := max(chosen_B)) == min(chosen_B):
        return (order_BM[:, :most] + moved(start_B[:, None], order_BM.device)).view(-1)
    member_J, rank_J, start_J = moved_together(
        order_BM.device, members(chosen_B), ranks(chosen_B), np.repeat(start_B, chosen_B)
    )
    return order_BM[member_J, rank_J] + start_J


def best_rows(priority_N: Tensor, count_B: Counts, chosen_B: Counts) -> Tensor:
    """The rows of the `chosen_B` highest priorities of each sequence, by its number of rows; ties by the
    first."""
    order_BM = padded(priority_N, count_B, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    return first_by_order(order_BM, starts(count_B), chosen_B)


def first_true(flag_N: Tensor) -> Tensor:
    """The rows, those with the flag first, each part in its order. The host need not know them to take as
    many as it knows there are."""
    return flag_N.sort(descending=True, stable=True).indices


def slot_index(slots: Sequence[int], device: torch.device) -> slice | Tensor:
    """An index of these slots: a slice if they are consecutive, which copies nothing."""
    first = slots[0]
    if list(slots) == list(range(first, first + len(slots))):
        return slice(first, first + len(slots))
    return moved(np.array(slots), device)
