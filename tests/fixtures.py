"""Fixtures of many tests: small models and files, and quick training runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from unmask.data.characters import character_model
from unmask.generation.remote.http import HttpClient
from unmask.tasks import get_task


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model over Sudoku's characters."""
    path = tmp_path_factory.mktemp("models") / "causal"
    character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0).save(path)
    return path


@pytest.fixture
def debugging() -> Iterator[None]:
    """Of a test of `--debug`, whose checks and messages are for a whole process: they end with the test."""
    yield
    torch.autograd.set_detect_anomaly(False)
    transformers.logging.set_verbosity_warning()


@pytest.fixture
def dynamo_as_it_was() -> Iterator[None]:
    """Of a test that compiles: neither its settings of torch nor its graphs are there for the next one."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        force_nn_module_property_static_shapes=True, specialize_float=False, recompile_limit=8
    ):
        yield
    torch._dynamo.reset()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(
        "\n".join(row["prompt"] + row["completion"] for row in get_task("sudoku").generate("train", 12, 0))
    )
    return path


@contextmanager
def clients_closed() -> Iterator[None]:
    """Closes the connections to servers that were opened within, however it ends."""
    opened: list[HttpClient] = []
    make = HttpClient.__init__

    def remembered(self: HttpClient, *given: Any, **more: Any) -> None:
        make(self, *given, **more)
        opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpClient, "__init__", remembered)
        try:
            yield
        finally:
            for client in opened:
                client.close()


@pytest.fixture(autouse=True)
def no_connection_left() -> Iterator[None]:
    """Close connections after each test, so that a failing test does not make another one fail."""
    with clients_closed():
        yield


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Skip accelerate's garbage collection at the end of a training run: it takes longer than the run."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def tf32_restored() -> Iterator[None]:
    """Restore the switches of both APIs, the general one first, as it overwrites the specific ones."""
    backends = torch.backends
    places = [
        backends,
        backends.cuda.matmul,
        backends.cudnn,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
    ]
    older = [
        (backends.cuda.matmul, backends.cuda.matmul.allow_tf32),
        (backends.cudnn, backends.cudnn.allow_tf32),
    ]
    before = [(place, place.fp32_precision) for place in places]
    yield
    for place, allowed in older:
        place.allow_tf32 = allowed
    for place, precision in before:
        place.fp32_precision = precision
