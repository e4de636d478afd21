"""Where a model is, here or on the hub, and whether its files are whole. Nothing here imports torch, so that
a wrong path is an error at once."""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from unmask.artifacts import read_file
from unmask.errors import ModelError, NoModelError, UnmaskWarning, first_line

RUN_CONFIG, RUN_MANIFEST, TRAINED_MODEL = "config.yaml", "manifest.json", "model"
"""The resolved config, the manifest and the trained model in the output folder of a run."""
TEXTS = (".json", ".jinja", ".txt", ".model")
"""Kinds of a model's files besides its weights."""
CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.safetensors"
STAGE_NAME = re.compile(r"(stage|checkpoint)-\d+")
LFS_POINTER = b"version https://git-lfs"
"""What a file begins with that `git clone` wrote without Git LFS in the place of a large one."""
NO_NEAR_PATH = "Check the path"
AGAIN = "Download the folder again; `hf download NAME --local-dir FOLDER` resumes an interrupted download"


def model_folder(path_or_id: str | os.PathLike[str]) -> str:
    """Where a model is: for the folder of a training run, which has no config.json itself, the trained model
    in it. Warns if the run has not finished, as the model may then be that of an earlier one."""
    folder = Path(path_or_id)
    trained = folder / TRAINED_MODEL
    if (folder / CONFIG).exists() or not (trained / CONFIG).is_file():
        return str(path_or_id)
    with suppress(OSError, ValueError, AttributeError):  # no manifest of ours
        if (state := json.loads(read_file(folder / RUN_MANIFEST)).get("state", "finished")) != "finished":
            what = (
                f"{folder}: the run has not finished ({state}), so {trained} may be the model of an "
                "earlier one"
            )
            warnings.warn(UnmaskWarning(what), stacklevel=1)  # once, whoever asks
    return str(trained)


def fetched(
    path_or_id: str | os.PathLike[str],
    *,
    weights: bool = True,
    model: bool = True,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    trust_remote_code: bool = False,
    **how: Any,
) -> str:
    """The folder of a model or of adapters: a folder itself, or the downloaded files of a name on the hub.

    Args:
        path_or_id: a folder, of a model or of a run, or a name on the hub.
        weights: whether they are needed, besides config and tokenizer.
        model: whether there has to be one; False: a tokenizer is enough.
        revision: branch, tag or commit on the hub.
        subfolder: of the folder or repository.
        variant: of the weights: `fp16` for model.fp16.safetensors.
        trust_remote_code: whether the repository's Python files are needed.
        how: token, cache_dir, local_files_only and force_download of `huggingface_hub.snapshot_download`.

    Raises:
        ModelError: a path that leads to no model, or nothing to be had under that name.
    """
    where = model_folder(path_or_id)
    if model:
        check_model(Path(where, subfolder) if subfolder else where, weights=weights)
    if Path(where).exists():
        return str(Path(where, subfolder))
    from huggingface_hub import snapshot_download

    def download(names: list[str]) -> Path:
        patterns = [f"{subfolder}/{name}" if subfolder else name for name in names]
        return Path(snapshot_download(where, revision=revision, allow_patterns=patterns, **how), subfolder)

    try:
        folder = download([*(f"*{kind}" for kind in TEXTS), "*.md", *(["*.py"] if trust_remote_code else [])])
        index = folder / of_variant("model.safetensors.index.json", variant)
        if weights and (folder / ADAPTER_CONFIG).is_file():
            download([ADAPTER_WEIGHTS])
        elif weights:
            shards = json.loads(read_file(index))["weight_map"].values() if index.is_file() else ()
            names = {glob.escape(name) for name in shards if name.endswith(".safetensors")}
            download([*names] or [of_variant("model.safetensors", variant)])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # of an index that is none
        near = near_path(Path(where))
        at = "" if revision is None else f" at the revision {revision!r}"
        raise NoModelError(
            f"no such folder, and cannot be had from the hub{at} ({first_line(error)})",
            where=where,
            remedy="Give a model folder or a hub id" if near == NO_NEAR_PATH else near,
        ) from error
    return str(folder)


def of_variant(name: str, variant: str | None) -> str:
    """The name of a file of weights of this variant: model.fp16.safetensors."""
    stem, _, kind = name.rpartition(".")
    return f"{stem}.{variant}.{kind}" if variant else name


def check_model(path_or_id: str | os.PathLike[str], *, weights: bool = True) -> None:
    """Raise ModelError for a path that leads to no model, or to a part of one. A name on the hub is not
    looked up.

    Args:
        weights: whether they are needed, besides config and tokenizer.
    """
    where = model_folder(path_or_id)
    folder = Path(where)
    if not folder.exists():
        # A name on the hub has at most one slash, and no folder of runs is an owner there.
        if (
            len(folder.parts) > 2
            or where.startswith(("/", ".", "~"))
            or any(folder.parent.glob(f"*/{RUN_MANIFEST}"))
        ):
            raise NoModelError("no such folder", where=where, remedy=near_path(folder))
        return
    if not folder.is_dir():
        raise ModelError(
            "is a file, not the folder of a model", where=where, remedy=f"Name the folder: {folder.parent}"
        )
    if (base := base_of_adapters(folder)) is not None:
        with naming_adapters(where):
            check_model(base[0], weights=weights)
    elif (folder / ADAPTER_WEIGHTS).is_file() and len([*folder.glob("*.safetensors")]) == 1:
        raise ModelError(f"holds adapters, and has no {ADAPTER_CONFIG}", where=where, remedy=AGAIN)
    elif not (folder / CONFIG).exists():
        _refuse_without_config(folder)
    for path in sorted(folder.glob("*.safetensors")) if weights else ():
        if path.is_file() and (fault := _fault_of(path)):
            raise ModelError(f"{path.name} {fault}", where=str(folder), remedy=AGAIN)


def base_of_adapters(folder: str | os.PathLike[str]) -> tuple[str, str | None] | None:
    """The base that the adapters in a folder name, a folder or a name on the hub, and its revision; None: it
    holds no adapters. Raises ModelError if they name none."""
    path = Path(folder, ADAPTER_CONFIG)
    if not path.is_file():
        return None
    with suppress(OSError, ValueError, AttributeError):  # no JSON, or no object
        config = json.loads(read_file(path))
        if isinstance(base := config.get("base_model_name_or_path"), str) and base:
            return base, config.get("revision")
    what = f"the adapters name no base model (base_model_name_or_path in {ADAPTER_CONFIG})"
    raise ModelError(what, where=str(folder), remedy="Name its folder there, or its name on the hub")


@contextmanager
def naming_adapters(where: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of a base that is not there name the adapters that need it."""
    try:
        yield
    except NoModelError as error:
        raise ModelError(
            f"the base of these adapters, {error.where}: {error.what}",
            where=str(where),
            remedy=f"Put its folder, or its name on the hub, into their {ADAPTER_CONFIG} as "
            "base_model_name_or_path",
        ) from error


def fetched_with(name: str, folder: str, **how: Any) -> str:
    """The folder, or if it holds adapters without a file of this name, that of their base."""
    if Path(folder, name).exists() or (base := base_of_adapters(folder)) is None:
        return folder
    with naming_adapters(folder):
        return fetched(base[0], weights=False, revision=base[1], **how)


def refuse_other_model(folder: Path) -> None:
    """Raise ModelError for a folder with a config.json that Unmask has not written: its cards say who has."""
    card = folder / "README.md"
    if (folder / CONFIG).exists() and not (card.is_file() and "unmask" in read_file(card)):
        raise ModelError(
            f"holds a {CONFIG} that Unmask has not written",
            where=str(folder),
            remedy="Choose another output folder",
        )


def near_path(path: Path) -> str:
    """A remedy for a path that leads nowhere: the path with the first part that is missing replaced by the
    most similar name there."""
    missing = next(part for part in [*reversed(path.parents), path] if not part.exists())
    names = (
        [each.name for each in missing.parent.iterdir()]
        if os.access(missing.parent, os.R_OK | os.X_OK)
        else []
    )
    for name in difflib.get_close_matches(missing.name, names):
        found = missing.parent / name / path.relative_to(missing)
        if found.exists():
            return f"Did you mean {found}?"
    return NO_NEAR_PATH


def _refuse_without_config(folder: Path) -> None:
    """Raise ModelError for a folder without config.json, with the model that is meant."""
    if (folder / RUN_MANIFEST).is_file():
        raise ModelError(
            "is the folder of a run that has not saved its model",
            where=str(folder),
            remedy="Finish it with --resume, or name another model",
        )
    run = folder
    while STAGE_NAME.fullmatch(run.name):
        run = run.parent
    if run != folder and (run / TRAINED_MODEL / CONFIG).is_file():
        found = [run / TRAINED_MODEL]
    else:  # the folders of models and of runs in it
        places = (f"*/{CONFIG}", f"*/{TRAINED_MODEL}/{CONFIG}")
        found = sorted(
            {folder / each.relative_to(folder).parts[0] for place in places for each in folder.glob(place)}
        )
    raise ModelError(
        f"is {'a folder' if run == folder else 'a part of a run'}, and has no {CONFIG}",
        where=str(folder),
        remedy=f"Name {' or '.join(map(str, found[:3]))}"
        if found
        else "Name the folder of a model or of a run",
    )


def _fault_of(path: Path) -> str | None:
    """What is wrong with a safetensors file that was not downloaded whole; None: nothing."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return "is a pointer of Git LFS, not the file itself"
    try:
        with safe_open(path, "np"):  # reads and checks the header
            return None
    except SafetensorError as error:
        return f"is incomplete, or no safetensors file ({error})"
