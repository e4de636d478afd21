"""Answers of every route, against the schema that the server itself gives of them (`/openapi.json`); streams
carry the same objects."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import jsonschema
import pytest

from tests.serving.openai.asking import answer, ask, get, stream
from tests.serving.servers import ADMIN, http_get, http_post, served
from tests.tiny import float64_lm
from unmask.serving.app import AppSettings

MESSAGES = [{"role": "user", "content": "Is it raining in Oslo?"}]
EDIT = [{"role": "user", "content": "<|code_to_edit|>\ny<|/code_to_edit|>"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
}
SAMPLED = {"max_tokens": 8, "temperature": 1.0, "seed": 3}
BLOCKS, BOTH_SIDES = ("block_causal", 4), ("bidirectional", None)
ANSWERS: list[tuple[tuple[str, int | None], str, dict[str, Any]]] = [
    (BLOCKS, "chat/completions", SAMPLED | {"messages": MESSAGES, "n": 2}),
    (
        BLOCKS,
        "chat/completions",
        SAMPLED | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "diffusion": {"trace": True}},
    ),
    (
        BLOCKS,
        "chat/completions",
        SAMPLED | {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 80},
    ),
    (BLOCKS, "completions", SAMPLED | {"prompt": ["a", "b"], "logprobs": 0, "echo": True}),
    (
        BLOCKS,
        "completions",
        SAMPLED | {"prompt": "a", "logprobs": 2, "diffusion": {"trace": True, "steps": 4}},
    ),
    (
        BLOCKS,
        "completions",
        {"prompt": "a", "max_tokens": 24, "stop": [*"aeiou "], "temperature": 5.0, "seed": 1},
    ),
    (BOTH_SIDES, "completions", SAMPLED | {"prompt": "a", "suffix": "b"}),
    (
        BOTH_SIDES,
        "fim/completions",
        SAMPLED | {"prompt": "a", "suffix": "b", "diffusion": {"length": "exact"}},
    ),
    (BOTH_SIDES, "infill", {"text": "ab<gap>cd<gap>e", "max_gap": 3, "seed": 1}),
    (
        BOTH_SIDES,
        "infill",
        {"segments": ["a", "b", ""], "lengths": [2, 3], "n": 2, "seed": 1, "diffusion": {"trace": True}},
    ),
    (BLOCKS, "edit/completions", SAMPLED | {"messages": EDIT}),
]


def closed(schema: Any) -> Any:
    """The schema without leave for fields that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    within = {name: closed(each) for name, each in schema.items()}
    return {"additionalProperties": False, **within} if "properties" in within else within


def check(api: dict[str, Any], path: str, method: str, status: int, content: Any) -> None:
    """Raise ValidationError unless the answer is what the schema of the API says."""
    responses = api["paths"][path][method]["responses"]
    schema = responses.get(str(status), responses.get("default"))["content"]["application/json"]["schema"]
    jsonschema.validate(
        content, {"components": closed(api["components"]), **schema}, jsonschema.Draft202012Validator
    )


def whole(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer whose chunks these are, as clients put it together."""
    *_, usage = chunks
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"]})
            delta = piece.pop("delta", {})
            if calls := delta.pop("tool_calls", []):
                choice.setdefault("tool_calls", []).extend(
                    {k: v for k, v in call.items() if k != "index"} for call in calls
                )
            for name in ("text", "content"):
                choice[name] = choice.get(name, "") + (piece.pop(name, None) or delta.pop(name, None) or "")
            choice |= {
                name: value
                for name, value in {**piece, **delta}.items()
                if value is not None or name not in choice
            }
            choice |= {"diffusion": chunk["diffusion"]} if chunk.get("diffusion") else {}
    return {**usage, "choices": [choices[index] for index in sorted(choices)]}


def as_streamed(answer: dict[str, Any]) -> dict[str, Any]:
    """A whole answer with the fields of messages beside those of their choices, as `whole` puts them."""
    answer = deepcopy(answer)
    for choice in answer["choices"]:
        message = choice.pop("message", {})
        choice |= {name: value for name, value in message.items() if name != "refusal"}
        choice |= {"text": choice.get("text", ""), "content": choice.get("content") or ""}
    return answer


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """What two answers to the same request share: neither ids nor times, nor facts that only frames or traces
    carry."""
    answer = {name: value for name, value in answer.items() if name not in ("id", "created", "object")}
    for choice in answer["choices"]:
        choice.pop("diffusion", None)
        for call in choice.get("tool_calls", []):
            call.pop("id")
    return answer


@pytest.mark.parametrize(
    "pattern, path, body", ANSWERS, ids=[f"{number}-{path}" for number, (_, path, _) in enumerate(ANSWERS)]
)
def test_answers_are_as_the_schema_says_whole_and_streamed(pattern, path, body, service):
    scheduler = service(*pattern)
    api = get(scheduler, "/openapi.json").json()
    found = answer(scheduler, path, **body)
    check(api, f"/v1/{path}", "post", 200, found)
    assert found["model"] == "tiny" and [choice["index"] for choice in found["choices"]] == [
        *range(len(found["choices"]))
    ]
    chunks = stream(scheduler, path, **body, stream_options={"include_usage": True})
    head = {name: chunks[0][name] for name in ("id", "created", "model", "system_fingerprint", "object")}
    assert all(chunk.items() >= head.items() for chunk in chunks)
    assert comparable(whole(chunks)) == comparable(as_streamed(found))


def test_a_schema_that_an_answer_does_not_fit_is_noticed(service):
    scheduler = service(*BLOCKS)
    api = get(scheduler, "/openapi.json").json()
    found = answer(scheduler, "completions", prompt="a", max_tokens=2)
    for change in ({"more": 1}, {"usage": None}, {"object": "chat.completion"}, {"choices": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            check(api, "/v1/completions", "post", 200, found | change)


def test_models_and_errors_are_as_the_schema_says(service):
    scheduler = service(*BLOCKS)
    api = get(scheduler, "/openapi.json").json()
    check(api, "/v1/models", "get", 200, get(scheduler, "/v1/models").json())
    check(api, "/v1/models/{model}", "get", 200, get(scheduler, "/v1/models/tiny").json())
    absent = get(scheduler, "/v1/models/other")
    check(api, "/v1/models/{model}", "get", absent.status_code, absent.json())
    for path in ("chat/completions", "completions", "fim/completions", "edit/completions", "infill"):
        for more in ({}, {"model": "other"}, {"diffusion": {"version": "other"}, "prompt": "a"}):
            refused = ask(scheduler, path, **more)
            assert refused.status_code in (400, 404, 409)
            check(api, f"/v1/{path}", "post", refused.status_code, refused.json())


def test_new_weights_are_as_the_schema_says(tmp_path):
    model = float64_lm(attention="block_causal", block_size=3, layers=1)
    model.save(tmp_path / "new")
    with served(model, AppSettings(admin_key="admin", weights_from=(tmp_path,))) as url:
        api = http_get(f"{url}/openapi.json").json()
        for path in ("new", "absent"):
            body = {"model": "tiny", "path": path, "version": "1"}
            answered = http_post(f"{url}/v1/weights", json=body, headers=ADMIN)
            assert answered.status_code == (200 if body["path"] == "new" else 400)
            if answered.status_code == 200:
                check(api, "/v1/weights", "post", 200, answered.json())
