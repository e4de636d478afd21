"""The models of a server, as `/v1/models` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from typing_extensions import TypedDict

from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.errors import NotFoundError
from unmask.serving.limits import Limits
from unmask.serving.model_service import ModelService

Model = TypeVar("Model")


class DiffusionFacts(TypedDict):
    """What a model is, as a diffusion model."""

    attention: str
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


def model_card(service: ModelService, limits: Limits, created: int, facts: dict[str, Any]) -> ModelCard:
    """The model of a service; `created`: when it was loaded, in seconds since 1970."""
    card: dict[str, Any] = {"id": service.name, "object": "model", "created": created, "owned_by": "unmask"}
    card |= {"parent": service.parent, "version": service.version}
    most: MostAsked = {"sequences": limits.sequences, "n": limits.n, "max_tokens": limits.max_tokens}
    diffusion = _facts(service.lm)
    return {**card, "diffusion": diffusion, "facts": facts, "limits": most}  # type: ignore[typeddict-item]


def find_model(models: Mapping[str, Model], name: str) -> Model:
    """The model of this name. Raises NotFoundError if there is none."""
    if name not in models:
        remedy = f"This server has {', '.join(map(repr, models))}"
        raise NotFoundError(f"the model {name!r} does not exist", where="model", remedy=remedy)
    return models[name]


def _facts(lm: DiffusionLM) -> DiffusionFacts:
    return {
        "attention": lm.attention,
        "block_size": lm.block_size,
        "context_length": lm.context_length,
        "mask_token": str(lm.tokenizer.mask_token),
        "chat": bool(lm.tokenizer.chat_template),
        "causal": lm.autoregressive,
        "variable_length": lm.expand_token_id is not None,
    }
