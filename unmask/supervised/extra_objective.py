"""An objective beside the masked loss of `SFTTrainer`: what it adds to the model, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unmask.diffusion.views import MaskRNG, Views
from unmask.models.diffusion_lm import DiffusionLM

Plan = Callable[[dict[str, Any], MaskRNG], Views]
"""The views of a batch in the masked loss."""


@dataclass
class ObjectiveLoss:
    """The loss of a micro-batch.

    Attributes:
        loss: summed over the batch's items.
        views: the views whose cross-entropy is added to it, if any.
        metrics: means to log, each with the number of values.
    """

    loss: Tensor
    views: Views | None = None
    metrics: Mapping[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)


def row_weights(chosen_BT: Tensor, items_B: Tensor) -> Tensor:
    """The weights [N] of the chosen positions with which a loss is the mean over those of each row, times the
    row's items."""
    return (items_B / chosen_BT.sum(1).clamp_min(1))[:, None].expand_as(chosen_BT)[chosen_BT]


@dataclass(eq=False)
class Objective:
    """An objective of supervised fine-tuning."""

    args: Any  # the `SFTConfig`

    def prepared(self, lm: DiffusionLM) -> DiffusionLM:
        """The model with what the objective trains."""
        raise NotImplementedError

    def training(self, lm: DiffusionLM) -> AbstractContextManager[None]:
        """A context in which the weights that it trains have gradients."""
        return nullcontext()

    def items(self, lm: DiffusionLM, batch: dict[str, Any], draw: MaskRNG) -> Tensor | None:
        """The divisor of the loss; None: that of the masked loss."""
        return None

    def loss(self, lm: DiffusionLM, batch: dict[str, Any], draw: MaskRNG, plan: Plan) -> ObjectiveLoss:
        """The loss of a micro-batch."""
        raise NotImplementedError
