"""A text as it is denoised: what each step reveals, and what it hides again. The frames of a sequence, in order, make its final text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unmask.config.run import SamplerConfig
from unmask.generation.engine.engine import Engine
from unmask.generation.output import Generation, Trace, make_generation
from unmask.generation.requests import Request
from unmask.models.diffusion_lm import DiffusionLM


class Revealed(NamedTuple):
    """A token that a step revealed."""

    position: int  # in the whole sequence
    token: int
    log_prob: float  # when it was revealed, in nats, at temperature 1


@dataclass(frozen=True)
class Frame:
    """What changed between two looks at a sequence: one denoising step, or several where drafts were right.

    Attributes:
        step: denoising steps so far.
        revealed: tokens that were revealed, or replaced.
        hidden: positions that were hidden again.
        num_final: positions from the first one on that no later step changes.
    """

    step: int
    revealed: list[Revealed]
    hidden: list[int]
    num_final: int


@dataclass
class Watched:
    """A sequence that is watched, as it was when last seen."""

    request: Request
    mask_token_id: int
    ids: list[int] = field(init=False)
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.request.ids)

    def look(self, engine: Engine, ticket: int) -> Frame | None:
        """What changed in a running sequence; None if it has not begun, has ended, or has made no step since it was last seen."""
        state = engine.state(ticket)
        return self._frame(*state) if state is not None and state[2] > self.step else None

    def last(self, trace: Trace) -> Frame:
        """What changed up to the end of a sequence."""
        start = self.request.start
        ids = [*self.request.ids[:start], *trace.canvas]
        return self._frame(ids, [0.0] * start + trace.log_probs, max(trace.steps, default=-1) + 1, len(ids))

    def _frame(self, ids: list[int], log_probs: Sequence[float], step: int, num_final: int) -> Frame:
        changed = [position for position, (old, new) in enumerate(zip(self.ids, ids, strict=True)) if old != new]
        hidden = [position for position in changed if ids[position] == self.mask_token_id]
        revealed = [Revealed(position, ids[position], log_probs[position]) for position in changed if ids[position] != self.mask_token_id]
        self.ids, self.step = ids, step
        return Frame(step, revealed, hidden, num_final)


def watch(lm: DiffusionLM, request: Request, config: SamplerConfig) -> Iterator[Frame | Generation]:
    """The frames of one sequence, then the result. Raises GenerationError as `unmask.generate`."""
    engine = Engine(lm, batch_size=1, max_batch_tokens=config.max_batch_tokens)
    watched = Watched(request, lm.mask_token_id)
    ticket = engine.submit(request, config)
    while not (finished := engine.step()):
        if frame := watched.look(engine, ticket):
            yield frame
    [(_, trace)] = finished
    yield watched.last(trace)
    yield make_generation(lm, [request], [trace], config)


def replay(ids: Sequence[int], frames: Iterable[Frame], mask_token_id: int) -> list[int]:
    """The ids of a sequence after these frames."""
    ids = list(ids)
    for frame in frames:
        for position in frame.hidden:
            ids[position] = mask_token_id
        for position, token, _ in frame.revealed:
            ids[position] = token
    return ids
