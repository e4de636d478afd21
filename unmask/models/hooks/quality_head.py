"""A head that estimates how probable it is that a visible token is right, given the rest of the partly filled
text (PRISM, Kim et al. 2025, arXiv 2510.01384).

Shapes: N rows, D hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

NAME = "unmask_quality"


class QualityHead(nn.Module):
    """A linear function of the hidden state that the output head reads at the token's own position; at first
    0, thus probability 1/2.

    A module of the model, saved with it. It has no gradient except where it is trained. It is no `nn.Linear`,
    so that adapters on all linear layers leave it out.
    """

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """The logits [N] of being right."""
        return (hidden_ND.to(self.weight.dtype) * self.weight).sum(-1) + self.bias


def add_quality_head(model: PreTrainedModel) -> QualityHead:
    """The model's quality head; created on first use."""
    existing = quality_head_of(model)
    if existing is None:
        table = model.get_output_embeddings().weight
        existing = QualityHead(table.shape[-1]).to(
            device=table.device, dtype=model.get_input_embeddings().weight.dtype
        )
        setattr(model, NAME, existing)
    return existing


def quality_head_of(model: nn.Module) -> QualityHead | None:
    """The quality head of a model or of a wrapper of it; None: it has none."""
    return next((module for module in model.modules() if isinstance(module, QualityHead)), None)
