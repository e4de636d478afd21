"""Schedulers for the tests of the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.serving.servers import running
from tests.tiny import chat_lm
from unmask.serving.scheduler import Scheduler


@pytest.fixture(scope="module")
def service() -> Iterator[Callable[..., Scheduler]]:
    """Gives the scheduler of a model of a pattern (`make_model`), which runs until the last test of the
    module."""
    with ExitStack() as stack:

        @cache
        def started(
            attention: str = "bidirectional", block_size: int | None = None, *, eos_bias: float = 0.0
        ) -> Scheduler:
            return stack.enter_context(running(chat_lm(attention, block_size, eos_bias=eos_bias)))

        yield started
