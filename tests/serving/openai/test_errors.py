"""What is refused: by name, in OpenAI's shape, and never with a status of 500."""

from __future__ import annotations

import asyncio
import json
import math
import re

import pydantic
import pytest

from tests.serving.openai.asking import answer, app_of, ask, chunks_of, post
from tests.serving.servers import running
from tests.tiny import chat_lm
from unmask.errors import GenerationError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.serving.errors import error_of
from unmask.serving.limits import RequestLimits
from unmask.serving.openai import plans
from unmask.serving.openai.answers import to_json
from unmask.serving.openai.requests import ChatRequest, CompletionRequest, InfillRequest
from unmask.serving.submission import OverloadedError

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
TEXT = {"prompt": "a", "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f"}}
FORMAT = {"type": "json_object"}
ENDLESS = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null", "not": {}}}}
CONSTRAINED = {"constraint": {"regex": "a"}}
REFUSED = [
    ("chat/completions", CHAT | {"mesages": 1}, "mesages", "is not a known field"),
    (
        "chat/completions",
        CHAT | {"steps": 1},
        "steps",
        'is not a known field, but one of diffusion: "diffusion": {"steps": ...}',
    ),
    (
        "chat/completions",
        CHAT | {"frequency_penalty": 0.5},
        "frequency_penalty",
        "frequency_penalty is not supported, except 0",
    ),
    ("chat/completions", CHAT | {"top_logprobs": 3}, "top_logprobs", "has no effect without logprobs"),
    (
        "chat/completions",
        CHAT | {"top_logprobs": 21, "logprobs": True},
        "top_logprobs",
        "less than or equal to 20",
    ),
    ("chat/completions", CHAT | {"functions": []}, "functions", "is not supported"),
    ("chat/completions", CHAT | {"reasoning_effort": "low"}, "reasoning_effort", "is not supported"),
    ("chat/completions", {"max_tokens": 4}, "messages", "is required"),
    ("chat/completions", CHAT | {"messages": []}, "messages", "at least 1 item"),
    ("chat/completions", CHAT | {"messages": [1]}, "messages.0", "should be an object"),
    (
        "chat/completions",
        CHAT | {"messages": [{"role": "robot", "content": "a"}]},
        "messages.0.role",
        "'system'",
    ),
    (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content.0.type",
        "'text'",
    ),
    (
        "chat/completions",
        CHAT | {"max_completion_tokens": 5},
        "max_completion_tokens",
        "differs from max_tokens",
    ),
    ("chat/completions", CHAT | {"max_tokens": "4"}, "max_tokens", "valid integer"),
    ("chat/completions", CHAT | {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ("chat/completions", CHAT | {"temperature": -1}, "temperature", "greater than or equal to 0"),
    ("chat/completions", CHAT | {"temperature": 1e-9}, "temperature", "1e-09 is not valid"),
    ("chat/completions", CHAT | {"top_p": 0}, "top_p", "greater than 0"),
    ("chat/completions", CHAT | {"n": 17}, "n", "exceeds the server's limit of 16"),
    ("chat/completions", CHAT | {"max_tokens": 5000}, "max_tokens", "exceeds the server's limit of 4,096"),
    ("chat/completions", CHAT | {"max_tokens": 3000}, "messages", "Shorten the prompt or lower max_tokens"),
    ("chat/completions", CHAT | {"stop": [""]}, "stop.0", "at least 1"),
    ("chat/completions", CHAT | {"stop": ""}, "stop", "at least 1"),
    ("chat/completions", CHAT | {"stop": ["b" * 257]}, "stop.0", "at most 256"),
    ("chat/completions", CHAT | {"stop": "a\ufffd"}, "stop", "pattern"),
    ("chat/completions", CHAT | {"logit_bias": {"5": 3}}, "logit_bias", "only -100"),
    ("chat/completions", CHAT | {"logit_bias": {"a": 100}}, "logit_bias", "'a' is not a token id"),
    ("chat/completions", CHAT | {"logit_bias": {"99999": -100}}, "logit_bias", "outside the vocabulary"),
    (
        "chat/completions",
        CHAT | {"logit_bias": {"5": -100}, "diffusion": {"forbidden_tokens": [6]}},
        "logit_bias",
        "diffusion.forbidden_tokens",
    ),
    ("chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice", "there are no tools"),
    (
        "chat/completions",
        CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "not among",
    ),
    (
        "chat/completions",
        CHAT | {"tools": [TOOL], "response_format": FORMAT},
        "response_format",
        "can call no tool",
    ),
    ("chat/completions", CHAT | {"tools": [{"type": "web"}]}, "tools.0.type", "'function'"),
    ("chat/completions", CHAT | {"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
    (
        "chat/completions",
        CHAT | {"response_format": FORMAT, "diffusion": {"constraint": {"regex": "a"}}},
        "diffusion.constraint",
        "already",
    ),
    (
        "chat/completions",
        CHAT | {"response_format": FORMAT, "max_tokens": 1},
        "response_format",
        "the shortest has",
    ),
    (
        "chat/completions",
        CHAT | {"response_format": ENDLESS},
        "response_format.json_schema.not",
        "cannot be enforced",
    ),
    (
        "chat/completions",
        CHAT | {"tools": [TOOL], "tool_choice": "required"},
        "tool_choice",
        "the shortest has",
    ),
    ("chat/completions", CHAT | {"diffusion": {"stepz": 3}}, "diffusion.stepz", "is not a known field"),
    (
        "chat/completions",
        CHAT | {"diffusion": {"batch_size": 3}},
        "diffusion.batch_size",
        "is a setting of the server",
    ),
    ("chat/completions", CHAT | {"diffusion": {"steps": 9}}, "diffusion.steps", "9 steps for 4 tokens"),
    (
        "chat/completions",
        CHAT | {"diffusion": {"steps": 2, "threshold": 0.5}},
        "diffusion.threshold",
        "contradict",
    ),
    ("chat/completions", CHAT | {"diffusion": {"constraint": {}}}, "diffusion.constraint", "says nothing"),
    (
        "chat/completions",
        CHAT | {"diffusion": {"constraint": {"regex": "("}}},
        "diffusion.constraint.regex",
        "missing )",
    ),
    (
        "chat/completions",
        CHAT | {"diffusion": {"constraint": {"regex": "a{9}"}}},
        "diffusion.constraint",
        "the shortest has 9",
    ),
    (
        "chat/completions",
        CHAT | {"diffusion": {"constraint": {"regex": "a" * 70000}}},
        "diffusion.constraint",
        "server's limit",
    ),
    ("chat/completions", CHAT | {"diffusion": {"keys": [1, 2]}}, "diffusion.keys", "2 keys for 1"),
    ("chat/completions", CHAT | {"diffusion": {"block_size": 3}}, "diffusion.block_size", "does not divide"),
    ("chat/completions", CHAT | {"model": "other"}, "model", "the model 'other' does not exist"),
    ("completions", TEXT | {"prompt": []}, "prompt", "there is none"),
    ("completions", TEXT | {"prompt": [99999]}, "prompt", "outside the vocabulary"),
    ("completions", TEXT | {"prompt": {"a": 1}}, "prompt", "valid"),
    ("completions", TEXT | {"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ("completions", TEXT | {"best_of": 2}, "best_of", "is not supported, except 1"),
    ("completions", TEXT | {"suffix": "b", "echo": True}, "echo", "no meaning"),
    ("completions", TEXT | {"max_tokens": 0}, "max_tokens", "0 tokens are no answer"),
    (
        "completions",
        TEXT | {"max_tokens": 0, "suffix": "b", "echo": True},
        "max_tokens",
        "0 tokens are no answer",
    ),
    ("completions", TEXT | {"suffix": "b", "prompt": ["a", "b"]}, "prompt", "needs one prompt"),
    (
        "edit/completions",
        {"messages": [{"role": "user", "content": "a"}]},
        "messages.0.content",
        "Mark one region",
    ),
    (
        "edit/completions",
        {"messages": [{"role": "user", "content": "a"}], "tools": []},
        "tools",
        "is not supported. Leave it out.",
    ),
    (
        "edit/completions",
        {"messages": [{"role": "system", "content": "a"}]},
        "messages",
        "Give one message of a user, after at most one",
    ),
    (
        "edit/completions",
        {"messages": [{"role": "user", "content": "a"}] * 2},
        "messages",
        "Give one message of a user, after at most one",
    ),
    ("infill", {"text": "ab"}, "text", "has no mask token"),
    ("infill", {}, "text", "give either"),
    ("infill", {"text": "a<gap>b", "lengths": [3]}, "lengths", "are for segments"),
    ("infill", {"segments": ["a", "b"], "lengths": [3, 4]}, "lengths", "2 for 1 gaps"),
    ("infill", {"segments": ["a", "b"], "lengths": [9999]}, "lengths", "server's limit"),
    ("infill", {"text": "a<gap>b<gap>c", "max_gap": 257}, "max_gap", "514 exceeds the server's limit of 512"),
    ("infill", {"text": "a<gap>b", "max_tokens": 3}, "max_tokens", "is not supported"),
    ("infill", {"text": "a<gap>"}, "text", "no text after it"),
]


@pytest.mark.parametrize(
    "path, body, param, message", REFUSED, ids=[f"{number}-{case[2]}" for number, case in enumerate(REFUSED)]
)
def test_what_is_refused(path, body, param, message, service):
    response = ask(service(), path, **body)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400), error
    assert {*error} == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert message in error["message"] and error["param"] == param, error


OTHER_NAMES = [
    ("chat/completions", CHAT | {"max_tokens": 5000}, "max_tokens: 5,000 exceeds"),
    (
        "chat/completions",
        {**CHAT, "max_tokens": None, "max_completion_tokens": 5000},
        "max_completion_tokens: 5,000 exceeds",
    ),
    (
        "chat/completions",
        CHAT | {"max_tokens": None, "max_completion_tokens": 3000},
        "lower max_completion_tokens.",
    ),
    ("chat/completions", CHAT | {"max_tokens": 3000}, "messages: "),
    (
        "chat/completions",
        CHAT | {"response_format": FORMAT, "max_tokens": 1},
        "response_format: no text that meets it has 1 token",
    ),
    ("chat/completions", CHAT | {"diffusion": {"steps": 9}}, "diffusion.steps: 9 steps for 4 tokens"),
    ("chat/completions", CHAT | {"diffusion": {"block_size": 3}}, "diffusion.block_size 3: does not divide"),
    ("chat/completions", CHAT | {"diffusion": {"steps": 2, "threshold": 0.5}}, "diffusion.threshold: "),
    (
        "completions",
        TEXT | {"diffusion": {"constraint": {"regex": "a{9}"}}},
        "the shortest has 9. Set max_tokens to 9 or more",
    ),
    ("completions", TEXT | {"prompt": ["a", "b" * 3000], "n": 2}, "prompt 1: "),
    ("completions", TEXT | {"prompt": "b" * 3000, "n": 2}, "prompt: "),
    ("completions", TEXT | {"suffix": "b" * 3000}, "prompt: "),
    ("infill", {"text": "b" * 3000 + "<|mask|>"}, "text: "),
    (
        "infill",
        {"text": "ab"},
        "text: has no mask token. Write <|mask|> for every token to fill in, or <gap> for a gap.",
    ),
    ("infill", {"segments": ["b" * 3000, ""], "lengths": [1]}, "segments: "),
    ("fim/completions", TEXT | {"max_tokens": 5000, "suffix": "b"}, "max_tokens: 5,000 exceeds"),
]
INTERNAL = re.compile(
    r"max_new_tokens|top_log_probs|length=|--|unmask\.\w+|(?<!diffusion\.)\b(?:block_size|steps):"
)


@pytest.mark.parametrize("path, body, message", OTHER_NAMES)
def test_an_error_has_the_names_of_the_api(path, body, message, service):
    error = ask(service(), path, **body).json()["error"]
    assert message in error["message"] and not INTERNAL.search(error["message"]), error
    assert (
        message.startswith(("lower", "the shortest"))
        or error["message"].split(":")[0].split(" ")[0] == error["param"]
    ), error


def test_a_location_within_a_schema_is_left_as_it_is():
    error = GenerationError(
        "is wrong", where="tools.0.function.parameters.properties.text", remedy="Use max_tokens"
    )
    assert (
        error_of(error, CHAT)[1]["error"]["message"]
        == "tools.0.function.parameters.properties.text: is wrong. Use max_tokens."
    )


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("content", [b'{"prompt": "a"}', b"[]", b"{"])
def test_a_body_that_is_not_said_to_be_json_is_told_so(content, kind, service):
    error = asyncio.run(post(app_of(service()), "completions", content, kind)).json()["error"]
    assert "Content-Type: application/json" in error["message"] and error["param"] is None


NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "store": False,
    "service_tier": "auto",
    "modalities": ["text"],
    "stop": None,
}


def test_what_changes_nothing_is_accepted(service):
    asked = CHAT | {"seed": 1, "user": "someone"}
    assert (
        answer(service(), "chat/completions", **asked, **NEUTRAL, audio=None)["choices"]
        == answer(service(), "chat/completions", **asked)["choices"]
    )


@pytest.mark.parametrize(
    "body, message",
    [
        (b"{", "is not JSON: "),
        (b"[]", "not a JSON object"),
        (b"3", "not a JSON object"),
        (b"", "is empty"),
        (b"\xff", "not JSON in UTF-8"),
        (b'"\\ud800"', ""),
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (
            b'{"prompt": "a", "' + b"x" * 300 + b'": 1}',
            "xxxxxxxxxxxxxxxxxxxx...: has more than 256 characters",
        ),
        (b'{"prompt": "a", "model": "' + b"x" * 300 + b'"}', "model: has more than 256 characters"),
        (b"null", ""),
    ],
)
def test_a_body_that_is_no_request(body, message, service):
    response = asyncio.run(post(app_of(service()), "completions", body))
    assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [{"diffusion": {"x" * 9000: 1}}, {"response_format": {"type": "x" * 9000}}, {"user": {"a": "x" * 9000}}],
)
def test_no_error_is_as_long_as_the_text_that_it_quotes(more, service):
    response = ask(service(), "chat/completions", **CHAT | more)
    assert response.status_code == 400 and len(response.text) < 5000


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
@pytest.mark.parametrize(
    "path, body",
    [
        ("completions", lambda text: TEXT | {"prompt": text}),
        ("completions", lambda text: TEXT | {text: 1}),
        ("completions", lambda text: TEXT | {"model": text}),
        ("completions", lambda text: TEXT | {"diffusion": {"constraint": {"json_schema": {"enum": [text]}}}}),
        (
            "chat/completions",
            lambda text: (
                CHAT
                | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {text: text}}}]}
            ),
        ),
        ("chat/completions", lambda text: CHAT | {"logit_bias": {text: 1}}),
    ],
)
def test_half_a_character_is_refused(path, body, text, service):
    assert ask(service(), path, **body(text)).status_code in (400, 404)


def nested(depth: int) -> list:
    """Arrays in one another."""
    value: list = []
    for _ in range(depth - 1):
        value = [value]
    return value


DEEP = [
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": nested(300)}}}]}, "tools"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "c", "function": {"name": "f", "arguments": f'{{"a": {nested(300)}}}'}}
                    ],
                }
            ]
        },
        "messages.tool_calls.function.arguments",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"a": nested(300)}},
            }
        },
        "response_format",
    ),
    ({"diffusion": {"constraint": {"json_schema": {"a": nested(300)}}}}, "diffusion"),
    (
        {"diffusion": {"constraint": {"json_schema": f'{{"a": {nested(300)}}}'}}},
        "diffusion.constraint.json_schema",
    ),
    ({"diffusion": {"constraint": {"json_schema": "[" * 50_000}}}, "diffusion.constraint.json_schema"),
    ({"user": nested(300)}, "user"),
]


@pytest.mark.parametrize("more, param", DEEP, ids=range(len(DEEP)))
def test_what_is_nested_too_deep(more, param, service):
    response = ask(service(), "chat/completions", **CHAT | more)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("completions", {"prompt": ["a"] * 9}, "prompt"),
        ("completions", {"prompt": ["a"] * 5, "n": 2}, "prompt"),
        ("completions", {"prompt": "a", "n": 3}, "n"),
        ("infill", {"text": "a<gap>" * 600 + "a"}, "max_gap"),
        ("infill", {"text": "a<gap>b", "n": 3}, "n"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_encoded(path, body, param, service, monkeypatch):
    for name in ("encode_prompt", "encode_completion"):
        monkeypatch.setattr(plans, name, lambda *_: pytest.fail("was encoded"))
    response = ask(service(), path, RequestLimits(sequences=8, n=2), **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize(
    "path, body",
    [("completions", {"prompt": "a" * 60, "max_tokens": 5}), ("infill", {"text": "a" * 65 + "<gap>b"})],
)
def test_the_length_of_a_sequence_is_limited_where_the_model_has_no_longest_context(
    path, body, service, monkeypatch
):
    assert ask(service(), path, RequestLimits(length=64), **body).status_code == 200
    monkeypatch.setattr(DiffusionLM, "context_length", None)
    response = ask(service(), path, RequestLimits(length=64), **body)
    assert response.status_code == 400 and response.json()["error"]["param"] in body, response.text


FLOODS = [
    (ChatRequest, CHAT | {"messages": [1] * 60_000}),
    (ChatRequest, CHAT | {"messages": [CHAT["messages"][0]] * 60_000}),
    (ChatRequest, CHAT | {"messages": [{"role": "user", "content": [1] * 60_000}]}),
    (ChatRequest, CHAT | {"tools": [1] * 60_000}),
    (ChatRequest, CHAT | {"stop": [1] * 60_000}),
    (ChatRequest, CHAT | {"logit_bias": dict.fromkeys(map(str, range(60_000)), "a")}),
    (ChatRequest, CHAT | dict.fromkeys(map(str, range(60_000)), 1)),
    (ChatRequest, CHAT | {"messages": [dict.fromkeys(map(str, range(60_000)), 1)]}),
    (ChatRequest, CHAT | {"diffusion": dict.fromkeys(map(str, range(60_000)), 1)}),
    (ChatRequest, CHAT | {"diffusion": {"constraint": dict.fromkeys(map(str, range(60_000)), 1)}}),
    (ChatRequest, CHAT | {"diffusion": {"constraint": {"choice": [1] * 60_000}}}),
    (ChatRequest, CHAT | {"diffusion": {"revise": dict.fromkeys(map(str, range(60_000)), 1)}}),
    (ChatRequest, CHAT | {"diffusion": {"keys": [0.5] * 60_000}}),
    (ChatRequest, CHAT | {"diffusion": {"forbidden_tokens": [0.5] * 60_000}}),
    *((CompletionRequest, TEXT | {"prompt": [item] * 60_000}) for item in (0.5, None, {}, [0.5], [[]], True)),
    *((CompletionRequest, TEXT | {"prompt": [first, *[0.5] * 60_000]}) for first in ("a", 1, [1])),
    (InfillRequest, {"segments": [1] * 60_000, "lengths": [0.5] * 60_000}),
]


@pytest.mark.parametrize("request_type, body", FLOODS, ids=range(len(FLOODS)))
def test_of_many_errors_in_a_body_few_are_told(request_type, body):
    """Each takes time in the event loop."""
    with pytest.raises(pydantic.ValidationError) as caught:
        request_type.model_validate({"model": "tiny", **body})
    assert caught.value.error_count() < 5


@pytest.mark.parametrize(
    "more",
    [
        {"diffusion": {"stream": None, "policy": None, "trace": None, "constraint": None, "timeout": None}},
        {"diffusion": {"constraint": {"regex": "a{4}", "json": None, "depth": None}}},
        {"diffusion": {"revise": {"by": None}}},
        {"stream_options": {"include_usage": None}, "diffusion": None},
        {
            "messages": [
                {"role": "user", "content": "a", "tool_calls": None, "annotations": None, "name": None}
            ]
        },
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "description": None, "strict": None, "parameters": None},
                }
            ]
        },
    ],
)
def test_null_is_the_same_as_leaving_a_field_out(more, service):
    answer(service(), "chat/completions", **CHAT | more)


def test_routes_and_methods_that_are_not_there(service):
    app = app_of(service())
    for path in ("embeddings", "images/generations", "audio/speech", "nothing"):
        response = asyncio.run(post(app, path, {}))
        assert response.status_code == 404 and f"/v1/{path}" in response.json()["error"]["message"]
    response = asyncio.run(post(app, "models", {}))
    assert response.status_code == 405 and response.json()["error"]["type"] == "invalid_request_error"


def test_no_answer_names_a_path(service, monkeypatch):
    tokenizer = service().models["tiny"].lm.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", None)
    monkeypatch.setattr(tokenizer, "name_or_path", "/secret/folder")
    response = ask(service(), "chat/completions", **CHAT)
    assert (
        response.status_code == 400 and "no chat template" in response.text and "/secret" not in response.text
    )


def test_a_full_queue_says_when_to_come_back(service, monkeypatch):
    def refuse(*_, **__):
        raise OverloadedError("the queue is full", 6.5)

    monkeypatch.setattr(service(), "submit", refuse)
    for stream in (False, True):
        response = ask(service(), "completions", **TEXT, stream=stream)
        assert response.status_code == 429 and response.headers["retry-after"] == "7"
        assert response.json()["error"]["code"] == "rate_limit_exceeded"


def test_other_weights():
    with running(chat_lm()) as scheduler:
        asyncio.run(scheduler.replace_weights("tiny", lambda: None, "step-3"))
        assert (
            answer(scheduler, "completions", **TEXT, diffusion={"version": "step-3"})["system_fingerprint"]
            == "step-3"
        )
        response = ask(scheduler, "completions", **TEXT, diffusion={"version": "step-4"})
    assert response.status_code == 409 and response.json()["error"]["param"] == "diffusion.version"


class Generated:
    """The events of a submission, from a generator."""

    def __init__(self, events):
        self.events = events

    def __aiter__(self):
        return self.events

    async def ready(self):
        pass

    async def aclose(self):
        await self.events.aclose()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_the_weights_that_sampled_it(stream, monkeypatch):
    with running(chat_lm()) as scheduler:
        submit = scheduler.submit

        async def replaced(*given, **more):
            await scheduler.replace_weights("tiny", lambda: None, "new")
            async for event in submit(*given, **more):
                yield event

        monkeypatch.setattr(scheduler, "submit", lambda *given, **more: Generated(replaced(*given, **more)))
        response = ask(scheduler, "completions", **TEXT, stream=stream)
    for each in chunks_of(response) if stream else [response.json()]:
        assert each["system_fingerprint"] == "new", each


@pytest.mark.parametrize(
    "more, param",
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": FORMAT}, "response_format"),
    ],
)
def test_a_constraint_that_is_too_large_is_named_as_it_was_given(more, param, service):
    response = ask(service(), "chat/completions", RequestLimits(schema_bytes=100), **CHAT | more)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_what_is_not_finite_is_null():
    assert to_json({"a": [math.nan, (-math.inf, 1.5)]}) == '{"a": [null, [null, 1.5]]}'


def test_an_error_after_the_first_chunk_is_the_last_event(service, monkeypatch):
    scheduler = service("block_causal", 4)
    submit = scheduler.submit

    async def fail(*given, **more):
        async for event in submit(*given, **more):
            yield event
            raise OverloadedError("lost")

    monkeypatch.setattr(scheduler, "submit", lambda *given, **more: Generated(fail(*given, **more)))
    response = ask(scheduler, "completions", **TEXT, stream=True)
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "lost. Try again in 1 second."


def test_limits_of_the_server(service):
    limits = RequestLimits(max_tokens=8, n=2, steps=4, schema_bytes=40)
    for more, param in (
        ({"max_tokens": 9}, "max_tokens"),
        ({"n": 3}, "n"),
        ({"max_tokens": 8, "diffusion": {"steps": 5}}, "diffusion.steps"),
        ({"diffusion": {"max_denoising_steps": 5}}, "diffusion.max_denoising_steps"),
        ({"diffusion": {"constraint": {"regex": "a" * 40}}}, "diffusion.constraint"),
    ):
        response = ask(service(), "completions", limits, **TEXT | more)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    assert (
        ask(
            service(), "completions", limits, prompt="a", max_tokens=8, n=2, diffusion={"steps": 4}
        ).status_code
        == 200
    )


def test_time_limits_and_priorities_reach_the_scheduler(service, monkeypatch):
    scheduler, submitted = service(), []
    submit = scheduler.submit

    def note(model, work, **options):
        submitted.append((options["priority"], options["timeout"]))
        return submit(model, work, **options)

    monkeypatch.setattr(scheduler, "submit", note)
    for asked in ({}, {"timeout": 3, "priority": 2}):
        assert (
            ask(scheduler, "completions", RequestLimits(timeout=50.0), **TEXT, diffusion=asked).status_code
            == 200
        )
    assert submitted == [(0, 50.0), (2, 3)]
