"""A tokenizer trained on texts: it writes every text, and the same texts give the same one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.helpers import REPOSITORY, run_all
from unmask.config.run import TOKENIZER_SIZES, StartConfig
from unmask.data.byte_level import train_tokenizer
from unmask.data.encoding import encode_prompt
from unmask.data.unknown_tokens import UnknownTokens
from unmask.errors import ConfigError

TEXTS = ["the cat sat on the mat", "the dog sat on the log"] * 20
TOKENIZER = train_tokenizer(TEXTS, 300)


@given(st.text(max_size=30))
def test_every_text_is_restored_and_none_of_it_is_unknown(text):
    ids = encode_prompt(TOKENIZER, text)
    assert ids[0] == TOKENIZER.bos_token_id and TOKENIZER.decode(ids[1:]) == text
    unknown = UnknownTokens(0.0)
    unknown.count(TOKENIZER, ids, text)
    unknown.check("here")


def test_frequent_words_become_tokens_as_far_as_the_size_goes():
    assert len(TOKENIZER) < 300  # no more pairs to join
    smallest = TOKENIZER_SIZES[0]
    assert (
        len(train_tokenizer(TEXTS, smallest)) == smallest
        and len(train_tokenizer(TEXTS, smallest + 5)) == smallest + 5
    )
    assert (
        TOKENIZER.tokenize("the cat") == ["the", "Ġcat"]
        and len(train_tokenizer(TEXTS, smallest).tokenize("the cat")) == 7
    )


@pytest.mark.parametrize("size", ["", "8k", "0", "258", "1000001", "1000000000"])
def test_a_size_that_has_no_room_for_the_bytes_or_fills_the_memory_is_refused(size):
    with raises(ConfigError, where="tokenizer"):
        StartConfig(path="m", tokenizer=f"train:{size}")
    assert [StartConfig(path="m", tokenizer=f"train:{size}").tokenizer_size for size in (259, 1_000_000)] == [
        259,
        1_000_000,
    ]


def test_long_data_is_read_to_a_limit(monkeypatch):
    monkeypatch.setattr("unmask.data.byte_level.READ", sum(map(len, TEXTS)))

    def endless():
        yield from TEXTS
        while True:
            raise AssertionError("read on")

    assert train_tokenizer(endless(), 300).get_vocab() == TOKENIZER.get_vocab()


@pytest.mark.slow
def test_another_process_with_other_threads_makes_the_same_tokenizer():
    program = (
        "from unmask.data.byte_level import train_tokenizer; import hashlib\n"
        f"print(hashlib.sha256(train_tokenizer({TEXTS}, "
        "290).backend_tokenizer.to_str().encode()).hexdigest())"
    )
    made = set()
    for threads in ("1", "3"):
        environment = {
            "PATH": "",
            "PYTHONPATH": str(REPOSITORY),
            "RAYON_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "true",
        }
        made.add(
            run_all(
                [sys.executable, "-c", program],
                timeout=300,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            ).stdout
        )
    assert len(made) == 1 and len(made.pop().strip()) == 64
