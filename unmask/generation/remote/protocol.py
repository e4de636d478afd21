"""The protocol of `unmask serve`: JSON of requests and completions, and the facts in which server and client must agree."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from unmask.config.base import Config
from unmask.config.run import SamplerConfig
from unmask.generation.output import Generation, Trace
from unmask.models.diffusion_lm import DiffusionLM

OTHER_WEIGHTS = 409  # the status of a request for weights that the server does not hold


class GenerateRequest(Config):
    """Body of POST /generate, answered by the fields of a `Generation`."""

    prompts: list[list[int]]
    """Token ids."""
    config: SamplerConfig
    """How to sample."""
    keys: list[int]
    """Keys of the random numbers, one per prompt."""
    version: str | None = None
    """The weights to sample from; unset: any."""


class UpdateRequest(Config):
    """Body of POST /update_weights."""

    path: str
    """A folder that the server can read, as `DiffusionLM.save` writes it."""
    version: str
    """The name of these weights."""


def model_facts(lm: DiffusionLM) -> dict[str, Any]:
    """The facts that a server's model must share with the trained one: all but the weights and their dtype."""
    vocabulary = json.dumps(sorted(lm.tokenizer.get_vocab().items()))
    return {
        "model_type": lm.config.model_type,
        **lm.settings,
        "vocab_size": lm.config.vocab_size,
        "context_length": lm.context_length,
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
    }


def differences(facts: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """A description of the facts of a model that are not as expected; empty: all are."""
    return ", ".join(f"{name} is {facts.get(name)!r} and not {fact!r}" for name, fact in expected.items() if facts.get(name) != fact)


def dump_generation(generation: Generation) -> str:
    """JSON of all fields; numbers are restored bit for bit."""
    return json.dumps(dataclasses.asdict(generation))


def read_generation(fields: Mapping[str, Any]) -> Generation:
    """The completions of a parsed `dump_generation`. Raises TypeError for other fields."""
    traces = fields["trace"]
    return Generation(**{**fields, "trace": None if traces is None else [Trace(**trace) for trace in traces]})
