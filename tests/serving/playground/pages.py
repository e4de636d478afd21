"""What tests do with the page, and read from it."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect

from tests.serving.playground.reciting import reciting
from unmask.config.sampler import SamplerConfig
from unmask.generation import sampler

BEGINNING = "A lens gathers light"


def answer(prompt: str = BEGINNING, **settings: Any) -> str:
    """What the model writes."""
    return sampler.generate(reciting(), [prompt], SamplerConfig(**settings)).texts[0]


def shown(page: Page, which: int = 0) -> str:
    """The visible tokens of a text."""
    script = (
        "text => [...text.children].filter(cell => !cell.matches('.hidden')).map(cell => "
        "cell.textContent).join('')"
    )
    return str(page.locator(".text").nth(which).evaluate(script))


def finish(page: Page) -> None:
    """Wait until nothing runs, and the last frame is shown."""
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    page.wait_for_function(
        "() => { const [a, b] = document.querySelector('.counter').innerText.split(/[^0-9]+/); return "
        "a === b && b > 0 }"
    )


def complete(page: Page, prompt: str = BEGINNING) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Prompt").press("Control+Enter")
    finish(page)
