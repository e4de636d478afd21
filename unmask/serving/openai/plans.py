"""From the body of a request to the sequences that answer it. Encoding, constraints and searches for lengths
take their time: none of this runs in the event loop."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.data.decoding import text_after
from unmask.data.encoding import encode_completion, encode_messages, encode_prompt
from unmask.data.formats import call_arguments
from unmask.errors import ConfigError, GenerationError
from unmask.generation.canvas import CanvasSettings
from unmask.generation.constraints.bounded_process import bounded
from unmask.generation.constraints.grammars import JSON
from unmask.generation.fill_in_the_middle import fim_prompt
from unmask.generation.gap_lengths import find_lengths
from unmask.generation.prompt_log_probs import PromptLogProbs, prompt_log_probs
from unmask.generation.requests import (
    Request,
    check_ids,
    completion_length,
    make_infill_requests,
    make_requests,
    without_ends,
)
from unmask.models.chat_template import without_start
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.errors import UnsupportedError, check_depth
from unmask.serving.limits import RequestLimits
from unmask.serving.openai.edits import REGION, edit_prompt, region_to_edit
from unmask.serving.openai.requests import (
    NO_SUFFIX,
    ChatRequest,
    CompletionRequest,
    EditRequest,
    FimRequest,
    InfillRequest,
    Message,
    ObjectFormat,
    SamplingRequest,
    SchemaFormat,
    TextFormat,
)
from unmask.serving.openai.tools import CallFormat, call_constraint, call_format, check_renders_tools
from unmask.serving.scheduler import ModelEngine, Scheduler
from unmask.serving.submission import BetweenSteps, Result, Work

MOST_SEARCHED = 512
"""Tokens of all gaps of a request whose lengths are searched: others wait meanwhile."""
JSON_OBJECT = JSON.replace("start: value", "start: object")
EDIT_MARGIN = 128
"""Tokens by which an edit may be longer than its region: new lines, and the code fence around it."""
COLDEST = 1e-6
"""The lowest temperature on a canvas of random tokens but 0: with it as `t_max` every step draws the most
probable tokens."""
SEEDS = 2**53
"""Seeds that are drawn lie below: JSON of any client reads them exactly."""


@dataclass(frozen=True)
class Context:
    """For whom a request is planned.

    Attributes:
        model: the one of the scheduler's that is asked.
        owner: who takes turns with others.
    """

    scheduler: Scheduler
    model: ModelEngine
    limits: RequestLimits
    owner: str

    @property
    def lm(self) -> DiffusionLM:
        return self.model.lm

    async def make(self, function: Callable[[], Result], *, compiles: bool) -> Result:
        """The result of a function, which takes its time; `compiles`: whether it compiles a constraint."""
        if compiles:
            return await self.scheduler.aside(self.bounded(function), owner=self.owner)
        return await asyncio.to_thread(function)

    def bounded(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """A function that compiles constraints, within the limits."""

        def within() -> Result:
            with bounded(self.limits.compile_seconds, self.limits.compile_bytes):
                return function()

        return within

    async def search(self, function: Callable[[BetweenSteps], Result]) -> tuple[Result, int]:
        """What a search finds with the model, and the weights with which it found all of it."""
        while True:
            weights = self.model.weights
            found = await self.scheduler.search(self.model.name, function, owner=self.owner)
            if self.model.weights == weights:  # else a part of the search was of other weights
                return found, weights

    def check_answers(self, prompts: int, body: SamplingRequest) -> None:
        """Raise GenerationError for more answers than a request may ask for, and OverloadedError where they
        have no place in the queue: before anything is encoded, compiled or searched."""
        if not prompts:
            raise GenerationError("there is none", where="prompt", remedy="Give one")
        check_limit(body.n, self.limits.n, "n", "answers to a prompt")
        check_limit(prompts * body.n, self.limits.sequences, "prompt", "answers at once")
        self.scheduler.check_room(prompts * body.n, self.owner)

    def check_length(self, length: int) -> None:
        """Raise GenerationError for a sequence that is too long; where the model has a longest context, the
        engine does."""
        if self.lm.context_length is None:
            check_limit(length, self.limits.length, "prompt", "tokens")


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
class RequestPlan:
    """What answers a request.

    Attributes:
        work: one sequence per answer; those of one prompt side by side.
        regions: of each sequence, what is answered.
        prompt_tokens: of all prompts, each counted once; of a text with gaps, what is not missing.
        weights: with which lengths were searched, which have to fill them, as of `Scheduler.submit`; None:
            any.
        calls: how the model writes calls; None: it may not call.
    """

    work: list[Work]
    regions: list[Region]
    prompt_tokens: int
    weights: int | None = None
    calls: CallFormat | None = None


async def plan_completion(context: Context, body: CompletionRequest | FimRequest) -> RequestPlan:
    """A completion, or with a suffix what stands before it."""
    prompts = _prompts(body.prompt)
    context.check_answers(len(prompts), body)
    if body.max_tokens == 0 and (body.suffix or not body.echo):
        raise GenerationError(
            "0 tokens are no answer", where="max_tokens", remedy="Send 1 or more, or echo the prompt"
        )
    if body.suffix and body.suffix != NO_SUFFIX:
        return await _plan_middle(context, body, prompts, body.suffix)
    config = sampler_config(context.lm, body, context.limits, top_log_probs=body.logprobs)
    encoded = await asyncio.to_thread(
        lambda: [encode_prompt(context.lm.tokenizer, prompt) for prompt in prompts]
    )
    if body.max_tokens == 0:
        _check_scored(context, encoded, body.n)
        # what follows is not returned: as few tokens as can be are before it, so that it always has room
        plan = await _plan_prompts(
            context, body, [ids[:1] for ids in encoded], config.model_copy(update={"trace": False})
        )
        plan = replace(plan, prompt_tokens=sum(map(len, encoded)))
    else:
        plan = await _plan_prompts(context, body, encoded, config)
    return await _with_echoes(context, body, prompts, encoded, plan) if body.echo else plan


def _check_scored(context: Context, encoded: list[list[int]], answers: int) -> None:
    """Raise GenerationError for prompts that the model cannot read, with nothing after them."""
    longest = context.lm.context_length
    for index, ids in enumerate(encoded):
        where = f"prompt {index * answers}"
        if longest is not None and len(ids) > longest:
            what = f"{len(ids)} prompt tokens exceed the context of {longest}"
            raise GenerationError(what, where=where, remedy="Shorten the prompt")
        check_ids(context.lm, ids, where)
        context.check_length(len(ids))


async def _with_echoes(
    context: Context,
    body: CompletionRequest | FimRequest,
    prompts: Sequence[str | list[int]],
    encoded: list[list[int]],
    plan: RequestPlan,
) -> RequestPlan:
    """A plan whose answers begin with the text of their prompts, and with its log-probabilities if they are
    wanted."""
    lm, logprobs, weights = context.lm, body.logprobs, None
    texts = await asyncio.to_thread(
        lambda: [each if isinstance(each, str) else text_after(lm.tokenizer, [], each) for each in prompts]
    )
    found: list[PromptLogProbs | None] = [None] * len(prompts)
    if logprobs is not None:
        found, weights = await context.search(
            lambda between_steps: [prompt_log_probs(lm, ids, logprobs, between_steps) for ids in encoded]
        )
    regions = [
        replace(
            region,
            stop=region.start if body.max_tokens == 0 else region.stop,
            before=texts[index // body.n],
            prompt=found[index // body.n],
        )
        for index, region in enumerate(plan.regions)
    ]
    return replace(plan, regions=regions, weights=weights)


async def _plan_middle(
    context: Context,
    body: CompletionRequest | FimRequest,
    prompts: Sequence[str | list[int]],
    suffix: str,
) -> RequestPlan:
    """What stands between a prompt and a suffix: a gap for a model that sees both sides, else the completion
    of a prompt that has both."""
    lm, prompt = context.lm, prompts[0]
    if len(prompts) != 1 or not isinstance(prompt, str):
        raise GenerationError(
            "a suffix needs one prompt, as text", where="prompt", remedy="Send one request for each"
        )
    if body.echo:
        raise GenerationError("has no meaning with a suffix", where="echo", remedy="Leave it out")
    config = sampler_config(lm, body, context.limits, top_log_probs=body.logprobs)
    if lm.autoregressive:
        encoded = await asyncio.to_thread(fim_prompt, lm, prompt, suffix)
        return await _plan_prompts(context, body, [encoded], config)
    if lm.attention != "bidirectional":
        what = f"a model with {lm.attention.replace('_', '-')} attention does not see the text after a gap"
        raise GenerationError(
            what, where="suffix", remedy="Use a bidirectional model, or complete the prompt alone"
        )
    config, size = without_ends(lm, config), config.max_new_tokens
    before, after = await asyncio.to_thread(
        lambda: (encode_prompt(lm.tokenizer, prompt), encode_completion(lm.tokenizer, "<gap>", suffix))
    )
    exact, most = body.diffusion.length == "exact", min(size, MOST_SEARCHED)
    if lm.noise != "masked" and not exact:
        what = f"that of a gap is searched with masks, and this model's noise is {lm.noise}"
        raise GenerationError(what, where="length", remedy="Set it to exact: max_new_tokens are written")
    parts = [[*before, *[lm.mask_token_id] * size, *after]] if exact else [before, after]
    ids, weights = await _with_lengths(context, parts, config, most, "<gap>")
    length = len(ids) - len(before) - len(after)
    # the longest one may be too short for what is missing
    region = Region(len(before), len(before) + length, fills=not exact and length < most)
    plan = await _plan(context, body, make_infill_requests, [ids], config)
    return replace(plan, regions=[region] * body.n, weights=weights)


async def plan_infill(context: Context, body: InfillRequest) -> RequestPlan:
    """A text with its gaps filled."""
    context.check_answers(1, body)
    lm, limits = context.lm, context.limits
    config = without_ends(lm, sampler_config(lm, body, limits))
    parts = await asyncio.to_thread(_parts, lm, body, limits)
    ids, weights = await _with_lengths(context, parts, config, body.max_gap, body.gap_mark)
    where = "text" if body.text is not None else "segments"
    check_limit(ids.count(lm.mask_token_id), limits.max_tokens, where, "tokens")
    plan = await _plan(context, body, make_infill_requests, [ids], config)
    regions = [replace(region, fills=True) for region in plan.regions]
    return replace(plan, regions=regions, weights=weights)


async def plan_chat(context: Context, body: ChatRequest) -> RequestPlan:
    """The answers to messages.

    Raises:
        DataError: the model has no chat template, or it refuses the messages.
        GenerationError: `max_tokens` and `max_completion_tokens` differ, the answer has two constraints, or a
            limit is exceeded.
    """
    if body.top_logprobs and not body.logprobs:
        raise GenerationError(
            "has no effect without logprobs", where="top_logprobs", remedy="Set logprobs to true"
        )
    context.check_answers(1, body)
    called = bool(body.tools) and body.tool_choice not in ("auto", "none")
    ids, calls, constraint = await context.make(
        partial(_chat_prompt, context.lm, body, context.limits), compiles=called
    )
    try:
        config = sampler_config(
            context.lm, body, context.limits, constraint=constraint, top_log_probs=body.top_logprobs
        )
        return replace(await _plan_prompts(context, body, [ids], config), calls=calls)
    except GenerationError as error:
        where = error.where or ""
        if constraint is None or body.diffusion.constraint is not None or not where.startswith("constraint"):
            raise
        cause = "response_format" if body.response_format is not None else "tool_choice"
        raise error.moved(cause + where.removeprefix("constraint")) from None


async def plan_edit(context: Context, body: EditRequest) -> RequestPlan:
    """The edited region of a file. Errors as of `plan_chat`, and GenerationError for a message without one
    region."""
    context.check_answers(1, body)
    messages = edit_prompt(body.content, body.instruction)

    def prepare() -> tuple[list[int], SamplerConfig]:
        ids = encode_messages(context.lm.tokenizer, messages)
        default = None
        if body.wanted_tokens is None:
            default = edit_length(context.lm, body, context.limits, len(ids))
        return ids, sampler_config(context.lm, body, context.limits, default_tokens=default)

    ids, config = await asyncio.to_thread(prepare)
    return await _plan_prompts(context, body, [ids], config)


async def _plan_prompts(
    context: Context, body: SamplingRequest, encoded: list[list[int]], config: SamplerConfig
) -> RequestPlan:
    """Completions of token ids."""
    context.check_length(max(map(len, encoded)) + completion_length(context.lm, config.max_new_tokens))
    return await _plan(context, body, make_requests, encoded, config)


async def _plan(
    context: Context,
    body: SamplingRequest,
    make: Callable[..., list[Request]],
    encoded: list[list[int]],
    config: SamplerConfig,
) -> RequestPlan:
    """The plan of token ids, of which `make` makes requests."""
    repeated = [ids for ids in encoded for _ in range(body.n)]
    requests = await context.make(
        partial(make, context.lm, repeated, config, body.diffusion.keys),
        compiles=config.constraint is not None,
    )
    work = [Work(request, config, body.watched) for request in requests]
    regions = [Region(request.start, request.end) for request in requests]
    return RequestPlan(work, regions, sum(request.hidden.count(False) for request in requests[:: body.n]))


async def _with_lengths(
    context: Context, parts: list[list[int]], config: SamplerConfig, max_gap: int, gap_mark: str
) -> tuple[list[int], int | None]:
    """The ids of a text from those between its gaps, with as many mask tokens in each as are found to be
    missing; and the weights that found it, None: any."""
    context.check_length(sum(map(len, parts)) + (len(parts) - 1) * max_gap)
    if len(parts) == 1:
        return parts[0], None

    def search(between_steps: BetweenSteps) -> list[int]:
        find = partial(find_lengths, context.lm, [parts], config, max_gap, gap_mark, between_steps)
        return context.bounded(find)()[0].ids

    return await context.search(search)


def _parts(lm: DiffusionLM, body: InfillRequest, limits: RequestLimits) -> list[list[int]]:
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
    if lm.noise != "masked" and None in lengths:
        what = f"those of gaps are searched with masks, and this model's noise is {lm.noise}"
        remedy = "Give segments with the lengths of all gaps, or a mask token for every missing token"
        raise GenerationError(what, where="lengths", remedy=remedy)
    if body.gap_mark in lm.tokenizer.mask_token:
        raise GenerationError(
            "it is in the mask token", where="gap_mark", remedy="Use a text that occurs only where a gap is"
        )
    check_limit(sum(length or 0 for length in lengths), limits.max_tokens, "lengths", "tokens")
    searched = lengths.count(None) * body.max_gap
    check_limit(searched, min(MOST_SEARCHED, limits.max_tokens), "max_gap", "tokens")
    keep = [lm.tokenizer.mask_token] if body.text is not None else []
    parts = [encode_prompt(lm.tokenizer, segments[0], keep)]
    for length, segment in zip(lengths, segments[1:], strict=True):
        following = encode_completion(lm.tokenizer, body.gap_mark, segment, keep)
        if length is None:
            parts.append(following)
        else:
            parts[-1] += [lm.mask_token_id] * length + following
    return parts


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    single = isinstance(prompt, str) or isinstance(next(iter(prompt), None), int)
    return [prompt] if single else prompt  # type: ignore[list-item, return-value]


def _chat_prompt(
    lm: DiffusionLM, body: ChatRequest, limits: RequestLimits
) -> tuple[list[int], CallFormat | None, ConstraintConfig | None]:
    """What the model reads, how it writes calls, if it may, and what the answer has to match."""
    constraint = format_constraint(body.response_format)
    messages = without_start(lm.tokenizer, template_messages(body.messages))
    if body.tool_choice == "none" or not body.tools:
        if body.tool_choice not in ("none", "auto"):
            raise GenerationError(
                "there are no tools", where="tool_choice", remedy="Give some, or leave it out"
            )
        return encode_messages(lm.tokenizer, messages), None, constraint
    if constraint is not None:
        what = "an answer that has to match it can call no tool"
        raise GenerationError(
            what, where="response_format", remedy="Leave it out, or set tool_choice to none"
        )
    schemas = [tool.model_dump(exclude_none=True) for tool in body.tools]
    check_limit(len(json.dumps(schemas)), limits.schema_bytes, "tools", "bytes")
    check_renders_tools(lm.tokenizer)
    written = call_format(lm.tokenizer)
    ids = encode_messages(lm.tokenizer, messages, schemas)
    return ids, written, call_constraint(body, body.tools, written)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content as one string, and the arguments of calls as objects."""
    rendered = []
    for message in messages:
        content = message.content or ""
        one: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": content if isinstance(content, str) else "".join(part.text for part in content),
            **message.model_dump(include={"name", "tool_call_id"}, exclude_none=True),
        }
        if message.tool_calls:
            one["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        for call in one.get("tool_calls", ()):
            called = call["function"]
            called["arguments"] = call_arguments(called["arguments"])
            check_depth(called["arguments"], "messages.tool_calls.function.arguments")
        rendered.append(one)
    return rendered


def sampler_config(
    lm: DiffusionLM,
    request: SamplingRequest,
    limits: RequestLimits,
    *,
    default_tokens: int | None = None,
    constraint: ConstraintConfig | None = None,
    top_log_probs: int | None = None,
) -> SamplerConfig:
    """The settings of a request. With neither seed nor keys the seed is drawn.

    Args:
        default_tokens: of the answer, where the request does not say how many; None: the sampler's default,
            or the limit if that is lower.

    Raises:
        ConfigError: settings that contradict one another.
        GenerationError: a limit is exceeded, a constraint is given twice, or two names of one field have
            different values.
    """
    default_tokens = default_tokens or min(
        SamplerConfig.model_fields["max_new_tokens"].default, limits.max_tokens
    )
    wanted = request.wanted_tokens
    max_tokens = default_tokens if wanted is None else max(wanted, 1)  # of none, the prompt alone is shown
    given = request.diffusion.sampler
    openai = {
        "max_new_tokens": max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_log_probs": top_log_probs,
    }
    if lm.noise == "uniform" and wanted == 0:
        given["max_denoising_steps"] = 1  # of what is not returned
    if lm.noise == "uniform" and request.temperature is not None:
        openai |= {"temperature": None, **_canvas_temperatures(lm, request.temperature, given)}
    given |= {name: value for name, value in openai.items() if value is not None}
    seed = request.wanted_seed
    if seed is None:
        seed = 0 if request.diffusion.keys is not None else secrets.randbelow(SEEDS)
    given["seed"] = seed
    given |= _biases(lm, request.logit_bias or {}, given)
    if constraint is not None:
        if given.get("constraint") is not None:
            what = "the answer has a constraint already, by response_format or tool_choice"
            raise GenerationError(what, where="constraint", remedy="Leave one out")
        given["constraint"] = constraint
    config = SamplerConfig(**given)
    check_limit(config.max_new_tokens, limits.max_tokens, "max_new_tokens", "tokens")
    for name in ("steps", "max_denoising_steps"):
        check_limit(getattr(config, name) or 0, limits.steps, name, "steps")
    if config.constraint is not None:
        check_limit(len(config.constraint.model_dump_json()), limits.schema_bytes, "constraint", "bytes")
        check_depth(config.constraint.schema_object(), "constraint.json_schema")  # which may be given as text
    return config


def _canvas_temperatures(lm: DiffusionLM, temperature: float, given: Mapping[str, Any]) -> dict[str, float]:
    """The temperatures of a canvas's steps for OpenAI's `temperature`, by which they are multiplied: so 1
    changes nothing. What becomes colder than `COLDEST` is as cold as that, so that 0 draws the most probable
    tokens at every step."""
    own = CanvasSettings.of(lm, SamplerConfig(t_min=given.get("t_min"), t_max=given.get("t_max")))
    t_min, t_max = temperature * own.t_min, temperature * own.t_max
    return {"t_min": t_min if t_min >= COLDEST else 0.0, "t_max": max(t_max, COLDEST)}


def edit_length(lm: DiffusionLM, request: EditRequest, limits: RequestLimits, prompt_tokens: int) -> int:
    """The tokens of an edit that does not say how many it wants: those of the region and `EDIT_MARGIN`, in
    whole decoding blocks, as far as there is room. Raises GenerationError if there is none for the region
    itself."""
    region = len(encode_completion(lm.tokenizer, REGION, region_to_edit(request.content)))
    block, canvas = request.diffusion.block_size or 1, completion_length(lm, 1)
    room = ((lm.context_length or limits.length) - prompt_tokens) // canvas * canvas
    room = min(limits.max_tokens, room) // block * block
    if room < region:
        what = (
            f"the region to edit has {region:,} tokens, and the answer to this message at most "
            f"{max(room, 0):,}"
        )
        raise GenerationError(
            what,
            where="messages",
            remedy="Mark fewer lines, or give max_tokens for an answer that is shorter",
        )
    return min(-(-(region + EDIT_MARGIN) // block) * block, room)


def check_limit(value: int, most: int, where: str, unit: str) -> None:
    """Raise GenerationError for a value above the server's limit, both in the `unit`."""
    if value > most:
        raise GenerationError(
            f"{value:,} exceeds the server's limit of {most:,} {unit}", where=where, remedy="Lower it"
        )


def format_constraint(wanted: TextFormat | ObjectFormat | SchemaFormat | None) -> ConstraintConfig | None:
    """The constraint of a `response_format`. Raises ConfigError for a schema that is no JSON."""
    if isinstance(wanted, SchemaFormat):
        try:
            return ConstraintConfig(json_schema=wanted.json_schema.json_schema)
        except ConfigError as error:
            raise error.moved("response_format.json_schema.schema") from None
    return ConstraintConfig(grammar=JSON_OBJECT) if isinstance(wanted, ObjectFormat) else None


def _biases(lm: DiffusionLM, biases: dict[str, float], given: dict[str, Any]) -> dict[str, list[int]]:
    """The tokens that biases forbid or allow: -100 and 100 are, as OpenAI says, a ban and an exclusive
    selection."""
    found: dict[str, list[int]] = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise GenerationError(
                f"{token!r} is not a token id", where="logit_bias", remedy="Use token ids as keys"
            )
        if bias not in (-100, 0, 100):
            what = (
                f"{bias} for token {token}: only -100 (the token is forbidden), 100 (only such tokens are "
                "allowed) and 0 are supported"
            )
            raise UnsupportedError(what, where="logit_bias", remedy="Use one of them")
        check_ids(lm, [int(token)], "logit_bias")
        if bias:
            found.setdefault("forbidden_tokens" if bias < 0 else "allowed_tokens", []).append(int(token))
    if twice := next((name for name in found if given.get(name)), None):
        raise GenerationError(
            f"says the same as diffusion.{twice}", where="logit_bias", remedy="Leave one out"
        )
    return found
