"""An embedding of the noise level, added to the token embeddings (the time conditioning of DiT, Peebles and
Xie 2023).

The noise level is the fraction of hidden tokens in a token's document or attention block: the time t of
training, which is known in generation too. Nothing is added to segments without hidden tokens, so that the
model reads clean text as the causal model does.

Shapes: B batch, T tokens, D hidden width, F frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

FREQUENCIES = 128
NAME = "unmask_time"


class HiddenFraction:
    """The fraction of hidden tokens in the current pass (`value_BT`; None: nothing is hidden), shared by all
    copies of a module.

    With `in_every_pass` the module is called even if nothing is hidden, to add zeros.
    """

    def __init__(self) -> None:
        self.value_BT: Tensor | None = None
        self.in_every_pass = False

    def __deepcopy__(self, memo: dict) -> HiddenFraction:
        return self


class TimeEmbedding(nn.Module):
    """Sinusoids of the fraction of hidden tokens, through an MLP whose last layer starts at zero, so that at
    first nothing changes.

    A module of the model, trained and saved with it. `add` is a forward hook of the input embeddings.
    """

    def __init__(self, width: int, fraction: HiddenFraction):
        super().__init__()
        self.fraction = fraction
        self.into = nn.Linear(2 * FREQUENCIES, width)
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, fraction_BT: Tensor) -> Tensor:
        """[B, T, D]."""
        weight = self.into.weight
        frequency_F = torch.exp(
            -math.log(10_000.0) * torch.arange(FREQUENCIES, device=fraction_BT.device) / FREQUENCIES
        )
        angle_BTF = 1000.0 * fraction_BT[..., None].float() * frequency_F
        waves_BTF = torch.cat([angle_BTF.cos(), angle_BTF.sin()], -1).to(weight.dtype)
        return self.out(nn.functional.silu(self.into(waves_BTF))) * (fraction_BT > 0)[..., None]

    def add(self, embeddings: nn.Module, args: tuple[Tensor, ...], out_BTD: Tensor) -> Tensor:
        """The hook."""
        fraction_BT = self.fraction.value_BT
        if fraction_BT is None and not self.fraction.in_every_pass:
            return out_BTD
        return out_BTD + self(
            torch.zeros(out_BTD.shape[:2], device=out_BTD.device) if fraction_BT is None else fraction_BT
        )


def add_time_embedding(model: PreTrainedModel) -> TimeEmbedding:
    """The model's time embedding; created on first use."""
    existing = getattr(model, NAME, None)
    if existing is not None:
        return existing
    table = model.get_input_embeddings()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the same initial function everywhere
        time = TimeEmbedding(table.weight.shape[1], HiddenFraction()).to(table.weight)
    setattr(model, NAME, time)
    table.register_forward_hook(time.add)
    return time
