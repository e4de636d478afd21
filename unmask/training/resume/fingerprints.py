"""Fingerprints of what a run reads: token rows, files, adapters and weights."""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Iterable, Mapping, Sized
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from unmask.artifacts import plain
from unmask.data.rows import Row
from unmask.models.adapters import has_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.distributed import from_first

STREAMED_ROWS = 64
"""Rows of a stream that are compared."""
BLOCKS, BLOCK_BYTES = 64, 2**16
"""The parts of a file that are compared, spread over its length; a file of no more than these is compared as a whole."""
SAMPLED_WEIGHTS = 1024
"""Values of each weight tensor that are compared, spread over its length."""


def rows_fingerprint(rows: Iterable[Row] | None) -> dict[str, Any] | None:
    """The number of rows and a hash of their content. Of a stream: of its first rows, and no number. A collective: the first process reads
    them."""
    return from_first(lambda: None if rows is None else _of_rows(rows))


def _of_rows(rows: Iterable[Row]) -> dict[str, Any]:
    digest, rows = hashlib.sha256(), getattr(rows, "rows", rows)  # prompts are repeated for their groups
    if cached := getattr(rows, "cache_files", None):  # the token cache: its folder is named by a hash of the content
        digest.update("".join(Path(file["filename"]).parent.name for file in cached).encode())
    else:
        for row in islice(rows, len(rows) if isinstance(rows, Sized) else STREAMED_ROWS):
            _feed(digest, row)
    return {"rows": len(rows) if isinstance(rows, Sized) else None, "sha256": digest.hexdigest()}


def reads_first_weights(args: Any) -> bool:
    """Whether training reads the weights that the model had before training."""
    return getattr(args, "needs_reference", False) and args.reference_model is None


def model_inputs(lm: DiffusionLM, *, weights_matter: bool) -> dict[str, Any]:
    """The facts of a model that a checkpoint does not bring back: its pattern, its shapes, its adapters, and a hash of weights.

    Args:
        lm: the model before training.
        weights_matter: whether training reads its first weights, as of a reference. Weights under adapters are always compared.
    """
    adapters, digest = has_adapters(lm), hashlib.sha256()
    named = [(name, weight) for name, weight in lm.model.named_parameters() if weights_matter or (adapters and not weight.requires_grad)]
    for name, weight in named:
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED_WEIGHTS)].cpu().contiguous()
        digest.update(name.encode() + sample.view(torch.uint8).numpy().tobytes())
    pattern = {f"model.{name}": value for name, value in lm.settings.items()}
    shapes = {name: [*weight.shape] for name, weight in lm.model.named_parameters()}
    configs = {name: config.to_dict() for name, config in getattr(lm.model, "peft_config", {}).items()} if adapters else {}
    described = {name: {key: _ordered(value) for key, value in config.items() if key not in OF_LAUNCH} for name, config in configs.items()}
    return pattern | {
        "model.dtype": str(lm.weight_dtype).removeprefix("torch."),
        "model.shapes": content_hash(shapes),
        "model.tokenizer": content_hash([lm.tokenizer.chat_template, len(lm.tokenizer)]),
        "model.adapters": content_hash(described) if described else None,
        "model.weights": {"sha256": digest.hexdigest()} if named else None,
    }


OF_LAUNCH = {"base_model_name_or_path", "revision", "inference_mode"}


def _ordered(value: Any) -> Any:
    """A set has another order in each process."""
    return sorted(value) if isinstance(value, set) else value


def content_hash(value: Any) -> dict[str, str]:
    """The fingerprint of a value of JSON types."""
    return {"sha256": hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()}


def file_fingerprints(paths: Iterable[str]) -> list[dict[str, Any]]:
    """The name, size and sampled content of local files, and of the files in folders. Names on the hub are left out."""
    files = [file for path in map(Path, paths) if path.exists() for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [{"name": file.name, "bytes": file.stat().st_size, "sha256": _sampled(file)} for file in files if file.is_file()]


def _sampled(path: Path) -> str:
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for start in range(0, size, max(BLOCK_BYTES, size // BLOCKS)):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """Add a value to a hash, with its type and length, so that boundaries count."""
    if isinstance(value, Mapping):
        digest.update(f"{{{len(value)}".encode())
        for key in sorted(value, key=str):
            _feed(digest, [str(key), value[key]])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        if value and all(type(item) is int and abs(item) < 2**63 for item in value):
            digest.update(array.array("q", value).tobytes())
        else:
            for item in value:
                _feed(digest, item)
    elif hasattr(value, "tolist"):
        _feed(digest, value.tolist())
    elif type(value).__repr__ is object.__repr__:  # its text would hold an address
        digest.update(type(value).__qualname__.encode())
    else:
        digest.update(repr(value).encode())
