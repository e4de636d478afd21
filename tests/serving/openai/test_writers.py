"""With every kind of tokenizer, the texts and bytes of tokens are those of the text that they make."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import cache

import pytest
import torch

import unmask
from tests.helpers import each_once, partly_slow, shared_path
from tests.serving.openai.asking import answer, stream
from tests.serving.openai.test_frames import replayed
from tests.serving.servers import running
from tests.tiny import lm_of_tokenizer
from tests.tokenizers import tokenizer
from unmask.config.sampler import SamplerConfig
from unmask.data.decoding import text_after
from unmask.data.encoding import encode_prompt
from unmask.models.chat_template import TEMPLATES
from unmask.models.diffusion_lm import DiffusionLM

KINDS = ("bytes", "llama", "mistral", "metaspace", "wordpiece")
SAMPLED = {"temperature": 1.0, "seed": 4, "max_tokens": 24}


def make_lm(kind: str, attention: str = "block_causal") -> DiffusionLM:
    """A random model that writes no byte tokens, for which texts have bytes that are no characters."""
    made = copy.deepcopy(tokenizer(kind))
    made.chat_template = TEMPLATES["simple"]
    lm = lm_of_tokenizer(made, attention, 4 if attention == "block_causal" else None)
    names = made.convert_ids_to_tokens(list(range(len(made))))
    bias_V = torch.tensor(
        [
            -50.0 if (name or "").startswith("<0x") or "\ufffd" in made.decode([n]) else 0.0
            for n, name in enumerate(names)
        ]
    )
    head = lm.model.get_output_embeddings()
    head.bias = torch.nn.Parameter(bias_V.to(head.weight), requires_grad=False)
    return lm


@pytest.fixture(scope="module")
def serving():
    """Gives the scheduler of a kind's model."""
    with ExitStack() as stack:
        yield cache(lambda *kind: stack.enter_context(running(make_lm(*kind))))


@pytest.mark.parametrize("kind", KINDS)
def test_joined_bytes_of_logprobs_are_the_text(kind, serving):
    asked = {
        "messages": [{"role": "user", "content": "Once upon"}],
        "logprobs": True,
        "top_logprobs": 5,
        **SAMPLED,
    }
    choice = answer(serving(kind), "chat/completions", **asked)["choices"][0]
    content = choice["logprobs"]["content"]
    assert (
        bytes(byte for each in content for byte in each["bytes"]).decode()
        == choice["message"]["content"]
        != ""
    )
    for each in content:  # the same token has the same bytes among the likeliest
        assert all(
            top["bytes"] == each["bytes"] for top in each["top_logprobs"] if top["token"] == each["token"]
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["Once upon a time", [2], "Once \u732b"])
def test_joined_tokens_are_the_text(kind, prompt, serving):
    choice = answer(serving(kind), "completions", prompt=prompt, logprobs=4, echo=True, **SAMPLED)["choices"][
        0
    ]
    logprobs, text = choice["logprobs"], choice["text"]
    special = tokenizer(kind).all_special_tokens
    ids = encode_prompt(tokenizer(kind), prompt)
    read = text_after(tokenizer(kind), [], ids)  # WordPiece reads small letters
    echo = prompt if isinstance(prompt, str) else read
    assert (
        text.startswith(echo)
        and b"".join(written(token, special) for token in logprobs["tokens"]).decode()
        == read + text[len(echo) :]
    )
    for at, (token, offset) in enumerate(zip(logprobs["tokens"], logprobs["text_offset"], strict=True)):
        whole = read if at < len(ids) else text
        assert token.startswith("bytes:") or whole.startswith(written(token, special).decode(), offset)
    assert logprobs["top_logprobs"][0] is None and all(
        len(each) == 4 for each in logprobs["top_logprobs"][1:]
    )


def written(token: str, special: list[str]) -> bytes:
    """What a token that is named in a list of tokens writes."""
    if token.startswith("bytes:"):
        return bytes(int(byte, 16) for byte in token.removeprefix("bytes:").split("\\x")[1:])
    return b"" if token in special else token.encode()


@each_once("route, kind", ["completions", "chat/completions"], KINDS)
def test_joined_frames_and_streams_are_the_text(kind, route, serving):
    asked = (
        {"prompt": "Once upon"}
        if route == "completions"
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    chunks = stream(
        serving(kind), route, **asked, **SAMPLED, diffusion={"stream": "frames", "stop_at_eos": False}
    )
    canvas, text, last, _ = replayed(chunks)
    names = dict.fromkeys(tokenizer(kind).all_special_tokens, "")
    assert "".join(names.get(token, token) for token in canvas) == text == last["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_frames_and_gaps_are_the_text_with_gaps(kind, serving):
    scheduler, mask = serving(kind, "bidirectional"), tokenizer(kind).mask_token
    asked = {"text": f"once upon{mask}{mask} there{mask}", "temperature": 1.0, "seed": 2}
    chunks = stream(scheduler, "infill", **asked, diffusion={"stream": "frames"})
    assert not {*tokenizer(kind).all_special_tokens} & {*chunks[0]["diffusion"]["canvas"]["tokens"]}
    canvas, text, last, _ = replayed(chunks)
    [expected] = unmask.infill(
        make_lm(kind, "bidirectional"), [asked["text"]], SamplerConfig(temperature=1.0, seed=2)
    ).texts
    names = dict.fromkeys(tokenizer(kind).all_special_tokens, "")
    assert "".join(names.get(token, token) for token in canvas) == text == last["text"] == expected
    gaps = answer(scheduler, "infill", **asked)["choices"][0]["gaps"]
    assert text == "once upon" + gaps[0]["text"] + " there" + gaps[1]["text"]


@pytest.fixture(scope="module")
def stories():
    with running(unmask.load(str(shared_path("models", "stories260K")))) as scheduler:
        yield scheduler


def test_stop_strings_and_echo_with_the_space_of_a_sentencepiece_tokenizer(stories):
    asked = {"prompt": "Once upon a time,", "max_tokens": 8, "temperature": 0}
    assert answer(stories, "completions", **asked, echo=True)["choices"][0]["text"].startswith(
        "Once upon a time, there was"
    )
    ids = unmask.load(str(shared_path("models", "stories260K"))).tokenizer(asked["prompt"])["input_ids"]
    assert answer(stories, "completions", **asked | {"prompt": ids}, echo=True)["choices"][0][
        "text"
    ].startswith("Once upon a time, there")
    for stop, text in ((" there", ""), (" was", " there"), ("there", " ")):
        choice = answer(stories, "completions", **asked, stop=[stop])["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert (
            "".join(
                chunk["choices"][0]["text"] for chunk in stream(stories, "completions", **asked, stop=[stop])
            )
            == text
        )


@partly_slow("kind", ["bytes", "llama", "mistral"], 1)
def test_streams_of_bytes_that_are_no_characters(kind):
    with running(lm_of_tokenizer(copy.deepcopy(tokenizer(kind)))) as scheduler:
        for seed in range(4):
            asked = {
                "prompt": "Once\n",
                **SAMPLED,
                "seed": seed,
                "logprobs": 5,
                "diffusion": {"stop_at_eos": False},
            }
            choice = answer(scheduler, "completions", **asked)["choices"][0]
            assert "\ufffd" in choice["text"]
            assert (
                "".join(chunk["choices"][0]["text"] for chunk in stream(scheduler, "completions", **asked))
                == choice["text"]
            )
            names = choice["logprobs"]["tokens"]
            assert any(name.startswith("bytes:\\x") for name in names) and "\ufffd" not in "".join(names)
            assert all(len(top) == 5 for top in choice["logprobs"]["top_logprobs"])
