"""Weights in aligned memory: matrix products of the same numbers at other addresses differ in their last bits."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes; what torch's own allocator gives on a CPU, and the vector units of one read at once."""
MADV_PAGEOUT = 21
"""Of Linux: the pages are not needed soon. It never changes what they hold."""


@torch.no_grad()
def align_weights(model: nn.Module) -> None:
    """Copy the weights on the CPU that lie off alignment, as those do that are mapped from a file, one after another.

    Memory holds each of them twice at most while it is copied: the pages of a file are given back at once.
    """
    for weight in [*model.parameters(), *model.buffers()]:
        if weight.device.type == "cpu" and weight.data_ptr() % ALIGNMENT:
            mapped = weight.data
            weight.data = mapped.clone()
            _release(mapped)


def _release(mapped: Tensor) -> None:
    """Tell the kernel that the pages within a tensor are not needed; advice, where it knows it."""
    start = -(-mapped.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = mapped.data_ptr() + mapped.nbytes - start
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and size >= mmap.PAGESIZE:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(size - size % mmap.PAGESIZE), MADV_PAGEOUT)
