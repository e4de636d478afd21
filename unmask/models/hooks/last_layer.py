"""The last layer at selected rows: the other rows need only keys and values, so their queries, outputs and
MLP are skipped.

Shapes: B batch, T tokens, D width of a module's input or output, N selected rows.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unmask.models.attention import attention_layers
from unmask.models.recurrent import recurrent_layers

QUERIES = ("q_proj",)
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")

Owner = TypeVar("Owner")


def hook_owner(module: nn.Module, kind: type[Owner]) -> Owner | None:
    """The object of this class whose method is a hook of the module; None: there is none."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, kind)), None)


def _takes_rows(module: nn.Module) -> bool:
    """Whether a module computes rows [N, D] as it does [1, N, D], with fewer operations: a linear layer, or
    one that is made of them."""
    parts = module._modules.values()
    linear = all(
        isinstance(part, nn.Linear) or part is None or not (part._parameters or part._modules)
        for part in parts
    )
    return isinstance(module, nn.Linear) or (linear and bool(parts) and not module._parameters)


class LastLayer:
    """Hooks of the last layer's row-wise modules: they compute the rows `at` (indices into [B, T]; None:
    all), and return zeros elsewhere.

    A module of unknown name computes all rows, which costs time and changes nothing. All copies of a model
    share the hooks.
    """

    def __init__(self) -> None:
        self.at: tuple[Tensor, Tensor] | None = None
        self._shape: torch.Size | None = None

    def __deepcopy__(self, memo: dict) -> LastLayer:
        return self

    @classmethod
    def of(cls, model: nn.Module) -> LastLayer:
        """The hooks of this model; created on first use."""
        hooks = cls()
        attention = attention_layers(model)
        if not attention:
            return hooks
        layer = next(module for module in model.modules() if attention[-1] in module.children())
        stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        if recurrent_layers(model) and not any(stack[-1] is layer for stack in stacks):
            return hooks  # a recurrent layer after it reads all rows
        parts = [part for name, part in attention[-1].named_children() if name in QUERIES + OUTPUTS]
        for part in parts + [child for child in layer.children() if type(child).__name__.endswith("MLP")]:
            if (existing := hook_owner(part, cls)) is not None:
                return existing
            part.register_forward_pre_hook(hooks.select)
            part.register_forward_hook(hooks.restore)
        return hooks

    def select(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the module."""
        if self.at is None:
            return None
        rows_BTD = args[0]
        self._shape = rows_BTD.shape[:-1]
        rows_ND = rows_BTD[self._on(rows_BTD.device)]
        return (rows_ND if _takes_rows(module) else rows_ND[None], *args[1:])

    def restore(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
        """After the module."""
        if self.at is None:
            return None
        assert self._shape is not None
        whole = out.new_zeros(*self._shape, out.shape[-1])
        whole[self._on(whole.device)] = out if out.dim() == 2 else out[0]
        return whole

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        assert self.at is not None
        row_N, column_N = self.at
        return row_N.to(device), column_N.to(device)
