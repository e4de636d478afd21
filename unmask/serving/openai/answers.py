"""Answers to requests: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from unmask.data.decoding import UNFINISHED, canvas_texts, num_at_start, token_bytes
from unmask.errors import UnmaskError
from unmask.generation.frames import Frame
from unmask.serving.connections import DisconnectedError, while_connected
from unmask.serving.errors import error_of
from unmask.serving.openai.choices import (
    ChatWriter,
    EditWriter,
    Fields,
    FimWriter,
    InfillWriter,
    TextWriter,
)
from unmask.serving.openai.plans import Context, RequestPlan
from unmask.serving.openai.requests import SamplingRequest
from unmask.serving.submission import Event, Events

HEARTBEAT = 15.0  # seconds
WAITING = b": waiting\n\n"
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Kind:
    """What an answer's objects are.

    Attributes:
        whole, chunk: the names of a whole answer, and of a chunk.
        prefix: of ids.
        writer: what writes a choice.
    """

    whole: str
    chunk: str
    prefix: str
    writer: type[TextWriter]


CHAT = Kind("chat.completion", "chat.completion.chunk", "chatcmpl", ChatWriter)
TEXT = Kind("text_completion", "text_completion", "cmpl", TextWriter)
FIM = Kind("text_completion", "text_completion", "cmpl", FimWriter)
EDIT = Kind("edit.completion", "edit.completion.chunk", "editcmpl", EditWriter)
INFILL = Kind("infill", "infill.chunk", "infill", InfillWriter)


class Reply:
    """The answer to one request."""

    def __init__(self, context: Context, body: SamplingRequest, plan: RequestPlan, kind: Kind):
        self.body, self.plan, self.kind, self.config = body, plan, kind, plan.work[0].config
        self.writers = [kind.writer(context.lm, body, plan, index) for index in range(len(plan.work))]
        self.version: str | None = None  # of the weights, known from the first event on
        self._head = {"id": f"{kind.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._head["model"] = context.model.name
        self._tokenizer = context.lm.tokenizer
        self._token_bytes = lru_cache(maxsize=1024)(partial(token_bytes, self._tokenizer))

    async def whole(self, events: Events) -> Fields:
        """The answer as one object."""
        async for event in events:
            self.version = event.version
            self.writers[event.index].see(event)
            if self._drop_cut(event, events):
                break
        choices = [
            {"index": index, **writer.choice(), "diffusion": writer.facts()}
            for index, writer in enumerate(self.writers)
        ]
        return self._object(self.kind.whole, choices, **self._totals())

    async def chunks(self, events: Events) -> AsyncGenerator[str, None]:
        """The answer as server-sent events. An error on the way is the last event."""
        options, opened = self.body.stream_options, False
        usage = {"usage": None} if options is not None and options.include_usage else {}
        async with aclosing(events):
            try:
                async for event in events:
                    self.version = event.version
                    for index in range(0 if opened else len(self.writers)):
                        for chunk in self._opening(index):
                            yield _event({**chunk, **usage})
                    opened = True
                    for chunk in self._step(event):
                        yield _event({**chunk, **usage})
                    if not self.body.frames and self._drop_cut(event, events):
                        break
            except UnmaskError as error:
                yield _event(error_of(error)[1])
                return
        if usage:
            yield _event(self._object(self.kind.chunk, [], **self._totals()))
        yield DONE

    def _object(self, name: str, choices: list[Fields], **more: Any) -> Fields:
        head = {**self._head, "system_fingerprint": self.version, "object": name}
        return {**head, "choices": choices, **more}

    def _totals(self) -> Fields:
        """Tokens, steps and passes of all choices; and with what `unmask.generate` gives the same."""
        outcomes = [writer.outcome for writer in self.writers]
        written = sum(outcome.written for outcome in outcomes)
        passes = [outcome.forward_passes for outcome in outcomes]
        usage = {
            "prompt_tokens": self.plan.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.plan.prompt_tokens + written,
            "diffusion": {
                "denoising_steps": sum(outcome.denoising_steps for outcome in outcomes),
                "forward_passes": None if None in passes else sum(filter(None, passes)),
            },
        }
        keys = [work.request.key for work in self.plan.work]
        return {
            "usage": usage,
            "diffusion": {"seed": self.config.seed, "keys": keys, "version": self.version},
        }

    def _drop_cut(self, event: Event, events: Events) -> bool:
        """Free the slot of a choice that is known before its sequence ends. Whether all choices are known."""
        if event.trace is None and self.writers[event.index].known:
            events.drop(event.index)
        return all(writer.known for writer in self.writers)

    def _opening(self, index: int) -> list[Fields]:
        writer = self.writers[index]
        if not self.body.frames:
            return self._chunks(index, writer.opening())
        canvas = canvas_texts(self._tokenizer, writer.before, *writer.given)
        return self._chunks(index, writer.opening(), {"canvas": {"tokens": canvas}})

    def _step(self, event: Event) -> list[Fields]:
        """The chunks of an event: of its frame, of the text that it commits, and of the end of its choice."""
        index, writer, frames = event.index, self.writers[event.index], self.body.frames
        known, pieces, frame = writer.known, writer.see(event), event.frame
        facts = {"frame": self._frame(writer, frame)} if frames and frame is not None else None
        chunks = self._chunks(index, pieces, facts)
        if event.trace is not None if frames else not known and writer.known:
            facts = None
            if frames or self.config.trace:
                own = {"text": writer.outcome.text, "seed": self.config.seed}
                own["key"] = writer.work.request.key
                facts = writer.facts() | own
            chunks += self._chunks(index, [writer.closing()], facts)
        return chunks

    def _chunks(self, index: int, pieces: list[Fields], facts: Fields | None = None) -> list[Fields]:
        """The chunks of a choice, of which the first has the facts."""
        pieces = pieces or [self.writers[index].delta("")] * (facts is not None)
        chunks = [self._object(self.kind.chunk, [{"index": index, **piece}]) for piece in pieces]
        if facts is not None:
            chunks[0]["diffusion"] = facts
        return chunks

    def _frame(self, writer: TextWriter, frame: Frame) -> Fields:
        """A frame, whose positions count from the first one that is answered. What is denoised after the
        last one, as a canvas is whole, is left out."""
        region = writer.region
        number = num_at_start(self._tokenizer, writer.before, *writer.given)  # that no text precedes
        revealed = []
        for each in frame.revealed:
            if each.position >= region.stop:
                continue
            position = each.position - region.start
            fields = {"position": position, **self._token(each.token, each.log_prob, position < number)}
            if self.config.top_forbidden:
                fields["forbidden"] = [self._token(*token, position < number) for token in each.forbidden]
            revealed.append(fields)
        committed = min(max(frame.num_final, region.start), region.stop) - region.start
        hidden = [position - region.start for position in frame.hidden if position < region.stop]
        return {"step": frame.step, "revealed": revealed, "hidden": hidden, "committed": committed}

    def _token(self, token: int, log_prob: float, first: bool) -> Fields:
        """A token, with its bytes where it is a part of a character; a special one, which has no text, by its
        name."""
        written = self._token_bytes(token, first=first)
        text = written.decode(errors="replace") or str(self._tokenizer.decode([token]))
        part = {"bytes": [*written]} if UNFINISHED in text else {}
        return {"token": token, "text": text, **part, "probability": math.exp(log_prob)}


def _event(content: Any) -> str:
    return f"data: {to_json(content)}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. Their generator is closed as soon as the client disconnects. Whenever none comes
    for a while, a comment says that the server is still there, which clients and proxies would doubt
    otherwise."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]):
        super().__init__(events, headers={"X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(DisconnectedError, OSError):  # nobody reads the rest
                await while_connected(receive, self.stream_response(send))
        finally:
            await self._events.aclose()

    async def stream_response(self, send: Send) -> None:
        silent = False

        async def say(content: bytes) -> None:
            nonlocal silent
            silent = False
            await send({"type": "http.response.body", "body": content, "more_body": True})

        async def comment() -> None:
            nonlocal silent
            while True:
                silent = True
                await asyncio.sleep(HEARTBEAT)
                if silent:
                    await say(WAITING)

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        commenting = asyncio.create_task(comment())
        try:
            async for event in self._events:
                await say(event.encode())
        finally:
            commenting.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def to_json(value: Any) -> str:
    """JSON; null stands for NaN and infinity, which JSON readers refuse."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
