"""What the terminal does not show: lines, progress bars and warnings of libraries. With `--debug` it shows
them all.

Errors that libraries log stay, and so does what Unmask and the user's own code warn of and log.
"""

from __future__ import annotations

import importlib.abc
import logging
import os
import site
import sys
import sysconfig
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from unmask.console import first_to_report
from unmask.errors import UnmaskWarning
from unmask.redaction import shown

VARIABLES = {
    # Unmask has its own progress display.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers reads it, too
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    # What C++ writes. DDP warns that it found no unused parameters; some models have them, so it must look.
    # Gloo names its peers.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "6",  # the profiler says when it starts and stops
}
OURS = ("unmask", "uvicorn")
"""Loggers of code in `LIBRARIES` that are heard below an error. uvicorn's are the log of `unmask serve`."""
FOLDERS = (
    *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
    site.getusersitepackages(),
    str(Path(__file__).parents[1]),
)
LIBRARIES = (*(f"{folder}{os.sep}" for folder in FOLDERS), "<frozen")
"""What begins the paths of code whose warnings are hidden: of libraries, and of our own calls of them."""


def debugging(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a command line asks for everything. Read before it is parsed: libraries read the variables when
    they are imported."""
    return "--debug" in arguments or environ.get("UNMASK_DEBUG", "").lower() in ("1", "true", "yes", "on")


def silence_libraries() -> None:
    """Show nothing below errors that is not ours. Called before libraries are imported, as they read the
    variables then."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    logging.setLoggerClass(_Logger)
    warnings.showwarning = _show_warning
    sys.meta_path.insert(0, _WithoutBitsandbytes())


class _Logger(logging.Logger):
    """Drops what libraries log below an error, whatever level they set: DeepSpeed's accelerator, torchao's
    kernels, transformers' keys that a checkpoint of tied weights lacks."""

    def handle(self, record: logging.LogRecord) -> None:
        library = record.pathname.startswith(LIBRARIES) and record.name.partition(".")[0] not in OURS
        if record.levelno >= logging.ERROR or not library:
            super().handle(record)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """One line, which of several processes only one writes."""
    ours = issubclass(category, UnmaskWarning)
    if not ours and filename.startswith(LIBRARIES):
        return
    text = (
        shown(f"warning: {message}")
        if ours
        else warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n")
    )
    if first_to_report(text):
        print(text, file=file or sys.stderr, flush=True)


class _WithoutBitsandbytes(importlib.abc.MetaPathFinder):
    """Hides bitsandbytes from `peft.helpers`, which does without if it is not installed, and is imported by
    every command that loads a model. Where it is used, it is found: peft reads 8-bit weights elsewhere."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if (
            name == "bitsandbytes"
            and "peft.helpers" in sys.modules
            and not hasattr(sys.modules["peft.helpers"], "bnb")
        ):
            raise ModuleNotFoundError(name, name=name)
