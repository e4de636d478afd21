"""The device of a model, or of each part of a model that one process spreads over several devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from unmask.errors import ModelError, first_line


def split_layers(config: PretrainedConfig, dtype: torch.dtype, memory: Sequence[float]) -> dict[str, str]:
    """The device of each part of a model, by the part's name: consecutive layers, divided in proportion to
    the memory of each device.

    Raises:
        ModelError: there are fewer than two devices.
    """
    if len(memory) < 2:
        raise ModelError(
            f"a model is spread over two GPUs or more, but there {'is one' if memory else 'are none'} here",
            where="device_map",
            remedy="Leave it out",
        )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    parts = list(_parts(model))
    sizes = [sum(weight.nbytes for weight in part.parameters()) for _, part in parts]
    cumulative = [sum(memory[: number + 1]) / sum(memory) for number in range(len(memory))]
    places, before = dict[str, str](), 0.0
    for (name, part), size in zip(parts, sizes, strict=True):
        middle = (before + size / 2) / sum(sizes)
        places[name] = f"cuda:{next(number for number, end in enumerate(cumulative) if middle <= end)}"
        before += size
        if part is model.get_output_embeddings() and part.weight is model.get_input_embeddings().weight:
            places[name] = "cuda:0"  # with the embeddings
    return places


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts that stay whole on a device, in the order of a forward pass: layers, and the modules around
    them."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    for name, part in module.named_children():
        divided = isinstance(part, nn.ModuleList) or (
            prefix.count(".") < 2 and any(other in lists for other in part.modules())
        )
        if divided and not isinstance(module, nn.ModuleList):
            yield from _parts(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part


def resolve_device(device: str | int) -> str:
    """A torch device; a number is that of a GPU, and "auto" the GPU if there is one. Raises ModelError if
    this machine lacks the device."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = f"cuda:{device}" if isinstance(device, int) else device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        raise ModelError(
            f"no device {device!r} ({first_line(error)})", where="device", remedy="Use cpu, or auto"
        ) from error
    return device
