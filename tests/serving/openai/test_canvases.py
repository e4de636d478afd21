"""Canvases of random tokens, served: DiffusionGemma, and models of uniform noise. By the official client."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import cache
from typing import Any

import openai
import pytest

import unmask
from tests.diffusion_gemma import save_published
from tests.helpers import each_once, partly_slow
from tests.serving.openai.forms import QUESTION, WEATHER, check_json, check_tool_call
from tests.serving.openai.test_frames import replayed
from tests.serving.servers import served
from tests.tiny import HERMES, PRINTABLE, chat_lm
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import SPECIAL
from unmask.generation.canvas import CanvasSettings
from unmask.generation.prompt_log_probs import prompt_log_probs
from unmask.generation.requests import completion_length, make_requests
from unmask.models.load import load

CANVAS = 16
CONTEXT = 1024
STEPS = {"max_denoising_steps": 4}
SETTINGS = STEPS | {"t_max": 2.0, "entropy_bound": 2.0}
KINDS = ["bidirectional", "blocks", "whole canvases"]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Gives one of the models, the same one each time but for its place in memory."""
    folder = tmp_path_factory.mktemp("model")
    save_published(folder, PRINTABLE, canvas=CANVAS, max_position_embeddings=CONTEXT)

    def loaded(kind: str):
        if kind == "whole canvases":
            lm = load(folder, dtype="float64")
            lm.tokenizer.chat_template = HERMES
            return lm
        pattern = ("block_causal", 4) if kind == "blocks" else ("bidirectional", None)
        noise = ("hybrid", 0.1) if kind == "hybrid noise" else ("uniform",)
        return chat_lm(*pattern, eos_bias=0.5).with_noise(*noise)

    return loaded


@pytest.fixture(scope="module")
def ask(model):
    """Gives the client of a server with one of the models, and the same model to compare with."""
    with ExitStack() as stack:

        @cache
        def asked(kind: str):
            url = stack.enter_context(served(model(kind)))
            made = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            return stack.enter_context(made), model(kind)

        yield asked


def extra(**fields: Any) -> dict[str, Any]:
    return {"extra_body": {"diffusion": fields}}


@partly_slow("kind", KINDS, 0, 2)
def test_a_chat_is_that_of_generate(kind, ask):
    """`max_tokens` is what is returned, though canvases are whole."""
    client, lm = ask(kind)
    answer = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        max_tokens=CANVAS + 5,
        seed=3,
        n=3,
        logprobs=True,
        top_logprobs=2,
        **extra(**SETTINGS),
    )
    config = SamplerConfig(max_new_tokens=CANVAS + 5, seed=3, top_log_probs=2, trace=True, **SETTINGS)
    expected = unmask.generate(lm, [QUESTION] * 3, config)
    assert [choice.message.content for choice in answer.choices] == expected.texts
    for choice, tokens, log_probs, trace in zip(
        answer.choices, expected.tokens, expected.log_probs, expected.trace, strict=True
    ):
        assert choice.finish_reason == ("stop" if tokens[-1] in lm.eos_token_ids else "length")
        assert [each.logprob for each in choice.logprobs.content] == pytest.approx(log_probs, abs=1e-9)
        top = [[each.logprob for each in token.top_logprobs] for token in choice.logprobs.content]
        assert top == [pytest.approx(each, abs=1e-9) for each in trace.top_log_probs[: len(tokens)]]
    assert answer.usage.completion_tokens == sum(map(len, expected.tokens)) <= 3 * (CANVAS + 5)
    assert answer.usage.prompt_tokens == len(expected.prompts[0])
    assert answer.usage.diffusion["forward_passes"] == sum(expected.forward_passes)
    again = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=CANVAS + 5, seed=3, **extra(**SETTINGS)
    )
    assert again.choices[0].message.content == expected.texts[0]


@partly_slow("kind", KINDS, 0, 2)
def test_temperature_multiplies_those_of_all_steps(kind, ask):
    client, lm = ask(kind)

    def answered(temperature: float | None, **more: Any) -> str:
        given = {} if temperature is None else {"temperature": temperature}
        asked = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "seed": 1, **given}
        return client.completions.create(**asked, **extra(**STEPS | more)).choices[0].text

    def expected(**more: Any) -> str:
        config = SamplerConfig(max_new_tokens=20, seed=1, **STEPS | more)
        return unmask.generate(lm, ["abc"], config).texts[0]

    own = CanvasSettings()
    assert answered(None) == answered(1) == answered(1.0) == expected()
    assert answered(2.0) == expected(t_min=2 * own.t_min, t_max=2 * own.t_max)
    assert answered(0.5, t_max=3.0) == expected(t_min=own.t_min / 2, t_max=1.5)
    assert answered(0) == answered(0, t_min=0.9, t_max=3.0) == answered(1, t_min=0.0, t_max=1e-6)
    assert answered(0) == answered(1, t_min=2e-6, t_max=3e-6, entropy_bound=0.0)


@every_kind
def test_at_temperature_0_every_step_draws_the_most_probable_tokens(kind, ask):
    client, _ = ask(kind)
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=20, temperature=0, seed=1, **extra(**STEPS, trace=True)
    )
    trace = answer.choices[0].diffusion["trace"]
    assert trace["entropies"] == pytest.approx([0.0] * len(trace["entropies"]), abs=1e-9)
    assert trace["sampled_log_probs"] == pytest.approx([0.0] * len(trace["entropies"]), abs=1e-9)


@every_kind
def test_filters_and_bans_are_those_of_generate(kind, ask):
    client, lm = ask(kind)
    banned = lm.tokenizer.convert_tokens_to_ids([*"aeiou "])
    given = SETTINGS | {"top_k": 5, "min_p": 0.01}
    answer = client.completions.create(
        model="tiny",
        prompt="abc",
        max_tokens=20,
        top_p=0.8,
        seed=5,
        logit_bias={str(token): -100 for token in banned},
        **extra(**given),
    )
    config = SamplerConfig(max_new_tokens=20, top_p=0.8, seed=5, forbidden_tokens=banned, **given)
    assert answer.choices[0].text == unmask.generate(lm, ["abc"], config).texts[0]
    assert not {*answer.choices[0].text} & {*"aeiou "}


@pytest.mark.parametrize(
    "asked, param, meant",
    [
        ({"diffusion": {"steps": 4}}, "diffusion.steps", "max_denoising_steps"),
        ({"diffusion": {"threshold": 0.9}}, "diffusion.threshold", "entropy_bound"),
        ({"diffusion": {"remask_fraction": 0.5}}, "diffusion.remask_fraction", "every step"),
        ({"diffusion": {"cache": "dual"}}, "diffusion.cache", "what can be kept is kept"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "Send 0"),
        ({"diffusion": {"t_max": 0.1}}, "diffusion.t_min", "t_max"),
        ({"diffusion": {"t_min": 0, "t_max": 1e-40}}, "diffusion.t_max", "0.000001"),
        ({"diffusion": {"t_min": 1e-9}, "temperature": 1}, "diffusion.t_min", "1e-6 and more"),
    ],
    ids=str,
)
def test_what_needs_masks_is_refused_by_name(asked, param, meant, ask):
    client, _ = ask("bidirectional")
    with pytest.raises(openai.BadRequestError, match=meant) as error:
        client.completions.create(model="tiny", prompt="abc", extra_body=asked)
    assert error.value.param == param


@partly_slow("kind", KINDS, 0, 2)
def test_a_stream_has_only_final_text(kind, ask):
    client, _ = ask(kind)
    for seed in range(3):
        asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 2 * CANVAS + 3, "seed": seed}
        whole = client.chat.completions.create(**asked, **extra(**SETTINGS))
        chunks = [
            chunk.model_dump()
            for chunk in client.chat.completions.create(
                **asked,
                **extra(**SETTINGS, stream="frames"),
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        canvas, text, last, frames = replayed(chunks)
        assert text == last["text"] == whole.choices[0].message.content
        assert chunks[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens
        tokens, final = whole.usage.completion_tokens, ""
        shown = [each for each in canvas[:tokens] if each not in SPECIAL.values()]
        assert len(canvas) == 2 * CANVAS + 3 and "".join(shown) == text
        for frame in frames:
            assert not frame["hidden"] and all(each["position"] < len(canvas) for each in frame["revealed"])
        plain = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**asked, **extra(**SETTINGS), stream=True)
        ]
        assert "".join(plain) == text
        pieces = [text_of for text_of in plain if text_of]
        assert kind == "bidirectional" or len(pieces) > 1 or tokens <= 2 * CANVAS
        for piece in pieces:
            final += piece
            assert text.startswith(final)


@every_kind
def test_frames_in_company_replay_to_the_answers(kind, ask):
    """They end at different steps, and slots move."""
    client, lm = ask(kind)
    asked = {"model": "tiny", "prompt": ["abc", "f"], "max_tokens": 2 * CANVAS - 3, "n": 3, "seed": 6}
    stream = client.completions.create(
        **asked, **extra(**SETTINGS, confidence_threshold=1.0, stream="frames"), stream=True
    )
    chunks = [chunk.model_dump() for chunk in stream]
    config = SamplerConfig(max_new_tokens=2 * CANVAS - 3, seed=6, confidence_threshold=1.0, **SETTINGS)
    expected = unmask.generate(lm, ["abc"] * 3 + ["f"] * 3, config)
    steps = set()
    for index, tokens in enumerate(expected.tokens):
        canvas, text, last, frames = replayed(chunks, index)
        assert text == last["text"] == expected.texts[index]
        assert canvas[: len(tokens)] == [lm.tokenizer.decode([token]) for token in tokens]
        found = {each["position"]: each for frame in frames for each in frame["revealed"]}
        probabilities = [found[place]["probability"] for place in range(len(tokens))]
        assert probabilities == pytest.approx([*map(math.exp, expected.log_probs[index])], abs=1e-9)
        steps.add(len(frames))
    assert kind == "bidirectional" or len(steps) > 1


@partly_slow("kind", KINDS, 0, 2)
def test_a_stop_string_ends_an_answer_where_it_is_final(kind, ask):
    client, _ = ask(kind)
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 3 * CANVAS, "seed": 2, **extra(**SETTINGS)}
    whole = client.completions.create(**asked).choices[0].text
    for stop in {whole[1:2], whole[len(whole) // 2 :][:2], whole[-2:]}:
        expected = whole[: whole.index(stop)]
        choice = client.completions.create(**asked, stop=[stop]).choices[0]
        assert choice.text == expected and choice.finish_reason == "stop"
        chunks = client.completions.create(**asked, stop=[stop], stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_a_completion_has_its_tokens_and_not_those_of_its_canvas(ask):
    client, _ = ask("whole canvases")
    for tokens in (1, CANVAS - 6, CANVAS, CANVAS + 1):
        asked = {"model": "tiny", "prompt": "abc", "max_tokens": tokens, "seed": 4, "logprobs": 0}
        answer = client.completions.create(**asked, **extra(**STEPS))
        [choice] = answer.choices
        ended = choice.logprobs.tokens[-1] == "</s>"
        assert answer.usage.completion_tokens == len(choice.logprobs.tokens) <= tokens
        assert ended or (len(choice.text), choice.finish_reason) == (tokens, "length")
    room = CONTEXT - CANVAS
    client.completions.create(model="tiny", prompt=[5] * room, max_tokens=1, **extra(**STEPS))
    with pytest.raises(openai.BadRequestError, match=f"{CANVAS} new ones exceed the context") as error:
        client.completions.create(model="tiny", prompt=[5] * (room + 1), max_tokens=1, **extra(**STEPS))
    assert error.value.param == "prompt"


def test_the_most_steps_of_a_sequence_are_those_of_its_canvases(model):
    lm = model("whole canvases")
    [request] = make_requests(lm, ["abc"], SamplerConfig(max_new_tokens=CANVAS + 1, **STEPS))
    assert request.most_steps == 2 * 4 and request.end == request.start + CANVAS + 1
    assert completion_length(lm, CANVAS + 1) == 2 * CANVAS
    [request] = make_requests(model("bidirectional"), ["abc"], SamplerConfig(max_new_tokens=9))
    assert request.most_steps == CanvasSettings().max_denoising_steps


@every_kind
def test_gaps_are_filled(kind, ask):
    client, lm = ask(kind)
    mask = lm.tokenizer.mask_token
    text = f"ab{mask}{mask}cd{mask}"
    found = client.post(
        "/infill",
        body={"model": "tiny", "text": text, "seed": 2, "diffusion": SETTINGS},
        cast_to=dict[str, Any],
    )
    [expected] = unmask.infill(lm, [text], SamplerConfig(seed=2, **SETTINGS)).texts
    assert found["choices"][0]["text"] == expected and expected[2:4] + expected[-1:] != ""
    with pytest.raises(openai.BadRequestError, match="mask"):
        client.post("/infill", body={"model": "tiny", "text": "ab<gap>c"}, cast_to=dict[str, Any])


@pytest.mark.parametrize("kind, settings", [("bidirectional", SETTINGS), ("hybrid noise", {"steps": 2})])
def test_a_suffix_needs_a_gap_of_known_length(kind, settings, ask):
    client, lm = ask(kind)
    asked = {"model": "tiny", "prompt": "ab", "suffix": "cd", "max_tokens": 5, "seed": 1}
    with pytest.raises(openai.BadRequestError, match="Set it to exact: max_tokens are written") as error:
        client.completions.create(**asked)
    assert error.value.param == "diffusion.length"
    with pytest.raises(openai.BadRequestError, match="Set it to exact: max_tokens are written"):
        client.post("/fim/completions", body=asked, cast_to=dict[str, Any])
    answer = client.completions.create(**asked, **extra(**settings, length="exact"))
    text = f"ab{lm.tokenizer.mask_token * 5}cd"
    [expected] = unmask.infill(lm, [text], SamplerConfig(seed=1, **settings)).texts
    assert answer.choices[0].text == expected[2:-2] and answer.usage.completion_tokens == 5


@pytest.mark.parametrize("kind, settings", [("bidirectional", SETTINGS), ("hybrid noise", {"steps": 2})])
def test_gaps_need_lengths(kind, settings, ask):
    client, lm = ask(kind)
    asked = {"model": "tiny", "seed": 1, "diffusion": settings}

    def filled(**given: Any) -> str:
        answer = client.post("/infill", body=asked | given, cast_to=dict[str, Any])
        return answer["choices"][0]["text"]

    for given in ({"text": "ab<gap>cd"}, {"segments": ["ab", "cd"]}):
        with pytest.raises(
            openai.BadRequestError, match="Give segments with the lengths of all gaps"
        ) as error:
            filled(**given)
        assert error.value.param == "lengths"
    assert filled(segments=["ab", "cd"], lengths=[2]) == filled(text=f"ab{lm.tokenizer.mask_token * 2}cd")


@every_kind
def test_an_edit(kind, ask):
    client, _ = ask(kind)
    region = "x = 1\n"
    message = {"role": "user", "content": f"<|code_to_edit|>\n{region}<|/code_to_edit|>"}
    body = {"model": "tiny", "messages": [message], "seed": 1, "diffusion": SETTINGS}
    if kind == "whole canvases":  # its context has room for some canvases
        body["messages"] = [{"role": "system", "content": "Edit."}, message]
    found = client.post("/edit/completions", body=body, cast_to=dict[str, Any])
    assert found["usage"]["completion_tokens"] <= len(region) + 128 and found["choices"][0]["message"]


def test_the_log_probabilities_of_a_prompt(ask):
    client, lm = ask("whole canvases")
    ids = lm.tokenizer("def f")["input_ids"]
    asked = {"model": "tiny", "prompt": ids, "echo": True, "logprobs": 2, **extra(**STEPS)}
    found = prompt_log_probs(lm, ids, 2, lambda part: part())
    for tokens in (0, 3):
        answer = client.completions.create(**asked, max_tokens=tokens)
        assert (answer.usage.diffusion["forward_passes"] == 1) == (tokens == 0)
        listed = answer.choices[0].logprobs.token_logprobs
        assert listed[0] is None and listed[1 : len(ids)] == pytest.approx(found.log_probs[1:], abs=1e-9)
        assert len(listed) <= len(ids) + tokens
    client, _ = ask("bidirectional")
    with pytest.raises(openai.BadRequestError, match="Leave out echo or logprobs") as error:
        client.completions.create(**asked, max_tokens=3)
    assert error.value.param == "prompt"


def test_a_prompt_is_scored_that_leaves_no_room_for_a_canvas(ask):
    client, lm = ask("whole canvases")
    asked = {"model": "tiny", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = client.completions.create(**asked, prompt=[[5] * CONTEXT, [5, 6]], n=2, **extra(trace=True))
    assert [len(choice.logprobs.token_logprobs) for choice in answer.choices] == [CONTEXT] * 2 + [2] * 2
    assert answer.usage.prompt_tokens == CONTEXT + 2 and answer.usage.completion_tokens == 0
    texts = [choice.text for choice in answer.choices[::2]]
    assert texts == [lm.tokenizer.decode([5]) * CONTEXT, lm.tokenizer.decode([5, 6])]
    chunks = client.completions.create(**asked, prompt="abcd", stream=True, **extra(stream="frames"))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "abcd"
    for prompt in ([5] * (CONTEXT + 1), [5, 10**6]):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(**asked, prompt=[[5], prompt], n=2)
        assert error.value.param == "prompt" and "prompt 1" in str(error.value)


@partly_slow("kind", KINDS, 0, 2)
def test_json_that_fits_a_schema(kind, ask):
    check_json(ask(kind)[0], **extra(**SETTINGS))


@each_once("kind, stream", KINDS, [False, True])
def test_a_tool_is_called(kind, stream, ask):
    check_tool_call(ask(kind)[0], "required", stream=stream, **extra(**SETTINGS))


@every_kind
def test_tools_that_need_not_be_called(kind, ask):
    client, _ = ask(kind)
    asked = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER], "max_tokens": 8, "seed": 4}
    answer = client.chat.completions.create(**asked, **extra(**STEPS))
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
