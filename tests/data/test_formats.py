"""Every record format is converted to TRL's columns; a file has one format."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from unmask.data.formats import (
    PREFERENCES,
    PROMPT,
    SPEAKERS,
    SUPERVISED,
    TRACE_INSTRUCTIONS,
    UNPAIRED,
    Reader,
)
from unmask.errors import DataError

words = st.text("abc", min_size=1, max_size=5)
spoken = st.lists(st.tuples(st.sampled_from(sorted(SPEAKERS)), words), min_size=1, max_size=4)


def said(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Messages in ShareGPT's format."""
    return [{"from": speaker, "value": text} for speaker, text in turns]


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": SPEAKERS[speaker], "content": text} for speaker, text in turns]


def read(rows: list[Any], formats: Any = SUPERVISED) -> list[dict[str, Any]]:
    reader = Reader(formats)
    return [reader.read(row) for row in rows]


@given(spoken, words, words)
def test_conversations_of_sharegpt_are_messages(turns, chosen, rejected):
    assert read([{"conversations": said(turns)}]) == [{"messages": messages(turns)}]
    sides = {"chosen": {"from": "gpt", "value": chosen}, "rejected": {"from": "gpt", "value": rejected}}
    expected = {
        "prompt": messages(turns),
        "chosen": messages([("gpt", chosen)]),
        "rejected": messages([("gpt", rejected)]),
    }
    assert read([{"conversations": said(turns), **sides}], PREFERENCES) == [expected]
    in_lists = {name: [side] for name, side in sides.items()}
    assert read([{"conversations": said(turns), **in_lists}], PREFERENCES) == [expected]
    assert read([{"prompt": said(turns), **sides}], PREFERENCES) == [expected]


@given(spoken, words)
def test_the_system_column_becomes_the_first_message(turns, system):
    turns = [turn for turn in turns if turn[0] != "system"] or [("human", "a")]
    row = {"conversations": said(turns), "system": system}
    first = [("system", system)]
    assert (
        read([row])
        == read([row | {"conversations": said(first + turns)}])
        == [{"messages": messages(first + turns)}]
    )
    assert read([row | {"system": ""}]) == [{"messages": messages(turns)}]
    [same] = read([row | {"conversations": [{"from": "system", "value": system, "weight": 0}, *said(turns)]}])
    assert same == {"messages": [messages(first)[0] | {"weight": 0}, *messages(turns)]}
    with raises(DataError, where="system") as caught:
        read([row | {"conversations": said([("system", system + "d"), *turns])}])
    assert caught.value.reason == "two system prompts"


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("formats", "row"),
    [
        (SUPERVISED, {"text": "a"}),
        (SUPERVISED, {"messages": CHAT}),
        (SUPERVISED, {"prompt": "a", "completion": "b"}),
        (SUPERVISED, {"prompt": CHAT[:1], "completion": CHAT[1:]}),
        (PREFERENCES, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        (PREFERENCES, {"chosen": CHAT, "rejected": CHAT}),
        (UNPAIRED, {"prompt": "a", "completion": "b", "label": False}),
        (UNPAIRED, {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True}),
    ],
)
def test_the_formats_of_trl_are_unchanged_and_other_columns_left_out(formats, row):
    others = {"source": "", "score": None, "id": 3}
    assert read([row, row | others, others | row], formats) == [row] * 3


def test_a_trace_is_a_question_with_instructions_and_an_answer_behind_the_thoughts():
    row = {
        "question": "1+1?",
        "thinking_trajectories": ["one and\none", "no"],
        "attempt": "It is 2.",
        "solution": "2",
        "cot": None,
    }
    answer = "<reasoning>\none and\none\n</reasoning>\n<answer>\nIt is 2.\n</answer>"
    prompt = [{"role": "user", "content": f"{TRACE_INSTRUCTIONS}\n\n1+1?"}]
    assert read([row]) == [{"prompt": prompt, "completion": [{"role": "assistant", "content": answer}]}]
    for thoughts, reason in [("one", "wrong type"), ([1], "wrong type"), ([], "empty"), ([" "], "empty")]:
        with raises(DataError, where="thinking_trajectories") as caught:
            read([row | {"thinking_trajectories": thoughts}])
        assert caught.value.reason == reason
    with raises(DataError, where="attempt"):
        read([row | {"attempt": ""}])


def test_a_prompt_that_both_conversations_repeat_is_left_out():
    whole = {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "c"}]}
    assert read([{"prompt": "a", **whole}] * 2, PREFERENCES) == [whole] * 2
    assert read([{"prompt": "z", **whole}], PREFERENCES) == [{"prompt": "z", **whole}]  # rendering refuses it
    apart = whole | {"rejected": [{"role": "user", "content": "z"}, CHAT[1]]}
    assert read([{"prompt": "a", **apart}], PREFERENCES) == [{"prompt": "a", **apart}]


TEXTS = {"prompt": "a", "chosen": "b", "rejected": "c"}
IN_MESSAGES = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "c"}]}
REPEATED = {"prompt": "a", "chosen": CHAT, "rejected": CHAT}

TABLES = [
    [
        {"messages": CHAT},
        {"messages": [*CHAT, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]},
    ],
    [
        {"conversations": said([("human", "a"), ("gpt", "b")])},
        {"conversations": said([("system", "s"), ("human", "a")])},
    ],
    [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d", "note": "e"}],
]


@pytest.mark.parametrize("rows", TABLES)
def test_a_null_in_a_table_counts_as_absent(rows):
    """A table gives every row, and every message, all columns."""
    assert read(list(Dataset.from_list(rows))) == read(rows)


@pytest.mark.parametrize(
    ("formats", "first", "other"),
    [
        (SUPERVISED, {"text": "a"}, {"prompt": "a", "completion": "b"}),
        (SUPERVISED, {"prompt": "a", "completion": "b"}, {"prompt": CHAT[:1], "completion": CHAT[1:]}),
        (SUPERVISED, {"messages": CHAT}, {"conversations": said([("human", "a")])}),
        (SUPERVISED, {"messages": CHAT}, {"messages": said([("human", "a")])}),
        (
            PREFERENCES,
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {
                "conversations": said([("human", "a")]),
                **{name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")},
            },
        ),
        (PREFERENCES, {"prompt": "a", "chosen": "b", "rejected": "c"}, {"chosen": "ab", "rejected": "ac"}),
        (PREFERENCES, {"chosen": "ab", "rejected": "ac"}, {"chosen": CHAT, "rejected": CHAT}),
        (PREFERENCES, TEXTS, REPEATED),
        (PREFERENCES, IN_MESSAGES, REPEATED),
        (PREFERENCES, {"chosen": CHAT, "rejected": CHAT}, REPEATED),
        (PREFERENCES, IN_MESSAGES, {**IN_MESSAGES, "prompt": said([("human", "a")])}),
    ],
)
def test_the_first_row_sets_the_format(formats, first, other):
    for one, two in ((first, other), (other, first)):
        reader = Reader(formats)
        reader.read(one)
        with raises(DataError, where=None) as caught:
            reader.read(two)
        assert caught.value.reason == "another format"
        assert reader.read(one)
    with raises(DataError, where=None):
        read([first, other], formats)
    with raises(DataError, where=None):
        reader = Reader(formats)
        with pytest.raises(DataError):
            reader.read({})
        reader.read(first)
        reader.read(other)


@pytest.mark.parametrize(
    "bad",
    [{"prompt": "a"}, {"prompt": "z", "chosen": CHAT}, {"chosen": " "}, {"chosen": 3}, {"rejected": "c"}],
)
@pytest.mark.parametrize("good", [TEXTS, IN_MESSAGES, REPEATED])
def test_a_bad_first_row_sets_no_format(bad, good):
    reader = Reader(PREFERENCES)
    with contextlib.suppress(DataError):  # rendering refuses the mix of text and messages
        assert reader.read(IN_MESSAGES | bad)
    assert reader.read(good) == read([good], PREFERENCES)[0]


@pytest.mark.parametrize(
    ("formats", "row"),
    [
        (SUPERVISED, {"prompt": "a"}),
        (SUPERVISED, {"promt": "a"}),
        (SUPERVISED, {"question": "a", "attempt": "b"}),
        (SUPERVISED, {"question": "a", "answer": "b"}),
        (SUPERVISED, {"question": "a"}),
        (UNPAIRED, {"question": "a", "output": "b", "label": True}),
        (PREFERENCES, {"prompt": "a", "chosen": "b"}),
        (PREFERENCES, {"chosen": "b"}),
        (PREFERENCES, {"conversations": [], "chosen": "b"}),
        (UNPAIRED, {"prompt": "a", "completion": "b"}),
    ],
)
def test_the_nearest_format_names_the_missing_columns(formats, row):
    with raises(DataError, where=None) as caught:
        read([row], formats)
    assert caught.value.reason == "a column is missing"


@pytest.mark.parametrize("column", ["prompt", "conversations"])
def test_a_prompt_that_is_null_is_missing_and_does_not_decide_for_the_file(column):
    reader = Reader(PREFERENCES)
    with raises(DataError, where="") as caught:
        reader.read({column: None, "chosen": "ab", "rejected": "ac"})
    assert caught.value.reason == "without a value"
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert reader.read(good) == good


def test_a_later_row_is_told_what_the_first_has():
    with raises(DataError, where=None):
        read([{"text": "a"}, {"prompt": "b"}])
    with raises(DataError, where=None):
        read([{"text": "a"}, {"text": None}])


@pytest.mark.parametrize(
    ("row", "where", "reason"),
    [
        ({"text": "\n"}, "text", "empty"),
        ({"messages": []}, "messages", "empty"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]},
            "messages",
            "empty",
        ),
        ({"prompt": [{"role": "user", "content": ""}], "completion": CHAT[1:]}, "prompt", "empty"),
        ({"messages": [{"role": "user", "content": 3}]}, "content", "wrong type"),
        ({"conversations": [{"from": "human", "content": "a"}]}, "content", "wrong type"),
        ({"conversations": [{"from": "bard", "value": "a"}]}, "from", "wrong type"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "from", "wrong type"),
        ({"prompt": [1, 2], "completion": "a"}, "prompt", "wrong type"),
        ({"prompt": [True], "completion": "a"}, "prompt", "wrong type"),
        ({"messages": [CHAT]}, "messages", "wrong type"),
        ({"text": 3}, "text", "wrong type"),
        ({"question": "a", "thinking_trajectories": ["b"], "attempt": 3}, "attempt", "wrong type"),
        ({"messages": [{"role": 5, "content": "a"}]}, "role", "wrong type"),
        ({"conversations": [{"from": "human", "value": "a"}], "system": 5}, "system", "wrong type"),
    ],
)
def test_blank_texts_and_what_is_no_message_are_refused(row, where, reason):
    with raises(DataError, where=where) as caught:
        read([row])
    assert caught.value.reason == reason


@given(st.lists(words, min_size=1, max_size=3))
def test_parts_of_text_are_joined(texts):
    parts = [{"type": "text", "text": text} for text in texts]
    expected = [CHAT[0], {"role": "assistant", "content": "".join(texts)}]
    assert read([{"messages": [CHAT[0], {"role": "assistant", "content": parts}]}]) == [
        {"messages": expected}
    ]


@pytest.mark.parametrize(
    "part", ["a", {"type": "image_url", "image_url": {}}, {"type": "text", "text": 3}, None]
)
def test_parts_that_are_no_text_are_refused(part):
    with raises(DataError, where="content") as caught:
        read([{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}, CHAT[1]]}])
    assert caught.value.reason == "wrong type"


def test_a_blank_system_prompt_is_no_fault():
    chat = [{"role": "system", "content": ""}, *CHAT]
    assert read([{"messages": chat}]) == [{"messages": chat}]


def test_a_line_that_could_not_be_read_is_its_own_error():
    error = DataError("malformed JSON", where="line 7", reason="malformed JSON")
    reader = Reader(SUPERVISED)
    with pytest.raises(DataError) as caught:
        reader.read(error)
    assert caught.value is error
    assert reader.read({"text": "a"}) == {"text": "a"}


@pytest.mark.parametrize(
    ("row", "where", "reason"),
    [
        ("text", None, "wrong type"),
        (None, None, "wrong type"),
        ({"prompt": "a", "completion": "b", "tools": [{"name": "add"}]}, "tools", "with tools"),
        ({"conversations": CHAT, "history": [["a", "b"]]}, "history", "with history"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "system", "with system"),
    ],
)
def test_rows_of_a_wrong_type_or_with_unsupported_columns_are_refused(row, where, reason):
    reader = Reader(SUPERVISED)
    with raises(DataError, where=where) as caught:
        reader.read(row)
    assert caught.value.reason == reason
    assert reader.read({"messages": CHAT, "tools": []}) == {"messages": CHAT}


@pytest.mark.parametrize("name", ["question", "instruction", "input", "query", "system", "history"])
def test_a_prompt_under_another_name_is_refused(name):
    row = {"chosen": "the one", "rejected": "the other"}
    with raises(DataError, where=name):
        Reader(PREFERENCES).read(row | {name: "a"})
    assert Reader(PREFERENCES).read(row | {name: "", "score": 1}) == row


@pytest.mark.parametrize("name", ["ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps"])
def test_log_probabilities_of_a_reference_in_rows_are_refused(name):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": "b", "rejected": "c"},
        {"conversations": CHAT[:1], "chosen": CHAT[1], "rejected": CHAT[1] | {"content": "c"}},
        {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]},
    ]
    for formats, row in [
        *((PREFERENCES, row) for row in rows),
        (UNPAIRED, {"prompt": "a", "completion": "b", "label": 1}),
    ]:
        with raises(DataError, where=name):
            Reader(formats).read(row | {name: -3.5})


@pytest.mark.parametrize(
    "name",
    [
        "system",
        "system_prompt",
        "history",
        "functions",
        "documents",
        "images",
        "image",
        "videos",
        "video",
        "audio",
        "audios",
    ],
)
def test_a_column_that_would_change_the_prompt_is_refused_in_every_format(name):
    rows = [
        (SUPERVISED, {"messages": CHAT}),
        (SUPERVISED, {"conversations": said([("human", "a"), ("gpt", "b")])}),
        (SUPERVISED, {"prompt": "a", "completion": "b"}),
        (SUPERVISED, {"text": "a"}),
        (PREFERENCES, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        (PREFERENCES, {"chosen": "ab", "rejected": "ac"}),
        (UNPAIRED, {"prompt": "a", "completion": "b", "label": True}),
        ([PROMPT], {"prompt": "a"}),
    ]
    media = name.startswith(("image", "video", "audio"))
    for formats, row in rows:
        for empty in (None, "") if "conversations" in row else (None, "", [], np.array([])):
            assert read([row | {name: empty}], formats) == read([row], formats)
        if ("text" in row and not media) or ("conversations" in row and name == "system"):
            read([row | {name: "b"}], formats)  # of a whole text, or read
            continue
        for value in ("b", ["b"], {"b": 1}, np.array([1, 2])):
            with raises(DataError, where=name) as caught:
                read([row | {name: value}], formats)
            assert caught.value.reason == f"with {name}"


def test_columns_for_rewards_are_none_of_the_prompt():
    others = {"input": "a", "context": "b", "instruction": "c", "answer": 3, "question": "d"}
    assert read([{"prompt": "a", **others}], [PROMPT]) == [{"prompt": "a"}]
    assert read([{"prompt": "a", "completion": "b", **others}]) == [{"prompt": "a", "completion": "b"}]


@pytest.mark.parametrize("name", ["function_call", "images", "image", "videos", "audio", "train_detail"])
def test_parts_of_a_message_that_are_not_read_are_refused(name):
    with raises(DataError, where=name) as caught:
        read([{"messages": [CHAT[0], CHAT[1] | {name: [{"name": "f"}]}]}])
    assert caught.value.reason == f"with {name}"
    assert read([{"messages": [CHAT[0], CHAT[1] | {name: None}]}]) == [{"messages": CHAT}]


def test_tools_are_given_once():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for inside in (tools, [], None):
        with raises(DataError, where="tools"):
            read([{"messages": CHAT, "tools": tools, "chat_template_kwargs": {"tools": inside}}])
    for row in ({"tools": tools}, {"chat_template_kwargs": {"tools": tools}}):
        assert read([{"messages": CHAT, **row}]) == [{"messages": CHAT, **row}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [('{"a": 1}', {"a": 1}), (' {"a": {"b": "1"}}\n', {"a": {"b": "1"}}), ({"a": 1}, {"a": 1})]
    + [(empty, {}) for empty in ("", " ", "{}", "null", None, {})],
)
def test_the_arguments_of_a_call_are_an_object(given, expected):
    def called(arguments):
        return [
            {"type": "function", "function": {"name": "f", "arguments": arguments}},
            {"name": "g", "arguments": arguments},
        ]

    for content in ("", None, "b"):
        row = {"messages": [CHAT[0], {"role": "assistant", "content": content, "tool_calls": called(given)}]}
        [found] = read([row])
        assert found["messages"][1] == {
            "role": "assistant",
            "content": content,
            "tool_calls": called(expected),
        }


@pytest.mark.parametrize(
    "calls",
    [
        "f",
        '[{"name": "f"}]',
        ["f"],
        [{"name": "f", "arguments": "a b"}],
        [{"name": "f", "arguments": "[1]"}],
        {"a": 1},
    ],
)
def test_calls_without_arguments_by_name_are_refused(calls):
    with raises(DataError, where="tool_calls") as caught:
        read([{"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": calls}]}])
    assert caught.value.reason == "wrong type"


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ({"train": False}, {"weight": 0}),
        ({"train": 0}, {"weight": 0}),
        ({"train": True}, {}),
        ({"train": None}, {}),
        ({"train": False, "weight": 0}, {"weight": 0}),
    ],
)
def test_train_is_a_weight(given, read_as):
    answer = {"role": "assistant", "content": "c"}
    assert read([{"messages": [*CHAT, CHAT[0], answer | given]}]) == [
        {"messages": [*CHAT, CHAT[0], answer | read_as]}
    ]
    assert read([{"messages": [CHAT[0] | {"train": False}, CHAT[1]]}]) == [
        {"messages": [CHAT[0] | {"weight": 0}, CHAT[1]]}
    ]


@pytest.mark.parametrize(
    ("role", "given"),
    [("user", {"train": True}), ("assistant", {"train": "no"}), ("assistant", {"train": True, "weight": 0})],
)
def test_a_train_that_says_no_weight_is_refused(role, given):
    with raises(DataError, where="train") as caught:
        read([{"messages": [{"role": role, "content": "a", **given}, *CHAT]}])
    assert caught.value.reason == "wrong type"


@pytest.mark.parametrize(
    ("role", "weight"), [("assistant", 0.5), ("assistant", "0"), ("user", 1), ("system", 2)]
)
def test_a_weight_is_0_or_1_and_only_answers_have_one(role, weight):
    with raises(DataError, where="weight") as caught:
        read([{"messages": [{"role": role, "content": "a", "weight": weight}, *CHAT]}])
    assert caught.value.reason == "wrong type"


@pytest.mark.parametrize(
    ("row", "formats", "renamed"),
    [
        ({"question": "a", "answer": "b"}, SUPERVISED, "question to prompt and answer to completion"),
        ({"instruction": "a", "output": "b"}, SUPERVISED, "instruction to prompt and output to completion"),
        ({"prompt": "a", "response": "b"}, SUPERVISED, "response to completion"),
        ({"query": "a", "completion": "b", "label": True}, UNPAIRED, "query to prompt"),
    ],
)
def test_a_column_under_another_name_is_named(row, formats, renamed):
    with pytest.raises(DataError) as caught:
        read([row], formats)
    assert caught.value.remedy is not None and caught.value.remedy.startswith(f"Rename {renamed}:")
    words = renamed.split()
    names = dict(zip(words[0::4], words[2::4], strict=True))
    assert read([{names.get(name, name): value for name, value in row.items()}], formats)  # the remedy works
