"""The shards that FSDP writes into a checkpoint: torch unpickles their index and all that is no tensor
without a check."""

from __future__ import annotations

import io
import pickle
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.serialization import get_unsafe_globals_in_checkpoint

INDEX = ".metadata"
INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "BytesStorageMetadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},
}
"""What an index may name, by module; data types of torch besides."""


class _Index(pickle.Unpickler):
    """Reads an index and makes nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in INDEX_CLASSES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        if (module, name) == (
            "builtins",
            "getattr",
        ):  # Python 3.11.0 to 3.11.3 pickle members of an Enum by it
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")


def _member(kind: object, name: str) -> Enum:
    if isinstance(kind, EnumType):
        return kind[name]
    raise pickle.UnpicklingError(f"it asks {kind} for {name}, which is no part of an index")


def check_shards(index: Path) -> None:
    """Raise ValueError or pickle.UnpicklingError for an index, or a value that it leads to, that could run
    code; OSError if one of them cannot be read."""
    with index.open("rb") as file:
        found = _Index(file).load()
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError("it is no index of shards")
    for part, place in found.storage_data.items():
        if (
            getattr(place, "transform_descriptors", None)
            or Path(place.relative_path).name != place.relative_path
        ):
            raise ValueError(f"{part.fqn} is stored elsewhere, or in a way of its own")
        if not isinstance(found.state_dict_metadata.get(part.fqn), BytesStorageMetadata):
            continue  # a tensor, which torch reads as one
        with (index.parent / place.relative_path).open("rb") as shard:
            shard.seek(place.offset)
            value = shard.read(place.length)
        if unsafe := get_unsafe_globals_in_checkpoint(io.BytesIO(value)):
            raise ValueError(f"{part.fqn} names {', '.join(sorted(unsafe))}, which could run code")
