"""What the reward functions of a run are: their names, and the source of functions, which a resumed run
compares."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unmask.config.user_code import current_folder_last
from unmask.tasks import get_task
from unmask.training.run.fingerprints import code_fingerprint, content_hash, source_fingerprint


def reward_identities(
    reward_funcs: Sequence[Callable[..., Any] | str] | Callable[..., Any] | str,
) -> list[dict[str, Any]]:
    """A name for each reward function, with a hash of its source; of a function or task in a file or module,
    of all of that file."""
    listed = (
        reward_funcs
        if isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str)
        else [reward_funcs]
    )
    return [_of_name(one) if isinstance(one, str) else _of_function(one) for one in listed]


def _of_name(name: str) -> dict[str, Any]:
    if name.startswith(("http://", "https://")):  # without a password
        address = urlsplit(name)
        return {"name": f"{address.hostname}:{address.port}{address.path}"}
    if name.startswith("model:"):
        return {"name": name}
    target, colon, function = name.rpartition(":")
    if not colon:
        return {"name": name} | (code_fingerprint(get_task(name.partition("/")[0])) or {})
    with current_folder_last(target):
        found = None if target.endswith(".py") else importlib.util.find_spec(target)
    origin = target if found is None else found.origin
    return {"name": function} | (content_hash(Path(origin).read_text(encoding="utf-8")) if origin else {})


def _of_function(function: Callable[..., Any]) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isfunction(function) or inspect.ismethod(function)):  # an object that is called
        return {"name": getattr(function, "__name__", type(function).__name__)} | (
            source_fingerprint(type(function)) or {}
        )
    return {"name": function.__name__} | (source_fingerprint(function) or {})
