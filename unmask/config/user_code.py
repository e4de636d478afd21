"""Python code that a config or the command line names: `path/to/file.py:NAME` or `package.module:NAME`, and
modules to import.

Paths are relative to the current folder, as those of data are. A module that is found nowhere else may be in
the current folder.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from unmask.errors import ConfigError, UnmaskError, did_you_mean

FORMS = "Give package.module:NAME or path/to/file.py:NAME"
PACKAGE = str(Path(__file__).parents[1])
LOADED = itertools.count()
"""Numbers the modules of files, so that two files of one name do not hide each other."""
NAMED_FILES: set[str] = set()
"""The files of all code that was named so far, but Unmask's own."""


class CurrentFolder(MetaPathFinder):
    """Finds one module, or package, in the current folder, and nothing that lies beside it."""

    def __init__(self, module: str):
        self.module = module.partition(".")[0]

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [os.getcwd()]) if name == self.module else None


@contextlib.contextmanager
def current_folder_last(module: str) -> Iterator[None]:
    """Inside, this module is also looked for in the current folder, after all others."""
    finder = CurrentFolder(module)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def naming_setting(key: str) -> Iterator[None]:
    """Inside, errors about named code are errors of this setting."""
    try:
        yield
    except ConfigError as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        raise ConfigError(what, where=key, remedy=error.remedy) from error


@contextlib.contextmanager
def failing_as(kind: type[UnmaskError], what: str, *, where: str, remedy: str) -> Iterator[None]:
    """Inside, an exception of user code, `what`, is an error of this kind, with the line. Errors of Unmask
    pass."""
    try:
        yield
    except UnmaskError:
        raise
    except (Exception, SystemExit) as error:  # user code
        raise kind(
            f"{what} raised {type(error).__name__}: {error}{_line_of(error)}", where=where, remedy=remedy
        ) from error


def load_function(target: str) -> Callable[..., Any]:
    """The function that `target` names. Raises ConfigError as `load_named`."""
    function: Callable[..., Any] = load_named(
        target, lambda found: callable(found) and not isinstance(found, type), "a function"
    )
    return function


def load_class(target: str, base: type[Any]) -> type[Any]:
    """The subclass of `base` that `target` names. Raises ConfigError as `load_named`."""
    wanted = f"a subclass of {base.__module__}.{base.__name__}"
    cls: type[Any] = load_named(
        target, lambda found: isinstance(found, type) and issubclass(found, base), wanted
    )
    return cls


def load_named(target: str, fits: Callable[[Any], bool], wanted: str) -> Any:
    """What `target` names.

    Args:
        target: `package.module:NAME` or `path/to/file.py:NAME`.
        fits: whether an object is of the kind that is wanted.
        wanted: this kind in words, for errors.

    Raises:
        ConfigError: there is no such file or module, it raises, it defines no such name, or that is of
            another kind.
    """
    source, _, name = target.rpartition(":")
    module = load_module(source, target)
    try:
        found = getattr(module, name)
    except Exception as error:  # user code, which may compute its names
        raise ConfigError(
            "there is no such name", where=target, remedy=_name_like(name, module, fits)
        ) from error
    if not fits(found):
        kind = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
        raise ConfigError(f"is {kind}, not {wanted}", where=target, remedy=_name_like(name, module, fits))
    return found


def _name_like(name: str, module: ModuleType, fits: Callable[[Any], bool]) -> str:
    """The remedy for a name that a module does not define, or not as what is wanted."""
    own = names_in(module, fits)
    return did_you_mean(name, own) if own else FORMS


def names_in(module: ModuleType, fits: Callable[[Any], bool]) -> list[str]:
    """The names that a module itself defines as what `fits`."""
    return [
        each
        for each, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and fits(value)
    ]


def refuse_file_alone(name: str, fits: Callable[[Any], bool], what: str) -> None:
    """Raise ConfigError if a name is that of a file, without what is meant in it; it lists what the file
    has."""
    if name.endswith(".py"):
        found = names_in(load_module(name), fits) or ["NAME"]
        remedy = f"Write {' or '.join(f'{name}:{each}' for each in found)}"
        raise ConfigError(f"names a file, but no {what} in it", where=name, remedy=remedy)


def load_module(source: str, target: str | None = None) -> ModuleType:
    """The module of a file, `path/to/file.py`, or the one of a name, `package.module`. A file whose text has
    not changed is run once.

    Args:
        target: the setting that names it, for errors; None: `source`.

    Raises:
        ConfigError: there is none, or it raises; with the line.
    """
    path, where, remedy = (
        Path(source),
        target or source,
        FORMS if target else "Give package.module or path/to/file.py",
    )
    if source.endswith(".py") and not path.is_file():
        raise ConfigError(
            "there is no such file",
            where=where,
            remedy=f"Give its path from the current folder, {Path.cwd()}",
        )
    try:
        if source.endswith(".py"):
            return _named(_module_of(path.resolve(), path.read_bytes()))
        with current_folder_last(source):
            return _named(importlib.import_module(source))
    except (Exception, SystemExit) as error:  # user code
        what = f"cannot be imported ({type(error).__name__}: {error}{_line_of(error)})"
        raise ConfigError(what, where=where, remedy=_way_out(source, error) or remedy) from error


def error_of_named_code(error: BaseException) -> ConfigError | None:
    """The exception with the last line of named code that was running; None: none was."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in NAMED_FILES]
    if not frames:
        return None
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
    return ConfigError(
        f"{type(error).__name__}: {error}",
        where=where,
        remedy="Correct it; with UNMASK_DEBUG=1 the traceback is shown",
    )


def _named(module: ModuleType) -> ModuleType:
    """The module, whose file, if it has one, is noted unless it is one of Unmask's."""
    if module.__name__.partition(".")[0] != __name__.partition(".")[0]:
        NAMED_FILES.add(str(getattr(module, "__file__", None)))
    return module


@functools.cache
def _module_of(path: Path, text: bytes) -> ModuleType:
    """The module of a file, under a name that no import statement can give: dataclasses and pickle look there
    for what it defines."""
    spec = spec_from_file_location(f"{path.stem} {next(LOADED)}".replace(".", " "), path)
    assert spec
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))
    except BaseException:  # user code
        del sys.modules[spec.name]
        raise
    return module


def _line_of(error: BaseException) -> str:
    """Where in the user's file an exception arose. That of a syntax error is in its text."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _only_calls(frame.filename)]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f", line {lines[-1]} of {Path(frames[0].filename).name}" if lines else ""


def _only_calls(filename: str) -> bool:
    """Whether a file only imports or calls a user's: those of Unmask, or Python's own."""
    return filename == importlib.__file__ or filename.startswith((PACKAGE + os.sep, "<frozen "))


def _way_out(source: str, error: BaseException) -> str | None:
    """The remedy for a module that was found, but cannot be imported."""
    folder = Path(source).parent.resolve() if source.endswith(".py") else Path.cwd()
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing and ((folder / missing).is_dir() or (folder / f"{missing}.py").is_file()):
        path = shlex.quote(str(folder))
        return (
            f"To import {missing} from beside it, set PYTHONPATH={path}, or make both a package and give "
            "package.module:NAME"
        )
    return "Correct it" if _line_of(error) or isinstance(error, SyntaxError) else None
