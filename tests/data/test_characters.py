"""The character tokenizer restores text exactly."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.errors import raises
from unmask.data.characters import SPECIAL, character_tokenizer
from unmask.errors import ConfigError

characters = st.characters(exclude_categories=["Cs"])


@given(st.lists(characters, min_size=1, max_size=20).map("".join), st.data())
def test_decoding_restores_the_text(alphabet, data):
    tokenizer = character_tokenizer(alphabet)
    text = data.draw(st.text(st.sampled_from(alphabet), max_size=30))
    assume(not any(token in text for token in SPECIAL.values()))
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and len(ids) == len(text) + 1
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids[1:]
    assert (
        tokenizer.decode(ids[1:])
        == tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True)
        == text
    )
    assert tokenizer.unk_token_id not in ids
    assert len(tokenizer) == len(SPECIAL) + len(set(alphabet))


@pytest.mark.parametrize("alphabet", ["ab", " \n\tab", "01234=", "12, +é漢"])
def test_saving_keeps_everything(tmp_path, alphabet):
    tokenizer = character_tokenizer(alphabet)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = alphabet[::-1] * 2 + "  \n" * (" " in alphabet and "\n" in alphabet)
    assert loaded(text) == tokenizer(text)
    assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert {name: getattr(loaded, name) for name in SPECIAL} == SPECIAL


def test_other_characters_are_unknown():
    tokenizer = character_tokenizer("ab")
    assert tokenizer("axb", add_special_tokens=False)["input_ids"] == [4, tokenizer.unk_token_id, 5]


def test_there_is_no_mask_token_until_one_is_added():
    tokenizer = character_tokenizer("ab")
    assert tokenizer.mask_token is None
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert (
        tokenizer("a<mask>", add_special_tokens=False)["input_ids"] == [4, tokenizer.mask_token_id] == [4, 6]
    )


def test_repeated_characters_count_once_and_none_is_an_error():
    assert character_tokenizer("aba").get_vocab() == character_tokenizer("ab").get_vocab()
    with raises(ConfigError, where="character_tokenizer"):
        character_tokenizer("")
