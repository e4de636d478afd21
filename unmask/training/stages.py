"""The stages of a conversion: what each trains, how fast, under which attention, with which auxiliary loss. Data, not code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from unmask.config import Config
from unmask.errors import ConfigError
from unmask.models.attention import Pattern
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.time_embedding import NAME as TIME_EMBEDDING

MASK_TOKEN = "mask_token"


class ConversionStage(Config):
    """One stage of a conversion."""

    share: float = Field(default=1.0, gt=0)
    """Of the training steps, relative to the other stages."""
    rate: float = Field(default=1.0, gt=0)
    """Times the learning rate."""
    train: Literal["all"] | list[str] = "all"
    """What is trained: attention, time_embedding, mask_token (its own embedding row), or regular expressions of parameter names."""
    lm_loss: float = Field(default=0.0, ge=0)
    """The weight of an auxiliary next-token loss, so that the model keeps what it knew."""
    attention: Pattern | None = None
    """Another attention pattern than the conversion's."""
    block_size: int | None = Field(default=None, ge=1)
    """Another attention block than the conversion's."""

    def parameters(self, lm: DiffusionLM, where: str) -> set[nn.Parameter]:
        """What the stage trains; the mask token's row belongs to the embedding table, which is in the set for it.

        Raises:
            ConfigError: a name that no parameter has.
        """
        named = dict(lm.model.named_parameters())
        if self.train == "all":
            return set(named.values())
        found: set[nn.Parameter] = set()
        for name in self.train:
            chosen = _named(lm, name, named)
            if not chosen:
                remedy = "Use attention, time_embedding (of a model that has one), mask_token, or a regular expression of parameter names"
                raise ConfigError(f"{name!r} names no parameters of {type(lm.model).__name__}", where=where, remedy=remedy)
            found |= chosen
        return found


STAGES = (
    ConversionStage(share=0.1, rate=0.5, train=["attention", MASK_TOKEN]),
    ConversionStage(share=0.6, rate=1.0),
    ConversionStage(share=0.3, rate=0.3, lm_loss=0.1),
)
"""Attention first, so that it learns to look ahead before the rest forgets; then everything; then slowly, keeping next-token
prediction. A model with a time embedding trains it from the first stage on."""


def _named(lm: DiffusionLM, name: str, named: dict[str, nn.Parameter]) -> set[nn.Parameter]:
    if name == "attention":
        modules = [module for module in lm.model.modules() if type(module).__name__.endswith("Attention")]
        return {parameter for module in modules for parameter in module.parameters()}
    if name == "time_embedding":
        return {parameter for key, parameter in named.items() if f"{TIME_EMBEDDING}." in key}
    if name == MASK_TOKEN:
        return {lm.model.get_input_embeddings().weight}
    return {parameter for key, parameter in named.items() if re.search(name, key)}


@contextmanager
def freezing(lm: DiffusionLM, stage: ConversionStage) -> Iterator[None]:
    """Inside, only what the stage trains takes gradients; of the embedding table only the mask token's row where that is named alone."""
    before = {parameter: parameter.requires_grad for parameter in lm.model.parameters()}
    trained = stage.parameters(lm, "train")
    for parameter in before:
        parameter.requires_grad_(before[parameter] and parameter in trained)
    hook = None
    if only_mask_row(stage):
        table = lm.model.get_input_embeddings().weight
        row = torch.zeros(len(table), 1, dtype=table.dtype, device=table.device)
        row[lm.mask_token_id] = 1
        hook = table.register_hook(lambda gradient: gradient * row)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        for parameter, needed in before.items():
            parameter.requires_grad_(needed)


def only_mask_row(stage: ConversionStage) -> bool:
    """Whether the stage trains the mask token's row and no other of the embedding table."""
    return stage.train != "all" and MASK_TOKEN in stage.train
