"""Launches and memory traffic of a step: how they are counted, and those that do not follow from the
architecture.

A launch is an operation that PyTorch dispatches and that starts a kernel: all but views, allocations and
questions about a tensor. Traffic is what operations read and write, without products of matrices and
attention, whose time is that of their arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class PassCost:
    """Launches and traffic of a forward or backward pass up to the output head."""

    launches: float = 0.0
    fixed_bytes: float = 0.0  # of weights: casts
    token_bytes: float = 0.0  # of each token

    def traffic(self, tokens: float) -> float:
        """Bytes read and written in a pass of this many tokens."""
        return self.fixed_bytes + self.token_bytes * tokens


@dataclass(frozen=True)
class PassCosts:
    """The costs of a forward pass, and of its backward pass, without adapters."""

    forward: PassCost
    backward: PassCost


# Launches, counted on real steps and passes. `tests/planning/test_launches.py` counts them again: change them
# here when it fails.
LAUNCHES_OF_STEP = 75
"""Launches of a training step: metrics, clipping and the update, which a fused optimizer launches for all
parameters together."""
LAUNCHES_OF_NOISE = 225
"""Launches that draw the views of a batch of noised rows."""
LAUNCHES_OF_HEAD = 47
"""Launches of every pass of training: inputs, mask, head and loss."""
LAUNCHES_OF_ADAPTER = {"float32": 10, "mixed": 16, "bfloat16": 16}
"""Launches of the adapter of one matrix, forward and backward, by precision."""
LAUNCHES_PER_PARAMETER = {"adamw": 0, "adamw_8bit": 1}
"""Launches of an update, for each tensor of parameters."""
LAUNCHES_OF_CACHE = 3
"""Launches of a layer's cache of keys and values in a pass of generation."""
LAUNCHES_OF_SAMPLER = 55
"""Launches of a pass of generation: inputs, head, choice of tokens and bookkeeping."""
LAUNCHES_OF_DRAW = 25
"""Launches of a pass of generation above temperature 0."""

TRAFFIC_OF_ADAPTER = {"float32": (12, 32), "mixed": (12, 24), "bfloat16": (18, 38)}
"""Bytes of the adapter of one matrix for each token and column of its input, and of its output, forward and
backward."""

WITHOUT_KERNEL = {
    *("aten::_unsafe_view", "aten::lift_fresh", "aten::empty", "aten::empty_like", "aten::empty_strided"),
    *("aten::new_empty", "aten::new_empty_strided", "prim::device"),
}

WITHOUT_TRAFFIC = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::embedding"}
"""Products, and rows of a table, of which few are read."""


class LaunchCounter(TorchDispatchMode):
    """Counts the launches and the traffic, in bytes, of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.traffic = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, out = func._schema.name, func(*args, **(kwargs or {}))
        if not func.is_view and name not in WITHOUT_KERNEL:
            self.launches += 1
            if name not in WITHOUT_TRAFFIC and "attention" not in name:
                self.traffic += sum(
                    leaf.nbytes for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)
                )
        return out
