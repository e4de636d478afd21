"""Tools: how a chat template writes calls, and calls in a text that arrives in any pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.tiny import cached_chat_lm
from unmask.errors import GenerationError
from unmask.models.chat_template import TEMPLATES
from unmask.serving.openai import tools
from unmask.serving.openai.plans import template_messages
from unmask.serving.openai.requests import Message
from unmask.serving.openai.tools import HERMES, Call, CallFormat, CallReader, call_format, check_renders_tools

LLAMA = CallFormat("", "", "parameters")
MISTRAL = CallFormat("[", "]", "arguments")
TEMPLATE = (
    "{{{{ tools | tojson if tools }}}}{{% for message in messages %}}{{{{ message.content }}}}"
    "{{% for call in message.tool_calls or [] %}}{}{{% endfor %}}{{{{ eos_token if message.role == "
    "'assistant' }}}}{{% endfor %}}"
)


def pieces(written: CallFormat, chunks: list[str], *, single: bool = False) -> list[str | tuple[str, str]]:
    """The content, joined where nothing stands between, and the calls."""
    reader, found = CallReader(written, ["add", "f"], single=single), []
    for number, chunk in enumerate([*chunks, ""]):
        for piece in reader.read(chunk, done=number == len(chunks)):
            if isinstance(piece, Call):
                found.append((piece.name, piece.arguments))
            elif found and isinstance(found[-1], str):
                found[-1] += piece
            else:
                found.append(piece)
    return found


ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = [
    (HERMES, ONE, [("add", '{"a": 1}')]),
    (HERMES, f"I add.\n{ONE}\n{ONE}", ["I add.\n", ("add", '{"a": 1}'), ("add", '{"a": 1}')]),
    (HERMES, f"{ONE}  and then", [("add", '{"a": 1}'), "and then"]),
    (HERMES, "<tool_call>{}</tool_call> no", ["<tool_call>{}</tool_call> no"]),
    (
        HERMES,
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "other", "arguments": {}}</tool_call>'],
    ),
    (HERMES, '<tool_call>{"name": "add", "argum', ['<tool_call>{"name": "add", "argum']),
    (
        HERMES,
        "<tool_call>not JSON</tool_call>" + ONE,
        ["<tool_call>not JSON</tool_call>", ("add", '{"a": 1}')],
    ),
    (HERMES, "a < b, <tool", ["a < b, <tool"]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [("f", "{}")]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"t": "é</tool_call>"}}</tool_call>',
        [("f", '{"t": "é</tool_call>"}')],
    ),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [("f", '{"a": 1}')]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        ['<tool_call>{"name": "f", "arguments": [1]}</tool_call>'],
    ),
    (LLAMA, '{"name": "f", "parameters": {}}', [("f", "{}")]),
    (LLAMA, '{"name": "f"}', [("f", "{}")]),
    (
        LLAMA,
        ' {"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}',
        [" ", ("f", "{}"), '; {"name": "f", "parameters": {}}'],
    ),
    (LLAMA, 'so {"name": "f", "parameters": {}}', ['so {"name": "f", "parameters": {}}']),
    (MISTRAL, '[{"name": "f", "arguments": {}}]', [("f", "{}")]),
    (MISTRAL, '[{"name": "f", "arguments": {}}, 1]', ['[{"name": "f", "arguments": {}}, 1]']),
]


@pytest.mark.parametrize("written, text, expected", TEXTS, ids=[str(number) for number in range(len(TEXTS))])
@given(st.data())
def test_calls_are_found_in_whatever_pieces_the_text_arrives(written, text, expected, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert pieces(written, chunks) == expected


def test_content_before_a_call_is_released_before_the_call_is_there():
    reader = CallReader(HERMES, ["add"])
    assert [*reader.read("well <tool", done=False)] == ["well "]
    assert [*reader.read('_call>{"name"', done=False)] == []
    assert [*reader.read(': "add", "arguments": {}}</tool_call>', done=False)] == [Call("add", "{}")]


@pytest.mark.parametrize("written", [HERMES, LLAMA])
@pytest.mark.parametrize("closed", [True, False])
def test_a_call_in_many_pieces_is_not_parsed_again_at_each(written, closed, monkeypatch):
    """Whatever brackets, quotes and escapes are in it, and however much white space follows it."""
    read, parsed = tools.read_object, []
    monkeypatch.setattr(tools, "read_object", lambda text, at: (parsed.append(len(text)), read(text, at))[1])
    arguments = json.dumps({"code": 'if (a) { b = "}"; } \\' * 200, "inner": [{"c": [{}]}] * 50})
    call = f'{written.before}{{"name": "f", "{written.key}": {arguments}}}' + " " * 500 * bool(written.after)
    text = call + written.after if closed else call[: call.rindex("]")]
    found = pieces(written, list(text))
    assert found == ([("f", arguments)] if closed else [text])
    assert sum(parsed) < 4 * len(text)


def test_what_cannot_become_a_call_is_released_before_its_end():
    reader, text = (
        CallReader(HERMES, ["add"]),
        '<tool_call>{"name": "add", oops, no call at all, and much more text that is content',
    )
    released = "".join(piece for character in text for piece in reader.read(character, done=False))
    assert len(released) > len(text) - 8


def test_without_parallel_calls_the_text_ends_with_the_first():
    assert pieces(HERMES, [f"a {ONE} b {ONE}"], single=True) == ["a ", ("add", '{"a": 1}')]


@pytest.mark.parametrize(
    "written, expected",
    [
        (
            (
                '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments '
                "| tojson }}}\n</tool_call>"
            ),
            HERMES,
        ),
        ('{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}', LLAMA),
        (
            (
                '[{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson '
                '}}, "id": "x"}]'
            ),
            MISTRAL,
        ),
        ("<call:{{ call.function.name }}>{{ call.function.arguments | tojson }}", HERMES),
        (
            (
                "{{ bos_token }}CALL {{ {'name': call.function.name, 'arguments': call.function.arguments} "
                "| tojson }}"
            ),
            CallFormat("CALL ", "", "arguments"),
        ),
    ],
)
def test_the_chat_template_says_how_calls_are_written(written, expected, monkeypatch):
    tokenizer = cached_chat_lm().tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE.format(written))
    assert call_format(tokenizer) == expected


def test_a_template_that_renders_no_tools_is_refused(monkeypatch):
    tokenizer = cached_chat_lm().tokenizer
    check_renders_tools(tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES["simple"])
    with raises(GenerationError, where="tools"):
        check_renders_tools(tokenizer)


@pytest.mark.parametrize(
    "arguments, read",
    [
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ("{}", {}),
        ('{"a": null}', {"a": None}),
        ("[1]", "[1]"),
        ('{"a"', '{"a"'),
        (None, {}),
    ],
)
def test_a_template_gets_the_arguments_of_a_call_as_an_object(arguments, read):
    given = {"name": "f"} if arguments is None else {"name": "f", "arguments": arguments}
    message = Message.model_validate({"role": "assistant", "tool_calls": [{"id": "c", "function": given}]})
    [rendered] = template_messages([message])
    assert rendered["tool_calls"][0]["function"] == {"name": "f", "arguments": read}


def test_a_call_as_clients_read_it():
    call = Call("f", json.dumps({"a": 1})).as_openai()
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'} and call["id"].startswith("call_")
