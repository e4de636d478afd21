"""`unmask serve` in the process of the tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

import unmask
from unmask.generation.remote.server import make_app, open_port
from unmask.models.diffusion_lm import DiffusionLM


@contextmanager
def served(lm: DiffusionLM, port: int = 0, api_key: str | None = None) -> Iterator[str]:
    """The address of a server with this model."""
    with open_port("127.0.0.1", port) as listener:
        server = uvicorn.Server(uvicorn.Config(make_app(lm, api_key), log_level="error", ws="none"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:  # until then the port refuses connections
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def copied(lm: DiffusionLM, path: Path) -> DiffusionLM:
    """A copy of the model, loaded as a server loads it."""
    lm.save(path)
    return unmask.load(path, dtype=str(lm.log_prob_dtype).removeprefix("torch."))
