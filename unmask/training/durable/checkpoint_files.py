"""The files of a checkpoint on the disk: written whole or not at all, listed with sizes and hashes, and
compared with that list.

A folder is written in `.unfinished` beside it, and renamed when every file is on the disk. The list,
`checkpoint_files.json`, is written last. It covers the files of all processes, so also the shards of FSDP and
DeepSpeed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accelerate import PartialState
from safetensors import SafetensorError, safe_open

from unmask.artifacts import default_mode, irregular_file, read_file, write_atomic
from unmask.errors import TrainingError, first_line
from unmask.training.resume.record import RECORD_FILE

FILE_LIST = "checkpoint_files.json"
UNFINISHED = ".unfinished"
EARLIER = ".earlier"  # ends the name of a folder that a new one replaces
MAKE_ROOM = "Make room and permit writing"
FULL_DISK = f"{MAKE_ROOM}: --resume continues from the last checkpoint"
THREADS = 4  # hashing releases the lock of the interpreter


@contextlib.contextmanager
def written_whole(folder: Path, *, writes: bool, listed: bool) -> Iterator[Path]:
    """Inside, all processes write into the folder that this yields. Afterwards it takes the place of
    `folder`. If anything fails, `folder` is unchanged.

    Args:
        writes: whether this process creates and moves the folder.
        listed: whether a list of its files is written.
    """
    unfinished = folder.parent / UNFINISHED / folder.name
    processes = PartialState()
    if writes:
        # of a run that was killed while it moved the folder
        for earlier in unfinished.parent.glob(f"*{EARLIER}"):
            if not (place := folder.with_name(earlier.name.removesuffix(EARLIER))).exists():
                earlier.rename(place)
        shutil.rmtree(unfinished.parent, ignore_errors=True)
        unfinished.mkdir(parents=True)
    processes.wait_for_everyone()
    with contextlib.ExitStack() as failing:
        if writes:
            failing.callback(shutil.rmtree, unfinished.parent, ignore_errors=True)  # it may fill the disk
        yield unfinished
        processes.wait_for_everyone()
        if writes:
            publish(unfinished, folder, listed=listed)
        failing.pop_all()
    processes.wait_for_everyone()


def publish(unfinished: Path, folder: Path, *, listed: bool) -> None:
    """Move a folder to its place when its files are on the disk, with the permissions that the umask
    gives."""
    files = [path for path in sorted(unfinished.rglob("*")) if path.is_file()]
    for path in files:
        path.chmod(default_mode())  # safetensors lets only the owner read
        sync(path)
    if listed:
        write_atomic(
            unfinished / FILE_LIST, json.dumps({"files": described(unfinished, files)}, indent=1) + "\n"
        )
    for inner in {path.parent for path in files}:
        sync(inner)
    earlier = unfinished.with_name(folder.name + EARLIER)
    if folder.exists():
        folder.rename(earlier)
    try:
        unfinished.rename(folder)
    except OSError:
        if earlier.exists():
            earlier.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(unfinished.parent, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def described(folder: Path, files: list[Path]) -> dict[str, dict[str, int | str]]:
    """Size in bytes and SHA-256 of files, by their paths in the folder."""
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = pool.map(sha256, files)
        return {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": each}
            for path, each in zip(files, hashes, strict=True)
        }


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(folder: Path) -> str | None:
    """The first difference between a checkpoint and its list of files, as a sentence; None: there is none. A
    checkpoint of an earlier version has no list: its files are only opened."""
    try:
        if irregular := irregular_file(folder):
            return f"{irregular} is not a file"
        text = read_file(folder / FILE_LIST)
    except FileNotFoundError:
        return f"{FILE_LIST} is missing" if (folder / RECORD_FILE).exists() else _unreadable(folder)
    except (OSError, ValueError) as error:
        return f"{FILE_LIST} cannot be read ({first_line(error)})"
    try:
        listed: dict[str, dict[str, int | str]] = json.loads(text)["files"]
        sizes = {name: int(each["bytes"]) for name, each in listed.items()}
        hashes = {name: str(each["sha256"]) for name, each in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{FILE_LIST} is damaged"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if added := sorted(
        name for name in files - sizes.keys() - {FILE_LIST} if not name.rpartition("/")[2].startswith(".")
    ):
        return f"{added[0]} is not in {FILE_LIST}"  # transformers reads some by their names: scaler.pt
    try:
        for name, size in sizes.items():
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
        with ThreadPoolExecutor(THREADS) as pool:
            found_hashes = pool.map(sha256, [folder / name for name in hashes])
            return next(
                (
                    f"{name} is damaged"
                    for name, each in zip(hashes, found_hashes, strict=True)
                    if each != hashes[name]
                ),
                None,
            )
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"


def _unreadable(folder: Path) -> str | None:
    """The first file of a checkpoint without a list that cannot be opened."""
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        try:
            if path.suffix == ".json":
                json.loads(read_file(path))
            elif path.suffix == ".safetensors":
                # reads the header, and compares the file's length with it
                with safe_open(path, framework="pt"):
                    pass
            elif path.suffix in (".pt", ".pth") and not zipfile.is_zipfile(path):
                return f"{path.name} is incomplete"
        except (OSError, ValueError, SafetensorError) as error:
            return f"{path.name} cannot be read ({first_line(error)})"
    return None


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_free_space(folder: Path, needed: int, remedy: str) -> None:
    """Raise TrainingError if the disk of a folder has fewer free bytes than needed."""
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < needed:
        what = f"a checkpoint needs {needed / 1e9:.3g} GB, but the disk has {free / 1e9:.3g} GB left"
        raise TrainingError(what, where=str(folder), remedy=remedy)


WRITE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.EMFILE,
}
IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}
"""Errors of a folder in the place of a file, or the reverse."""


@contextlib.contextmanager
def naming_write_errors(where: Path, remedy: str) -> Iterator[None]:
    """Inside, an error of the disk is raised as a TrainingError."""
    try:
        yield
    except OSError as error:
        if error.errno not in WRITE_ERRORS | IN_THE_WAY:
            raise
        path = error.filename2 or error.filename or where
        if error.errno in IN_THE_WAY:
            remedy = remedy.replace(MAKE_ROOM, "Move away what is in its place")
        raise TrainingError(
            f"cannot be written ({error.strerror})", where=str(path), remedy=remedy
        ) from error
    except SafetensorError as error:
        raise TrainingError(
            f"cannot be written ({first_line(error)})", where=str(where), remedy=remedy
        ) from error
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error) and "unexpected pos" not in str(error):
            raise
        what = f"cannot be written ({first_line(error.__context__ or error)})"
        raise TrainingError(what, where=str(where), remedy=remedy) from error
