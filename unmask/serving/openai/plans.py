"""From the body of a request to the sequences that answer it. Encoding, constraints and searches for lengths
take their time: none of this runs in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby

from unmask.config.sampler import SamplerConfig
from unmask.data.decoding import text_after
from unmask.data.encoding import encode_completion, encode_prompt
from unmask.errors import GenerationError
from unmask.generation.constraints.bounded_process import bounded
from unmask.generation.fill_in_the_middle import fim_prompt
from unmask.generation.gap_lengths import find_lengths
from unmask.generation.prompt_log_probs import PromptLogProbs, prompt_log_probs
from unmask.generation.requests import Request, make_infill_requests, make_requests, without_ends
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.limits import Limits
from unmask.serving.model_service import ModelService
from unmask.serving.openai.editor_requests import NO_SUFFIX, EditRequest, FimRequest
from unmask.serving.openai.progress import Region
from unmask.serving.openai.requests import ChatRequest, CompletionRequest, InfillRequest, SamplingRequest
from unmask.serving.openai.settings import check_limit, sampler_config
from unmask.serving.service import BetweenSteps, Result, Work

MOST_SEARCHED = 512
"""Tokens of all gaps of a request whose lengths are searched: others wait meanwhile."""


@dataclass(frozen=True)
class Context:
    """For whom a request is planned.

    Attributes:
        owner: who takes turns with others.
    """

    service: ModelService
    limits: Limits
    owner: str

    @property
    def lm(self) -> DiffusionLM:
        return self.service.lm

    async def make(self, function: Callable[[], Result], *, compiles: bool) -> Result:
        """The result of a function, which takes its time; `compiles`: whether it compiles a constraint."""
        return await (
            self.service.aside(self.bounded(function), owner=self.owner)
            if compiles
            else asyncio.to_thread(function)
        )

    def bounded(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """A function that compiles constraints, within the limits."""

        def within() -> Result:
            with bounded(self.limits.compile_seconds, self.limits.compile_bytes):
                return function()

        return within


@dataclass(frozen=True)
class Plan:
    """What answers a request.

    Attributes:
        work: one sequence per answer; those of one prompt side by side.
        regions: of each sequence, what is answered.
        stops: strings before which answers are cut.
        prompt_tokens: of all prompts, each counted once; of a text with gaps, what is not missing.
        weights: with which lengths were searched, which have to fill them, as of `ModelService.submit`; None:
            any.
    """

    work: list[Work]
    regions: list[Region]
    stops: list[str]
    prompt_tokens: int
    weights: int | None = None

    @property
    def config(self) -> SamplerConfig:
        return self.work[0].config

    @property
    def keys(self) -> list[int]:
        """Of the random numbers, one per answer."""
        return [each.request.key for each in self.work]


async def plan_completion(context: Context, body: CompletionRequest | FimRequest) -> Plan:
    """A completion, or with a suffix what stands before it."""
    prompts = _prompts(body.prompt)
    check_answers(context, len(prompts), body)
    if body.max_tokens == 0 and (body.suffix or not (isinstance(body, CompletionRequest) and body.echo)):
        raise GenerationError(
            "0 tokens are no answer", where="max_tokens", remedy="Send 1 or more, or echo the prompt"
        )
    if body.suffix and body.suffix != NO_SUFFIX:
        return await _plan_middle(context, body, prompts)
    config = sampler_config(context.lm, body, context.limits, top_log_probs=_top_log_probs(body))
    encoded = await asyncio.to_thread(
        lambda: [encode_prompt(context.lm.tokenizer, prompt) for prompt in prompts]
    )
    return await plan_prompts(context, body, encoded, config)


async def plan_prompts(
    context: Context,
    body: ChatRequest | CompletionRequest | EditRequest | FimRequest,
    encoded: list[list[int]],
    config: SamplerConfig,
) -> Plan:
    """Completions of token ids."""
    check_length(context.lm, max(map(len, encoded)) + config.max_new_tokens, context.limits)
    repeated = _repeated(encoded, body)
    make = partial(make_requests, context.lm, repeated, config, body.diffusion.keys)
    requests = await context.make(make, compiles=config.constraint is not None)
    regions, weights = [Region(request.start, request.length) for request in requests], None
    if isinstance(body, CompletionRequest) and body.echo:
        echoes, weights = await _echoes(context, body, encoded)
        shown = [echo for echo in echoes for _ in range(body.n)]
        regions = [
            Region(
                request.start,
                request.length if body.max_tokens != 0 else request.start,
                before,
                prompt=prompt,
            )
            for request, (before, prompt) in zip(requests, shown, strict=True)
        ]
    return _plan(body, requests, config, regions, sum(map(len, encoded)), weights)


async def _echoes(
    context: Context, body: CompletionRequest, encoded: list[list[int]]
) -> tuple[list[tuple[str, PromptLogProbs | None]], int | None]:
    """The text of each prompt with its log-probabilities, if they are wanted, and the weights that gave them,
    None: any."""
    lm, logprobs = context.lm, body.logprobs

    def decoded() -> list[str]:
        return [
            text if isinstance(text, str) else text_after(lm.tokenizer, [], text)
            for text in _prompts(body.prompt)
        ]

    def found(between_steps: BetweenSteps) -> list[PromptLogProbs]:
        return [prompt_log_probs(lm, ids, logprobs or 0, between_steps) for ids in encoded]

    texts = await asyncio.to_thread(decoded)
    if logprobs is None:
        return [(text, None) for text in texts], None
    prompts, weights = await _searched(context, found)
    return list(zip(texts, prompts, strict=True)), weights


async def plan_infill(context: Context, body: InfillRequest) -> Plan:
    """A text with its gaps filled."""
    check_answers(context, 1, body)
    config = without_ends(context.lm, sampler_config(context.lm, body, context.limits))
    parts = await asyncio.to_thread(_parts, context.lm, body, context.limits)
    ids, weights = await _with_lengths(context, parts, config, body.max_gap, body.gap_mark)
    check_limit(
        ids.count(context.lm.mask_token_id),
        context.limits.max_tokens,
        "text" if body.text is not None else "segments",
        "tokens",
    )
    requests = await _infill_requests(context, ids, config, body)
    return _plan(
        body,
        requests,
        config,
        [Region(0, request.length, fills=True) for request in requests],
        weights=weights,
    )


async def _plan_middle(
    context: Context, body: CompletionRequest | FimRequest, prompts: Sequence[str | list[int]]
) -> Plan:
    """What stands between a prompt and a suffix: a gap for a model that sees both sides, else the completion
    of a prompt that has both."""
    if len(prompts) != 1 or not isinstance(prompts[0], str):
        raise GenerationError(
            "a suffix needs one prompt, as text", where="prompt", remedy="Send one request for each"
        )
    if isinstance(body, CompletionRequest) and body.echo:
        raise GenerationError("has no meaning with a suffix", where="echo", remedy="Leave it out")
    lm, prompt, suffix = context.lm, prompts[0], body.suffix or ""
    config = sampler_config(lm, body, context.limits, top_log_probs=_top_log_probs(body))
    if lm.autoregressive:
        encoded = await asyncio.to_thread(fim_prompt, lm, prompt, suffix)
        return await plan_prompts(context, body, [encoded], config)
    if lm.attention != "bidirectional":
        what = f"a model with {lm.attention.replace('_', '-')} attention does not see the text after a gap"
        raise GenerationError(
            what, where="suffix", remedy="Use a bidirectional model, or complete the prompt alone"
        )
    config, size = without_ends(lm, config), config.max_new_tokens
    before, after = await asyncio.to_thread(
        lambda: (encode_prompt(lm.tokenizer, prompt), encode_completion(lm.tokenizer, "<gap>", suffix))
    )
    exact = body.diffusion.length == "exact"
    parts = [[*before, *[lm.mask_token_id] * size, *after]] if exact else [before, after]
    ids, weights = await _with_lengths(context, parts, config, min(size, MOST_SEARCHED), "<gap>")
    requests = await _infill_requests(context, ids, config, body)
    length = len(ids) - len(before) - len(after)
    # the longest one may be too short for what is missing
    fills = not exact and length < min(size, MOST_SEARCHED)
    regions = [Region(len(before), len(before) + length, fills=fills) for _ in requests]
    return _plan(body, requests, config, regions, weights=weights)


async def _with_lengths(
    context: Context, parts: list[list[int]], config: SamplerConfig, max_gap: int, gap_mark: str
) -> tuple[list[int], int | None]:
    """The ids of a text from those between its gaps, with as many mask tokens in each as are found to be
    missing; and the weights that found it, None: any."""
    if len(parts) == 1:
        check_length(context.lm, len(parts[0]), context.limits)
        return parts[0], None

    def search(between_steps: BetweenSteps) -> list[int]:
        return context.bounded(
            lambda: find_lengths(context.lm, [parts], config, max_gap, gap_mark, between_steps)
        )()[0].ids

    check_length(context.lm, sum(map(len, parts)) + (len(parts) - 1) * max_gap, context.limits)
    return await _searched(context, search)


async def _searched(context: Context, search: Callable[[BetweenSteps], Result]) -> tuple[Result, int]:
    """What a search finds, and the weights with which it found all of it."""
    while True:
        weights = context.service.weights
        found = await context.service.search(search, owner=context.owner)
        if context.service.weights == weights:  # else a part of the search was of other weights
            return found, weights


async def _infill_requests(
    context: Context,
    ids: list[int],
    config: SamplerConfig,
    body: InfillRequest | CompletionRequest | FimRequest,
) -> list[Request]:
    """Requests for the hidden positions of a text."""
    repeated = _repeated([ids], body)
    make = partial(make_infill_requests, context.lm, repeated, config, body.diffusion.keys)
    return await context.make(make, compiles=config.constraint is not None)


def _parts(lm: DiffusionLM, body: InfillRequest, limits: Limits) -> list[list[int]]:
    """The ids between gaps whose length is searched; those of gaps whose length is known are mask tokens."""
    if (body.text is None) == (body.segments is None):
        raise GenerationError("give either text or segments", where="text", remedy="Give one of them")
    if body.text is not None and body.lengths is not None:
        raise GenerationError(
            "are for segments", where="lengths", remedy="Leave them out, or give segments in place of text"
        )
    segments = body.text.split(body.gap_mark) if body.text is not None else list(body.segments or [])
    lengths = body.lengths or [None] * (len(segments) - 1)
    if len(lengths) != len(segments) - 1:
        what = f"{len(lengths)} for {len(segments) - 1} gaps"
        raise GenerationError(what, where="lengths", remedy="Give one for each gap; null: it is searched")
    if body.gap_mark in lm.tokenizer.mask_token:
        raise GenerationError(
            "it is in the mask token", where="gap_mark", remedy="Use a text that occurs only where a gap is"
        )
    check_limit(sum(length or 0 for length in lengths), limits.max_tokens, "lengths", "tokens")
    check_limit(
        lengths.count(None) * body.max_gap, min(MOST_SEARCHED, limits.max_tokens), "max_gap", "tokens"
    )
    keep = [lm.tokenizer.mask_token] if body.text is not None else []
    parts = [encode_prompt(lm.tokenizer, segments[0], keep)]
    for length, segment in zip(lengths, segments[1:], strict=True):
        following = encode_completion(lm.tokenizer, body.gap_mark, segment, keep)
        if length is None:
            parts.append(following)
        else:
            parts[-1] += [lm.mask_token_id] * length + following
    return parts


def gaps(request: Request) -> list[tuple[int, int]]:
    """The runs of hidden positions of a text, each as (start, stop)."""
    found, start = [], 0
    for hidden, run in groupby(request.hidden):
        stop = start + len(list(run))
        found += [(start, stop)] if hidden else []
        start = stop
    return found


def _top_log_probs(body: CompletionRequest | FimRequest) -> int | None:
    return body.logprobs if isinstance(body, CompletionRequest) else None


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(token, int) for token in prompt):
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


def check_answers(context: Context, prompts: int, body: SamplingRequest) -> None:
    """Raise GenerationError for more answers than a request may ask for, and OverloadedError where they have
    no place in the queue: before anything is encoded, compiled or searched."""
    if not prompts:
        raise GenerationError("there is none", where="prompt", remedy="Give one")
    check_limit(body.n, context.limits.n, "n", "answers to a prompt")
    check_limit(prompts * body.n, context.limits.sequences, "prompt", "answers at once")
    context.service.check_room(prompts * body.n, context.owner)


def check_length(lm: DiffusionLM, length: int, limits: Limits) -> None:
    """Raise GenerationError for a sequence that is too long; where the model has a longest context, the
    engine does."""
    if lm.context_length is None:
        check_limit(length, limits.length, "prompt", "tokens")


def _repeated(encoded: list[list[int]], body: SamplingRequest) -> list[list[int]]:
    """The prompts, each as often as answers are wanted."""
    return list(chain.from_iterable([ids] * body.n for ids in encoded))


def _plan(
    body: SamplingRequest,
    requests: list[Request],
    config: SamplerConfig,
    regions: list[Region],
    prompt_tokens: int | None = None,
    weights: int | None = None,
) -> Plan:
    """The plan of requests."""
    if prompt_tokens is None:
        prompt_tokens = requests[0].length - sum(requests[0].hidden)
    return Plan(
        [Work(request, config, body.watched) for request in requests],
        regions,
        body.stops,
        prompt_tokens,
        weights,
    )
