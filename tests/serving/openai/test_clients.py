"""The official client and litellm, unchanged, against a server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Literal

import openai
import pydantic
import pytest
import torch

import unmask
from tests.helpers import partly_slow
from tests.models.configurations import DELTA_NET
from tests.serving.openai.forms import QUESTION, WEATHER, check_json, check_tool_call
from tests.serving.servers import served
from tests.tiny import HERMES, PRINTABLE, build_lm, cached_chat_lm, chat_lm
from unmask.config.sampler import SamplerConfig


@pytest.fixture(scope="module")
def url():
    with served(chat_lm("block_causal", 4, eos_bias=1.0)) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def test_models(client):
    [listed] = client.models.list().data
    assert (
        listed.id == "tiny"
        and listed.diffusion["attention"] == "block_causal"
        and listed.diffusion["block_size"] == 4
    )
    assert client.models.retrieve("tiny") == listed
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert (error.value.param, error.value.code) == ("model", "model_not_found")


def test_a_chat_is_that_of_generate(client):
    lm = cached_chat_lm("block_causal", 4, eos_bias=1.0)
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=24, temperature=1.0, seed=3, n=3, logprobs=True
    )
    config = SamplerConfig(max_new_tokens=24, temperature=1.0, seed=3)
    expected = unmask.generate(lm, [QUESTION] * 3, config)
    assert [choice.message.content for choice in answer.choices] == expected.texts
    assert len({*expected.texts}) == 3
    ended = [tokens[-1] in lm.eos_token_ids for tokens in expected.tokens]
    assert [choice.finish_reason for choice in answer.choices] == [
        "stop" if end else "length" for end in ended
    ]
    assert [
        [each.logprob for each in choice.logprobs.content] for choice in answer.choices
    ] == expected.log_probs
    usage = answer.usage
    assert usage.prompt_tokens == len(expected.prompts[0]) and usage.completion_tokens == sum(
        map(len, expected.tokens)
    )
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.diffusion["forward_passes"] == sum(expected.forward_passes)
    again = unmask.generate(lm, [QUESTION], config, keys=answer.diffusion["keys"][1:2])
    assert again.texts == expected.texts[1:2]


def test_a_model_with_recurrent_layers_answers_as_generate_does():
    layers = {"layer_types": ["linear_attention", "full_attention"], **DELTA_NET, "num_key_value_heads": 1}
    lms = [
        build_lm(
            "qwen3_5_text",
            PRINTABLE,
            "block_causal",
            4,
            template=HERMES,
            context=256,
            dtype=torch.float64,
            **layers,
        )
        for _ in range(2)
    ]
    asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 16, "temperature": 1.0, "seed": 3}
    with served(lms[0]) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**asked, n=3)
        parts = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**asked, stream=True)
            if chunk.choices
        ]
    config = SamplerConfig(max_new_tokens=16, temperature=1.0, seed=3)
    expected = unmask.generate(lms[1], [QUESTION] * 3, config).texts
    assert [choice.message.content for choice in answer.choices] == expected and "".join(parts) == expected[0]


def test_a_stream_is_the_whole_answer(client):
    asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 30, "temperature": 1.0, "seed": 5, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts, finishes, usage = ["", ""], [None, None], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_many_at_once_have_the_answers_that_they_have_alone(client, url):
    seeds = range(8)

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as many:
            asked = [
                many.completions.create(model="tiny", prompt="ab", max_tokens=20, temperature=1.0, seed=seed)
                for seed in seeds
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    alone = [
        client.completions.create(model="tiny", prompt="ab", max_tokens=20, temperature=1.0, seed=s)
        .choices[0]
        .text
        for s in seeds
    ]
    assert asyncio.run(ask_all()) == alone and len({*alone}) > 4


def test_an_asynchronous_stream(url):
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as one:
            stream = await one.chat.completions.create(
                model="tiny", messages=QUESTION, max_tokens=12, seed=1, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    expected = unmask.generate(
        cached_chat_lm("block_causal", 4, eos_bias=1.0), [QUESTION], SamplerConfig(max_new_tokens=12, seed=1)
    )
    assert asyncio.run(ask()) == expected.texts[0]


def test_json_that_fits_a_schema(client):
    check_json(client)


class Kept(pydantic.BaseModel):
    kind: Literal["cat"]


@pytest.mark.parametrize("tokens, text", [(14, '{"kind":"cat"}'), (15, None)])
def test_json_that_fills_its_tokens_is_whole(client, tokens, text):
    """The client throws away what ended by its length."""
    answer = client.chat.completions.parse(
        model="tiny", messages=QUESTION, max_tokens=tokens, temperature=1.0, seed=3, response_format=Kept
    )
    assert answer.choices[0].message.parsed == Kept(kind="cat") and answer.choices[0].finish_reason == "stop"
    assert text is None or answer.choices[0].message.content == text


@partly_slow("stream", [False, True], 1)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called(client, choice, stream):
    check_tool_call(client, choice, stream=stream)


def test_tools_change_what_the_model_reads_unless_they_may_not_be_called(client):
    def prompt_tokens(**more) -> int:
        return client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=2, **more
        ).usage.prompt_tokens

    assert (
        prompt_tokens() == prompt_tokens(tools=[WEATHER], tool_choice="none") < prompt_tokens(tools=[WEATHER])
    )


def test_completions_of_every_kind_of_prompt(client):
    lm = cached_chat_lm("block_causal", 4, eos_bias=1.0)
    config = SamplerConfig(max_new_tokens=9)
    for prompt, prompts in (
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7], [8, 9]], [[7], [8, 9]]),
    ):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, logprobs=0, seed=0)
        expected = unmask.generate(lm, prompts, config)
        assert [choice.text for choice in answer.choices] == expected.texts
        assert [choice.logprobs.token_logprobs for choice in answer.choices] == expected.log_probs
        assert answer.usage.prompt_tokens == sum(map(len, expected.prompts))
    echoed = client.completions.create(model="tiny", prompt="ab", max_tokens=9, echo=True)
    assert echoed.choices[0].text.startswith("ab")


def test_routes_that_are_not_served_are_refused(client):
    with pytest.raises(openai.NotFoundError, match=r"GET /models: Not Found.*begin with /v1"):
        client.with_options(base_url=str(client.base_url).removesuffix("v1/")).models.list()
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not served"):
        client.embeddings.create(model="tiny", input="text")
    with pytest.raises(openai.NotFoundError, match="/v1/responses is not served"):
        client.responses.create(model="tiny", input="text")


@pytest.mark.slow  # its import takes most of it
def test_litellm(url):
    """In a process of its own: it changes what others log, and asks the internet for prices."""
    program = f"""
import litellm
asked = dict(model="openai/tiny", api_base={url!r}, api_key="none", messages={QUESTION!r}, max_tokens=12, seed=1, num_retries=0)
whole = litellm.completion(**asked)
stream = litellm.completion(**asked, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
called = litellm.completion(**asked | dict(max_tokens=150), tools=[{WEATHER!r}], tool_choice="required")
assert called.choices[0].message.tool_calls[0].function.name == "weather"
print(repr(whole.choices[0].message.content))
"""
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    expected = unmask.generate(
        cached_chat_lm("block_causal", 4, eos_bias=1.0), [QUESTION], SamplerConfig(max_new_tokens=12, seed=1)
    )
    assert done.stdout.splitlines()[-1] == repr(expected.texts[0])
