"""Every test runs offline, ignores the user's environment variables, and draws the same examples each
time."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator

import hypothesis
import pytest
import typer.testing

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" not in os.environ:  # rows are stored for one session, of all workers
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="rows-")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-messages",
        action="store_true",
        help="record the errors of the tests that pass (tests/errors.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands out tests (`-n`) need not import what they do, before which no worker would
    start."""
    if config.getoption("write_messages") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--write-messages writes one file from one process: leave out -n")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")
        config.pluginmanager.import_plugin("tests.errors")


hypothesis.settings.register_profile(
    "thorough", max_examples=50, derandomize=True, deadline=None, database=None
)
hypothesis.settings.register_profile("fast", hypothesis.settings.get_profile("thorough"), max_examples=15)
hypothesis.settings.load_profile("fast")  # `make test-nightly` takes the other one

LONG = {
    "test_other_device.py",
    "test_readme.py",
    "test_release.py",
    "test_sharding.py",
    "test_lost_process.py",
    "test_equal_runs.py",
}

# A `CliRunner` makes the commands of an app anew for every call, which takes longer than most calls.
typer.testing._get_command = functools.cache(typer.testing._get_command)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collection makes a million objects, all of them to keep: looking for garbage takes a quarter of its
    time, and later some more."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of long tests come first: nothing would run beside them at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("UNMASK_", "DIFFU_", "GRPO_", "VLLM_SERVER_")) and name != "UNMASK_SHARED":
            monkeypatch.delenv(name)
    monkeypatch.delenv("RANK", raising=False)
