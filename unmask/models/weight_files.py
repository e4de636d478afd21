"""Reads nothing but safetensors weights, and turns whatever libraries raise on a stranger's files into ModelErrors."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from unmask.errors import ModelError, UnmaskError, first_line

PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@contextmanager
def reading(what: str, where: str, remedy: str) -> Iterator[None]:
    """Inside, every error that is not Unmask's is a ModelError with these words."""
    try:
        yield
    except UnmaskError:
        raise
    except Exception as error:  # user code: a folder's files make libraries raise anything
        known = isinstance(error, (OSError, ValueError, RuntimeError, AssertionError))
        reason = first_line(error) if known else f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"{what} ({reason})", where=where, remedy=remedy) from error


def refuse_pickled(where: str, revision: str | None = None) -> None:
    """Raise ModelError if the weights are not in safetensors files, or if the index names other files or other folders."""
    remedy = "Give safetensors weights: model.save_pretrained of transformers writes them, on a machine where these files are trusted"
    folder = pathlib.Path(where)
    stored = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    pickled = sorted(name for name in stored if name.endswith(PICKLED))
    if pickled and not any(name.endswith((".safetensors", SAFE_WEIGHTS_INDEX_NAME)) for name in stored):
        raise ModelError(f"its weights are pickled ({pickled[0]}): loading them could run code", where=where, remedy=remedy)
    for shard in weight_files(where, revision):
        if not shard.endswith(".safetensors") or "/" in shard or "\\" in shard:
            raise ModelError(f"{SAFE_WEIGHTS_INDEX_NAME} names {shard!r}, no safetensors file beside it", where=where, remedy=remedy)


def weight_files(where: str, revision: str | None = None) -> list[str]:
    """The names of the weight files: those of the index if there is one."""
    with reading("cannot load the weights", where, "Give a causal language model with safetensors weights"):
        index = cached_file(where, SAFE_WEIGHTS_INDEX_NAME, revision=revision, _raise_exceptions_for_missing_entries=False)
        if index is None:
            return [SAFE_WEIGHTS_NAME]
        return sorted({str(name) for name in json.loads(pathlib.Path(index).read_text(encoding="utf-8"))["weight_map"].values()})
