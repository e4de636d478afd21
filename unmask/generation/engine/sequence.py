"""The progress of one request.

Shapes: G drafts, D depths, K candidates, V vocabulary, N positions of a canvas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import numpy as np
from torch import Tensor

from unmask.config.sampler import SamplerConfig
from unmask.generation.engine.slots import Draft
from unmask.generation.policies import count_remasked
from unmask.generation.requests import Request


class SequenceNoise(NamedTuple):
    """The steps whose random numbers a slot holds: for each step and stream those of a block, `width`
    positions apart."""

    first: int  # denoising steps before the first of them
    blocks: list[int]  # of each step
    width: int


class RecordedStep(NamedTuple):
    """A `CanvasStep` whose tensors are on the device."""

    start: int
    tokens_2N: Tensor  # shown, and kept or -1
    log_prob_N: Tensor
    temperature: float


@dataclass
class Speculation:
    """The progress of a sequence in mode self-speculative."""

    position: int  # of the first token that is not decided
    num_drafter_cached: int  # positions whose keys the drafting model has cached, where another one verifies
    draft_G: Tensor  # the tokens of the first nodes of the tree
    drafted_DKV: Tensor  # the distributions that the candidates at each depth were drawn from
    num_drafted: int = 0  # tokens so far that were verified
    num_accepted: int = 0  # and kept


@dataclass(eq=False)
class SequenceState:
    """A request and its progress."""

    ticket: int
    request: Request
    config: SamplerConfig
    texts: list[list[int]]  # its ids, and with guidance those of the copy with a hidden prompt
    num_columns: int  # KV-cache columns reserved for the sequence: positions and drafts
    slots: list[int] = field(default_factory=list)  # of each text
    block: int = 0  # the current decoding block
    step: int = 0  # denoising steps of this block so far
    steps_done: int = 0  # denoising steps of all blocks so far
    num_forward_passes: int = 0
    num_cached: int = 0  # positions whose keys and values are cached, from the first one on
    draft: Draft | None = None  # the predicted states after the next steps
    speculation: Speculation | None = None  # in mode self-speculative
    noise: SequenceNoise | None = None  # its random numbers that are made already
    recorded_steps: list[RecordedStep] = field(default_factory=list)  # with a trace
    num_hidden: int = field(init=False)  # hidden tokens of the current block

    def __post_init__(self) -> None:
        self.num_hidden = self.block_size

    def begin_block(self, block: int) -> None:
        """Go on to the first step of a block, unless it was the last one."""
        self.block, self.step, self.draft = block, 0, None
        if block < len(self.request.blocks):
            self.num_hidden = self.block_size

    @property
    def block_size(self) -> int:
        """The tokens of the block to decode."""
        return sum(self.request.hidden[slice(*self.span)])

    @property
    def span(self) -> tuple[int, int]:
        return self.request.blocks[self.block]

    @property
    def counts(self) -> list[int]:
        """Tokens to reveal at each step of the block; empty where the predictions decide."""
        return self.request.counts[self.block] if self.request.counts else []

    def tokens_to_reveal(self, ahead: int = 0) -> int:
        """The count of the step that comes `ahead` steps after the current one; 0 after the last step."""
        step = self.step + ahead
        return self.counts[step] if step < len(self.counts) else 0

    def coming_blocks(self, ahead: int) -> Iterator[int]:
        """The block of every step from the one that comes `ahead` steps after the current one on. Where
        predictions decide how many tokens a step reveals, only of those steps that this block may need."""
        if self.request.counts is None or self.config.early_commit is not None:
            yield from repeat(self.block, max(self.num_hidden - ahead, 1))
        else:
            for block in range(self.block, len(self.request.counts)):
                yield from repeat(
                    block, len(self.request.counts[block]) - (self.step + ahead if block == self.block else 0)
                )

    @property
    def hides_again(self) -> bool:
        """Whether steps may hide tokens again."""
        return self.config.remask_fraction > 0 or self.config.revise is not None

    @property
    def num_remasked(self) -> int:
        """The number of tokens that the step hides again. It reveals as many more than its count."""
        return count_remasked(self.counts, self.step, self.config.remask_fraction)

    @property
    def num_revised(self) -> int:
        """The most tokens that the step hides again by its own predictions. It reveals as many more than its
        count."""
        return self.request.revisions[self.block][self.step] if self.request.revisions else 0


def by_settings(sequences: Sequence[SequenceState]) -> Iterator[tuple[SamplerConfig, np.ndarray]]:
    """Each distinct config, and a mask [B] of the sequences that use it. The engine keeps equal configs as
    one object."""
    for config in {id(sequence.config): sequence.config for sequence in sequences}.values():
        yield config, np.array([sequence.config is config for sequence in sequences])
