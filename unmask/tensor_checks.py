"""Checks of the tensors that users pass: their shapes and kinds, by their names. Nothing is computed, and no
device is asked."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from unmask.errors import ConfigError

LETTERS = re.compile(r"_([A-Z1-9]+)$")
MASKS = {
    "maskable",
    "hidden",
    "filled",
    "target",
    "completion",
    "prompt",
    "loss_mask",
    "kept",
    "desirable",
    "taught",
}
INTEGERS = {"ids", "group", "document", "key", "number", "unit", "segment", "rows_before"}
"""Names of boolean and of integer tensors, without the letters of their shapes."""
LETTERS_REMEDY = "Sizes of the same letter must be equal (docs/contributing.md, shape letters)"


def check_tensors(**tensors: Any) -> None:
    """Check that shapes fit the letters of names, such as `ids_BT`: the same letter has the same size
    everywhere, and 1 is the size 1.

    A tensor whose name has no letters must have the dimensions of the first tensor, each of its size or 1, or
    none. Names also say what is boolean or integer (MASKS, INTEGERS). None is not checked.

    Raises:
        ConfigError: names the first argument that does not fit, its shape, the expected one, and the argument
            that the latter is from.
    """
    given = {name: value for name, value in tensors.items() if value is not None}
    sizes: dict[str, tuple[int, str]] = {"1": (1, "")}  # of each letter, and the argument that it is from
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"is a {type(tensor).__name__}, not a tensor", where=name, remedy="Use torch.tensor"
            )
        found = LETTERS.search(name)
        _check_kind(name.removesuffix(found[0]) if found else name, name, tensor)
        if found is None:
            _check_broadcast(name, tensor, *next(iter(given.items())))
            continue
        letters = found[1]
        if tensor.dim() != len(letters):
            wanted = "1 dimension is" if len(letters) == 1 else f"{len(letters)} dimensions are"
            what = f"has the shape {list(tensor.shape)}, but {wanted} expected: [{', '.join(letters)}]"
            raise ConfigError(what, where=name, remedy=LETTERS_REMEDY)
        for letter, size in zip(letters, tensor.shape, strict=True):
            expected, source = sizes.setdefault(letter, (size, name))
            if size != expected:
                because = (
                    f" {letter} is {expected} in {source} of shape {list(given[source].shape)}"
                    if source
                    else ""
                )
                what = f"has the shape {list(tensor.shape)}, but [{', '.join(letters)}] is expected:{because}"
                raise ConfigError(what, where=name, remedy=LETTERS_REMEDY)


def _check_kind(kind: str, name: str, tensor: Tensor) -> None:
    if kind in MASKS and tensor.dtype != torch.bool:
        raise ConfigError(f"is of {tensor.dtype}, not torch.bool", where=name, remedy=f"Use {name}.bool()")
    if kind in INTEGERS and (tensor.dtype == torch.bool or tensor.is_floating_point()):
        raise ConfigError(f"is of {tensor.dtype}, not of integers", where=name, remedy=f"Use {name}.long()")


def _check_broadcast(name: str, tensor: Tensor, first: str, whole: Tensor) -> None:
    fits = tensor.dim() == whole.dim() and all(
        size in (1, other) for size, other in zip(tensor.shape, whole.shape, strict=True)
    )
    if tensor.dim() and not fits:
        what = f"has the shape {list(tensor.shape)}, but {first} has {list(whole.shape)}"
        raise ConfigError(
            what, where=name, remedy=f"Give it as many dimensions as {first}, each of the same size or 1"
        )
