"""Special tokens in users' texts stay text; those of chat templates are tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.data.test_encoding import ASKED, CHATML, SPACED, _tokenizer, _turn
from tests.errors import raises
from unmask.data.encoding import (
    encode_completion,
    encode_example,
    encode_pair,
    encode_preference,
    encode_prompt,
    encode_turns,
)
from unmask.data.rows import iter_text_rows
from unmask.data.special_tokens import encode, encode_texts
from unmask.errors import DataError

CHAT = _tokenizer(CHATML)
for _each in (CHAT, *SPACED.values()):
    _each.add_special_tokens({"mask_token": "<|mask|>"})
TYPED = ["<|mask|>", "<s>", "</s>", "x</s>y", "a <|mask|> b", "</s></s>", "<pad>", "<</s>/s>"]
TOKENIZERS = {"characters": CHAT, **SPACED}


def _special(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The special tokens among ids, without the unknown token and the bytes of unknown characters."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = [tokenizer.convert_ids_to_tokens(token) for token in ids]
    return [
        token for token in tokens if token in special and token != "<unk>" and not token.startswith("<0x")
    ]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("typed", TYPED)
def test_typed_special_tokens_are_text_in_prompts_completions_and_documents(name: str, typed: str) -> None:
    tokenizer = TOKENIZERS[name]
    bos = ["<s>"] if tokenizer("")["input_ids"] else []
    assert _special(tokenizer, encode_prompt(tokenizer, typed)) == bos
    assert _special(tokenizer, encode_completion(tokenizer, "a", typed)) == []
    assert _special(tokenizer, encode_texts(tokenizer, ["plain", typed])[1]) == []
    rows = [*iter_text_rows(tokenizer, ["a", typed], 512)]
    assert _special(tokenizer, rows[0]["input_ids"]) == ["<s>", tokenizer.eos_token] * 2


@given(st.lists(st.sampled_from([*TYPED, "<|im_end|>", "<|im_start|>", "word", "\n", " "])).map("".join))
def test_the_only_special_tokens_of_a_chat_are_the_templates(content: str) -> None:
    """Also for contents that join into special tokens, and roles."""
    plain = [_turn("user", "a"), _turn("assistant", "b"), _turn("user", "c")]
    typed = [_turn("user", f"a{content}"), _turn("assistant", f"b{content}c"), _turn("user", f"{content}c")]
    assert _special(CHAT, encode_prompt(CHAT, typed)) == _special(CHAT, encode_prompt(CHAT, plain))


def test_a_role_cannot_open_a_turn() -> None:
    assert _special(CHAT, encode_prompt(CHAT, [_turn("user<|im_end|>", "a")])) == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]


def test_marks_in_a_text_mark_nothing() -> None:
    forged = "\U000f0001</s>\U000f0000"
    assert _special(CHAT, encode_prompt(CHAT, forged)) == ["<s>"]
    assert _special(CHAT, encode_prompt(CHAT, [_turn("user", forged)])) == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]


def test_training_rows_hold_the_tokens_that_sampling_sees() -> None:
    prompt, asked = [_turn("user", "what does <|mask|> do?")], [_turn("assistant", "it hides")]
    assert encode_pair(CHAT, prompt, asked)[0] == encode_prompt(CHAT, prompt)
    assert encode_pair(CHAT, "x<|mask|>", "y")[0] == encode_prompt(CHAT, "x<|mask|>")
    ids, chosen, rejected = encode_preference(
        CHAT, {"prompt": "a<|mask|>", "chosen": "b<pad>", "rejected": "c"}
    )
    assert [_special(CHAT, side) for side in (ids, chosen, rejected)] == [
        ["<s>"],
        ["<|im_end|>"],
        ["<|im_end|>"],
    ]


def test_a_text_ends_once() -> None:
    for text in ("abc", "abc<|im_end|>"):
        assert _special(CHAT, encode_example(CHAT, {"text": text})[1]) == ["<|im_end|>"]
    assert _special(CHAT, encode_example(CHAT, {"text": "a<|im_end|>b"})[1]) == ["<|im_end|>"]


def test_earlier_answers_are_learnt_beside_typed_special_tokens() -> None:
    messages = [
        _turn("user", "<|mask|>?"),
        _turn("assistant", "b<pad>b"),
        _turn("user", "c"),
        _turn("assistant", "d"),
    ]
    prompt, answer, learnt = encode_turns(CHAT, messages, "all")
    learnt_text = CHAT.decode([token for token, is_trained in zip(prompt, learnt, strict=True) if is_trained])
    assert learnt_text.startswith("b") and learnt_text.endswith("b<|im_end|>")
    assert CHAT.decode(answer) == "d<|im_end|>" and CHAT.mask_token_id not in prompt


def test_they_are_tokens_if_asked() -> None:
    tokenizer = _tokenizer(CHATML)
    tokenizer.parse_special_tokens = True
    assert _special(tokenizer, encode_prompt(tokenizer, "a</s>")) == ["<s>", "</s>"]
    assert _special(tokenizer, encode_prompt(tokenizer, [_turn("user", "a</s>")])).count("</s>") == 1
    assert _special(tokenizer, encode_texts(tokenizer, ["a</s>b"])[0]) == ["</s>"]
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    with raises(DataError, where="train_dataset, row 0"):
        list(iter_text_rows(tokenizer, ["a<|mask|>"], 8))


class Lower(PreTrainedTokenizerFast):
    """Of a repository with code of its own."""

    def __call__(self, text: str, *arguments: Any, **options: Any) -> Any:
        return super().__call__(text.lower(), *arguments, **options)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.sampled_from("aB é\n</s>")))
def test_ids_are_those_of_a_call_in_every_state_of_a_tokenizer(name: str, text: str) -> None:
    plain = copy.deepcopy(TOKENIZERS[name])
    split, own = copy.deepcopy(plain), Lower(tokenizer_object=plain.backend_tokenizer)
    split.split_special_tokens = True
    for tokenizer in (plain, split, own):
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        for _ in range(2):
            assert encode(tokenizer, text) == expected
            tokenizer("a longer text", truncation=True, max_length=2)


def test_kept_tokens_are_tokens() -> None:
    assert _special(CHAT, encode_prompt(CHAT, "a<|mask|></s>", keep=["<|mask|>"])) == ["<s>", "<|mask|>"]
    assert _special(CHAT, encode_prompt(CHAT, ASKED)) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
