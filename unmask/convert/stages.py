"""The stages of a conversion: trained weights, learning rate, attention and auxiliary loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from unmask.config.run import AttentionName, Config
from unmask.errors import ConfigError
from unmask.models.adapters import has_adapters
from unmask.models.attention import attention_modules
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.hooks.time_embedding import NAME as TIME_EMBEDDING
from unmask.models.model_state import training_only

MASK_TOKEN = "mask_token"
PEFT_ROW_PARAMETER = "trainable_tokens_delta"
"""Part of the parameter name that PEFT gives to single trained embedding rows."""


class ConversionStage(Config):
    """One stage of a conversion."""

    share: float = Field(default=1.0, gt=0)
    """Weight of the stage when the training steps are divided among the stages."""
    rate: float = Field(default=1.0, gt=0)
    """Multiplies the learning rate."""
    final_rate: float | None = Field(default=None, ge=0)
    """Multiplies the learning rate at the end of the stage, which a cosine schedule then reaches; None: use
    `lr_scheduler_type`."""
    train: Literal["all"] | list[str] = "all"
    """The trained weights: all, or a list of attention, time_embedding (if the model has one), mask_token
    (its embedding row alone) and regular expressions of parameter names."""
    lm_loss: float = Field(default=0.0, ge=0)
    """The weight of an auxiliary next-token loss, which preserves the knowledge of the causal model."""
    attention: AttentionName | None = None
    """Overrides the attention pattern of the conversion."""
    block_size: int | None = Field(default=None, ge=1)
    """Overrides the attention block of the conversion."""

    def parameters(self, lm: DiffusionLM, where: str) -> set[nn.Parameter]:
        """The parameters that the stage trains. The mask token's row is represented by the whole embedding
        table.

        Raises:
            ConfigError: the stage trains nothing, or a name matches no parameter.
        """
        named = dict(lm.model.named_parameters())
        if self.train == "all":
            return set(named.values())
        chosen = {name: _parameters_named(lm, name, named, where) for name in self.train}
        empty = [name for name, found in chosen.items() if not found and name != "time_embedding"]
        if empty or not any(chosen.values()):
            what = (
                f"{repr(empty[0]) if empty else 'the stage'} names no parameters of {type(lm.model).__name__}"
            )
            remedy = (
                "Use attention, mask_token, time_embedding (of a model that has one), or regular "
                "expressions of parameter names"
            )
            raise ConfigError(what, where=where, remedy=remedy)
        return set().union(*chosen.values())


STAGES = (
    ConversionStage(share=0.1, rate=0.5, train=["attention", "time_embedding", MASK_TOKEN]),
    ConversionStage(share=0.6, rate=1.0),
    ConversionStage(share=0.3, rate=0.3, lm_loss=0.1),
)
"""Attention first, so that it learns to look ahead before other weights forget; then all; then all slowly,
with a next-token loss."""


def stage_ends(stages: Sequence[ConversionStage], steps: int) -> list[int]:
    """The optimizer step at which each stage ends, of `steps` in all.

    Raises:
        ConfigError: a stage would have no steps.
    """
    shares = [stage.share for stage in stages]
    ends = _ends(shares, steps)
    if (number := _empty_stage(ends)) is not None:
        enough = math.ceil(sum(shares) / min(shares))
        if _empty_stage(_ends(shares, enough)) is not None:  # round() rounds halves to even numbers
            enough += 1
        what = f"its share, {shares[number - 1]:g} of {sum(shares):g}, rounds to none of the {steps} steps"
        remedy = (
            f"Use max_steps of at least {enough} (or more epochs), give it a larger share, or leave it out"
        )
        raise ConfigError(what, where=f"stages, stage {number}", remedy=remedy)
    return ends


def _ends(shares: list[float], steps: int) -> list[int]:
    return [round(sum(shares[:number]) / sum(shares) * steps) for number in range(1, len(shares) + 1)]


def _empty_stage(ends: list[int]) -> int | None:
    """The number of the first stage without steps; None: every stage has some."""
    return next(
        (number for number, (first, last) in enumerate(pairwise([0, *ends]), start=1) if first == last), None
    )


def _parameters_named(
    lm: DiffusionLM, name: str, named: dict[str, nn.Parameter], where: str = "train"
) -> set[nn.Parameter]:
    if name == "attention":
        return {parameter for module in attention_modules(lm.model) for parameter in module.parameters()}
    if name == "time_embedding":
        return {parameter for key, parameter in named.items() if f"{TIME_EMBEDDING}." in key}
    if name == MASK_TOKEN:  # with adapters PEFT holds its row in a parameter
        return {parameter for key, parameter in named.items() if PEFT_ROW_PARAMETER in key} or {
            lm.model.get_input_embeddings().weight
        }
    try:
        return {parameter for key, parameter in named.items() if re.search(name, key)}
    except re.error as error:
        raise ConfigError(
            f"{name!r} is not a regular expression ({error})",
            where=where,
            remedy="Write it as for Python's re, such as mlp for all names that contain it",
        ) from error


@contextmanager
def freezing(lm: DiffusionLM, stage: ConversionStage) -> Iterator[None]:
    """Let only the weights that the stage trains take gradients, for a while."""
    trained = {parameter for parameter in stage.parameters(lm, "train") if parameter.requires_grad}
    with training_only(lm, trained), _mask_row_alone(lm) if only_mask_row(lm, stage) else nullcontext():
        yield


@contextmanager
def _mask_row_alone(lm: DiffusionLM) -> Iterator[None]:
    """Give the embedding table a gradient for the mask token's row only, for a while.

    The gradient is stopped after the lookup, not at the weights, which wrappers that shard a model replace. A
    head tied to the table contributes no gradient, because the mask token is never predicted.
    """
    table, head = lm.model.get_input_embeddings(), lm.model.get_output_embeddings()

    def stop(_: nn.Module, args: tuple[Tensor, ...], out_BTD: Tensor) -> Tensor:
        return torch.where((args[0] == lm.mask_token_id)[..., None], out_BTD, out_BTD.detach())

    # later hooks add to the embeddings, with gradients of their own
    hook = table.register_forward_hook(stop, prepend=True)
    before = head.__dict__.get("forward")  # set by accelerate when a model is split over devices
    if head.weight is table.weight:
        head.forward = lambda hidden: F.linear(hidden.to(head.weight.device), head.weight.detach(), head.bias)
    try:
        yield
    finally:
        hook.remove()
        head.__dict__.pop("forward", None)
        if before is not None:
            head.forward = before


def only_mask_row(lm: DiffusionLM, stage: ConversionStage) -> bool:
    """Whether the mask token's row is the only row of the embedding table that the stage trains."""
    if stage.train == "all" or MASK_TOKEN not in stage.train or has_adapters(lm):
        return False
    named, table = dict(lm.model.named_parameters()), lm.model.get_input_embeddings().weight
    return not any(table in _parameters_named(lm, name, named) for name in stage.train if name != MASK_TOKEN)
