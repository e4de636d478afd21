"""What would stall a GPU, counted on a CPU: values that the host reads, and operations that are
dispatched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READING = {
    f"aten::{name}"
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "bincount")
}
READING |= {"aten::unique_consecutive", "aten::unique_dim"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}


class Counts(TorchDispatchMode):
    """Counts inside it.

    Attributes:
        reads: operations whose result the host must wait for: a value, or a size that depends on values, as
            that of a boolean index.
        operations: all operations, those of backward passes too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        by_mask = name in INDEXING and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.operations += 1
        self.reads += name in READING or by_mask
        return function(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts the copies to the host inside it, for which a GPU waits, and which a CPU does not dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += function in (Tensor.cpu, Tensor.tolist)
        return function(*args, **(kwargs or {}))
