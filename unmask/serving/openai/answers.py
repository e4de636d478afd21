"""Answers to requests: whole, or as server-sent events."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from unmask.data.decoding import UNFINISHED, canvas_texts, num_at_start, token_bytes
from unmask.errors import UnmaskError
from unmask.generation.frames import Frame
from unmask.serving.errors import error_of
from unmask.serving.model_service import ModelService
from unmask.serving.openai.json_text import to_json
from unmask.serving.openai.plans import Plan
from unmask.serving.openai.progress import Progress
from unmask.serving.openai.requests import SamplingRequest
from unmask.serving.openai.writers import Fields, TextWriter, choice_facts
from unmask.serving.service import Event
from unmask.serving.submission import Events

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Kind:
    """The names of an answer's objects.

    Attributes:
        whole, chunk: of a whole answer, and of a chunk.
        prefix: of ids.
    """

    whole: str
    chunk: str
    prefix: str


CHAT = Kind("chat.completion", "chat.completion.chunk", "chatcmpl")
TEXT = Kind("text_completion", "text_completion", "cmpl")
EDIT = Kind("edit.completion", "edit.completion.chunk", "editcmpl")
INFILL = Kind("infill", "infill.chunk", "infill")


class Reply:
    """The answer to one request.

    Args:
        make_writer: makes the writer of a choice.
    """

    def __init__(
        self,
        service: ModelService,
        body: SamplingRequest,
        plan: Plan,
        kind: Kind,
        make_writer: Callable[[Progress], TextWriter],
    ):
        self.body, self.plan, self.kind = body, plan, kind
        self.progresses = [
            Progress(service.lm, *one, plan.stops) for one in zip(plan.work, plan.regions, strict=True)
        ]
        self.writers = [make_writer(progress) for progress in self.progresses]
        self.version: str | None = None  # of the weights, which the first event tells
        self._name, self._id, self._created = (
            service.name,
            f"{kind.prefix}-{uuid.uuid4().hex}",
            int(time.time()),
        )
        self._tokenizer = service.lm.tokenizer
        self._token_bytes = lru_cache(maxsize=1024)(partial(token_bytes, self._tokenizer))

    @property
    def _head(self) -> Fields:
        """What every object begins with."""
        return {
            "id": self._id,
            "created": self._created,
            "model": self._name,
            "system_fingerprint": self.version,
        }

    @property
    def done(self) -> bool:
        """Whether all choices are known."""
        return all(progress.outcome is not None for progress in self.progresses)

    async def whole(self, events: Events) -> Fields:
        """The answer as one object."""
        async for event in events:
            self.version = event.version
            self._write(event)
            self._drop_cut(event, events)
            if self.done:
                break
        choices = [
            {"index": index, **writer.choice(), "diffusion": choice_facts(writer.progress, writer.outcome)}
            for index, writer in enumerate(self.writers)
        ]
        return {
            **self._head,
            "object": self.kind.whole,
            "choices": choices,
            "usage": self.usage(),
            "diffusion": self._facts(),
        }

    async def chunks(self, events: Events) -> AsyncGenerator[str, None]:
        """The answer as server-sent events. An error on the way is the last event."""
        options = self.body.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        opened = False
        async with aclosing(events):
            try:
                async for event in events:
                    self.version = event.version
                    openings = (
                        []
                        if opened
                        else list(chain.from_iterable(map(self._opening, range(len(self.writers)))))
                    )
                    opened = True
                    for chunk in [*openings, *self._step(event)]:
                        yield _event({**chunk, **usage})
                    if not self.body.frames:
                        self._drop_cut(event, events)
                        if self.done:
                            break
            except UnmaskError as error:
                yield _event(error_of(error)[1])
                return
        if usage:
            yield _event(
                {
                    **self._head,
                    "object": self.kind.chunk,
                    "choices": [],
                    "usage": self.usage(),
                    "diffusion": self._facts(),
                }
            )
        yield DONE

    def usage(self) -> Fields:
        """Tokens, steps and passes of all choices."""
        outcomes = [writer.outcome for writer in self.writers]
        written, passes = (
            sum(outcome.written for outcome in outcomes),
            [outcome.forward_passes for outcome in outcomes],
        )
        return {
            "prompt_tokens": self.plan.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.plan.prompt_tokens + written,
            "diffusion": {
                "denoising_steps": sum(outcome.denoising_steps for outcome in outcomes),
                "forward_passes": None if None in passes else sum(filter(None, passes)),
            },
        }

    def _facts(self) -> Fields:
        """With what `unmask.generate` gives the same."""
        return {"seed": self.plan.config.seed, "keys": self.plan.keys, "version": self.version}

    def _write(self, event: Event) -> list[Fields]:
        """The pieces that an event adds to its choice."""
        progress = self.progresses[event.index]
        if progress.outcome is not None:
            return []
        text, writer = progress.see(event), self.writers[event.index]
        pieces = writer.write(text, done=progress.outcome is not None)
        if writer.complete:
            progress.end_here()
        return pieces

    def _drop_cut(self, event: Event, events: Events) -> None:
        """Free the slot of a choice that is known before its sequence ends."""
        if event.trace is None and self.progresses[event.index].outcome is not None:
            events.drop(event.index)

    def _opening(self, index: int) -> list[Fields]:
        pieces = self.writers[index].opening()
        if not self.body.frames:
            return [self._chunk(index, piece) for piece in pieces]
        first, *others = pieces or [self.writers[index].delta("")]
        return [
            self._chunk(index, first, {"canvas": {"tokens": self._canvas(index)}}),
            *(self._chunk(index, piece) for piece in others),
        ]

    def _step(self, event: Event) -> list[Fields]:
        """The chunks of an event: of its frame, of the text that it commits, and of the end of its choice."""
        index, writer = event.index, self.writers[event.index]
        known = self.progresses[index].outcome is not None
        pieces = self._write(event)
        frames = self.body.frames
        if frames and event.frame is not None:
            first, *others = pieces or [writer.delta("")]
            chunks = [self._chunk(index, first, {"frame": self._frame(index, event.frame)})]
        else:
            chunks, others = [], pieces
        chunks += [self._chunk(index, piece) for piece in others]
        ended = (
            event.trace is not None if frames else not known and self.progresses[index].outcome is not None
        )
        if ended:
            own = {"text": writer.outcome.text, "seed": self.plan.config.seed, "key": self.plan.keys[index]}
            facts = choice_facts(self.progresses[index], writer.outcome) | own
            chunks.append(
                self._chunk(index, writer.closing(), facts if frames or self.plan.config.trace else None)
            )
        return chunks

    def _chunk(self, index: int, piece: Fields, facts: Fields | None = None) -> Fields:
        chunk = {**self._head, "object": self.kind.chunk, "choices": [{"index": index, **piece}]}
        return chunk if facts is None else {**chunk, "diffusion": facts}

    def _canvas(self, index: int) -> list[str | None]:
        """The texts of the tokens that are answered, None where they are hidden."""
        progress = self.progresses[index]
        return canvas_texts(self._tokenizer, progress.before, *progress.given)

    def _frame(self, index: int, frame: Frame) -> Fields:
        """A frame, whose positions count from the first one that is answered."""
        region, number = self.progresses[index].region, self._num_at_start(index)
        revealed = []
        for each in frame.revealed:
            position = each.position - region.start
            fields = {"position": position, **self._token(each.token, each.log_prob, position < number)}
            if self.plan.config.top_forbidden:
                fields["forbidden"] = [self._token(*token, position < number) for token in each.forbidden]
            revealed.append(fields)
        committed = min(max(frame.num_final, region.start), region.stop) - region.start
        hidden = [position - region.start for position in frame.hidden]
        return {"step": frame.step, "revealed": revealed, "hidden": hidden, "committed": committed}

    def _num_at_start(self, index: int) -> int:
        """How many positions no text precedes."""
        progress = self.progresses[index]
        return num_at_start(self._tokenizer, progress.before, *progress.given)

    def _token(self, token: int, log_prob: float, first: bool) -> Fields:
        """A token, with its bytes where it is a part of a character; a special one, which has no text, by its
        name."""
        written = self._token_bytes(token, first=first)
        text = written.decode(errors="replace") or str(self._tokenizer.decode([token]))
        part = {"bytes": [*written]} if UNFINISHED in text else {}
        return {"token": token, "text": text, **part, "probability": math.exp(log_prob)}


def _event(content: Any) -> str:
    return f"data: {to_json(content)}\n\n"
