"""A server with the playground, and one browser for all tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.serving.playground.reciting import reciting
from tests.serving.servers import served
from unmask.serving.app import PLAYGROUND

PATIENCE_MS = 120_000  # no test demands seconds
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


# while it is open, Playwright's event loop runs in this thread, where other tests have theirs
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if not (PLAYGROUND / "index.html").exists():
        pytest.skip("the playground is not built: make playground")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(chromium: Browser) -> Iterator[str]:
    with served(reciting()) as address:
        yield address


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    context = chromium.new_context(
        viewport={"width": 1280, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, address: str) -> Iterator[Page]:
    """The playground in the mode for completions. Whatever its content security policy stops, or its script
    throws, fails the test."""
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.get_by_role("button", name="Completion").click()
    yield page
    answers = ("status of 400", "status of 401")  # Chromium reports answers that a test asks for
    assert not [problem for problem in problems if not any(answer in problem for answer in answers)]


@pytest.fixture
def sent(page: Page) -> list[dict]:
    """Bodies of the requests that the page sends."""
    bodies: list[dict] = []
    page.on(
        "request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None
    )
    return bodies
