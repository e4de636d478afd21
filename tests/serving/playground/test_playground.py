"""The playground in a browser: what a person does with it."""

from __future__ import annotations

import httpx2 as httpx
import pytest
from playwright.sync_api import Browser, CDPSession, Page, Route, expect

from tests.helpers import REPOSITORY
from tests.serving.playground.pages import BEGINNING, answer, complete, finish, shown
from tests.serving.playground.reciting import TEXT, reciting
from tests.serving.servers import served
from unmask.config.sampler import SamplerConfig
from unmask.generation import sampler
from unmask.serving.app import AppSettings

pytestmark = pytest.mark.slow

AXE = REPOSITORY / "playground" / "node_modules" / "axe-core" / "axe.min.js"


def test_type_and_watch(page: Page, sent: list[dict]) -> None:
    complete(page)
    [body] = sent
    assert body["prompt"] == BEGINNING and body["diffusion"] == {
        "stream": "frames",
        "remasking": "low_confidence",
    }
    assert shown(page) == answer(max_new_tokens=64)
    assert page.locator(".figures dd").first.inner_text() == "64"
    expect(page.get_by_role("status").filter(has_text="Done: 64 tokens in 64 passes.")).to_have_count(1)


def test_every_frame_can_be_gone_back_to(page: Page, sent: list[dict]) -> None:
    page.get_by_label("Per step").check(force=True)
    complete(page)
    slider, final = page.get_by_role("slider", name="Frame"), shown(page)
    assert slider.get_attribute("aria-valuetext") == "frame 16 of 16"
    visible = []
    for at in (0, 5, 16, 15):
        slider.fill(str(at))
        visible.append(page.locator(".text .cell:not(.hidden)").count())
    assert visible == [0, 20, 64, 60]
    assert "".join(page.locator(".text .cell").all_text_contents()) == final  # hidden tokens keep their room
    slider.fill("16")
    slider.press("ArrowLeft")
    assert slider.get_attribute("aria-valuetext") == "frame 15 of 16"
    page.keyboard.press("p")
    finish(page)
    assert shown(page) == final


def test_tokens_are_coloured_by_probability_or_order(page: Page, sent: list[dict]) -> None:
    complete(page)
    cells = page.locator(".text .cell")
    colour = "cells => cells.map(cell => getComputedStyle(cell).backgroundColor)"
    log_probs = sampler.generate(reciting(), [BEGINNING], SamplerConfig(max_new_tokens=64)).log_probs[0]
    doubts = page.evaluate(
        "() => [...document.querySelectorAll('.text .cell')].map(c => "
        "parseFloat(c.style.getPropertyValue('--doubt')))"
    )
    order = sorted(range(64), key=lambda position: log_probs[position])
    assert [doubts[position] for position in order] == sorted(doubts, reverse=True)
    before = cells.evaluate_all(colour)
    page.keyboard.press("Escape")
    page.get_by_label("Order").check(force=True)
    assert before != cells.evaluate_all(colour) and len(set(cells.evaluate_all(colour))) > 30


def test_tokens_are_inspected_with_the_keyboard(page: Page, sent: list[dict]) -> None:
    complete(page)
    text = page.get_by_role("group", name="Text.")
    text.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".inspector")).to_contain_text("token 2")
    assert page.locator(".inspector q").inner_text() == page.locator(".text .cell").nth(1).text_content()


def test_single_letters_are_no_shortcuts_where_text_is_typed_or_they_are_switched_off(page: Page) -> None:
    complete(page)
    order = page.get_by_label("Order")
    page.get_by_label("Prompt").press("o")
    assert not order.is_checked() and page.get_by_label("Prompt").input_value() == BEGINNING + "o"
    page.get_by_label("Prompt").blur()
    page.keyboard.press("o")
    expect(order).to_be_checked()
    page.keyboard.press("?")
    page.get_by_label("Single letters are keys").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("o")
    page.wait_for_timeout(100)
    assert order.is_checked()


def test_a_selection_becomes_a_gap_that_is_filled(page: Page, sent: list[dict]) -> None:
    page.get_by_role("button", name="Infill").click()
    area = page.get_by_label("Text", exact=True)
    words = TEXT[: TEXT.index(" Where")]
    area.fill(words)
    gap = "every point of an"
    start = words.index(gap)
    area.evaluate("(area, [start, end]) => area.setSelectionRange(start, end)", [start, start + len(gap)])
    area.press("Control+g")
    assert area.input_value() == words.replace(gap, "▯▯▯▯")
    area.press("Control+z")
    assert area.input_value() == words  # the browser can undo it
    area.evaluate("(area, [start, end]) => area.setSelectionRange(start - 1, end)", [start, start + len(gap)])
    page.get_by_role("button", name="Make gap").click()
    page.get_by_role("button", name="Gap 1: one token more").click()
    page.get_by_role("button", name="Gap 1: one token less").click()
    page.get_by_role("button", name="Gap 1: one token less").click()
    expect(page.get_by_label("Gaps")).to_contain_text("4 tokens")
    page.locator("form .primary").click()
    finish(page)
    mask = reciting().tokenizer.mask_token
    text = words.replace(" " + gap, mask * 4)
    assert sent[0]["text"] == text
    assert shown(page) == sampler.infill(reciting(), [text], SamplerConfig()).texts[0]
    assert page.locator(".text .cell:not(.given)").count() == 4


def test_two_settings_on_one_seed(page: Page, sent: list[dict]) -> None:
    page.get_by_label("Compare two settings").check()
    complete(page)
    first, second = sent
    assert (
        first["seed"] == second["seed"]
        and "threshold" not in first["diffusion"]
        and second["diffusion"]["threshold"] == 0.9
    )
    assert [shown(page, 0), shown(page, 1)] == [
        answer(max_new_tokens=64),
        answer(max_new_tokens=64, threshold=0.9),
    ]
    passes = sampler.generate(
        reciting(), [BEGINNING], SamplerConfig(max_new_tokens=64, threshold=0.9)
    ).forward_passes[0]
    expect(page.locator(".verdict")).to_contain_text(f"takes {passes} passes where A takes 64")
    figures = page.locator(".figures").nth(1).inner_text()
    assert all(name in figures for name in ("passes", "tokens", "per pass", "per second"))


def test_cancelling_frees_the_server_and_keeps_what_was_revealed(page: Page, address: str) -> None:
    def ended(outcome: str) -> float:
        lines = httpx.get(f"{address}/metrics").text.splitlines()
        name = f'unmask_sequences_total{{model="tiny",outcome="{outcome}"}} '
        return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)

    before = ended("canceled")
    page.get_by_label("Tokens", exact=True).fill("600")
    page.get_by_label("Prompt").fill(BEGINNING)
    page.get_by_role("button", name="Complete").click()
    expect(page.locator(".text .cell:not(.hidden)").nth(2)).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_text("Canceled. What had been revealed stays.")).to_be_visible()
    for _ in range(200):
        if ended("canceled") > before:
            break
        page.wait_for_timeout(50)
    assert ended("canceled") == before + 1
    assert 3 <= page.locator(".text .cell:not(.hidden)").count() < 600


def test_a_link_brings_the_setup_back(page: Page, sent: list[dict]) -> None:
    page.get_by_label("Prompt").fill(BEGINNING)
    page.get_by_label("Seed", exact=True).fill("7")
    page.get_by_label("Tokens", exact=True).fill("24")
    page.get_by_label("Threshold").check(force=True)
    page.get_by_role("button", name="Share link").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    link = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(link)
    page.reload()
    assert page.get_by_label("Prompt").input_value() == BEGINNING
    page.get_by_role("button", name="Complete").click()
    finish(page)
    assert sent[0]["seed"] == 7 and sent[0]["max_tokens"] == 24
    assert sent[0]["diffusion"] == {"stream": "frames", "threshold": 0.9}


def test_a_model_with_a_chat_template_is_talked_to_first(page: Page) -> None:
    page.reload()
    expect(page.get_by_label("Message")).to_be_visible()
    page.get_by_role("button", name="Completion").click()
    complete(page)
    page.get_by_role("button", name="Share link").click()
    page.reload()  # a link has its own mode
    expect(page.get_by_label("Prompt")).to_be_visible()


def test_a_conversation_has_turns(page: Page, sent: list[dict]) -> None:
    page.get_by_role("button", name="Chat").click()
    page.get_by_label("Tokens", exact=True).fill("8")
    for message in ("What is a lens", "And then"):
        page.get_by_label("Message").fill(message)
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_label("Conversation")).to_contain_text(message)
        finish(page)
    first, second = (body["messages"] for body in sent)
    reply = sampler.generate(reciting(), [first], SamplerConfig(max_new_tokens=8)).texts[0]
    assert [message["role"] for message in second] == ["user", "assistant", "user"] and second[1][
        "content"
    ] == reply
    page.get_by_role("button", name="Infill").click()
    page.get_by_role("button", name="Chat").click()
    expect(page.get_by_label("Conversation").locator("li")).to_have_count(4)  # no turn is lost
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_label("Conversation")).to_have_count(0)


def test_a_link_of_a_chat_has_the_conversation(page: Page, sent: list[dict]) -> None:
    page.get_by_role("button", name="Chat").click()
    page.get_by_label("Tokens", exact=True).fill("8")
    for message in ("What is a lens", "And then"):
        page.get_by_label("Message").fill(message)
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_label("Conversation")).to_contain_text(message)
        finish(page)
    page.get_by_role("button", name="Share link").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    link = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(link)
    expect(page.get_by_label("Conversation").locator("li")).to_have_count(2)
    assert page.get_by_label("Message").input_value() == "And then"
    page.get_by_role("button", name="Send").click()
    finish(page)
    assert sent[2] == sent[1]
    page.get_by_label("Message").fill("A draft")
    page.get_by_role("button", name="Share link").click()
    page.reload()
    expect(page.get_by_label("Conversation").locator("li")).to_have_count(4)
    assert page.get_by_label("Message").input_value() == "A draft"
    page.get_by_role("button", name="Infill").click()
    page.get_by_role("button", name="Share link").click()
    assert "lens" not in page.url


def ask_for_too_many_steps(page: Page, *, last: int = 0) -> None:
    for which in range(last + 1):
        page.get_by_label("Steps", exact=True).nth(which).check(force=True)
        page.get_by_label("Steps in all").nth(which).fill("500")
    page.get_by_label("Prompt").fill(BEGINNING)
    with page.expect_response("**/v1/completions"):
        page.get_by_role("button", name="Complete").click()


def test_errors_of_the_server_are_shown_alone(page: Page) -> None:
    """Without the figures of an answer that does not exist."""
    ask_for_too_many_steps(page)
    expect(page.get_by_role("alert")).to_contain_text("500 steps for 64 tokens")
    expect(page.locator(".figures, .stage-waiting, .legend")).to_have_count(0)


def test_of_two_settings_that_fail_alike_the_error_is_shown_once(page: Page) -> None:
    page.get_by_label("Compare two settings").check()
    ask_for_too_many_steps(page, last=1)
    expect(page.get_by_role("status").filter(has_text="Failed. Failed.")).to_have_count(1)
    expect(page.get_by_role("alert")).to_have_count(1)
    page.get_by_label("Threshold").nth(1).check(force=True)
    page.get_by_role("button", name="Complete").click()
    expect(page.get_by_role("status").filter(has_text="Failed. Done")).to_have_count(1)
    expect(page.get_by_label("Run A").get_by_role("alert")).to_have_count(1)
    expect(page.locator(".figures")).to_have_count(1)


@pytest.mark.parametrize("typed", ["-5", "0", "9000", "1.5", ""])
def test_a_number_that_is_not_taken_is_said(typed: str, page: Page, sent: list[dict]) -> None:
    tokens = page.get_by_label("Tokens", exact=True)
    tokens.fill("16")
    tokens.fill(typed)
    tokens.blur()
    expect(page.get_by_text("A whole number from 1 to 8,192. It stays 16.")).to_be_visible()
    assert tokens.input_value() == "16" and tokens.get_attribute("aria-invalid") == "true" and axe(page) == []
    complete(page)
    assert sent[0]["max_tokens"] == 16
    tokens.fill("8")
    expect(page.get_by_text("It stays")).to_have_count(0)


CUT = """select => {
    const copy = document.createElement('select');
    copy.append(select.selectedOptions[0].cloneNode(true));
    copy.style.cssText = 'width: max-content; position: absolute';
    select.parentElement.append(copy);
    const needed = copy.getBoundingClientRect().width;
    copy.remove();
    return needed - select.getBoundingClientRect().width;
}"""
"""By how many pixels a select is narrower than what it shows."""


@pytest.mark.parametrize("width, height", [(320, 640), (390, 844), (700, 900), (1280, 900)])
def test_nothing_is_cut_off_and_the_message_is_on_the_first_screen(
    width: int, height: int, chromium: Browser
) -> None:
    other = "organization/another-model-with-a-long-name-8B"
    with served(reciting(), more={other: reciting()}) as address:
        page = chromium.new_page(viewport={"width": width, "height": height})
        page.goto(address)
        for name in ("tiny", other):
            page.locator(".model select").select_option(name)
            for part in (".model select", ".model small"):
                box = page.locator(part).bounding_box()
                assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
            assert page.locator(".model small").evaluate(
                "small => small.scrollWidth <= small.clientWidth + 1"
            )
            message = page.get_by_label("Message").bounding_box()
            assert message is not None and message["y"] + message["height"] <= height
        if width < 1000:
            page.get_by_role("button", name="Settings").click()
        for choice in ("nothing", "improbable when revealed"):
            page.get_by_label("Hide again").select_option(choice)
            assert page.get_by_label("Hide again").evaluate(CUT) <= 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()


def test_a_key_is_kept_for_the_tab_and_is_in_no_link(page: Page) -> None:
    def guard(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret-key":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "the API key is wrong or missing"}})

    page.route("**/v1/**", guard)
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("the API key is wrong or missing")
    page.get_by_label("Key of this server").fill("secret-key")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Completion").click()
    complete(page)
    assert shown(page)
    page.get_by_role("button", name="Share link").click()
    assert "secret" not in page.url
    page.reload()
    expect(page.get_by_role("button", name="Key set")).to_be_visible()
    assert page.evaluate(
        "() => [sessionStorage.length, Object.values(localStorage).includes('secret-key')]"
    ) == [1, False]


def test_a_server_with_a_key_lets_browsers_in_with_its_password(chromium: Browser) -> None:
    settings = AppSettings(api_keys=("secret-key",))
    with served(reciting(), settings) as address:
        context = chromium.new_context(http_credentials={"username": "", "password": "secret-key"})
        page = context.new_page()
        page.goto(address)
        page.get_by_role("button", name="Completion").click()
        complete(page)
        assert shown(page) == answer(max_new_tokens=64)
        context.close()


def axe(page: Page) -> list[str]:
    """What axe-core finds wrong with the page."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make playground")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        "async () => (await axe.run()).violations.map(v => `${v.id}: ${v.nodes.map(n => n.html).join(' ')}`)"
    )
    return [str(each) for each in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_accessible_and_within_the_page(page: Page, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 844 if width == 390 else 900})
    assert axe(page) == []
    if width == 390:
        page.get_by_role("button", name="Settings").click()
    page.get_by_label("JSON schema").check(force=True)
    page.get_by_label("Compare two settings").check()
    assert axe(page) == []
    page.get_by_label("Regex", exact=True).first.check(force=True)
    page.get_by_role("textbox", name="Regular expression").fill("[A-Z]( [a-z]+){8,16}")
    page.get_by_label("Hide again").first.select_option("improbable now")
    complete(page)
    page.get_by_role("slider", name="Frame").fill("20")
    assert page.locator(".text .draft").count()
    assert axe(page) == []
    page.get_by_role("slider", name="Frame").press("End")
    page.locator(".text .overruled").first.hover()
    expect(page.locator(".inspector s").first).to_be_visible()
    assert axe(page) == []
    page.get_by_label("Order").check(force=True)
    assert axe(page) == []
    page.keyboard.press("?")
    assert axe(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Infill").click()
    page.get_by_role("button", name="Make gap").click()
    assert axe(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_theme_is_chosen_and_kept(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Switch to dark").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = page.evaluate(background)
    page.reload()
    expect(page.get_by_role("button", name="Switch to light")).to_be_visible()
    assert light != dark and page.evaluate(background) == dark


def test_nothing_moves_where_motion_is_reduced(page: Page) -> None:
    names = "[...document.querySelectorAll('.text .cell')].map(cell => getComputedStyle(cell).animationName)"
    complete(page)
    assert {*page.evaluate(names)} > {"none"}
    page.emulate_media(reduced_motion="reduce")
    assert set(page.evaluate(names)) == {"none"}


def test_two_hundred_frames_of_512_tokens_play_without_touching_more_than_changes(page: Page) -> None:
    page.get_by_label("Tokens", exact=True).fill("512")
    page.get_by_label("Steps", exact=True).check(force=True)
    page.get_by_label("Steps in all").fill("200")
    complete(page)
    slider = page.get_by_role("slider", name="Frame")
    assert slider.get_attribute("max") == "200" and page.locator(".text .cell").count() == 512
    slider.fill("0")
    page.evaluate(
        """() => {
            window.changed = new Set();
            window.seen = [];
            const note = records => records.forEach(record => window.changed.add(record.target));
            new MutationObserver(note).observe(document.querySelector('.text'), {attributes: true, subtree: true});
            let last = '';
            const look = () => {
                const text = document.querySelector('.counter b').textContent;
                if (text !== last) window.seen.push([performance.now(), Number(last = text)]);
                requestAnimationFrame(look);
            };
            look();
        }"""
    )
    slider.press("ArrowRight")
    assert page.evaluate("window.changed.size") <= 6
    page.get_by_role("combobox", name="Frames a second").select_option("30")
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")
    busy = {name: -seconds for name, seconds in metrics(devtools).items()}
    page.keyboard.press("p")
    finish(page)
    for name, seconds in metrics(devtools).items():
        busy[name] += seconds
    assert shown(page)
    seen = page.evaluate("window.seen")
    seconds, frames = (seen[-1][0] - seen[2][0]) / 1000, len(seen)
    print(
        f"{frames} of 200 frames were drawn in {seconds:.2f} s; ms a frame: "
        f"{ ({name: round(5 * each, 2) for name, each in busy.items()}) }"
    )
    assert frames > 20  # a busy machine draws fewer: no test demands seconds


def metrics(devtools: CDPSession) -> dict[str, float]:
    """Seconds that the page's main thread was busy."""
    found = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
    return {name: found[f"{name}Duration"] for name in ("Script", "RecalcStyle", "Layout", "Task")}
