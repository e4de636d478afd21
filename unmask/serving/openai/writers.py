"""The choices of an answer, whole or in chunks: each kind of route has a writer, one for every choice."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unmask.data.decoding import num_at_start, text_after, token_bytes, token_name, token_texts
from unmask.serving.openai.edits import edited_region
from unmask.serving.openai.plans import Plan
from unmask.serving.openai.progress import Outcome, Progress
from unmask.serving.openai.requests import ChatRequest, EditRequest, SamplingRequest
from unmask.serving.openai.tools import Call, CallReader

LEAST_LOG_PROB = -9999.0
"""What OpenAI writes for a log-probability of minus infinity, which JSON has no number for."""
Fields = dict[str, Any]


class TextWriter:
    """A choice of a completion."""

    def __init__(self, progress: Progress, body: SamplingRequest, plan: Plan):
        self.progress, self.body = progress, body
        self.tokenizer = progress.lm.tokenizer
        self._name = functools.cache(functools.partial(token_name, self.tokenizer))
        prompt, self._of_prompt = progress.region.prompt, None
        if prompt is not None:
            top = prompt.top if progress.work.config.top_log_probs else []
            self._of_prompt = self._listed([], prompt.tokens, prompt.log_probs, top, 0)

    @property
    def outcome(self) -> Outcome:
        """The answer, which is known when a choice is closed."""
        assert self.progress.outcome is not None
        return self.progress.outcome

    @property
    def complete(self) -> bool:
        """Whether what has been written is the whole choice, though more text may follow."""
        return False

    def opening(self) -> list[Fields]:
        """What chunks begin with."""
        return [self.delta(self.progress.region.before)] if self.progress.region.before else []

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
        text = self.progress.region.before + self.outcome.text
        return {"text": text, "logprobs": self._logprobs(), "finish_reason": self.outcome.finish}

    def _logprobs(self) -> Fields | None:
        if not self.body.wants_log_probs:
            return None
        outcome, region = self.outcome, self.progress.region
        own = self._listed(
            self.progress.before, outcome.tokens, outcome.log_probs, outcome.top, len(region.before)
        )
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
        """Of each token whether no text precedes it."""
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
        for hidden, run in itertools.groupby(self.progress.work.request.hidden):
            length = len(list(run))
            if hidden:
                text = text_after(self.tokenizer, ids[:start], ids[start : start + length])
                found.append({"start": start, "length": length, "text": text})
            start += length
        return found


class ChatWriter(TextWriter):
    """A choice of a chat."""

    def __init__(self, progress: Progress, body: SamplingRequest, plan: Plan):
        super().__init__(progress, body, plan)
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
        firsts = self._firsts(self.progress.before, outcome.tokens)
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


def choice_facts(progress: Progress, outcome: Outcome) -> Fields:
    """The numbers of a choice; with a trace also the tokens, and the whole canvas with the step that revealed
    each position."""
    work = progress.work
    facts: Fields = {
        "denoising_steps": outcome.denoising_steps,
        "forward_passes": outcome.forward_passes,
        "tokens_per_pass": outcome.tokens_per_pass,
    }
    if work.config.trace:
        facts |= {
            "prompt": work.request.prompt,
            "tokens": outcome.tokens,
            "log_probs": [*map(_finite, outcome.log_probs)],
        }
        facts["trace"] = None if outcome.trace is None else asdict(outcome.trace)
    return facts


def _pieces(reader: CallReader | None, text: str, *, done: bool) -> list[str | Call]:
    """The content and the calls that a text adds."""
    return list(reader.read(text, done=done)) if reader is not None else [text] * bool(text)


def _chat_delta(delta: Fields) -> Fields:
    return {"delta": delta, "logprobs": None, "finish_reason": None}


def _finite(log_prob: float) -> float:
    return max(log_prob, LEAST_LOG_PROB)
