"""The results of generation: completions, and the step that revealed each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unmask.config.sampler import SamplerConfig
from unmask.data.decoding import text_after
from unmask.generation.requests import Request
from unmask.models.diffusion_lm import DiffusionLM


@dataclass
class CanvasStep:
    """What a denoising step saw of a canvas of random tokens, and the drawn tokens that it kept. Given the
    canvas, the kept tokens are independent; the others are new random tokens.

    Attributes:
        start: the first of the canvas's positions, counted as in `Trace.canvas`.
        shown: the tokens that the step saw at the positions to predict.
        kept: the tokens that were drawn and kept; -1 where the next step saw a new random token. The last
            step of a canvas keeps none: its most probable tokens are the result.
        log_probs: of the kept tokens under the distribution that they were drawn from, in nats; else 0.
        temperature: of that distribution.
    """

    start: int
    shown: list[int]
    kept: list[int]
    log_probs: list[float]
    temperature: float


@dataclass
class Trace:
    """The whole canvas of a completion, with what follows its end token.

    Attributes:
        canvas: token ids; the mask token at positions that decoding did not reach.
        steps: the step that revealed each position (the last one, with remasking); -1: it is hidden, or was
            never hidden.
        log_probs: of each revealed token under the model at temperature 1 (guidance included), 0 where none
            was revealed.
        sampled_log_probs: the same under the distribution that it was drawn from; only with `config.trace`.
        entropies: of the model's distribution there, in nats; only with `config.trace`.
        top_ids, top_log_probs: of each position the `config.top_log_probs` most probable tokens when it was
            revealed, under the model at temperature 1; [] where none was revealed. Only with that setting.
        forbidden_ids, forbidden_log_probs: likewise the `config.top_forbidden` most probable tokens that the
            constraint forbids there: no text that meets it has them there, given what had been revealed
            before the step.
        forward_passes: passes over the sequence; with a verifier, its passes.
        num_drafted, num_accepted: with mode self-speculative, the tokens that were drafted and verified, and
            those that were kept.
        canvas_steps: of canvases of random tokens, every step; only with `config.trace`.
    """

    canvas: list[int]
    steps: list[int]
    log_probs: list[float]
    sampled_log_probs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_log_probs: list[list[float]] = field(default_factory=list)
    forbidden_ids: list[list[int]] = field(default_factory=list)
    forbidden_log_probs: list[list[float]] = field(default_factory=list)
    forward_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    canvas_steps: list[CanvasStep] = field(default_factory=list)


@dataclass(frozen=True)
class FoundGap:
    """A gap of unknown length, and what the search for its length found.

    Attributes:
        start: the position of its first token in the whole sequence.
        length: the best length, in tokens.
        scores: of the best lengths, in nats: the log-probability of the text next to the gap for each
            (`gap_lengths.py`); empty if the model found the length while it filled the gap.
        forward_passes: passes over the sequence that the search needed; 0 without one.
    """

    start: int
    length: int
    scores: dict[int, float] = field(repr=False)
    forward_passes: int


@dataclass(frozen=True)
class Generation:
    """Completions, one entry per prompt.

    Attributes:
        prompts: token ids.
        texts: what the completions add to their prompts, without special tokens and without the end token
            (`text_after`).
        tokens: completion ids, up to and including the first end token; for infilling the whole sequence.
        log_probs: of these tokens when they were revealed, in nats, at temperature 1.
        steps: the denoising step that revealed each of them.
        forward_passes: passes over each sequence.
        trace: the whole canvases, with `config.trace`.
        agreement: with lossy settings, the fraction of tokens equal to the exact sampler's, measured on some
            of the prompts.
        prompt_reuse: the fraction of prompt tokens whose keys and values came from another sequence with the
            same prompt; None without an exact cache, and from vLLM.
        denoising_steps: of each sequence, with those that revealed only what follows its end token; drafts
            save passes, not steps. None from vLLM.
        accepted_drafts: with mode self-speculative, the fraction of drafted tokens that were kept, over all
            sequences; else None.
        gaps: of each text, its gaps of unknown length; None unless `infill` looked for lengths.
            `forward_passes` does not count this.
    """

    prompts: list[list[int]] = field(repr=False)
    texts: list[str]
    tokens: list[list[int]]
    log_probs: list[list[float]]
    steps: list[list[int]]
    forward_passes: list[int]
    trace: list[Trace] | None = field(default=None, repr=False)
    agreement: float | None = None
    prompt_reuse: float | None = None
    denoising_steps: list[int] | None = None
    accepted_drafts: float | None = None
    gaps: list[list[FoundGap]] | None = None


def end_of(tokens: Sequence[int], eos_token_ids: Sequence[int]) -> int:
    """The number of tokens up to and including the first end token; without an end token, of all."""
    return next(
        (number for number, token in enumerate(tokens, start=1) if token in eos_token_ids), len(tokens)
    )


def make_generation(
    lm: DiffusionLM, requests: Sequence[Request], traces: Sequence[Trace], config: SamplerConfig
) -> Generation:
    """Cut the canvases of completions at their first end token and decode them."""
    ends = []
    for request, trace in zip(requests, traces, strict=True):
        hidden = request.hidden[request.start :]
        shown = next((i for i, step in enumerate(trace.steps) if step < 0 and hidden[i]), len(trace.steps))
        shown = min(shown, request.end - request.start)
        ends.append(end_of(trace.canvas[:shown], lm.eos_token_ids) if request.stop_at_eos else shown)
    tokens = [trace.canvas[:end] for trace, end in zip(traces, ends, strict=True)]
    before = [request.ids[: request.start] for request in requests]
    num_drafted = sum(trace.num_drafted for trace in traces)
    return Generation(
        prompts=[request.prompt for request in requests],
        texts=[
            text_after(lm.tokenizer, *each, lm.eos_token_ids) for each in zip(before, tokens, strict=True)
        ],
        tokens=tokens,
        log_probs=[trace.log_probs[:end] for trace, end in zip(traces, ends, strict=True)],
        steps=[trace.steps[:end] for trace, end in zip(traces, ends, strict=True)],
        forward_passes=[trace.forward_passes for trace in traces],
        denoising_steps=[max(trace.steps, default=-1) + 1 for trace in traces],
        trace=list(traces) if config.trace else None,
        accepted_drafts=sum(trace.num_accepted for trace in traces) / num_drafted if num_drafted else None,
    )
