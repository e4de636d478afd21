"""The playground on models of uniform noise: tokens that change are seen to change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

import unmask
from tests.diffusion_gemma import loaded
from tests.serving.playground.pages import BEGINNING, complete, finish, shown
from tests.serving.playground.reciting import TEXT, reciting
from tests.serving.servers import served
from tests.tiny import PRINTABLE
from unmask.config.sampler import SamplerConfig
from unmask.models.diffusion_lm import DiffusionLM

pytestmark = pytest.mark.slow
CANVAS = 32


@pytest.fixture(scope="module", params=["bidirectional", "whole canvases"])
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DiffusionLM:
    if request.param == "bidirectional":
        return reciting().with_noise("uniform")
    folder = tmp_path_factory.mktemp("model")
    return loaded(folder, alphabet=PRINTABLE, canvas=CANVAS, max_position_embeddings=512)


@pytest.fixture(scope="module")
def address(chromium: Browser, lm: DiffusionLM) -> Iterator[str]:
    with served(lm) as address:
        yield address


def test_tokens_are_drafts_until_they_are_final(page: Page, sent: list[dict], lm: DiffusionLM) -> None:
    expect(page.locator("header")).to_contain_text("random tokens")
    expect(page.get_by_text("This model begins with random tokens.")).to_have_count(1)
    page.get_by_label("Tokens", exact=True).fill("40")
    page.get_by_label("Most steps").fill("12")
    complete(page)
    [body] = sent
    assert body["temperature"] == 1
    assert body["diffusion"] == {"stream": "frames", "max_denoising_steps": 12, "entropy_bound": 0.1}
    settings = {"max_new_tokens": 40, "max_denoising_steps": 12, "entropy_bound": 0.1}
    final = unmask.generate(lm, [BEGINNING], SamplerConfig(**settings))
    cells = page.locator(".text .cell")
    assert cells.count() == 40  # though canvases are whole
    assert page.locator(".figures dd").nth(1).inner_text() == str(len(final.tokens[0]))
    assert page.locator(".text .cell.draft").count() == 0
    slider = page.get_by_role("slider", name="Frame")
    last = int(slider.get_attribute("max") or 0)
    size = CANVAS if lm.canvas else 40
    texts, fresh, drafts = [], [], []
    for at in range(1, last + 1):
        slider.fill(str(at))
        texts.append(page.locator(".text .cell:not(.hidden)").all_text_contents())
        fresh.append(page.locator(".text .cell.fresh").count())
        drafts.append(page.locator(".text .cell.draft").count())
    assert fresh[0] == drafts[0] == size
    assert {*drafts[:-1]} <= {size, 40 - size} and drafts[-1] == 0
    for before, after, count in zip(texts, texts[1:], fresh[1:], strict=False):
        changed = sum(old != new for old, new in zip(before, after, strict=False))
        assert count == changed + len(after) - len(before)
    assert any(count < 40 for count in fresh[1:])


def test_a_draft_says_that_it_may_change(page: Page, lm: DiffusionLM) -> None:
    page.get_by_label("Most steps").fill("4")
    complete(page)
    page.get_by_role("slider", name="Frame").fill("1")
    page.get_by_role("group", name="Text.").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".inspector")).to_contain_text("may change")
    expect(page.locator(".legend")).to_contain_text("may change")


def test_two_settings_on_one_seed(page: Page, sent: list[dict], lm: DiffusionLM) -> None:
    page.get_by_label("Compare two settings").check()
    complete(page)
    assert [body["diffusion"]["max_denoising_steps"] for body in sent] == [48, 16]
    passes = [
        unmask.generate(
            lm, [BEGINNING], SamplerConfig(max_new_tokens=64, entropy_bound=0.1, max_denoising_steps=steps)
        ).forward_passes[0]
        for steps in (48, 16)
    ]
    expect(page.locator(".verdict")).to_contain_text(f"takes {passes[1]} passes where A takes {passes[0]}")


def test_a_gap_is_filled(page: Page, lm: DiffusionLM) -> None:
    page.get_by_role("button", name="Infill").click()
    words = TEXT[: TEXT.index(" of an")]
    page.get_by_label("Text", exact=True).fill(words.replace("gathers", "▯▯▯"))
    page.get_by_label("Most steps").fill("6")
    page.locator("form .primary").click()
    finish(page)
    mask = lm.tokenizer.mask_token
    config = SamplerConfig(max_denoising_steps=6, entropy_bound=0.1)
    text = words.replace("gathers", mask * 3)
    assert shown(page) == unmask.infill(lm, [text], config).texts[0]
    assert page.locator(".text .cell:not(.given)").count() == 3
