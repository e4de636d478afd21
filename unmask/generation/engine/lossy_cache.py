"""Lossy caches of bidirectional models: a step computes some positions, over stale keys of the others (Wu et
al. 2025, "Fast-dLLM").

Shapes: B sequences of a pass, Q queries, N hidden positions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from unmask.generation.engine.cached_forward import fill_in, make_queries, run_pass
from unmask.generation.engine.host import moved
from unmask.generation.engine.sequence import SequenceState
from unmask.generation.engine.slots import BatchEntry, BatchState
from unmask.models.diffusion_lm import DiffusionLM


def stale_positions(sequence: SequenceState) -> tuple[int, int]:
    """The positions that the next step computes with a lossy cache: all after each refresh interval, else the
    block, and in a cache of the prefix alone what comes after it."""
    (start, stop), config, length = sequence.span, sequence.config, sequence.request.length
    if sequence.step % (config.refresh_interval or sys.maxsize) == 0:
        return 0, length
    return start, stop if config.cache == "dual" else length


def partial_pass(
    lm: DiffusionLM,
    slots: BatchState,
    entries: Sequence[BatchEntry],
    member_N: np.ndarray,
    position_N: Tensor,
    ahead_N: np.ndarray,
) -> Tensor:
    """A pass over the positions to compute."""
    spans = [
        (entry.slot, max(entry.recompute[0] - int(lm.logit_shift), 0), entry.recompute[1], entry.length)
        for entry in entries
        if entry.recompute
    ]
    slot_B1, start_B1, stop_B1, length_B1 = np.array(spans).T[:, :, None]
    position_BQ = start_B1 + np.arange((stop_B1 - start_B1).max())
    queries = make_queries(lm, slots, slot_B1, position_BQ, position_BQ < stop_B1, length_B1, stop_B1)
    fill_in(lm, slots, queries)
    row_N = moved(member_N * position_BQ.shape[1] - start_B1[member_N, 0], position_N.device)
    index_N = row_N + slots.read_at(lm, entries, member_N, position_N)
    return run_pass(lm, slots, entries, queries, max(entry.length for entry in entries), index_N)
