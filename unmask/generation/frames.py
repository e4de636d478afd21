"""A text as it is denoised: what each step reveals, and what it hides again. The frames of a sequence, in
order, make its final text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unmask.config.sampler import SamplerConfig
from unmask.generation.engine.engine import Engine, SequenceView
from unmask.generation.output import Generation, Trace, make_generation
from unmask.generation.requests import Request
from unmask.models.diffusion_lm import DiffusionLM


class Revealed(NamedTuple):
    """A token that a step revealed; on a canvas of random tokens the most probable one after it."""

    position: int  # in the whole sequence
    token: int
    log_prob: float  # when it was revealed, in nats, at temperature 1
    # with `top_forbidden`: likewise the most probable tokens that the constraint forbids there
    forbidden: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Frame:
    """What changed between two looks at a sequence: one denoising step, or several where drafts were right.

    Attributes:
        step: denoising steps so far.
        revealed: tokens that were revealed, replaced, or predicted again: on a canvas of random tokens all of
            the current block, those that are the same with another probability.
        hidden: positions that were hidden again.
        num_final: positions from the first one on that no later step changes.
    """

    step: int
    revealed: list[Revealed]
    hidden: list[int]
    num_final: int


class Watched:
    """A sequence that is watched, as it was when last seen."""

    def __init__(self, request: Request):
        self.request = request
        self.ids, self.hidden = list(request.ids), list(request.hidden)
        self.log_probs, self.step = [0.0] * request.length, 0

    def look(self, engine: Engine, ticket: int) -> Frame | None:
        """What changed in a running sequence; None if it has not begun, has ended, or has made no step since
        it was last seen."""
        view = engine.state(ticket)
        return self._frame(view) if view is not None and view.steps > self.step else None

    def last(self, trace: Trace) -> Frame:
        """What changed up to the end of a sequence."""
        start = self.request.start
        ids, before = [*self.request.ids[:start], *trace.canvas], self.request.hidden[:start]
        steps = zip(self.request.hidden[start:], trace.steps, strict=True)
        hidden = before + [was_hidden and step < 0 for was_hidden, step in steps]
        forbidden = None
        if trace.forbidden_ids:
            given: list[list] = [[] for _ in range(start)]
            forbidden = (given + trace.forbidden_ids, given + trace.forbidden_log_probs)
        log_probs = [0.0] * start + trace.log_probs
        return self._frame(
            SequenceView(ids, hidden, log_probs, max(trace.steps, default=-1) + 1, len(ids), forbidden)
        )

    def _frame(self, view: SequenceView) -> Frame:
        hidden, revealed = [], []
        before = zip(self.ids, self.hidden, self.log_probs, strict=True)
        after = zip(view.ids, view.hidden, view.log_probs, strict=True)
        for position, (old, (token, is_hidden, log_prob)) in enumerate(zip(before, after, strict=True)):
            if is_hidden and not old[1]:
                hidden.append(position)
            elif not is_hidden and old != (token, is_hidden, log_prob):
                forbidden: list[tuple[int, float]] = []
                if view.forbidden is not None:
                    ids, log_probs = view.forbidden
                    forbidden = list(zip(ids[position], log_probs[position], strict=True))
                revealed.append(Revealed(position, token, log_prob, forbidden))
        self.ids, self.hidden, self.log_probs, self.step = view.ids, view.hidden, view.log_probs, view.steps
        return Frame(view.steps, revealed, hidden, view.num_final)


def watch(lm: DiffusionLM, request: Request, config: SamplerConfig) -> Iterator[Frame | Generation]:
    """The frames of one sequence, then the result. Raises GenerationError as `unmask.generate`."""
    engine = Engine(lm, batch_size=1, max_batch_tokens=config.max_batch_tokens)
    watched = Watched(request)
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
        for each in frame.revealed:
            ids[each.position] = each.token
    return ids
