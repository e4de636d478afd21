"""Fingerprints of what a run reads: token rows, files, code, adapters and weights."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Sized
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from unmask.artifacts import plain
from unmask.data.row_store import content_of
from unmask.data.rows import TokenRow
from unmask.models.adapters import has_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.distributed import from_first

STREAMED_ROWS = 64
"""Rows of a stream that are compared."""
BLOCKS, BLOCK_BYTES = 64, 2**16
"""The parts of a file that are compared, spread over its length; a file of no more than these is compared as
a whole."""
SAMPLED_WEIGHTS = 1024
"""Values of each weight tensor that are compared, spread over its length."""
LAUNCH_FIELDS = {"base_model_name_or_path", "revision", "inference_mode"}
"""Settings of adapters that do not change them."""


def rows_fingerprint(rows: Iterable[TokenRow] | None) -> dict[str, Any] | None:
    """The number of rows and a hash of their content. Of a stream: of its first rows, and no number. A
    collective: the first process reads them."""
    return from_first(lambda: None if rows is None else _of_rows(rows))


def _of_rows(rows: Iterable[TokenRow]) -> dict[str, Any]:
    digest, rows = hashlib.sha256(), getattr(rows, "rows", rows)  # prompts are repeated for their groups
    if content := content_of(rows):
        digest.update(content.encode())
    else:
        for row in islice(rows, len(rows) if isinstance(rows, Sized) else STREAMED_ROWS):
            digest.update(_json(row))
    return {"rows": len(rows) if isinstance(rows, Sized) else None, "sha256": digest.hexdigest()}


def reads_first_weights(args: Any) -> bool:
    """Whether training reads the weights that the model had before training."""
    return getattr(args, "needs_reference", False) and args.ref_model is None


def model_inputs(lm: DiffusionLM, *, weights_matter: bool) -> dict[str, Any]:
    """The facts of a model that a checkpoint does not bring back: its pattern, its shapes, its adapters, and
    a hash of weights.

    Args:
        lm: the model before training.
        weights_matter: whether training reads its first weights, as of a reference. Weights under adapters
            are always compared.
    """
    adapters, digest = has_adapters(lm), hashlib.sha256()
    named = [
        (name, weight)
        for name, weight in lm.model.named_parameters()
        if weights_matter or (adapters and not weight.requires_grad)
    ]
    for name, weight in named:
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED_WEIGHTS)].cpu().contiguous()
        digest.update(name.encode() + sample.view(torch.uint8).numpy().tobytes())
    pattern = {f"model.{name}": value for name, value in lm.settings.items()}
    shapes = {name: [*weight.shape] for name, weight in lm.model.named_parameters()}
    configs = (
        {name: config.to_dict() for name, config in getattr(lm.model, "peft_config", {}).items()}
        if adapters
        else {}
    )
    described = {
        name: {key: value for key, value in config.items() if key not in LAUNCH_FIELDS}
        for name, config in configs.items()
    }
    return pattern | {
        "model.dtype": str(lm.dtype).removeprefix("torch."),
        "model.shapes": content_hash(shapes),
        "model.tokenizer": content_hash([lm.tokenizer.chat_template, len(lm.tokenizer)]),
        "model.vocabulary": content_hash(lm.tokenizer.get_vocab()),
        "model.adapters": content_hash(described) if described else None,
        "model.weights": {"sha256": digest.hexdigest()} if named else None,
    }


def content_hash(value: Any) -> dict[str, str]:
    """The fingerprint of a value."""
    return {"sha256": hashlib.sha256(_json(value)).hexdigest()}


def source_fingerprint(of: Any) -> dict[str, str] | None:
    """The fingerprint of the text of a function or class; None for one that was typed in at a prompt, or is
    built in."""
    try:
        return content_hash(inspect.getsource(of))
    except (OSError, TypeError):
        return None


def code_fingerprint(of: object) -> dict[str, str] | None:
    """The fingerprint of the code of a user's task or method: of the whole file that defines its class, or in
    a script of the class alone. None for one of Unmask."""
    return _of_class(type(of))  # type: ignore[arg-type]  # mypy takes classes for unhashable


@functools.cache
def _of_class(cls: type) -> dict[str, str] | None:
    """Read once, as the code is: the file may be edited while it runs."""
    if cls.__module__.partition(".")[0] == "unmask":
        return None
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or cls.__module__ == "__main__":
        return source_fingerprint(cls)
    return {"sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest()}


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, default=_of_other_types).encode()
    except TypeError:  # keys that JSON does not have
        return json.dumps(plain(value), sort_keys=True).encode()


def _of_other_types(value: Any) -> Any:
    """What stands for a value that JSON does not have: the same in each process."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if hasattr(value, "tolist"):
        return value.tolist()
    # that text would hold an address
    return type(value).__qualname__ if type(value).__repr__ is object.__repr__ else repr(value)


def file_fingerprints(paths: Iterable[str]) -> list[dict[str, Any]]:
    """The size and sampled content of local files, and of the files in folders, in order. Names on the hub
    are left out."""
    files = [
        file
        for path in map(Path, paths)
        if path.exists()
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
    ]
    return [{"bytes": file.stat().st_size, "sha256": _sampled(file)} for file in files if file.is_file()]


def _sampled(path: Path) -> str:
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for start in range(0, size, max(BLOCK_BYTES, size // BLOCKS)):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
