"""Requests as editor plugins send them, unchanged but for the model's name, and what the plugins read of the
answers."""

from __future__ import annotations

import pytest

import unmask
from tests.serving.openai.asking import answer, ask, stream
from tests.tiny import CHAT_CONTEXT, cached_chat_lm
from unmask.config.sampler import SamplerConfig
from unmask.serving.limits import RequestLimits
from unmask.serving.openai.edits import edit_prompt, edited_region
from unmask.serving.openai.plans import EDIT_MARGIN

PREFIX = "def mean(values):\n    total = "
SUFFIX = "\n    return total / len(values)\n"
# streams of its provider `inception`, from /v1/completions, with the penalty that it has by default
CONTINUE = {
    "model": "tiny",
    "prompt": PREFIX,
    "suffix": SUFFIX,
    "max_tokens": 16,
    "temperature": 0,
    "presence_penalty": 1.5,
    "stop": ["<|endoftext|>", "\n\n", "\n \n"],
}
CONTINUE_EDIT = {  # of its provider `inception`, from /v1/edit/completions, streamed or whole
    "model": "tiny",
    "max_tokens": 16,
    "temperature": 0,
    "presence_penalty": 0,
    "stop": ["<|endoftext|>"],
}
CONTINUE_SYSTEM = (  # shortened
    "You are Mercury, created by Inception Labs. Your task is to predict and complete the changes the "
    "developer would have made next in "
    "the <|code_to_edit|> section. The output should be the revised code that was between the "
    "<|code_to_edit|> and <|/code_to_edit|> tags."
)
LITELLM = {
    "model": "tiny",
    "prompt": PREFIX,
    "suffix": SUFFIX,
    "max_tokens": 12,
    "stop": ["\n\n"],
    "stream": False,
}
MISTRAL = {  # streams of plugins for Codestral, from /v1/fim/completions
    "model": "tiny",
    "prompt": PREFIX,
    "suffix": SUFFIX,
    "max_tokens": 12,
    "temperature": 0.2,
    "top_p": 0.95,
    "stop": ["\n\n", ";"],
}
ZED = """<|recently_viewed_code_snippets|>
<|recently_viewed_code_snippet|>
code_snippet_file_path: src/units.py
KELVIN = 273.15
<|/recently_viewed_code_snippet|>
<|/recently_viewed_code_snippets|>
<|current_file_content|>
current_file_path: src/weather.py
from units import KELVIN

<|code_to_edit|>
def celsius(kelvin):
    return kelvin - <|cursor|>
<|/code_to_edit|>
<|/current_file_content|>
<|edit_diff_history|>
--- a/src/weather.py
+++ b/src/weather.py
@@ -1,2 +1,4 @@
 from units import KELVIN

+def celsius(kelvin):
+    return kelvin - 
<|/edit_diff_history|>
"""


def filled(size: int, stops: list[str], **sampling: float) -> str:
    """The gap between prefix and suffix, filled in process and cut at the first stop string."""
    config = SamplerConfig(**sampling)
    [text] = unmask.infill(
        cached_chat_lm(), [f"{PREFIX}<gap>{SUFFIX}"], config, length="search", max_gap=size
    ).texts
    middle = text.removeprefix(PREFIX).removesuffix(SUFFIX)
    return middle[: min([middle.find(stop) for stop in stops if stop in middle], default=len(middle))]


def test_a_completion_of_continue(service):
    penalty = ask(service(), "completions", **CONTINUE)
    error = penalty.json()["error"]
    assert penalty.status_code == 400 and error["param"] == "presence_penalty"
    assert error["message"].endswith(
        "Send 0, or leave it out; diffusion.repetition_penalty is another penalty."
    )
    # as a user of Continue may set it
    chunks = stream(service(), "completions", **CONTINUE | {"presence_penalty": 0})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == filled(16, CONTINUE["stop"])


def test_a_completion_of_continue_at_the_end_of_a_file(service):
    """Its suffix is then the name of an end token."""
    asked = CONTINUE | {"presence_penalty": 0, "suffix": "<|endoftext|>", "stop": None}
    chunks = stream(service(), "completions", **asked)
    assert ["".join(chunk["choices"][0]["text"] for chunk in chunks)] == unmask.generate(
        cached_chat_lm(), [PREFIX], SamplerConfig(max_new_tokens=16)
    ).texts


@pytest.mark.parametrize(
    "system", [[], [{"role": "system", "content": CONTINUE_SYSTEM}]], ids=["user", "system and user"]
)
def test_an_edit_of_continue(system, service):
    asked = CONTINUE_EDIT | {"messages": [*system, {"role": "user", "content": ZED}]}
    chunks = stream(service("block_causal", 4), "edit/completions", **asked)
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    [choice] = answer(service("block_causal", 4), "edit/completions", **asked)["choices"]
    assert streamed == choice["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    prompt = [*system, {"role": "user", "content": ZED}] if system else edit_prompt(ZED)
    [expected] = unmask.generate(
        cached_chat_lm("block_causal", 4), [prompt], SamplerConfig(max_new_tokens=16)
    ).texts
    assert streamed == edited_region(expected, ZED)
    assert streamed[streamed.index("```\n") + 4 : streamed.rindex("\n\n```")]  # as Continue reads it


def edited(region: str, scheduler, limits: RequestLimits | None = None, **asked):
    message = {"role": "user", "content": f"<|code_to_edit|>\n{region}<|/code_to_edit|>"}
    return ask(scheduler, "edit/completions", limits, messages=[message], **asked)


@pytest.mark.parametrize(
    "region, most", [("a\n" * 20, 40 + EDIT_MARGIN), ("a\n" * 20, 60), ("a\n" * 420, 4096)]
)
def test_an_edit_may_be_longer_than_its_region_within_the_limits(region, most, service):
    scheduler = service("block_causal", 4)
    usage = edited(
        region, scheduler, RequestLimits(max_tokens=most), diffusion={"stop_at_eos": False, "threshold": 1e-9}
    ).json()["usage"]
    expected = min(len(region) + EDIT_MARGIN, most, CHAT_CONTEXT - usage["prompt_tokens"])
    assert len(region) < usage["completion_tokens"] == expected


def test_a_region_without_room_for_it_is_refused(service):
    for region, limits in (("a" * 61, RequestLimits(max_tokens=60)), ("a" * 1000, RequestLimits())):
        error = edited(region, service("block_causal", 4), limits).json()["error"]
        assert (
            error["param"] == "messages"
            and f"the region to edit has {len(region):,} tokens" in error["message"]
        ), error
        assert "Mark fewer lines, or give max_tokens" in error["message"]


def test_the_default_length_of_an_edit_is_one_of_whole_blocks(service):
    found = edited(
        "a" * 9, service(), diffusion={"block_size": 8, "stop_at_eos": False, "threshold": 1e-9}
    ).json()
    assert found["usage"]["completion_tokens"] == 144


NEWER = [
    ("fim/completions", {"prompt": "ab"}),
    ("edit/completions", {"messages": [{"role": "user", "content": ZED}]}),
]


@pytest.mark.parametrize("path, body", NEWER)
def test_the_newer_name_of_max_tokens(path, body, service):
    scheduler = service("block_causal", 4)
    named = [
        answer(scheduler, path, **body, seed=1, **{name: 12})["choices"]
        for name in ("max_tokens", "max_completion_tokens")
    ]
    assert named[0] == named[1]
    error = ask(scheduler, path, **body, max_tokens=12, max_completion_tokens=13).json()["error"]
    assert error["param"] == "max_completion_tokens" and "differs from max_tokens" in error["message"]


def test_the_edited_region_ends_its_line_as_the_region_did():
    """Zed replaces the region by what stands in the fence: without the end of the line it would join the next
    line to it."""
    fence = "```\ny = 1\n```"
    assert edited_region(fence, "<|code_to_edit|>\ny\n<|/code_to_edit|>\n") == "```\ny = 1\n\n```"
    assert edited_region("```\ny = 1\n\n```", "<|code_to_edit|>\ny\n<|/code_to_edit|>") == "```\ny = 1\n\n```"
    assert edited_region(fence, "<|code_to_edit|>y<|/code_to_edit|>\n") == fence


def test_a_completion_that_litellm_sends_for_inception(service):
    [choice] = answer(service(), "fim/completions", **LITELLM)["choices"]
    assert choice["text"] == filled(12, LITELLM["stop"])


@pytest.mark.parametrize("frames", [False, True])
def test_a_completion_as_of_mistral(frames, service):
    chunks = stream(
        service(), "fim/completions", **MISTRAL, seed=4, diffusion={"stream": "frames" if frames else "text"}
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = filled(12, MISTRAL["stop"], temperature=0.2, top_p=0.95, seed=4)
    # a client reads it of every chunk
    assert expected and "".join(choice["delta"]["content"] for choice in choices) == expected
    assert "".join(choice["text"] for choice in choices) == expected
    [whole] = answer(service(), "fim/completions", **MISTRAL, seed=4)["choices"]
    assert whole["message"]["content"] == whole["text"] == expected


def test_fields_that_clients_of_mistral_send(service):
    scheduler = service()
    asked = {"prompt": PREFIX, "max_tokens": 12, "temperature": 1.5}
    seeded = answer(scheduler, "fim/completions", **asked, seed=4)["choices"]
    for fields in (
        {"random_seed": 4},
        {"random_seed": 4, "seed": 4},
        {"random_seed": 4, "min_tokens": 0, "metadata": None},
    ):
        assert answer(scheduler, "fim/completions", **asked, **fields)["choices"] == seeded
    assert answer(scheduler, "fim/completions", **asked, random_seed=5)["choices"] != seeded
    refused = {
        "random_seed": {"random_seed": 4, "seed": 5},
        "min_tokens": {"min_tokens": 3},
        "metadata": {"metadata": {"a": "b"}},
    }
    for name, fields in refused.items():
        found = ask(scheduler, "fim/completions", **asked, **fields)
        assert found.status_code == 400 and found.json()["error"]["param"] == name, found.text
    assert (
        "differs from seed"
        in ask(scheduler, "fim/completions", **asked, random_seed=4, seed=5).json()["error"]["message"]
    )
    assert (
        ask(scheduler, "completions", **asked, random_seed=4).json()["error"]["code"] == "unknown_parameter"
    )


def test_an_edit_of_zed(service):
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": ZED}],
        "stream": False,
        "max_completion_tokens": None,
    }
    [choice] = answer(service("block_causal", 4), "edit/completions", **asked)["choices"]
    content = choice["message"]["content"]
    assert content.startswith("```\n") and content.endswith("\n\n```")  # the region ends its line
    lm = cached_chat_lm("block_causal", 4)
    # a token is a character
    size = len("def celsius(kelvin):\n    return kelvin - <|cursor|>\n") + EDIT_MARGIN
    [expected] = unmask.generate(lm, [edit_prompt(ZED)], SamplerConfig(max_new_tokens=size)).texts
    assert content == edited_region(expected, ZED)
