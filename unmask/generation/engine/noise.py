"""Random numbers of the running sequences, for many steps at once: the generator has 250 small operations,
for one step as for all.

Shapes: B sequences, N predictions, K streams, M positions of several steps, U random numbers of a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from torch import Tensor

from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import RngStream, uniform
from unmask.generation.engine.host import moved, moved_together, ranks
from unmask.generation.engine.sequence import SequenceNoise, SequenceState
from unmask.generation.engine.slots import BatchState, Predictions
from unmask.generation.policies import streams
from unmask.generation.requests import Request

NUMBERS = 2**14
"""Random numbers that are made for a sequence at once, unless one step needs more."""


def num_numbers(request: Request, config: SamplerConfig) -> int:
    """The most random numbers that a slot has to hold for a request."""
    return _num_steps(request, config) * _width(request) * len(streams(config))


def numbers(
    slots: BatchState,
    sequences: Sequence[SequenceState],
    config: SamplerConfig,
    predictions: Predictions,
    ahead: int,
) -> dict[RngStream, Tensor]:
    """The random numbers of `policies.streams` at these positions of sequences, all with these settings, for
    the step that comes `ahead` steps after the current one."""
    drawn = streams(config)
    if not drawn:
        return {}
    members = np.flatnonzero(predictions.counts(len(sequences))).tolist()
    if lacking := [sequences[member] for member in members if not _has(sequences[member], ahead)]:
        _make(slots, lacking, config, drawn, ahead)
    offset_KB = np.zeros((len(drawn), len(sequences)), dtype=int)
    for member in members:
        sequence = sequences[member]
        assert sequence.noise is not None
        first, blocks, width = sequence.noise
        step = sequence.steps_done + ahead - first
        offset_KB[:, member] = (step + len(blocks) * np.arange(len(drawn))) * width - sequence.span[0]
    cell_KN = (
        moved(offset_KB[:, predictions.member_N], predictions.position_N.device) + predictions.position_N
    )
    return dict(zip(drawn, slots.noise_SU[predictions.slot_N, cell_KN].unbind(0), strict=True))


def _has(sequence: SequenceState, ahead: int) -> bool:
    """Whether the numbers of this step are made."""
    if sequence.noise is None:
        return False
    first, blocks, _ = sequence.noise
    step = sequence.steps_done + ahead - first
    return 0 <= step < len(blocks) and blocks[step] == sequence.block


def _make(
    slots: BatchState,
    sequences: Iterable[SequenceState],
    config: SamplerConfig,
    drawn: Sequence[RngStream],
    ahead: int,
) -> None:
    """Make the numbers of this step and of those after it."""
    parts, made = [], []
    for sequence in sequences:
        request, width, first = sequence.request, _width(sequence.request), sequence.steps_done + ahead
        blocks = list(islice(sequence.coming_blocks(ahead), _num_steps(request, config)))
        start_K, stop_K = np.array([request.blocks[block] for block in blocks]).T
        step_M, column_M = np.repeat(np.arange(len(blocks)), stop_K - start_K), ranks(stop_K - start_K)
        key_M, slot_M = np.full_like(step_M, request.key), np.full_like(step_M, sequence.slots[0])
        cell_M, stride_M = step_M * width + column_M, np.full_like(step_M, len(blocks) * width)
        parts.append(np.stack([key_M, first + step_M, start_K[step_M] + column_M, slot_M, cell_M, stride_M]))
        made.append((sequence, SequenceNoise(first, blocks, width)))
    key_M, step_M, position_M, slot_M, cell_M, stride_M = np.concatenate(parts, 1)
    key, step, position, slot, *cells = moved_together(
        slots.noise_SU.device,
        key_M,
        step_M,
        position_M,
        slot_M,
        *(cell_M + number * stride_M for number in range(len(drawn))),
    )
    for stream, cell in zip(drawn, cells, strict=True):
        slots.noise_SU[slot, cell] = uniform(config.seed, key, step=step, position=position, stream=stream)
    for sequence, noise in made:
        sequence.noise = noise


def _num_steps(request: Request, config: SamplerConfig) -> int:
    """The steps whose numbers are made at once."""
    width = _width(request)
    steps = width if request.counts is None else sum(map(len, request.counts))
    return max(1, min(steps, NUMBERS // (width * max(len(streams(config)), 1))))


def _width(request: Request) -> int:
    """The positions of the widest block."""
    return max(stop - start for start, stop in request.blocks)
