"""Counts what would stall a GPU: operations that are dispatched, and those whose result the host waits for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "bincount", "unique_consecutive", "unique_dim"}
INDEXED = {"index", "index_put", "index_put_"}


class Counts(TorchDispatchMode):
    """Inside, operations and reads are counted. Views are operations, and indexing by a boolean tensor is a read."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        masked = name in INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1])
        self.operations += 1
        self.reads += masked or name in READS
        return function(*args, **(kwargs or {}))
