"""From the fields of a request to the settings of the engine."""

from __future__ import annotations

import secrets
from typing import Any

from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.data.encoding import encode_completion
from unmask.errors import ConfigError, GenerationError
from unmask.generation.constraints.grammars import JSON
from unmask.generation.requests import check_ids
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.errors import UnsupportedError, check_depth
from unmask.serving.limits import Limits
from unmask.serving.openai.editor_requests import EditRequest, FimRequest
from unmask.serving.openai.edits import REGION, region_to_edit
from unmask.serving.openai.requests import (
    NewerRequest,
    ObjectFormat,
    SamplingRequest,
    SchemaFormat,
    TextFormat,
)

JSON_OBJECT = JSON.replace("start: value", "start: object")
EDIT_MARGIN = 128
"""Tokens by which an edit may be longer than its region: new lines, and the code fence around it."""
SEEDS = 2**53
"""Seeds that are drawn lie below: JSON of any client reads them exactly."""


def sampler_config(
    lm: DiffusionLM,
    request: SamplingRequest,
    limits: Limits,
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
    wanted = tokens_wanted(request)
    max_tokens = default_tokens if wanted is None else max(wanted, 1)  # of none, the prompt alone is shown
    given = request.diffusion.sampler
    openai = {
        "max_new_tokens": max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_log_probs": top_log_probs,
    }
    given |= {name: value for name, value in openai.items() if value is not None}
    seed = seed_wanted(request)
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
    check_limit(config.steps or 0, limits.steps, "steps", "steps")
    if config.constraint is not None:
        check_limit(len(config.constraint.model_dump_json()), limits.schema_bytes, "constraint", "bytes")
        check_depth(config.constraint.schema_object(), "constraint.json_schema")  # which may be given as text
    return config


def tokens_wanted(request: SamplingRequest) -> int | None:
    """The tokens of an answer that a request asks for. Raises GenerationError if it asks for two numbers of
    them."""
    newer = request.max_completion_tokens if isinstance(request, NewerRequest) else None
    if None not in (request.max_tokens, newer) and request.max_tokens != newer:
        raise GenerationError(
            "differs from max_tokens", where="max_completion_tokens", remedy="Leave one out"
        )
    return request.max_tokens if newer is None else newer


def seed_wanted(request: SamplingRequest) -> int | None:
    """The seed that a request gives. Raises GenerationError if it gives two."""
    other = request.random_seed if isinstance(request, FimRequest) else None
    if None not in (request.seed, other) and request.seed != other:
        raise GenerationError("differs from seed", where="random_seed", remedy="Leave one out")
    return other if request.seed is None else request.seed


def edit_length(lm: DiffusionLM, request: EditRequest, limits: Limits, prompt_tokens: int) -> int:
    """The tokens of an edit that does not say how many it wants: those of the region and `EDIT_MARGIN`, in
    whole decoding blocks, as far as there is room. Raises GenerationError if there is none for the region
    itself."""
    region, block = (
        len(encode_completion(lm.tokenizer, REGION, region_to_edit(request.content))),
        request.diffusion.block_size or 1,
    )
    room = min(limits.max_tokens, (lm.context_length or limits.length) - prompt_tokens) // block * block
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
