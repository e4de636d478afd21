"""What the fields of requests mean, for each route: the answers are those of the library."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from functools import cache
from types import SimpleNamespace

import pytest

import unmask
from tests.helpers import partly_slow, shared_path
from tests.serving.openai.asking import answer, app_of, ask, chunks_of, get, idle, post, stream
from tests.serving.servers import running
from tests.tiny import byte_lm, cached_chat_lm, chat_lm
from unmask.config.sampler import SamplerConfig
from unmask.data.encoding import encode_prompt
from unmask.generation.gap_lengths import find_lengths
from unmask.generation.prompt_log_probs import prompt_log_probs
from unmask.generation.requests import without_ends

BLOCKS = ("block_causal", 4)
LONG = {"prompt": "ab", "max_tokens": 40, "temperature": 1.0, "seed": 3, "diffusion": {"stop_at_eos": False}}


@cache
def long_text(*pattern) -> str:
    return unmask.generate(
        cached_chat_lm(*pattern),
        ["ab"],
        SamplerConfig(max_new_tokens=40, temperature=1.0, seed=3, stop_at_eos=False),
    ).texts[0]


BOTH_SIDES = ("bidirectional", None)  # which commits all of its text in its last step


@pytest.mark.parametrize(
    "pattern, start, length",
    [
        (BLOCKS, 0, 1),
        (BLOCKS, 9, 3),
        (BLOCKS, 20, 5),
        (BLOCKS, 38, 2),
        (BOTH_SIDES, 0, 1),
        (BOTH_SIDES, 20, 5),
    ],
    ids=str,
)
def test_a_stop_string_cuts_the_text_wherever_its_tokens_begin(pattern, start, length, service):
    scheduler, whole = service(*pattern), long_text(*pattern)
    stop = whole[start : start + length]
    cut = whole[: whole.find(stop)]
    asked = LONG | {"stop": ["never", stop], "logprobs": 0}
    choice = answer(scheduler, "completions", **asked)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (cut, "stop")
    assert "".join(choice["logprobs"]["tokens"]) == cut + stop  # one token is one character
    assert choice["logprobs"]["text_offset"] == [*range(len(cut + stop))]
    chunks = stream(scheduler, "completions", **asked)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut
    assert all(stop[0] not in chunk["choices"][0]["text"] or stop[0] in cut for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.fixture(scope="module")
def of_bytes():
    """A scheduler of a model of pieces of words, and the model once more."""
    with running(byte_lm()) as scheduler:
        yield scheduler, byte_lm()


@partly_slow("seed", range(6), 0, 1)
def test_streams_of_tokens_that_are_pieces_of_words_and_of_characters(seed, of_bytes):
    scheduler, lm = of_bytes
    asked = {
        "prompt": "the",
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": seed,
        "diffusion": {"stop_at_eos": False},
    }
    [whole] = unmask.generate(
        lm, ["the"], SamplerConfig(max_new_tokens=24, temperature=1.0, seed=seed, stop_at_eos=False)
    ).texts
    assert "\ufffd" in whole  # random bytes
    chunks = stream(scheduler, "completions", **asked)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    stop = re.findall("[^\ufffd]{1,4}", whole[3 + seed :])[0]  # with half a character it is refused
    cut = whole[: whole.find(stop)]
    chunks = stream(scheduler, "completions", **asked | {"stop": stop})
    [choice] = answer(scheduler, "completions", **asked | {"stop": stop}, logprobs=0)["choices"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"] == cut
    tokens = choice["logprobs"]["tokens"]
    assert len(tokens) <= 24 and choice["finish_reason"] == "stop"


def test_a_stop_string_ends_the_sequence_early(service):
    scheduler = service(*BLOCKS)
    stop = long_text(*BLOCKS)[2:4]
    passes = scheduler.metrics.forward_passes.labels("tiny")._value.get
    before = passes()
    usage = answer(scheduler, "completions", **LONG | {"stop": stop})["usage"]
    assert usage["completion_tokens"] == 4 and usage["diffusion"]["denoising_steps"] <= 8
    assert usage["diffusion"]["forward_passes"] is None
    assert idle(scheduler) and passes() - before < 20


def test_without_a_seed_answers_differ_and_say_how_to_get_them_again(service):
    asked = LONG | {"seed": None}
    first, second = (answer(service(), "completions", **asked) for _ in range(2))
    assert first["choices"][0]["text"] != second["choices"][0]["text"]
    config = SamplerConfig(
        max_new_tokens=40, temperature=1.0, seed=first["diffusion"]["seed"], stop_at_eos=False
    )
    expected = unmask.generate(cached_chat_lm(), ["ab"], config, keys=first["diffusion"]["keys"])
    assert expected.texts == [first["choices"][0]["text"]]


def test_keys_replace_the_hashes_of_prompts(service):
    keys = [3, -(2**63), 2**63 - 1, 0]
    asked = {"prompt": ["a", "b"], "n": 2, "max_tokens": 9, "temperature": 1.0, "diffusion": {"keys": keys}}
    found = answer(service(), "completions", **asked)
    expected = unmask.generate(
        cached_chat_lm(), ["a", "a", "b", "b"], SamplerConfig(max_new_tokens=9, temperature=1.0), keys
    )
    assert [choice["text"] for choice in found["choices"]] == expected.texts
    assert found["diffusion"] == {"seed": 0, "keys": keys, "version": None}


def test_a_trace_has_all_that_generate_returns(service):
    scheduler = service(*BLOCKS, eos_bias=2.0)
    asked = {
        "prompt": [[5, 6], [7]],
        "max_tokens": 9,
        "temperature": 1.0,
        "seed": 1,
        "diffusion": {"trace": True},
    }
    config = SamplerConfig(max_new_tokens=9, temperature=1.0, seed=1, trace=True)
    expected = unmask.generate(cached_chat_lm(*BLOCKS, eos_bias=2.0), [[5, 6], [7]], config)
    for index, choice in enumerate(answer(scheduler, "completions", **asked)["choices"]):
        facts, trace = choice["diffusion"], expected.trace[index]
        assert (facts["prompt"], facts["tokens"], facts["log_probs"]) == (
            expected.prompts[index],
            expected.tokens[index],
            expected.log_probs[index],
        )
        assert facts["trace"] == json.loads(json.dumps(vars(trace)))
    chunks = stream(scheduler, "completions", **asked)
    assert [chunk["diffusion"]["trace"] for chunk in chunks if "diffusion" in chunk] != []


@pytest.mark.parametrize("stop", [None, "found"])
def test_the_most_probable_tokens_when_each_was_revealed(stop, service):
    scheduler, lm = service(*BLOCKS), cached_chat_lm(*BLOCKS)
    config = SamplerConfig(
        max_new_tokens=40, temperature=1.0, seed=3, stop_at_eos=False, top_log_probs=3, trace=True
    )
    expected = unmask.generate(lm, ["ab"], config)
    [trace] = expected.trace
    more = {} if stop is None else {"stop": expected.texts[0][8:10]}
    text = answer(scheduler, "completions", **LONG | more, logprobs=3)["choices"][0]["logprobs"]
    count = 40 if stop is None else expected.texts[0].find(more["stop"]) + 2
    assert len(text["tokens"]) == len(text["top_logprobs"]) == count
    for found, ids, log_probs in zip(text["top_logprobs"], trace.top_ids, trace.top_log_probs, strict=False):
        assert found == {
            lm.tokenizer.decode([token]): value for token, value in zip(ids, log_probs, strict=True)
        }
    asked = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 1,
    }
    content = answer(scheduler, "chat/completions", **asked)["choices"][0]["logprobs"]["content"]
    for each in content:  # at temperature 0 the most probable token is taken
        assert (
            len(each["top_logprobs"]) == 2
            and {name: each[name] for name in ("token", "logprob", "bytes")} == each["top_logprobs"][0]
        )
    last = stream(scheduler, "chat/completions", **asked)[-1]["choices"][0]
    assert last["finish_reason"] == "length" and last["logprobs"]["content"] == content


def test_prompts_of_ids_are_shown_as_text_that_is_decoded_beside_the_event_loop(service, monkeypatch):
    scheduler, threads = service(), []
    tokenizer, ids = (
        scheduler.models["tiny"].lm.tokenizer,
        cached_chat_lm().tokenizer("def f", add_special_tokens=False)["input_ids"],
    )
    decode = tokenizer.decode

    def seen(tokens, **options):
        threads.extend([threading.current_thread()] * (list(tokens) == ids))
        return decode(tokens, **options)

    monkeypatch.setattr(tokenizer, "decode", seen)
    choices = answer(scheduler, "completions", prompt=[ids, ids[:2]], echo=True, n=2, max_tokens=3)["choices"]
    assert [choice["text"][:2] for choice in choices] == ["de"] * 4 and choices[1]["text"].startswith("def f")
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize("pattern", [BOTH_SIDES, BLOCKS, ("causal", None)], ids=str)
def test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens(pattern, service):
    scheduler, lm = service(*pattern), cached_chat_lm(*pattern)
    ids = lm.tokenizer("def f", add_special_tokens=False)["input_ids"]
    expected = [prompt_log_probs(lm, some, 2, lambda part: part()) for some in (ids, ids[:2])]
    asked = {"prompt": [ids, ids[:2]], "echo": True, "logprobs": 2, "n": 2, "seed": 0}
    written = answer(scheduler, "completions", **asked | {"echo": False, "max_tokens": 4})["choices"]
    for count in (0, 1, 4):
        whole = answer(scheduler, "completions", **asked, max_tokens=count)
        assert whole["usage"]["prompt_tokens"] == 7 and (count == 0) == (
            whole["usage"]["completion_tokens"] == 0
        )
        for choice, prompt, alone in zip(
            whole["choices"], [one for one in expected for _ in range(2)], written, strict=True
        ):
            text, found, size = lm.tokenizer.decode(prompt.tokens), choice["logprobs"], len(prompt.tokens)
            assert choice["text"][: len(text)] == text and found["text_offset"][:size] == list(range(size))
            assert found["tokens"][:size] == list(text) and found["token_logprobs"][:size] == prompt.log_probs
            shown = [
                each and {lm.tokenizer.decode([token]): value for token, value in each} for each in prompt.top
            ]
            assert found["top_logprobs"][:size] == shown and shown[0] is None
            if count == 4:
                assert found["token_logprobs"][size:] == alone["logprobs"]["token_logprobs"]
                assert (
                    found["top_logprobs"][size:] == alone["logprobs"]["top_logprobs"]
                    and choice["text"] == text + alone["text"]
                )
            if count == 0:
                assert (
                    choice["text"] == text
                    and len(found["tokens"]) == size
                    and choice["finish_reason"] == "length"
                )
        last = [chunk["choices"][0] for chunk in stream(scheduler, "completions", **asked, max_tokens=count)]
        closed = {each["index"]: each["logprobs"] for each in last if each["finish_reason"]}
        assert closed == {each["index"]: each["logprobs"] for each in whole["choices"]}


def test_the_beginning_that_the_tokenizer_adds_is_no_part_of_an_echoed_text(of_bytes):
    scheduler, lm = of_bytes
    choice = answer(scheduler, "completions", prompt="the cat", echo=True, logprobs=0, max_tokens=0)[
        "choices"
    ][0]
    ids, found = encode_prompt(lm.tokenizer, "the cat"), choice["logprobs"]
    assert (
        choice["text"] == "the cat"
        and len(found["token_logprobs"]) == len(ids)
        and found["top_logprobs"] is None
    )
    given = found["tokens"][ids[:1] == [lm.tokenizer.bos_token_id] :]
    assert (
        "".join(given) == "the cat"
        and found["text_offset"][0] == 0
        and found["text_offset"][-1] == 7 - len(given[-1])
    )


def test_lm_eval_scores_the_choices_of_a_question_by_a_server(service):
    """By its own payload and its own reading of the answer; the numbers are those of the library."""
    api = pytest.importorskip("lm_eval.models.openai_completions", reason="needs lm-eval").LocalCompletionsAPI
    for pattern in (("causal", None), BOTH_SIDES):
        scheduler, lm = service(*pattern), cached_chat_lm(*pattern)
        context, choices = [7, 8, 9], [[10], [11, 12], [13, 14, 15]]
        asked = [context + choice for choice in choices]
        payload = api._create_payload(SimpleNamespace(model="tiny"), asked)
        found = api.parse_logprobs(answer(scheduler, "completions", **payload), asked, [len(context)] * 3)
        expected = [prompt_log_probs(lm, ids, 1, lambda part: part()) for ids in asked]
        assert [value for value, _ in found] == pytest.approx(
            [math.fsum(each.log_probs[3:]) for each in expected], abs=1e-5
        )
        assert [greedy for _, greedy in found] == [
            all(most[0][0] == token for most, token in zip(each.top[3:], each.tokens[3:], strict=True))
            for each in expected
        ]
        if lm.autoregressive:
            scored = unmask.log_likelihood(lm, [context] * 3, choices)
            assert [value for value, _ in found] == pytest.approx(scored.tolist(), abs=1e-4)


def test_biases_forbid_and_allow_tokens(service):
    text = answer(service(), "completions", prompt="ab", max_tokens=12, diffusion={"stop_at_eos": False})[
        "choices"
    ][0]["text"]
    [token] = cached_chat_lm().tokenizer.encode(text[0], add_special_tokens=False)
    for bias in (-100, -100.0):
        banned = answer(service(), "completions", prompt="ab", max_tokens=12, logit_bias={str(token): bias})[
            "choices"
        ][0]["text"]
        assert text[0] not in banned
    only = answer(service(), "completions", prompt="ab", max_tokens=12, logit_bias={str(token): 100, "9": 0})[
        "choices"
    ][0]["text"]
    assert only == text[0] * 12


def test_settings_of_diffusion_reach_the_sampler(service):
    settings = {"steps": 3, "remasking": "random", "constraint": {"regex": "[ab ]{4,9}"}}
    asked = {
        "prompt": "ab",
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 0.9,
        "seed": 4,
        "diffusion": settings,
    }
    found = answer(service(), "completions", **asked)
    config = SamplerConfig(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=4, **settings)
    assert found["choices"][0]["text"] == unmask.generate(cached_chat_lm(), ["ab"], config).texts[0]
    assert found["usage"]["diffusion"] == {"denoising_steps": 3, "forward_passes": 3}


def test_gaps_of_given_and_of_searched_lengths(service):
    lm = cached_chat_lm()
    config = without_ends(lm, SamplerConfig(temperature=1.0, seed=2))
    asked = {"temperature": 1.0, "seed": 2, "max_gap": 6}
    [choice] = answer(service(), "infill", segments=["ab", "cd", ""], lengths=[2, 3], **asked)["choices"]
    mask = lm.tokenizer.mask_token
    expected = unmask.infill(lm, [f"ab{mask * 2}cd{mask * 3}"], SamplerConfig(temperature=1.0, seed=2))
    assert choice["text"] == expected.texts[0] and choice["finish_reason"] == "stop"
    assert [(gap["start"], gap["length"]) for gap in choice["gaps"]] == [(3, 2), (7, 3)]
    assert [gap["text"] for gap in choice["gaps"]] == [choice["text"][2:4], choice["text"][6:]]
    searched = answer(service(), "infill", text="ab<gap>cdef<gap>gh", **asked)
    again = answer(service(), "infill", segments=["ab", "cdef", "gh"], **asked)
    assert searched["choices"] == again["choices"]
    [found] = find_lengths(lm, ["ab<gap>cdef<gap>gh"], config, 6, "<gap>")
    lengths = [gap.length for gap in found.gaps]
    assert [gap["length"] for gap in searched["choices"][0]["gaps"]] == lengths
    assert searched["usage"]["completion_tokens"] == sum(lengths) and searched["usage"]["prompt_tokens"] == 9
    marked = answer(service(), "infill", text="ab__cdef__gh", gap_mark="__", **asked)
    assert marked["choices"] == searched["choices"]


def test_masks_in_a_text_stand_for_its_tokens():
    lm = unmask.load(shared_path("models", "stories260K"), attention="bidirectional", logit_shift=False)
    ids, mask = lm.tokenizer("Once upon a time, there was a girl")["input_ids"], lm.tokenizer.mask_token
    masked = [
        lm.mask_token_id
        if lm.tokenizer.convert_ids_to_tokens(token) in ("\u2581upon", "\u2581was")
        else token
        for token in ids
    ]
    assert masked.count(lm.mask_token_id) == 2
    with running(lm) as scheduler:
        asked = answer(
            scheduler, "infill", text=f"Once{mask} a time, there{mask} a girl", diffusion={"trace": True}
        )
    assert asked["choices"][0]["diffusion"]["prompt"] == masked


def test_special_tokens_in_segments_stay_text(service):
    mask = cached_chat_lm().tokenizer.mask_token
    response = ask(service(), "infill", segments=[f"a{mask}", "b"], lengths=[2])
    assert (
        response.status_code == 200 and len(response.json()["choices"][0]["gaps"]) == 1
    ) or "special token" in response.text


@pytest.mark.parametrize("path", ["completions", "fim/completions"])
def test_what_stands_before_a_suffix(path, service):
    scheduler, lm = service(), cached_chat_lm()
    asked = {"prompt": "def add(", "suffix": "return a + b", "temperature": 1.0, "seed": 5, "max_tokens": 6}
    [exact] = answer(scheduler, path, **asked, diffusion={"length": "exact"})["choices"]
    mask = lm.tokenizer.mask_token
    [whole] = unmask.infill(
        lm, [f"def add({mask * 6}return a + b"], SamplerConfig(temperature=1.0, seed=5)
    ).texts
    assert whole == f"def add({exact['text']}return a + b" and exact["finish_reason"] == "length"
    [searched] = answer(scheduler, path, **asked)["choices"]
    found = unmask.infill(
        lm, ["def add(<gap>return a + b"], SamplerConfig(temperature=1.0, seed=5), length="search", max_gap=6
    )
    assert found.texts[0] == f"def add({searched['text']}return a + b" and searched["finish_reason"] == "stop"
    chunks = stream(scheduler, path, **asked)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == searched["text"]


def test_an_empty_suffix_continues_the_prompt(service):
    found = answer(service(), "fim/completions", prompt="ab", max_tokens=6, seed=1)
    [choice] = answer(service(), "completions", prompt="ab", suffix="", max_tokens=6, seed=1)["choices"]
    assert found["choices"] == [
        choice | {"message": {"role": "assistant", "content": choice["text"], "refusal": None}}
    ]


def test_a_suffix_for_models_that_read_from_left_to_right(service, monkeypatch):
    assert (
        "does not see the text after a gap"
        in ask(service(*BLOCKS), "fim/completions", prompt="a", suffix="b").text
    )
    causal = service("causal")
    assert "no tokens for fill-in-the-middle" in ask(causal, "fim/completions", prompt="a", suffix="b").text
    monkeypatch.setattr("unmask.serving.openai.plans.fim_prompt", lambda lm, prefix, suffix: [5, 6, 7])
    expected = unmask.generate(cached_chat_lm("causal"), [[5, 6, 7]], SamplerConfig(max_new_tokens=5)).texts
    found = answer(causal, "fim/completions", prompt="a", suffix="b", max_tokens=5)
    assert [choice["text"] for choice in found["choices"]] == expected


EDIT = (
    "<|current_file_content|>\nx\n<|code_to_edit|>\ny<|cursor|>\n<|/code_to_edit|>\n<|/current_file_content|>"
)


def test_an_edit_answers_the_region_in_a_fence(service):
    constraint = {
        "constraint": {"choice": ["```py\ny = 1\n```", "y = 2", "<|code_to_edit|>\ny = 3\n<|/code_to_edit|>"]}
    }
    seen = set()
    for seed in range(6):
        asked = {
            "messages": [{"role": "user", "content": EDIT}],
            "max_tokens": 52,
            "temperature": 5.0,
            "seed": seed,
        }
        found = answer(service(*BLOCKS), "edit/completions", **asked, diffusion=constraint)
        assert found["object"] == "edit.completion" and found["id"].startswith("editcmpl-")
        seen.add(found["choices"][0]["message"]["content"])
    assert len(seen) > 1 and seen <= {f"```\ny = {number}\n\n```" for number in (1, 2, 3)}


@pytest.mark.parametrize("pattern, finish", [("[ab]{8}", "stop"), ("[ab]*", "stop"), (None, "length")])
def test_a_text_that_fills_its_tokens_is_whole_if_it_meets_a_constraint(pattern, finish, service):
    asked = {
        "prompt": "ab",
        "max_tokens": 8,
        "temperature": 1.0,
        "seed": 1,
        "diffusion": {"forbidden_tokens": [cached_chat_lm().eos_token_id]},
    }
    asked["diffusion"] |= {"constraint": {"regex": pattern}} if pattern else {}
    found = answer(service(), "completions", **asked)
    assert found["usage"]["completion_tokens"] == 8 and found["choices"][0]["finish_reason"] == finish
    assert stream(service(), "completions", **asked)[-1]["choices"][0]["finish_reason"] == finish


def test_calls_that_the_model_chooses_to_make(service):
    """A constraint stands for a model that writes a call by itself."""
    scheduler = service(*BLOCKS)
    text = 'Well: <tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
    asked = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "max_tokens": 80,
    }
    asked["diffusion"] = {"constraint": {"choice": [text]}}
    [choice] = answer(scheduler, "chat/completions", **asked)["choices"]
    assert choice["message"]["content"] == "Well: " and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": [1]}'}
    chunks = stream(scheduler, "chat/completions", **asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well: "
    [calls] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["index"] == 0 and calls[0]["function"] == choice["message"]["tool_calls"][0]["function"]
    plain = answer(scheduler, "chat/completions", **asked | {"tool_choice": "none"})["choices"][0]
    assert plain["message"]["content"] == text and "tool_calls" not in plain["message"]


@pytest.mark.parametrize("attention, block_size", [("causal", None), BLOCKS, ("bidirectional", None)])
def test_models_tell_what_they_are(attention, block_size):
    with running(chat_lm(attention, block_size)) as scheduler:
        asyncio.run(scheduler.replace_weights("tiny", lambda: None, "v1"))
        [card] = get(scheduler, "/v1/models").json()["data"]
    assert card["version"] == "v1" and card["diffusion"] == {
        "attention": attention,
        "noise": "masked",
        "block_size": block_size,
        "context_length": 2048,
        "mask_token": cached_chat_lm(attention, block_size).tokenizer.mask_token,
        "chat": True,
        "causal": attention == "causal",
        "variable_length": False,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_slot(stream, service):
    scheduler, sent = service(*BLOCKS), []
    passes = scheduler.metrics.forward_passes.labels("tiny")._value.get
    before = passes()
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1500, "stream": stream}).encode()

    async def leave() -> None:
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if received:
                return received.pop()
            while passes() == before or (stream and len(sent) < 3):
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
        }
        scope |= {
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
        }
        scope |= {"headers": [(b"content-type", b"application/json"), (b"host", b"localhost")]}
        await app_of(scheduler)(scope | {"client": ("c", 1), "server": ("s", 2)}, receive, send)

    asyncio.run(leave())
    assert idle(scheduler) and passes() - before < 200


def test_the_schema_of_the_api_names_all_fields(service):
    schema = get(service(), "/openapi.json").json()
    paths = {path: [*methods] for path, methods in schema["paths"].items()}
    assert paths == {
        "/health": ["get"],
        "/metrics": ["get"],
        "/v1/models": ["get"],
        "/v1/models/{model}": ["get"],
        **{
            f"/v1/{name}": ["post"]
            for name in ("chat/completions", "edit/completions", "completions", "fim/completions", "infill")
        },
    }
    parts = schema["components"]["schemas"]
    settings = parts["DiffusionSettings"]["properties"]
    assert {"steps", "threshold", "constraint", "keys", "stream", "version"} <= settings.keys() and settings[
        "steps"
    ]["description"]
    assert not {"batch_size", "temperature"} & settings.keys()
    assert parts["ChatRequest"]["additionalProperties"] is False
    undocumented = [
        f"{name}.{field}"
        for name in ("ChatRequest", "CompletionRequest", "InfillRequest")
        for field, about in parts[name]["properties"].items()
        if not about.get("description") and "$ref" not in about and "anyOf" not in about
    ]
    assert not undocumented
    assert "422" not in json.dumps(schema)


def test_answers_do_not_depend_on_others(service):
    scheduler = service(*BLOCKS, eos_bias=1.0)
    bodies = [LONG | {"seed": seed, "n": 2, "stream": bool(seed % 2)} for seed in range(4)]
    alone = [ask(scheduler, "completions", **body) for body in bodies]

    async def together():
        app = app_of(scheduler)
        return await asyncio.gather(*(post(app, "completions", {"model": "tiny", **body}) for body in bodies))

    def texts(response) -> list[str]:
        found = ["", ""]
        chunks = (
            chunks_of(response)
            if response.headers["content-type"].startswith("text/event-stream")
            else [response.json()]
        )
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            found[choice["index"]] += choice["text"]
        return found

    assert [texts(response) for response in asyncio.run(together())] == [
        texts(response) for response in alone
    ]
    assert idle(scheduler)
