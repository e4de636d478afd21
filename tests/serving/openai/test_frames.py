"""Frames of the wire: they replay to the final text, and beside them the committed text is that of a client
that knows only OpenAI's."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

import unmask
from tests.helpers import each_once
from tests.serving.openai.asking import answer, ask, stream
from tests.tiny import cached_chat_lm
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import SPECIAL

PATTERNS = [("causal", None), ("block_causal", 4), ("bidirectional", None)]


def text_of(choice: dict[str, Any]) -> str:
    return (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]


def replayed(chunks: list[Any], index: int = 0) -> tuple[list[str | None], str, dict[str, Any], list[Any]]:
    """Of a choice the canvas after all frames, the text of its chunks, the facts of the last, and the
    frames."""
    canvas: list[str | None] = []
    committed: list[str | None] = []
    text, last, frames = "", {}, []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            text += text_of(choice)
            facts = chunk.get("diffusion", {})
            if "canvas" in facts:
                canvas = list(facts["canvas"]["tokens"])
            elif "frame" in facts:
                frame = facts["frame"]
                frames.append(frame)
                for position in frame["hidden"]:
                    canvas[position] = None
                for each in frame["revealed"]:
                    canvas[each["position"]] = each["text"]
                    assert 0 <= each["probability"] <= 1
                assert canvas[: len(committed)] == committed
                committed = canvas[: frame["committed"]]
            elif facts:
                last = facts
                assert choice["finish_reason"]
    return canvas, text, last, frames


@each_once("path, attention, block_size", ["chat/completions", "completions"], PATTERNS)
def test_frames_replay_to_the_canvas_of_generate(attention, block_size, path, service):
    lm = cached_chat_lm(attention, block_size, eos_bias=2.0)
    prompt = "abc" if path == "completions" else [{"role": "user", "content": "abc"}]
    named = {"prompt": prompt} if path == "completions" else {"messages": prompt}
    settings = {"temperature": 1.0, "seed": 7, "max_tokens": 16}
    scheduler = service(attention, block_size, eos_bias=2.0)
    chunks = stream(scheduler, path, **named, **settings, n=2, diffusion={"stream": "frames"})
    expected = unmask.generate(
        lm, [prompt] * 2, SamplerConfig(max_new_tokens=16, temperature=1.0, seed=7, trace=True)
    )
    for index in range(2):
        canvas, text, last, frames = replayed(chunks, index)
        trace = expected.trace[index]
        assert canvas == [
            None if token == lm.mask_token_id else lm.tokenizer.decode([token]) for token in trace.canvas
        ]
        assert text == last["text"] == expected.texts[index]
        assert (
            last["denoising_steps"] == expected.denoising_steps[index]
            and last["forward_passes"] == expected.forward_passes[index]
        )
        assert last["tokens_per_pass"] == len(expected.tokens[index]) / expected.forward_passes[index]
        revealed = {
            each["position"]: (each["token"], each["probability"])
            for frame in frames
            for each in frame["revealed"]
        }
        seen = [position for position, step in enumerate(trace.steps) if step >= 0]
        assert revealed == {
            position: (trace.canvas[position], math.exp(trace.log_probs[position])) for position in seen
        }
        assert [frame["step"] for frame in frames] == list(range(1, len(frames) + 1))


def test_the_canvas_of_a_text_with_gaps_is_the_whole_text(service):
    lm = cached_chat_lm()
    mask = lm.tokenizer.mask_token
    asked = {"text": f"ab{mask}{mask}cd{mask}", "temperature": 1.0, "seed": 2}
    chunks = stream(service(), "infill", **asked, diffusion={"stream": "frames"})
    first = chunks[0]["diffusion"]["canvas"]["tokens"]
    assert first == ["", "a", "b", None, None, "c", "d", None]
    canvas, text, last, _ = replayed(chunks)
    [expected] = unmask.infill(lm, [asked["text"]], SamplerConfig(temperature=1.0, seed=2)).texts
    assert "".join(canvas) == text == last["text"] == expected
    assert last["tokens_per_pass"] == 3 / last["forward_passes"]  # what was given is not counted


@pytest.mark.parametrize("stops", [True, False])
def test_what_a_constraint_forbids(stops, service):
    pytest.importorskip("outlines_core")
    lm, constraint = cached_chat_lm(), {"regex": "[abc]{2,6}x"}
    settings = {"max_tokens": 9, "temperature": 1.0, "seed": 3}
    asked = {"constraint": constraint, "top_forbidden": 4, "stop_at_eos": stops}
    *_, frames = replayed(
        stream(service(), "completions", prompt="ab", **settings, diffusion={"stream": "frames", **asked})
    )
    config = SamplerConfig(max_new_tokens=9, temperature=1.0, seed=3, trace=True, **asked)
    [trace] = unmask.generate(lm, ["ab"], config).trace
    found = {each["position"]: each["forbidden"] for frame in frames for each in frame["revealed"]}
    assert any(found.values()) and sorted(found) == list(range(9))
    for position, forbidden in found.items():
        assert [each["token"] for each in forbidden] == trace.forbidden_ids[position]
        assert [each["text"] for each in forbidden] == [
            lm.tokenizer.decode([token]) for token in trace.forbidden_ids[position]
        ]
        assert [each["probability"] for each in forbidden] == pytest.approx(
            [*map(math.exp, trace.forbidden_log_probs[position])]
        )


def test_what_nobody_asks_for_is_not_told(service):
    pytest.importorskip("outlines_core")
    asked = {"stream": "frames", "constraint": {"regex": "[abc]{2,6}x"}}
    *_, frames = replayed(stream(service(), "completions", prompt="ab", max_tokens=9, diffusion=asked))
    assert not any("forbidden" in each for frame in frames for each in frame["revealed"])
    response = ask(service(), "completions", prompt="ab", diffusion={"top_forbidden": 4})
    assert (
        response.status_code == 400 and "top_forbidden: has no effect without a constraint" in response.text
    )


def test_tokens_that_are_hidden_again(service):
    settings = {"max_tokens": 12, "temperature": 1.0, "seed": 1, "n": 2}
    chunks = stream(
        service(),
        "completions",
        prompt="ab",
        **settings,
        diffusion={"stream": "frames", "remask_fraction": 0.5, "steps": 6},
    )
    for index in range(2):
        canvas, text, last, frames = replayed(chunks, index)
        assert any(frame["hidden"] for frame in frames)
        assert "".join(canvas).partition("</s>")[0] == text == last["text"]


@pytest.mark.parametrize(
    "count", [pytest.param(100, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.nightly)]
)
def test_random_requests(count, service):
    """Of all models, routes and settings at random: frames replay to the text of the same request without a
    stream."""
    draw = random.Random(0)
    schedulers = [service(*pattern, eos_bias=draw.choice([0.0, 3.0])) for pattern in PATTERNS]
    for _ in range(count):
        scheduler = draw.choice(schedulers)
        path, asked = random_request(draw, scheduler.models["tiny"].lm)
        whole = answer(scheduler, path, **asked, seed=draw.randrange(100))
        asked["seed"] = whole["diffusion"]["seed"]
        asked["diffusion"] = {**asked.get("diffusion", {}), "stream": "frames"}
        chunks = stream(scheduler, path, **asked)
        for index, choice in enumerate(whole["choices"]):
            canvas, text, last, _ = replayed(chunks, index)
            expected = choice["message"]["content"] if "message" in choice else choice["text"]
            assert text == last["text"] == expected
            until = canvas.index("</s>") if "</s>" in canvas else len(canvas)
            shown = "".join(
                token for token in canvas[:until] if token is not None and token not in SPECIAL.values()
            )
            assert shown.startswith(expected) if asked.get("stop") else shown == expected


def random_request(draw: random.Random, lm: Any) -> tuple[str, dict[str, Any]]:
    """A route and a body."""
    path = draw.choice(
        ["completions", "chat/completions"]
        + ["infill", "fim/completions"] * (lm.attention == "bidirectional")
    )
    size, letters = (
        draw.randint(1, 12),
        lambda: "".join(draw.choice("abc") for _ in range(draw.randint(1, 6))),
    )
    asked: dict[str, Any] = {
        "n": draw.randint(1, 2),
        "temperature": draw.choice([0.0, 0.7, 1.5]),
        "top_p": draw.choice([1.0, 0.8]),
    }
    rules = [
        {},
        {"steps": draw.randint(1, size) if lm.attention == "bidirectional" else size},
        {"threshold": 0.3},
        {"tokens_per_step": 2, "remasking": "random"},
        {"factor": 0.5},
    ]
    asked["diffusion"] = draw.choice(rules)
    if path == "infill":
        lengths = [draw.choice([None, size]) for _ in range(2)]
        lengths[-1] = size
        asked |= {"segments": [letters() + "a" for _ in range(3)], "lengths": lengths, "max_gap": 4}
        asked["diffusion"] = {name: value for name, value in asked["diffusion"].items() if name != "steps"}
        return path, asked
    asked |= {"max_tokens": size} | draw.choice([{}, {"stop": letters()[:2]}])
    if path == "chat/completions":
        asked["messages"] = [{"role": "user", "content": letters()}]
    else:
        asked["prompt"] = letters()
    if path == "fim/completions":
        asked["suffix"] = letters()
        asked["diffusion"] = {**asked["diffusion"], "length": draw.choice(["exact", "search"])}
        asked["diffusion"].pop("steps", None)
    return path, asked
