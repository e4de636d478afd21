"""A server of the playground, and one browser for all tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.helpers import REPOSITORY
from tests.serving.playground.fake_server import FakeServer
from tests.serving.playground.reciting import reciting

STATIC = REPOSITORY / "unmask" / "serving" / "static"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if not (STATIC / "index.html").exists():
        pytest.skip("the playground is not built: make playground")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(chromium: Browser) -> Iterator[tuple[FakeServer, str]]:
    fake = FakeServer(reciting(), STATIC)
    with fake.running() as address:
        yield fake, address


@pytest.fixture
def fake(server: tuple[FakeServer, str]) -> Iterator[FakeServer]:
    fake, _ = server
    fake.requests.clear()
    fake.pace, fake.key, fake.cancelled = 0.0, None, 0
    yield fake


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, permissions=["clipboard-read", "clipboard-write"])
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, server: tuple[FakeServer, str], fake: FakeServer) -> Iterator[Page]:
    """The playground, just opened. Whatever the page's content security policy stops, or its script throws, fails the test."""
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(server[1])
    yield page
    assert not [problem for problem in problems if "401" not in problem]
