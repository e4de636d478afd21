"""The peak memory of the device that trains: one figure for the logs, the trackers and the screen."""

from __future__ import annotations

import resource
import sys
import warnings
from pathlib import Path

import torch

FULL = 0.9
"""The share of a GPU's memory above which a run is warned: what its allocator cannot find in one piece is then soon out of reach."""

_peaks: dict[torch.device, tuple[int, int]] = {}  # bytes allocated and reserved; the largest that were begun anew
_warned: set[torch.device] = set()


def gpu_peaks(device: torch.device) -> tuple[int, int]:
    """The most bytes that this process's tensors have held on a GPU, and that its allocator has reserved for them."""
    allocated, reserved = _peaks.get(device, (0, 0))
    return max(allocated, torch.cuda.max_memory_allocated(device)), max(reserved, torch.cuda.max_memory_reserved(device))


def take_allocated_peak(device: torch.device) -> int:
    """The most bytes that tensors held on a GPU since the last call (or the start). `gpu_peaks` keeps what this makes torch forget."""
    _peaks[device] = gpu_peaks(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def memory_metrics(device: torch.device) -> dict[str, float]:
    """What a log line says of this process's memory so far.

    Returns:
        `memory_gb`, the peak on the device that trains, in 10^9 bytes: on a GPU what torch's allocator reserved, on a CPU the resident
        memory of the process. On a GPU also `memory/allocated_gb`, the peak of its tensors alone, and `memory/share`, the part of the
        card that `memory_gb` is. The first time that this exceeds 90% it warns.
    """
    if device.type != "cuda":
        return {"memory_gb": peak_memory_bytes() / 1e9}
    allocated, reserved = gpu_peaks(device)
    share = reserved / torch.cuda.get_device_properties(device).total_memory
    if share > FULL and device not in _warned:
        _warned.add(device)
        remedy = "Smaller micro-batches, activation checkpointing or a shorter max_length leave more room"
        warnings.warn(f"training takes {share:.0%} of the memory of {device}. {remedy}", RuntimeWarning, stacklevel=2)
    return {"memory_gb": reserved / 1e9, "memory/allocated_gb": allocated / 1e9, "memory/share": share}


_peak_taken = 0  # bytes; the largest peak that `take_peak_memory` has made the kernel forget


def peak_memory_bytes() -> int:
    """The largest resident memory that this process has held so far, in bytes (without its child processes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(_peak_taken, peak if sys.platform == "darwin" else peak * 1024)  # bytes on macOS, kibibytes on Linux


def take_peak_memory() -> int | None:
    """The largest resident memory since the last call (or the start), in bytes; None where the system does not tell.

    Only Linux does, where /proc is writable. Its kernel starts its count anew: what others read of this process from outside
    (`/usr/bin/time`, VmHWM) is then the peak since the last call too.
    """
    global _peak_taken
    try:
        _, _, rest = Path("/proc/self/status").read_text().partition("VmHWM:")
        peak = int(rest.split()[0]) * 1024
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, IndexError):
        return None
    _peak_taken = max(_peak_taken, peak)
    return peak
