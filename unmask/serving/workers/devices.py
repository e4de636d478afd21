"""Which device each worker computes on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from unmask.artifacts import num_cores
from unmask.errors import ConfigError, first_line
from unmask.models.device_map import resolve_device

GPU = "cuda"
VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


def place(workers: int | None, devices: str | None, device: str | None) -> list[str]:
    """The device of each worker. They take the devices in turn.

    Args:
        workers: how many there are; None: one for each device.
        devices: their devices, between commas; None: the GPUs that are visible, or the device of the model.
        device: of the model, if one was chosen.

    Raises:
        ConfigError: there is no such device, there are too many, or both are given.
    """
    if devices is None:
        named = _devices_of(device)
    elif device is not None:
        raise ConfigError(
            "is given together with --device", where="--devices", remedy="Leave one of the two out"
        )
    else:
        named = [name.strip() for name in devices.split(",")]
    for name in named:
        _check(name, "--device" if devices is None else "--devices")
    count = len(named) if workers is None else workers
    if devices is not None and len(named) > count:
        remedy = f"Start --workers {len(named)}, or name fewer"
        raise ConfigError(f"{len(named)} devices for {count} workers", where="--devices", remedy=remedy)
    return [named[number % len(named)] for number in range(count)]


def _devices_of(device: str | None) -> list[str]:
    """What workers take in turn where no devices are named."""
    if device not in (None, "auto", GPU):
        return [str(device)]
    gpus = [f"{GPU}:{number}" for number in range(torch.cuda.device_count())]
    return gpus or [resolve_device("auto") if device == "auto" else device or "cpu"]


def _check(name: str, where: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        remedy = "Give names of torch, such as cuda:0,cuda:1, or cpu"
        raise ConfigError(
            f"{name!r} is no device ({first_line(error)})", where=where, remedy=remedy
        ) from None
    count = torch.cuda.device_count()
    if device.type == GPU and (device.index or 0) >= count:
        raise ConfigError(
            f"{name!r}: this machine shows {count} GPUs", where=where, remedy="Name one that is there, or cpu"
        )
    if device.type not in (GPU, "cpu") and not _computes(device):
        raise ConfigError(
            f"{name!r}: torch does not compute on it here", where=where, remedy="Give cuda:0 or cpu, say"
        )


def _computes(device: torch.device) -> bool:
    """Whether a device of another kind is there, and gives results."""
    try:
        return torch.zeros(1, device=device).add(1).item() == 1
    except (RuntimeError, AssertionError, ImportError):  # the last two of a torch that was built without it
        return False


def environments(
    devices: Sequence[str], outer: Mapping[str, str] = os.environ
) -> list[tuple[str, dict[str, str]]]:
    """For each worker the device as its process names it, and what its environment has besides. A worker sees
    no GPU but its own, so that nothing of it gets onto another one; those on the CPU share the cores."""
    kinds = Counter(torch.device(name).type for name in devices)
    threads = {} if THREADS in outer else {THREADS: str(max(1, num_cores() // max(kinds["cpu"], 1)))}
    visible = [entry.strip() for entry in outer.get(VISIBLE, "").split(",") if entry.strip()]
    found = []
    for name in devices:
        device = torch.device(name)
        if device.type == GPU:
            index = device.index or 0
            found.append((GPU, {VISIBLE: visible[index] if visible else str(index)}))
        else:
            found.append((name, threads if device.type == "cpu" else {}))
    return found
