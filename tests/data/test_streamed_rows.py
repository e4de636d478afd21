"""A streamed corpus has the rows of the corpus, and is read lazily."""

from __future__ import annotations

import string
from functools import partial
from itertools import islice

import datasets
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from unmask.data.characters import character_tokenizer
from unmask.data.rows import TEXTS_AT_ONCE, Column, iter_text_rows
from unmask.data.streamed_rows import StreamedRows
from unmask.errors import DataError

TOKENIZER = character_tokenizer(string.ascii_lowercase)

words = st.text(string.ascii_lowercase, min_size=1, max_size=9)
corpora = st.lists(words | st.just(""), min_size=1, max_size=8).filter(any)


def stream(source, max_length=4) -> StreamedRows:
    return StreamedRows(
        Column(source, "text", "train_dataset"), partial(iter_text_rows, TOKENIZER, max_length=max_length)
    )


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


def test_a_pass_without_rows_is_an_error():
    none = Dataset.from_dict({"text": ["abc"]}).to_iterable_dataset().filter(lambda row: False)
    with raises(DataError, where="train_dataset"):
        next(iter(stream(none)))
    texts = iter([{"text": "abc"}])
    once = stream(datasets.IterableDataset.from_generator(lambda: texts), max_length=9)
    rows = iter(once)
    assert next(rows)["sample_id"] == 0
    for others in (rows, iter(once)):
        with raises(DataError, where="train_dataset"):
            next(others)
