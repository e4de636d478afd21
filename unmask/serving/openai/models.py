"""The models of a server, as `/v1/models` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import TypedDict

from unmask.serving.errors import NotFoundError
from unmask.serving.limits import RequestLimits
from unmask.serving.scheduler import ModelEngine


class DiffusionFacts(TypedDict):
    """What a model is, as a diffusion model."""

    attention: str
    noise: str
    block_size: int | None
    context_length: int | None
    mask_token: str
    chat: bool
    causal: bool
    variable_length: bool


class MostAsked(TypedDict):
    """The most that a request may ask for: answers to all prompts, answers to one, and new tokens of each."""

    sequences: int
    n: int
    max_tokens: int


class ModelCard(TypedDict):
    """A model. `parent`: the model whose weights it shares, of which it is adapters; `facts`: what the model
    of a client must share, for whom it draws (`model_facts`)."""

    id: str
    object: str
    created: int
    owned_by: str
    parent: str | None
    version: str | None
    diffusion: DiffusionFacts
    facts: dict[str, Any]
    limits: MostAsked


class ModelList(TypedDict):
    """All models."""

    object: str
    data: list[ModelCard]


def model_card(model: ModelEngine, limits: RequestLimits) -> ModelCard:
    """A model, and the most that may be asked of it."""
    lm = model.lm
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "unmask",
        "parent": model.parent,
        "version": model.version,
        "diffusion": {
            "attention": lm.attention,
            "noise": lm.noise,
            "block_size": lm.block_size,
            "context_length": lm.context_length,
            "mask_token": str(lm.tokenizer.mask_token),
            "chat": bool(lm.tokenizer.chat_template),
            "causal": lm.autoregressive,
            "variable_length": lm.expand_token_id is not None,
        },
        "facts": model.facts,
        "limits": {"sequences": limits.sequences, "n": limits.n, "max_tokens": limits.max_tokens},
    }


def find_model(models: Mapping[str, ModelEngine], name: str) -> ModelEngine:
    """The model of this name. Raises NotFoundError if there is none."""
    if name not in models:
        remedy = f"This server has {', '.join(map(repr, models))}"
        raise NotFoundError(f"the model {name!r} does not exist", where="model", remedy=remedy)
    return models[name]
