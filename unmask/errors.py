"""Exceptions that say what is wrong, where, and what to do about it.

Every error that a user can cause is an `UnmaskError`: the command line prints it without a traceback and
exits with status 2.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from unmask.names import NAMES_ELSEWHERE, remedy_of_trainers
from unmask.redaction import masked_text


class UnmaskError(ValueError):
    """Base of all errors that a user can cause and fix.

    Args:
        what: what is wrong, with the offending value.
        where: the file, row, key or argument with the problem.
        remedy: what to do, as a sentence (the final full stop is added).
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None):
        self.what, self.where, self.remedy = what, where, remedy
        head = f"{where}: {what}" if where else what
        stop = "" if (remedy or "").endswith((".", "?", "!")) else "."
        super().__init__(masked_text(f"{head}. {remedy}{stop}" if remedy else head))

    def moved(self, where: str | None) -> Self:
        """The same error with another location."""
        return type(self)(self.what, where=where, remedy=self.remedy)


class ConfigError(UnmaskError):
    """An unknown key, a wrong type or a value out of range."""


class DataError(UnmaskError):
    """A missing or malformed file, row or column.

    Args:
        what, where, remedy: see `UnmaskError`.
        reason: the category under which a report counts the row, if the error concerns a single row that may
            be skipped.
    """

    def __init__(
        self, what: str, *, where: str | None = None, remedy: str | None = None, reason: str | None = None
    ):
        super().__init__(what, where=where, remedy=remedy)
        self.reason = reason

    def moved(self, where: str | None) -> Self:
        return type(self)(self.what, where=where, remedy=self.remedy, reason=self.reason)

    def skippable(self) -> Self:
        """An error of a row, with the setting that leaves such rows out as another remedy; any other error
        unchanged."""
        if self.reason is None:
            return self
        remedy = (self.remedy or "Fix the row").rstrip(".")
        remedy += f"{'' if remedy.endswith('?') else '.'} Or leave such rows out with training.bad_rows=skip"
        return type(self)(self.what, where=self.where, remedy=remedy, reason=self.reason)


class ModelError(UnmaskError):
    """A model that cannot be loaded, converted or used as requested."""


class NoModelError(ModelError):
    """A path or a name on the hub that leads to no model."""


class GenerationError(UnmaskError):
    """A request that a sampler cannot serve."""


class TrainingError(UnmaskError):
    """A run that must stop or cannot start: a loss that is not finite, an output directory in use."""


class UnmaskWarning(RuntimeWarning):
    """What a user should know of a run that continues. The command line shows these, and no warnings of
    libraries."""


class LostProcessError(TrainingError):
    """Another process of the run has ended: this one can only end, too. Of several that do, the first says
    so."""


class RunStopped(BaseException):
    """A signal has ended a run. It is no error, and passes through code that handles errors.

    Args:
        what: what has happened, and how to continue.
        code: the exit code.
    """

    def __init__(self, what: str, *, code: int):
        self.code = code
        super().__init__(what)


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The remedy for an unknown name: the equivalent or most similar known name, or `otherwise` (None: the
    list of all known names)."""
    if remedy := remedy_of_trainers(name):
        return remedy
    known = sorted(known)
    otherwise = f"Known: {', '.join(known)}." if otherwise is None else otherwise
    ours = NAMES_ELSEWHERE.get(name)  # another name is not meant where there is none of this meaning
    if ours is None:
        return _most_similar(name, known, otherwise)
    return f"Did you mean {ours!r}?" if ours in known else otherwise


def _most_similar(name: str, known: Iterable[str], otherwise: str) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {nearest[0]!r}?" if nearest else otherwise


def require_known(name: str, known: Iterable[str], kind: str, *, where: str) -> None:
    """Raise ConfigError for a name of this kind that is not known, with the most similar one."""
    known = list(known)
    if name not in known:
        raise ConfigError(f"there is no {kind} {name!r}", where=where, remedy=did_you_mean(name, known))


def require_names(present: Iterable[str], wanted: Iterable[str], where: str) -> None:
    """Raise a DataError if wanted columns are missing; it names them, the columns present, and the most
    similar one."""
    present = list(present)
    missing = [name for name in wanted if name not in present]
    if not missing:
        return
    names, found = ", ".join(map(repr, missing)), ", ".join(map(repr, present)) or "none"
    what = f"no column {names} (present: {found})"
    remedy = _most_similar(
        missing[0],
        present,
        "Rename a column: docs/data.md and docs/tasks.md list those of each verb and task",
    )
    raise DataError(what, where=where, remedy=remedy, reason="a column is missing")


def require_values(row: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Like `require_names`, for a row, where None (an empty cell) is an error too."""
    names = list(names)
    require_names(row, names, where)
    if empty := [name for name in names if row[name] is None]:
        filled = ", ".join(repr(name) for name, value in row.items() if value is not None) or "none"
        what = f"no value in column {', '.join(map(repr, empty))}: null or left out (filled: {filled})"
        raise DataError(what, where=where, remedy="Fill it in, or remove the row", reason="without a value")


def require_text(row: Mapping[str, Any], name: str, where: str, setting: str | None = None) -> None:
    """Like `require_values`, for the column of a text. `setting`: the setting that names the column, for the
    error."""
    if not isinstance(row, Mapping):
        remedy = f'Give objects with columns, as {{"{name}": ...}}'
        raise DataError(f"a row cannot be {row!r:.80}", where=where, remedy=remedy, reason="wrong type")
    if setting and name not in row:
        what = f"no column {name!r} (present: {', '.join(map(repr, row)) or 'none'})"
        texts = [other for other, value in row.items() if isinstance(value, str)]
        remedy = f"Name an existing column with text: {setting}={texts[0] if texts else 'NAME'}"
        raise DataError(what, where=where, remedy=remedy, reason="a column is missing")
    require_values(row, (name,), where)


@contextmanager
def prepending_place(where: str) -> Iterator[None]:
    """Prepends `where`, the place of a row, to the place of DataErrors raised inside."""
    try:
        yield
    except DataError as error:
        where = f"{where}, {error.where}" if error.where else where
        raise error.moved(where) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the error's type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def require(module: str, *, where: str) -> None:
    """Raise ConfigError unless the library of an extra is installed."""
    if importlib.util.find_spec(module) is None:
        error = ModuleNotFoundError(name=module)
        raise missing_library(error, where=where) or error


def missing_library(error: ModuleNotFoundError, *, where: str) -> ConfigError | None:
    """The error of a user without the extra that a module belongs to; None: it belongs to none."""
    module = (error.name or "").partition(".")[0]
    for need in importlib.metadata.requires("unmask") or []:
        found = re.match(r"([\w.-]+).*extra == .(\w+)", need)
        if found and found[1].replace("-", "_") == module:
            remedy = f"Install it with pip install 'unmask[{found[2]}]'"
            return ConfigError(f"needs {module}, which is not installed", where=where, remedy=remedy)
    return None
