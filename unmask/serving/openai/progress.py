"""A sequence on its way: from the engine's events to committed text and to what is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unmask.data.decoding import GrowingText, text_after, without_end
from unmask.generation.frames import Frame
from unmask.generation.output import Trace, end_of, make_generation
from unmask.generation.prompt_log_probs import PromptLogProbs
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.openai.committed import CommittedText, tokens_until
from unmask.serving.service import Event, Work


@dataclass(frozen=True)
class Region:
    """The part of a sequence that is answered.

    Attributes:
        start, stop: its positions.
        before: text that the answer begins with.
        fills: whether the length was given by the text around it, so that the answer is whole.
        prompt: the log-probabilities of the prompt, which the answer has too; None: it has not.
    """

    start: int
    stop: int
    before: str = ""
    fills: bool = False
    prompt: PromptLogProbs | None = None


@dataclass(frozen=True)
class Outcome:
    """An answer.

    Attributes:
        text: cut before the first stop string.
        tokens, log_probs: up to the end token, or to the token that completes a stop string.
            Log-probabilities are those when the tokens were revealed, in nats, at temperature 1.
        written: how many of the tokens were not given.
        finish: "stop" or "length".
        forward_passes: None: a stop string ended the sequence before its end, and they are not known.
        trace: None: likewise.
        top: of each token the most probable ones at its position, and their log-probabilities; empty unless
            they are wanted.
    """

    text: str
    tokens: list[int]
    log_probs: list[float]
    written: int
    finish: str
    denoising_steps: int
    forward_passes: int | None
    trace: Trace | None
    top: list[list[tuple[int, float]]]

    @property
    def tokens_per_pass(self) -> float | None:
        """None: the passes are not known."""
        return self.written / self.forward_passes if self.forward_passes else None


class Progress:
    """One sequence: `see` its events, in their order, until `outcome` is there.

    Attributes:
        region: what is answered of it.
        ids: of the whole sequence, as far as the events say.
        outcome: the answer; None: it is not known yet.
    """

    def __init__(self, lm: DiffusionLM, work: Work, region: Region, stops: Sequence[str]):
        self.lm, self.work, self.region, self.stops = lm, work, region, stops
        self.ids = list(work.request.ids)
        self.outcome: Outcome | None = None
        self._text = CommittedText(stops)
        self._log_probs = [0.0] * len(self.ids)
        self._growing = GrowingText(lm.tokenizer, self.before)
        self._tokens: list[int] = []  # committed, up to the end token
        self._step = 0  # that committed them

    @property
    def before(self) -> list[int]:
        """The tokens before those that are answered."""
        return self.work.request.ids[: self.region.start]

    @property
    def given(self) -> tuple[list[int], list[bool]]:
        """The tokens that are answered, as they were at first, and which are hidden."""
        span = slice(self.region.start, self.region.stop)
        return self.work.request.ids[span], self.work.request.hidden[span]

    @property
    def _needs_end(self) -> bool:
        """Whether more is answered than is known where a stop string ends the text."""
        return self.work.config.trace or self.work.config.top_log_probs > 0

    def see(self, event: Event) -> str:
        """The text that an event commits."""
        if self.outcome is not None:
            return ""
        if event.frame is not None:
            for position in event.frame.hidden:
                self.ids[position] = self.lm.mask_token_id
            for each in event.frame.revealed:
                self.ids[each.position], self._log_probs[each.position] = each.token, each.log_prob
        if event.trace is not None:
            return self._end(event.trace)
        return "" if event.frame is None else self._commit(event.frame)

    def _commit(self, frame: Frame) -> str:
        new = self.ids[self.region.start + len(self._tokens) : min(frame.num_final, self.region.stop)]
        if not new or (
            self.work.request.stop_at_eos and self._tokens and self._tokens[-1] in self.lm.eos_token_ids
        ):
            return ""
        self._tokens += new[: end_of(new, self.lm.eos_token_ids)] if self.work.request.stop_at_eos else new
        self._step = frame.step
        released = self._text.grow(
            self._growing.settled(without_end(self._tokens, self.lm.eos_token_ids)), done=False
        )
        if self._text.stop is not None:
            self.end_here()
        return released

    def end_here(self) -> None:
        """Answer what is committed, unless more is answered than is known before the end."""
        if self.outcome is None and not self._needs_end:
            log_probs = self._log_probs[self.region.start : self.region.start + len(self._tokens)]
            self.outcome = self._cut(
                self._decode(self._tokens), self._tokens, log_probs, "stop", self._step, None, None
            )

    def _end(self, trace: Trace) -> str:
        request, region = self.work.request, self.region
        self.ids = [*request.ids[: request.start], *trace.canvas]
        generation = make_generation(self.lm, [request], [trace], self.work.config)
        span = slice(region.start - request.start, region.stop - request.start)
        tokens, log_probs = generation.tokens[0][span], generation.log_probs[0][span]
        whole = self._decode(tokens)
        released = self._text.grow(whole, done=True)
        ended = bool(tokens) and request.stop_at_eos and tokens[-1] in self.lm.eos_token_ids
        whole_text = ended or region.fills or self._text.stop is not None or self._is_complete()
        finish = "stop" if whole_text else "length"
        steps = max(trace.steps, default=-1) + 1
        self.outcome = self._cut(whole, tokens, log_probs, finish, steps, trace.forward_passes, trace)
        return released

    def _is_complete(self) -> bool:
        """Whether there is a constraint, and the text meets it as a whole: no end token has to say that."""
        gaps = self.work.request.gaps
        return bool(gaps) and all(gap.automaton.accepts(self.ids[gap.start : gap.stop]) for gap in gaps)

    def _cut(
        self,
        whole: str,
        tokens: list[int],
        log_probs: list[float],
        finish: str,
        steps: int,
        forward_passes: int | None,
        trace: Trace | None,
    ) -> Outcome:
        if self._text.stop is not None:
            count = tokens_until(lambda number: self._decode(tokens[:number]), len(tokens), self.stops)
            tokens, log_probs = tokens[:count], log_probs[:count]
        top = [] if trace is None else self._top(trace)[: len(tokens)]
        text = whole if self._text.stop is None else whole[: self._text.stop[0]]
        written = sum(self.work.request.hidden[self.region.start : self.region.start + len(tokens)])
        return Outcome(text, tokens, log_probs, written, finish, steps, forward_passes, trace, top)

    def _top(self, trace: Trace) -> list[list[tuple[int, float]]]:
        first = self.region.start - self.work.request.start
        pairs = zip(trace.top_ids[first:], trace.top_log_probs[first:], strict=True)
        return [list(zip(ids, log_probs, strict=True)) for ids, log_probs in pairs]

    def _decode(self, tokens: Sequence[int]) -> str:
        return text_after(self.lm.tokenizer, self.before, tokens, self.lm.eos_token_ids)
