"""The peak memory of the training device, for logs, trackers and the display."""

from __future__ import annotations

import resource
import sys
import warnings
from pathlib import Path

import torch

from unmask.errors import UnmaskWarning

# the fraction of a GPU's memory above which a run warns: fragmentation soon makes larger allocations fail
FULL = 0.9

earlier_peaks: dict[torch.device, tuple[int, int]] = {}
"""Bytes allocated and reserved: the largest peaks before torch's counter was reset."""
warned_devices: set[torch.device] = set()
"""GPUs of which a run has warned."""


def gpu_peaks(device: torch.device) -> tuple[int, int]:
    """The peak bytes of this process on a GPU: allocated by tensors, and reserved by the allocator."""
    allocated, reserved = earlier_peaks.get(device, (0, 0))
    return max(allocated, torch.cuda.max_memory_allocated(device)), max(
        reserved, torch.cuda.max_memory_reserved(device)
    )


def take_allocated_peak(device: torch.device) -> int:
    """The peak bytes allocated on a GPU since the last call (or the start). Resets torch's counter;
    `gpu_peaks` remembers."""
    earlier_peaks[device] = gpu_peaks(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def memory_metrics(device: torch.device) -> dict[str, float]:
    """The memory metrics of this process for a log line: `memory_gb`, the peak on the training device in 10^9
    bytes, which is the memory that torch's allocator reserved on a GPU, or the resident memory of the process
    on a CPU. On a GPU also `memory/allocated_gb`, the peak of tensors, and `memory/share`, `memory_gb` as a
    fraction of the GPU's memory. Warns once above 90%."""
    if device.type != "cuda":
        return {"memory_gb": peak_memory_bytes() / 1e9}
    allocated, reserved = gpu_peaks(device)
    fraction = reserved / torch.cuda.get_device_properties(device).total_memory
    if fraction > FULL and device not in warned_devices:
        warned_devices.add(device)
        remedy = "Smaller micro-batches, activation checkpointing or a shorter max_length leave more room"
        warnings.warn(
            f"training takes {fraction:.0%} of the memory of {device}. {remedy}", UnmaskWarning, stacklevel=2
        )
    return {"memory_gb": reserved / 1e9, "memory/allocated_gb": allocated / 1e9, "memory/share": fraction}


largest_peak_taken = 0
"""Bytes: the largest peak before `take_peak_memory` reset the kernel's counter."""


def peak_memory_bytes() -> int:
    """The peak resident memory of this process in bytes, without child processes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # bytes on macOS, kibibytes on Linux
    return max(largest_peak_taken, peak if sys.platform == "darwin" else peak * 1024)


def take_peak_memory() -> int | None:
    """The peak resident memory since the last call (or the start) in bytes; None unless on Linux with a
    writable /proc.

    Resets the kernel's counter, so that other readers (`/usr/bin/time`, VmHWM) also see the peak since the
    last call only.
    """
    global largest_peak_taken
    try:
        _, _, rest = Path("/proc/self/status").read_text().partition("VmHWM:")
        peak = int(rest.split()[0]) * 1024
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, IndexError):
        return None
    largest_peak_taken = max(largest_peak_taken, peak)
    return peak
