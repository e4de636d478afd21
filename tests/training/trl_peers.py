"""Helpers of the comparisons with TRL's trainers: the gradients of each step, and the distance between two.

The remaining difference: TRL computes the head in float32 for every model dtype. Unmask's model has one more
token, the mask,
which it never predicts: its rows have no gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TrainerCallback

from tests.tiny import llama_causal

Gradients = list[dict[str, Tensor]]


class Watch(TrainerCallback):
    """Keeps the gradients of each optimizer step."""

    def __init__(self) -> None:
        self.seen: Gradients = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        self.seen.append(
            {
                name: weight.grad.clone()
                for name, weight in model.named_parameters()
                if weight.grad is not None
            }
        )


def stock_on_disk(path: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """The stock model in float64, loaded from disk, where TRL finds its reference model too."""
    source, tokenizer = llama_causal()
    source.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), tokenizer


def distance(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest distance of the gradients of a parameter, relative to their norm."""
    assert mine.keys() == other.keys()
    gaps = []
    for name, gradient in other.items():
        rows = len(gradient)
        assert gradient.norm() > 0 and not mine[name][rows:].any()
        gaps.append(float((mine[name][:rows] - gradient).norm() / gradient.norm()))
    return max(gaps)
