"""Constraints are compiled beside all else: within bounds of time and memory, and nobody else waits for
it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.errors import raises
from tests.tiny import float64_lm
from unmask.config.constraint import ConstraintConfig
from unmask.errors import GenerationError
from unmask.generation.constraints import bounded_process, byte_automaton, compiled
from unmask.generation.constraints.automaton import token_automaton
from unmask.generation.constraints.bounded_process import bounded, run_bounded
from unmask.generation.constraints.byte_automaton import byte_automata
from unmask.generation.constraints.compiled import regex_of
from unmask.generation.constraints.vocabulary import Vocabulary
from unmask.serving.app import AppSettings, make_app
from unmask.serving.limits import RequestLimits
from unmask.serving.scheduler import Scheduler

SLOW = "(a|b)*a(a|b){24}"
"""Of which the automaton has millions of states."""


class Asking:
    """A server in the process of the tests, and its only client."""

    def __init__(self, scheduler: Scheduler, limits: RequestLimits):
        self.scheduler = scheduler
        transport = httpx.ASGITransport(make_app(scheduler, AppSettings(limits)))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost/v1")

    async def __call__(self, **fields: Any) -> httpx.Response:
        return await self.client.post(
            "/completions", json={"model": "tiny", "prompt": "abc", "max_tokens": 4, **fields}, timeout=60
        )


@contextlib.asynccontextmanager
async def asking(limits: RequestLimits | None = None) -> AsyncIterator[Asking]:
    scheduler = Scheduler({"tiny": float64_lm()})
    scheduler.start()
    try:
        yield Asking(scheduler, limits or RequestLimits())
    finally:
        await scheduler.stop(grace=0)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no automaton gets ready, and those that other tests made are not there."""
    monkeypatch.setattr(compiled, "cached_automata", OrderedDict())
    release, run = threading.Event(), byte_automaton.run_bounded

    def waiting(*args: Any, **options: Any) -> Any:
        assert release.wait(timeout=60)
        return run(*args, **options)

    monkeypatch.setattr(byte_automaton, "run_bounded", waiting)
    return release


def test_a_costly_constraint_is_refused_in_the_time_that_the_server_gives_it() -> None:
    async def run() -> httpx.Response:
        async with asking(RequestLimits(compile_seconds=0.5)) as ask:
            return await ask(diffusion={"constraint": {"regex": SLOW}})

    refused = asyncio.run(run())
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(
        "diffusion.constraint.regex: its automaton takes more than 0.5 seconds to build"
    )


def test_the_time_limit_of_a_request_covers_it(held: threading.Event) -> None:
    async def run() -> None:
        async with asking() as ask:
            late = await ask(diffusion={"constraint": {"regex": "a+"}, "timeout": 0.2})
            assert (
                late.status_code == 504
                and "not finished within 0.2 seconds" in late.json()["error"]["message"]
            )
            held.set()
            assert (await ask(diffusion={"constraint": {"regex": "a+"}})).status_code == 200

    asyncio.run(run())


def test_who_has_no_constraint_does_not_wait_for_those_who_have(held: threading.Event) -> None:
    async def run() -> None:
        async with asking() as ask:
            slow = [
                asyncio.create_task(ask(diffusion={"constraint": {"regex": "a" * number}}))
                for number in range(1, 5)
            ]
            # more than threads of the event loop's own
            answers = await asyncio.gather(*(ask() for _ in range(40)))
            assert {each.status_code for each in answers} == {200} and not any(task.done() for task in slow)
            held.set()
            assert {each.status_code for each in await asyncio.gather(*slow)} == {200}

    asyncio.run(run())


def test_so_many_of_a_client_wait_and_the_end_waits_for_none(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with asking() as ask:
            ask.scheduler.side_work.waiting = 2
            tasks = [asyncio.create_task(ask(diffusion={"constraint": {"regex": "ab?c"}})) for _ in range(4)]
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result().status_code for task in done] == [429] and len(waiting) == 3
            # of each that waits a second, while none has ended
            assert done.pop().result().headers["retry-after"] == "2"
            await ask.scheduler.stop(grace=30)
            assert {each.status_code for each in await asyncio.gather(*waiting)} == {503}

    asyncio.run(run())
    held.set()


def test_bounds_are_of_all_that_is_built_within_and_of_nothing_else() -> None:
    with bounded(0.3, 2**30):
        for _ in range(2):
            with raises(GenerationError, where="regex"):
                run_bounded("\nimport time; time.sleep(30); result = 1\n", None, "regex", remedy="")
    with bounded(60, 2**27), raises(GenerationError, where="regex"):
        run_bounded("\nx = bytes(2**28); result = 1\n", None, "regex", remedy="")
    assert bounded_process.bounds().seconds == bounded_process.SECONDS
    assert run_bounded("\nresult = given + 1\n", 1, "regex", remedy="") == 2


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 500,
        "[" * 60_000,
        "(?:" * 300 + ")" * 300,
        "a" + "*" * 3000,
        "\\" * 9999,
        "(?i)[\\x00-\uffff]" * 2000 + "(",
    ],
)
def test_a_pattern_that_no_parser_likes_is_refused_in_its_time(pattern: str) -> None:
    """Also by Python's parser, which is asked what is wrong: in the process with bounds, too."""
    begin = time.process_time()
    with bounded(5, 2**30), pytest.raises(GenerationError) as refused:
        byte_automata([pattern], "constraint.regex")
    assert refused.value.where == "constraint.regex" and time.process_time() - begin < 1


def test_what_is_made_of_an_automaton_is_bounded_too() -> None:
    (automaton,) = byte_automata(["[ab]{50}"], "constraint.regex")
    with bounded(0, 2**30), raises(GenerationError, where="constraint.regex"):
        token_automaton(
            automaton, Vocabulary((b"a", b"b")), end="none", at_start=True, where="constraint.regex"
        )
    found = token_automaton(
        automaton, Vocabulary((b"a", b"b")), end="none", at_start=True, where="constraint.regex"
    )
    with bounded(0, 2**30), raises(GenerationError, where="constraint"):
        found.shortest(found.live_classes())
    assert found.shortest(found.live_classes()) == 50


def test_a_schema_without_patterns_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_automaton, "run_bounded", lambda *_: 1 / 0)
    assert regex_of(ConstraintConfig(json_schema={"type": "integer"}), "constraint")
