"""The choices of an answer, each a sequence on its way: from the events of its engine to committed text, to
what is answered, and to what each kind of route writes of it."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unmask.data.decoding import (
    GrowingText,
    num_at_start,
    text_after,
    token_bytes,
    token_name,
    token_texts,
    without_end,
)
from unmask.generation.frames import Frame
from unmask.generation.output import Trace, end_of, make_generation
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.openai.edits import edited_region
from unmask.serving.openai.plans import RequestPlan
from unmask.serving.openai.requests import ChatRequest, EditRequest, SamplingRequest
from unmask.serving.openai.tools import Call, CallReader, held_back
from unmask.serving.submission import Event

LEAST_LOG_PROB = -9999.0
"""What OpenAI writes for a log-probability of minus infinity, which JSON has no number for."""
Fields = dict[str, Any]


@dataclass(frozen=True)
class ChoiceOutcome:
    """An answer.

    Attributes:
        text: cut before the first stop string.
        tokens, log_probs: up to the end token, or to the token that completes a stop string.
            Log-probabilities are those when the tokens were revealed, in nats, at temperature 1.
        written: how many of the tokens were not given.
        finish: "stop" or "length".
        trace: None: a stop string ended the sequence before its end, and it is not known.
        top: of each token the most probable ones at its position, and their log-probabilities; empty unless
            they are wanted.
    """

    text: str
    tokens: list[int]
    log_probs: list[float]
    written: int
    finish: str
    denoising_steps: int
    trace: Trace | None
    top: list[list[tuple[int, float]]]

    @property
    def forward_passes(self) -> int | None:
        """None: likewise."""
        return None if self.trace is None else self.trace.forward_passes

    @property
    def tokens_per_pass(self) -> float | None:
        """None: the passes are not known."""
        return self.written / self.forward_passes if self.forward_passes else None


class TextWriter:
    """A choice of a completion: the pieces that its events commit, and what is answered in the end."""

    def __init__(self, lm: DiffusionLM, body: SamplingRequest, plan: RequestPlan, index: int):
        self.lm, self.tokenizer, self.body = lm, lm.tokenizer, body
        self.work, self.region = plan.work[index], plan.regions[index]
        request, region, prompt = self.work.request, self.region, self.region.prompt
        self.before = request.ids[: region.start]
        # what is answered, as it was at first, and which of it is hidden
        self.given = request.ids[region.start : region.stop], request.hidden[region.start : region.stop]
        self._outcome: ChoiceOutcome | None = None
        self._ids = list(request.ids)  # as far as the events say
        self._log_probs = [0.0] * len(self._ids)
        self._text, self._growing = CommittedText(body.stops), GrowingText(self.tokenizer, self.before)
        self._tokens: list[int] = []  # committed, up to the end token
        self._step = 0  # that committed them
        self._name = functools.cache(functools.partial(token_name, self.tokenizer))
        self._of_prompt = None
        if prompt is not None:
            top = prompt.top if self.work.config.top_log_probs else []
            self._of_prompt = self._listed([], prompt.tokens, prompt.log_probs, top, 0)

    @property
    def known(self) -> bool:
        """Whether the answer is known."""
        return self._outcome is not None

    @property
    def outcome(self) -> ChoiceOutcome:
        """The answer, once it is known."""
        assert self._outcome is not None
        return self._outcome

    def see(self, event: Event) -> list[Fields]:
        """The pieces of chunks that the next event of the sequence adds."""
        if self.known:
            return []
        if event.frame is not None:
            for position in event.frame.hidden:
                self._ids[position] = self.lm.mask_token_id
            for each in event.frame.revealed:
                self._ids[each.position], self._log_probs[each.position] = each.token, each.log_prob
        if event.trace is not None:
            text = self._end(event.trace)
        else:
            text = "" if event.frame is None else self._commit(event.frame)
        pieces = self.write(text, done=self.known)
        if self.complete:
            self._end_here()
        return pieces

    def _commit(self, frame: Frame) -> str:
        ends = self.lm.eos_token_ids if self.work.request.stop_at_eos else ()
        new = self._ids[self.region.start + len(self._tokens) : min(frame.num_final, self.region.stop)]
        if not new or (self._tokens and self._tokens[-1] in ends):
            return ""
        self._tokens += new[: end_of(new, ends)]
        self._step = frame.step
        settled = self._growing.settled(without_end(self._tokens, self.lm.eos_token_ids))
        released = self._text.grow(settled, done=False)
        if self._text.stop is not None:
            self._end_here()
        return released

    def _end_here(self) -> None:
        """Answer what is committed, unless more is answered than is known before the end."""
        config = self.work.config
        if not (self.known or config.trace or config.top_log_probs > 0):
            log_probs = self._log_probs[self.region.start : self.region.start + len(self._tokens)]
            whole = self._decode(self._tokens)
            self._outcome = self._cut(whole, self._tokens, log_probs, "stop", self._step)

    def _end(self, trace: Trace) -> str:
        request, region = self.work.request, self.region
        ids = [*request.ids[: request.start], *trace.canvas]
        generation = make_generation(self.lm, [request], [trace], self.work.config)
        span = slice(region.start - request.start, region.stop - request.start)
        tokens, log_probs = generation.tokens[0][span], generation.log_probs[0][span]
        whole = self._decode(tokens)
        released = self._text.grow(whole, done=True)
        ended = bool(tokens) and request.stop_at_eos and tokens[-1] in self.lm.eos_token_ids
        # a text that meets a constraint as a whole needs no end token
        met = bool(request.gaps) and all(
            self.lm.mask_token_id not in given and gap.automaton.accepts(given)
            for gap in request.gaps
            for given in [ids[gap.start : gap.stop]]
        )
        finish = "stop" if ended or region.fills or self._text.stop is not None or met else "length"
        steps = max(trace.steps, default=-1) + 1
        self._outcome = self._cut(whole, tokens, log_probs, finish, steps, trace)
        return released

    def _cut(
        self,
        whole: str,
        tokens: list[int],
        log_probs: list[float],
        finish: str,
        steps: int,
        trace: Trace | None = None,
    ) -> ChoiceOutcome:
        text, top = whole, []
        if self._text.stop is not None:
            text = whole[: self._text.stop[0]]
            count = tokens_until(lambda number: self._decode(tokens[:number]), len(tokens), self.body.stops)
            tokens, log_probs = tokens[:count], log_probs[:count]
        if trace is not None:
            first = self.region.start - self.work.request.start
            pairs = zip(trace.top_ids[first:], trace.top_log_probs[first:], strict=True)
            top = [list(zip(*pair, strict=True)) for pair in pairs][: len(tokens)]
        return ChoiceOutcome(
            text, tokens, log_probs, sum(self.given[1][: len(tokens)]), finish, steps, trace, top
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return text_after(self.tokenizer, self.before, tokens, self.lm.eos_token_ids)

    @property
    def complete(self) -> bool:
        """Whether what has been written is the whole choice, though more text may follow."""
        return False

    def opening(self) -> list[Fields]:
        """What chunks begin with."""
        return [self.delta(self.region.before)] if self.region.before else []

    def write(self, text: str, *, done: bool) -> list[Fields]:
        """The chunks of newly committed text; `done`: nothing follows."""
        return [self.delta(text)] if text else []

    def delta(self, text: str) -> Fields:
        """A chunk with a text."""
        return {"text": text, "logprobs": None, "finish_reason": None}

    def closing(self) -> Fields:
        """The last chunk."""
        return {"text": "", "logprobs": self._logprobs(), "finish_reason": self.outcome.finish}

    def choice(self) -> Fields:
        """The whole."""
        text = self.region.before + self.outcome.text
        return {"text": text, "logprobs": self._logprobs(), "finish_reason": self.outcome.finish}

    def facts(self) -> Fields:
        """The numbers of the choice; with a trace also the tokens, and the whole canvas with the step that
        revealed each position."""
        outcome, trace = self.outcome, self.outcome.trace
        facts: Fields = {
            "denoising_steps": outcome.denoising_steps,
            "forward_passes": outcome.forward_passes,
            "tokens_per_pass": outcome.tokens_per_pass,
        }
        if self.work.config.trace:
            facts["prompt"], facts["tokens"] = self.work.request.prompt, outcome.tokens
            facts["log_probs"] = [*map(_finite, outcome.log_probs)]
            facts["trace"] = None if trace is None else asdict(trace)
        return facts

    def _logprobs(self) -> Fields | None:
        if not self.body.wants_log_probs:
            return None
        outcome, region = self.outcome, self.region
        own = self._listed(self.before, outcome.tokens, outcome.log_probs, outcome.top, len(region.before))
        both = (
            own
            if self._of_prompt is None
            else {name: self._of_prompt[name] + each for name, each in own.items()}
        )
        return {**both, "top_logprobs": both["top_logprobs"] or None}

    def _listed(
        self,
        before: list[int],
        tokens: list[int],
        log_probs: Sequence[float | None],
        top: Sequence[list[tuple[int, float]] | None],
        offset: int,
    ) -> dict[str, list[Any]]:
        """The lists of `logprobs`, of tokens after others."""
        firsts = self._firsts(before, tokens)
        *offsets, _ = itertools.accumulate(
            map(len, token_texts(self.tokenizer, before, tokens)), initial=offset
        )
        most = zip(tokens, top, firsts, strict=False)
        return {
            "tokens": [self._name(token, first=first) for token, first in zip(tokens, firsts, strict=True)],
            "token_logprobs": [value if value is None else _finite(value) for value in log_probs],
            "top_logprobs": [each and self._by_name(token, each, first) for token, each, first in most],
            "text_offset": offsets,
        }

    def _firsts(self, before: list[int], tokens: list[int]) -> list[bool]:
        """For each token, whether no text precedes it."""
        number = num_at_start(self.tokenizer, before, tokens)
        return [at < number for at in range(len(tokens))]

    def _by_name(self, chosen: int, top: list[tuple[int, float]], first: bool) -> dict[str, float]:
        """Log-probabilities of the likeliest tokens at a position. Of two with the same text, the other than
        the chosen one has its id for a name, as vLLM writes it."""
        found: dict[str, float] = {}
        for token, log_prob in sorted(top, key=lambda pair: pair[0] != chosen):
            name = self._name(token, first=first)
            found[f"token_id:{token}" if name in found else name] = _finite(log_prob)
        return found


class FimWriter(TextWriter):
    """A choice of a completion for editors. Those made for Mistral's API read a message, those made for
    Inception's the text."""

    def opening(self) -> list[Fields]:
        return [{**self.delta(""), "delta": {"role": "assistant", "content": ""}}]

    def delta(self, text: str) -> Fields:
        return {**super().delta(text), "delta": {"content": text}}

    def closing(self) -> Fields:
        return {**super().closing(), "delta": {"content": ""}}

    def choice(self) -> Fields:
        choice = super().choice()
        return {**choice, "message": {"role": "assistant", "content": choice["text"], "refusal": None}}


class InfillWriter(TextWriter):
    """A choice of a text with gaps. The whole one also has what each gap was filled with."""

    def choice(self) -> Fields:
        return {**super().choice(), "gaps": self._gaps()}

    def closing(self) -> Fields:
        return {**super().closing(), "gaps": self._gaps()}

    def _gaps(self) -> list[Fields]:
        ids, start, found = self.outcome.tokens, 0, []
        for hidden, run in itertools.groupby(self.work.request.hidden):
            length = len(list(run))
            if hidden:
                text = text_after(self.tokenizer, ids[:start], ids[start : start + length])
                found.append({"start": start, "length": length, "text": text})
            start += length
        return found


class ChatWriter(TextWriter):
    """A choice of a chat."""

    def __init__(self, lm: DiffusionLM, body: SamplingRequest, plan: RequestPlan, index: int):
        super().__init__(lm, body, plan, index)
        self._calls = plan.calls
        self.reader = self._make_reader()

    def _make_reader(self) -> CallReader | None:
        """What finds calls; None: there are none."""
        if self._calls is None:
            return None
        assert isinstance(self.body, ChatRequest)
        names = {tool.function.name for tool in self.body.tools or []}
        return CallReader(self._calls, names, single=not self.body.parallel_tool_calls)

    @property
    def complete(self) -> bool:
        return self.reader is not None and self.reader.single and self.reader.calls > 0

    def opening(self) -> list[Fields]:
        return [_chat_delta({"role": "assistant", "content": ""})]

    def write(self, text: str, *, done: bool) -> list[Fields]:
        number = 0 if self.reader is None else self.reader.calls
        chunks = []
        for piece in _pieces(self.reader, text, done=done):
            if isinstance(piece, Call):
                chunks.append(_chat_delta({"tool_calls": [{"index": number, **piece.as_openai()}]}))
                number += 1
            else:
                chunks.append(self.delta(piece))
        return chunks

    def delta(self, text: str) -> Fields:
        return _chat_delta({"content": text})

    def closing(self) -> Fields:
        called = self.reader is not None and self.reader.calls > 0
        return {
            "delta": {},
            "logprobs": self._logprobs(),
            "finish_reason": "tool_calls" if called else self.outcome.finish,
        }

    def choice(self) -> Fields:
        pieces = _pieces(self._make_reader(), self.outcome.text, done=True)
        content = "".join(each for each in pieces if isinstance(each, str))
        calls = [each for each in pieces if isinstance(each, Call)]
        message: Fields = {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
        }
        message |= {"tool_calls": [call.as_openai() for call in calls]} if calls else {}
        return {
            "message": message,
            "logprobs": self._logprobs(),
            "finish_reason": "tool_calls" if calls else self.outcome.finish,
        }

    def _logprobs(self) -> Fields | None:
        if not self.body.wants_log_probs:
            return None
        outcome = self.outcome
        firsts = self._firsts(self.before, outcome.tokens)
        tokens = zip(
            outcome.tokens, outcome.log_probs, outcome.top or [[]] * len(outcome.tokens), firsts, strict=True
        )
        content = [
            self._token(token, value, first) | {"top_logprobs": [self._token(*each, first) for each in top]}
            for token, value, top, first in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, log_prob: float, first: bool) -> Fields:
        written = token_bytes(self.tokenizer, token, first=first)
        return {"token": self._name(token, first=first), "logprob": _finite(log_prob), "bytes": [*written]}


class EditWriter(ChatWriter):
    """A choice of an edit, which is written again when it is whole: a stream has it in one piece."""

    def write(self, text: str, *, done: bool) -> list[Fields]:
        return [self.delta(self._region())] if done else []

    def choice(self) -> Fields:
        whole = super().choice()
        whole["message"]["content"] = self._region()
        return whole

    def _region(self) -> str:
        assert isinstance(self.body, EditRequest)
        return edited_region(self.outcome.text, self.body.content)


def _pieces(reader: CallReader | None, text: str, *, done: bool) -> list[str | Call]:
    """The content and the calls that a text adds."""
    return list(reader.read(text, done=done)) if reader is not None else [text] * bool(text)


def _chat_delta(delta: Fields) -> Fields:
    return {"delta": delta, "logprobs": None, "finish_reason": None}


def _finite(log_prob: float) -> float:
    return max(log_prob, LEAST_LOG_PROB)


class CommittedText:
    """A text that grows, and is cut before the first stop string.

    Args:
        stops: the stop strings, none empty.

    Attributes:
        text: what has been released.
        stop: where the stop string begins and ends; None: there is none yet.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = stops
        self.text = ""
        self.stop: tuple[int, int] | None = None
        self._searched = 0  # characters in which no stop string is

    def grow(self, sure: str, *, done: bool) -> str:
        """What is released of the text, of which nothing changes any more what is there; `done`: nothing
        follows."""
        if self.stop is not None:
            return ""
        self.stop = find_stop(sure, self.stops, max(0, self._searched - max(map(len, self.stops), default=0)))
        self._searched = len(sure)
        if self.stop is not None:
            sure = sure[: self.stop[0]]
        elif not done:
            sure = sure[: len(sure) - held_back(sure, self.stops)]
        # what was sent stays, also where a decoder has changed its mind about it
        released = sure[len(self.text) :]
        self.text += released
        return released


def find_stop(text: str, stops: Sequence[str], since: int = 0) -> tuple[int, int] | None:
    """Where, from `since` on, the stop string begins and ends that is complete first (of several, the
    longest); None: the text has none. It is the same however the text arrives."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop, since)) >= 0]
    return min(found)[::-1] if found else None


def tokens_until(decode: Callable[[int], str], count: int, stops: Sequence[str]) -> int:
    """The number of the first of `count` tokens with which a stop string is complete; `decode` gives the text
    of the first `number` tokens."""
    return bisect_left(range(count), True, key=lambda number: find_stop(decode(number), stops) is not None)
