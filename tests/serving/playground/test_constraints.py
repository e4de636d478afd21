"""The playground in a browser: texts that have to match, and tokens that may be hidden again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.serving.playground.pages import BEGINNING, answer, complete, shown
from tests.serving.playground.reciting import reciting
from unmask.config.sampler import SamplerConfig
from unmask.generation import sampler

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "kind, label, text, holds",
    [
        ("Regex", "Regular expression", "[a-c]+x", lambda text: set(text) <= set("abcx")),
        ("JSON schema", "JSON schema", '{"type": "boolean"}', lambda text: json.loads(text) in (True, False)),
    ],
)
def test_constraints(page: Page, kind: str, label: str, text: str, holds: Callable[[str], bool]) -> None:
    page.get_by_label("Tokens", exact=True).fill("12")
    page.get_by_label(kind, exact=True).first.check(force=True)
    page.get_by_role("textbox", name=label).fill(text)
    complete(page)
    assert holds(shown(page).removesuffix("</s>").split("</s>")[0])


def test_tokens_that_a_constraint_forbids_are_shown(page: Page, sent: list[dict]) -> None:
    pattern = "[A-Z]( [a-z]+){8,16}"
    page.get_by_label("Tokens", exact=True).fill("40")
    page.get_by_label("Regex", exact=True).first.check(force=True)
    page.get_by_role("textbox", name="Regular expression").fill(pattern)
    complete(page)
    assert sent[0]["diffusion"]["top_forbidden"] == 5
    config = SamplerConfig(max_new_tokens=40, constraint={"regex": pattern}, top_forbidden=5, trace=True)
    generation = sampler.generate(reciting(), [BEGINNING], config)
    [trace], count = generation.trace or [], len(generation.tokens[0])
    pairs = enumerate(zip(trace.log_probs[:count], trace.forbidden_log_probs[:count], strict=True))
    likelier = [position for position, (own, others) in pairs if others and others[0] > own]
    marked = page.locator(".text .cell").evaluate_all(
        "all => all.flatMap((cell, at) => cell.matches('.overruled') ? [at] : [])"
    )
    assert marked == likelier != []
    expect(
        page.get_by_text(f"forbade a likelier token at {len(likelier)} of {count} positions")
    ).to_be_visible()
    expect(page.locator(".legend")).to_contain_text("a likelier token is forbidden")
    for position in likelier[:3]:
        page.locator(".text .cell").nth(position).hover()
        forbidden = zip(trace.forbidden_ids[position], trace.forbidden_log_probs[position], strict=True)
        shares = [(reciting().tokenizer.decode([token]), math.exp(log_prob)) for token, log_prob in forbidden]
        noticeable = [text.replace("\n", "↵") for text, share in shares if share >= 0.0005]
        assert page.locator(".inspector s").all_text_contents() == noticeable != []
        expect(page.locator(".forbidden")).to_contain_text(f"{100 * shares[0][1]:.1f} %")
    page.get_by_role("slider", name="Frame").fill("0")
    expect(page.locator(".text .overruled")).to_have_count(0)
    expect(page.locator(".inspector")).to_contain_text("hidden")  # of the token that is still pointed at


@pytest.mark.parametrize("again", ["nothing", "improbable when revealed", "improbable now"])
def test_only_what_may_still_change_is_marked(page: Page, sent: list[dict], again: str) -> None:
    page.get_by_label("Steps", exact=True).check(force=True)
    page.get_by_label("Hide again").select_option(again)
    if again != "nothing":
        page.get_by_label("Fraction hidden again").fill("0.5")
    complete(page)
    fields = {
        "nothing": {},
        "improbable when revealed": {"remask_fraction": 0.5},
        "improbable now": {"revise": {"eta": 0.5}},
    }[again]
    settings = {"remasking": "low_confidence", "steps": 32, **fields}
    assert sent[0]["diffusion"] == {"stream": "frames", **settings}
    assert shown(page) == answer(max_new_tokens=64, **settings)
    drafts, text = page.locator(".text .draft"), page.locator(".text")
    expect(drafts).to_have_count(0)  # of the last frame
    page.get_by_role("slider", name="Frame").fill("10")
    assert drafts.count() == (0 if again == "nothing" else text.locator(".cell:not(.hidden)").count())
    expect(page.get_by_text("may change")).to_have_count(0 if again == "nothing" else 1)
