"""A streamed or cached corpus has the rows of the corpus, and is read lazily."""

from __future__ import annotations

import json
import string
import tracemalloc
from functools import partial
from itertools import islice

import datasets
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.helpers import examples
from unmask.data.characters import character_tokenizer
from unmask.data.rows import TEXTS_AT_ONCE, Column, iter_text_rows
from unmask.data.token_cache import MANIFEST, ROWS, StreamedRows, cached_rows
from unmask.errors import ConfigError, DataError

TOKENIZER = character_tokenizer(string.ascii_lowercase)
TEXTS = ["abc", "", "hello", "z" * 30]

words = st.text(string.ascii_lowercase, min_size=1, max_size=9)
corpora = st.lists(words | st.just(""), min_size=1, max_size=8).filter(any)


def stream(source, max_length=4) -> StreamedRows:
    return StreamedRows(
        Column(source, "text", "train_dataset"), partial(iter_text_rows, TOKENIZER, max_length=max_length)
    )


# Streams


@given(corpora, st.integers(2, 9), st.integers(0, 5))
def test_a_stream_repeats_the_corpus_with_increasing_sample_ids(texts, max_length, skipped):
    rows = list(iter_text_rows(TOKENIZER, texts, max_length))
    expected = [{**row, "sample_id": index} for index, row in enumerate(rows * 3)]
    streamed = stream([{"text": text} for text in texts], max_length)
    assert list(islice(streamed, len(expected))) == expected
    assert (
        list(islice(streamed.skip(skipped), len(expected)))[: len(expected[skipped:])] == expected[skipped:]
    )
    assert list(islice(streamed.skip(1).skip(skipped), 2)) == list(islice(streamed.skip(skipped + 1), 2))


def test_a_stream_is_read_lazily():
    read = []

    def endless():
        while True:
            read.append(1)
            yield {"text": "abcdefgh"}

    rows = iter(stream(datasets.IterableDataset.from_generator(endless), max_length=10))
    for taken in (1, 2, TEXTS_AT_ONCE, 1):  # a row for each document
        list(islice(rows, taken))
    assert len(read) <= 2 * TEXTS_AT_ONCE


def test_a_shuffled_source_has_another_order_in_each_pass_reproducibly():
    source = (
        Dataset.from_dict({"text": list("abcdefgh")}).to_iterable_dataset().shuffle(seed=0, buffer_size=8)
    )
    streamed = stream(source, max_length=3)
    one, other = (list(islice(streamed, 16)) for _ in range(2))
    assert one == other
    first, second = ([row["input_ids"] for row in half] for half in (one[:8], one[8:]))
    assert sorted(first) == sorted(second) and first != second


def test_bad_rows_are_errors_when_they_are_reached():
    for bad in (5, None):
        rows = iter(stream([{"text": "abc"}] * TEXTS_AT_ONCE + [{"text": bad}]))
        next(rows)
        with raises(DataError, where=f"train_dataset, row {TEXTS_AT_ONCE}"):
            list(rows)
    with raises(DataError, where="train_dataset"):
        next(iter(stream([{"text": ""}])))


# The token cache


def cached(folder, texts=TEXTS, tokenizer=TOKENIZER, max_length=4, **more) -> Dataset:
    return cached_rows(folder, tokenizer, texts, max_length, **more)


@examples(20)
@given(corpora, st.integers(2, 9), st.booleans())
def test_cached_rows_are_those_of_the_texts(tmp_path_factory, texts, max_length, packed):
    folder = tmp_path_factory.mktemp("cache")
    for _ in range(2):  # made, then found
        expected = list(iter_text_rows(TOKENIZER, texts, max_length, packed=packed))
        assert list(cached(folder, texts, max_length=max_length, packed=packed)) == expected
    assert len(list(folder.iterdir())) == 1


def test_a_cache_is_reused_only_for_the_same_inputs(tmp_path):
    def caches(**more):
        cached(tmp_path, **more)
        return len(list(tmp_path.iterdir()))

    assert caches() == caches() == 1
    padding = character_tokenizer(string.ascii_lowercase)
    padding(TEXTS, padding=True, truncation=True, max_length=3)  # leaves its traces in a tokenizer
    assert caches(tokenizer=padding) == 1
    other = character_tokenizer(string.ascii_lowercase[::-1])
    without_bos = character_tokenizer(string.ascii_lowercase)
    without_bos.bos_token = None
    changes = [
        {"texts": TEXTS[::-1]},
        {"texts": ["abchello", "z" * 30]},
        {"max_length": 5},
        {"packed": False},
    ]
    changes += [{"tokenizer": other}, {"tokenizer": without_bos}]
    for number, change in enumerate(changes, start=2):
        assert caches(**change) == number


def test_a_saved_tokenizer_finds_the_cache_of_the_one_in_memory(tmp_path):
    from transformers import AutoTokenizer

    for name in ("one", "two"):
        TOKENIZER.save_pretrained(tmp_path / name)
        cached(tmp_path / "cache", tokenizer=AutoTokenizer.from_pretrained(tmp_path / name))
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (ROWS, lambda content: content[:-8]),
        (ROWS, lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:]),
        (ROWS, None),
        (MANIFEST, None),
        (MANIFEST, lambda content: content[:-3]),
        (MANIFEST, lambda content: b"[]"),
        (MANIFEST, lambda content: b"{}"),
    ],
)
def test_a_damaged_cache_is_refused_with_folder_and_remedy(name, damage, tmp_path):
    cached(tmp_path)
    (home,) = tmp_path.iterdir()
    if damage is None:
        (home / name).unlink()
    else:
        (home / name).write_bytes(damage((home / name).read_bytes()))
    with raises(DataError, where=str(home)):
        cached(tmp_path)


def test_a_cache_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with raises(ConfigError, where="token_cache"):
            cached(folder)


def test_two_processes_may_create_the_same_cache_at_once(tmp_path):
    class Interrupted:
        """Texts of which another process creates a cache while they are tokenized."""

        passes = 0

        def __iter__(self):
            self.passes += 1
            yield TEXTS[0]
            if self.passes == 2:
                cached(tmp_path)
            yield from TEXTS[1:]

    texts = Interrupted()
    assert list(cached(tmp_path, texts)) == list(iter_text_rows(TOKENIZER, TEXTS, 4))
    assert texts.passes == 2 and len(list(tmp_path.iterdir())) == 1


def test_a_failed_cache_leaves_no_files(tmp_path):
    with raises(DataError, where="train_dataset, row 1"):
        cached(tmp_path, ["abc", 5])
    with raises(DataError, where="train_dataset"):
        cached(tmp_path, [""])
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    class Corpus:
        def __init__(self, documents):
            self.documents = documents

        def __iter__(self):
            return (f"{'abcdefghij' * 6}" for _ in range(self.documents))

    def peak(documents):
        tracemalloc.start()
        rows = cached(tmp_path, Corpus(documents), max_length=32)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(rows) > documents and rows.cache_files  # on disk, not in memory
        return most

    peak(500)  # and what is loaded once
    assert peak(2400) < 1.3 * peak(600)


def test_the_manifest_is_readable_by_others(tmp_path):
    cached(tmp_path)
    (home,) = tmp_path.iterdir()
    assert home.stat().st_mode & 0o755 == 0o755
    assert set(json.loads((home / MANIFEST).read_text())) == {"sha256"}
