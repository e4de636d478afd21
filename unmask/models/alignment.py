"""Weights in aligned memory: the last bits of matrix products depend on the alignment of their operands."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes: of torch's CPU allocator, and of a vector register."""
MADV_PAGEOUT = 21
"""Linux: the pages are not needed soon; their content is kept."""


@torch.no_grad()
def align_weights(model: nn.Module) -> None:
    """Copy the unaligned weights on the CPU, such as those mapped from a file, one after another.

    Only the weight being copied is in memory twice: the file's pages are released at once.
    """
    for weight in [*model.parameters(), *model.buffers()]:
        if weight.device.type == "cpu" and weight.data_ptr() % ALIGNMENT:
            mapped = weight.data
            weight.data = mapped.clone()
            _align_quantized(weight, mapped, weight.data)
            _release(mapped)
        _align_quantized(weight)


def _align_quantized(holder: Any, mapped: Tensor | None = None, aligned: Tensor | None = None) -> None:
    """Align what bitsandbytes keeps beside a weight: scales, code books, and in 8 bits the weight itself a
    second time (`CB`)."""
    for name, value in list(vars(holder).items()):
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.data_ptr() % ALIGNMENT:
            same = (
                mapped is not None and value.data_ptr() == mapped.data_ptr() and value.shape == mapped.shape
            )
            setattr(holder, name, aligned if same else value.clone())
        elif name in ("quant_state", "state2") and value is not None:
            _align_quantized(value)


def _release(mapped: Tensor) -> None:
    """Advise the kernel that the pages within a tensor are not needed, where it supports that."""
    start = -(-mapped.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = mapped.data_ptr() + mapped.nbytes - start
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and size >= mmap.PAGESIZE:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(size - size % mmap.PAGESIZE), MADV_PAGEOUT)
