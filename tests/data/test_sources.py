"""Rows of every kind of source are read unchanged; errors name the source and what is wrong."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
from itertools import islice
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.helpers import each_once, partly_slow, shared_path
from unmask.config.run import DataConfig, DataSource
from unmask.data.sources import (
    load_examples,
    load_mixture,
    load_records,
    load_rows,
    read_rows,
    split_documents,
)
from unmask.errors import DataError, UnmaskWarning

ROWS = [
    {"prompt": "0012", "completion": "a\nb"},
    {"prompt": "3400", "completion": "2024-01-01"},
    {"prompt": "7", "completion": ""},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    "suffix", ["csv", "json", "jsonl", "jsonl.gz", "parquet", "directory", "splits", "files"]
)
def test_rows_are_read_unchanged(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    dataset = Dataset.from_list(ROWS)
    if suffix == "csv":
        dataset.to_csv(path)
    elif suffix == "json":
        path.write_text(json.dumps(ROWS))
    elif suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    elif suffix == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    elif suffix == "files":  # as a dataset of the hub that was downloaded
        path.mkdir()
        dataset.to_parquet(path / "train.parquet")
    elif suffix == "parquet":
        dataset.to_parquet(path)
    elif suffix == "directory":
        dataset.save_to_disk(path)
    else:
        DatasetDict(train=Dataset.from_list(ROWS[::-1]), test=dataset).save_to_disk(path)
    split = "test" if suffix == "splits" else "train"
    loaded = load_rows(path, split=split)
    assert list(loaded) == ROWS
    assert list(load_rows(str(path), split=split, max_rows=2)) == ROWS[:2]
    assert len(load_rows(path, split=split, max_rows=99)) == 3
    stream = load_rows(path, split=split, streaming=True)
    assert list(stream) == list(stream) == ROWS
    assert list(load_rows(path, split=split, max_rows=2, streaming=True)) == ROWS[:2]


MIXED = [{"chosen": "a"}, {"chosen": [{"role": "user", "content": "b"}]}, {"chosen": 3, "more": None}]


def test_examples_keep_values_of_mixed_types(tmp_path):
    """A table would have one type per column, and all columns in each row."""
    for name, content in (
        ("rows.json", json.dumps(MIXED)),
        ("rows.jsonl", "\n".join(map(json.dumps, MIXED))),
    ):
        (tmp_path / name).write_text(content)
        rows = load_examples(tmp_path / name)
        assert list(rows) == [rows[index] for index in range(len(rows))] == MIXED
        assert list(load_examples(str(tmp_path / name), max_rows=2)) == MIXED[:2]
        with raises(DataError, where=str(tmp_path / name)):
            load_rows(tmp_path / name)
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    assert list(load_examples(tmp_path / "rows.parquet", max_rows=2)) == ROWS[:2]


def test_a_malformed_line_is_an_error_or_replaces_its_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n[1]\n{"a": 2}\n{"a')
    with raises(DataError, where=f"{path}, line 3"):
        list(load_examples(path))
    first, malformed, other, second, cut = load_examples(path, bad_rows="skip")
    assert (first, second) == ({"a": 1}, {"a": 2})
    assert [error.where for error in (malformed, other, cut)] == [
        f"{path}, line {number}" for number in (3, 4, 6)
    ]
    assert [error.reason for error in (malformed, other, cut)] == [
        "malformed JSON",
        "wrong type",
        "malformed JSON",
    ]
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": "\xff"}\n{"a": 2}\n')
    with raises(DataError, where=f"{path}, line 2"):
        list(load_examples(path))
    first, broken, second = load_examples(path, bad_rows="skip")
    assert (first, second) == ({"a": 1}, {"a": 2})
    assert (broken.where, broken.reason) == (f"{path}, line 2", "not valid Unicode")
    (tmp_path / "rows.json").write_text('[{"a": 1}, {"a"')
    with raises(DataError, where=f"{tmp_path}/rows.json, line 1"):
        list(load_examples(tmp_path / "rows.json", bad_rows="skip"))
    with raises(DataError, where=str(tmp_path / "absent.jsonl")):
        list(load_examples(tmp_path / "absent.jsonl", bad_rows="skip"))


def damaged_folder(home, suffix):
    """Two files, of which the second is damaged; this is found only on reading."""
    home.mkdir()
    for number in range(2):
        rows = Dataset.from_dict({"text": [f"{number} {row}" for row in range(300)]})
        path = home / f"train-{number}.{suffix}"
        rows.to_json(path) if suffix == "jsonl" else rows.to_parquet(path)
    content = path.read_bytes()
    path.write_bytes(content[:-9] if suffix == "jsonl" else content[:8] + b"?" * 400 + content[408:])
    return path


@pytest.mark.parametrize("streaming", [False, True])
def test_a_parquet_file_with_a_damaged_footer_is_named(tmp_path, streaming):
    path = tmp_path / "rows.parquet"
    Dataset.from_dict({"text": ["a"] * 300}).to_parquet(path)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[-8:-4], "little")
    content[-8 - length : -8] = b"\xff" * length
    path.write_bytes(content)
    with pytest.raises(DataError) as refused:
        load_rows(path, streaming=streaming)
    assert refused.value.where == str(path)


def test_an_error_of_the_system_is_not_one_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    Dataset.from_dict({"text": ["a"]}).to_parquet(path)

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("pyarrow.parquet.read_metadata", refuse)
    with pytest.raises(PermissionError):
        load_rows(path)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("cut", [slice(0, -200), slice(60, None)], ids=["end", "beginning"])
def test_a_damaged_saved_dataset_is_named(tmp_path, cut, streaming):
    Dataset.from_dict({"text": ["a"] * 300}).save_to_disk(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.arrow")
    path.write_bytes(path.read_bytes()[cut])
    with pytest.raises(DataError) as refused:
        list(load_rows(tmp_path / "saved", streaming=streaming))
    assert refused.value.where == str(tmp_path / "saved")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_damaged_file_in_a_stream_is_an_error_when_it_is_reached(tmp_path, suffix):
    home = tmp_path / "rows"
    path = damaged_folder(home, suffix)
    places = [f"{home}, part 2 of 2", str(path)] if suffix == "parquet" else [f"{path}, line 300"] * 2
    for source, where in zip((home, path), places, strict=True):
        with raises(DataError, where=where) as error:
            list(load_rows(source, streaming=True))
        assert error.value.where == where
    rows = iter(load_rows(home, streaming=True))
    assert [next(rows)["text"] for _ in range(300)] == [f"0 {row}" for row in range(300)]


def test_a_stream_of_files_keeps_its_columns_and_its_shuffle(tmp_path, monkeypatch):
    # datasets waits 5 seconds after each pass
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    home = tmp_path / "rows"
    home.mkdir()
    for number in range(3):
        Dataset.from_dict({"text": [f"{number}{row}" for row in range(4)]}).to_parquet(
            home / f"train-{number}.parquet"
        )
    stream = load_rows(home, streaming=True)
    assert (stream.column_names, stream.num_shards) == (["text"], 3)
    assert list(stream) == [{"text": f"{number}{row}"} for number in range(3) for row in range(4)]
    plain = datasets.load_dataset(str(home), split="train", streaming=True)
    one, other = (rows.shuffle(seed=1, buffer_size=2) for rows in (stream, plain))
    for epoch in range(2):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        assert list(one) == list(other)


def test_a_rewritten_file_is_read_again(tmp_path):
    for rows in (ROWS, ROWS[:1]):
        Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
        assert list(load_rows(tmp_path / "rows.parquet")) == rows


def test_columns_may_be_absent_in_some_rows_and_values_nested(tmp_path):
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    path.write_text(json.dumps({"a": 1}) + "\n" + json.dumps({"messages": messages, "a": 2}))
    assert list(load_rows(path)) == [{"a": 1, "messages": None}, {"a": 2, "messages": messages}]


paragraphs = st.lists(
    st.text(st.sampled_from("ab .\t"), min_size=1).filter(str.strip), min_size=1, max_size=4
).map("\n".join)


def documents_of(text):
    return list(split_documents(lambda: io.StringIO(text)))


@given(st.lists(paragraphs, min_size=2, max_size=5), st.text(st.sampled_from(" \t\n"), max_size=5))
def test_blank_lines_separate_documents(documents, blank):
    text = f"\n{blank}\n".join(documents)
    assert documents_of(f"\n{text}\n\n") == documents


@given(paragraphs)
def test_without_blank_lines_every_line_is_a_document(text):
    assert documents_of(text) == documents_of(text + "\n\n") == text.split("\n")


def test_the_column_of_a_text_file(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_bytes("Zoë\r\nsat.\r\n\r\nThen\u2028left.\n".encode())
    assert list(load_rows(path)) == [{"text": "Zoë\nsat."}, {"text": "Then\u2028left."}]
    assert load_rows(path, text_column="story").column_names == ["story"]


@pytest.mark.parametrize(
    ("parts", "rows", "columns"),
    [
        (("sudoku", "4x4_test_sudoku.csv"), 500, ["Puzzle", "Solution"]),
        (("countdown", "countdown_cd3_test.jsonl"), 256, ["input", "output"]),
        (("gsm8k", "test.jsonl"), 1319, ["question", "answer"]),
        (("preference", "llamafactory_dpo_en_demo.json"), 300, ["conversations", "chosen", "rejected"]),
        (("text", "tinystories_val_800k.txt"), 4302, ["text"]),
        (("text", "wikitext2_valid.txt"), 1160, ["text"]),
        (("text", "tinyshakespeare.txt"), 7222, ["text"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_real_files(parts, rows, columns):
    dataset = load_rows(shared_path("data", *parts))
    assert len(dataset) == rows
    assert dataset.column_names == columns


def test_leading_zeros_of_the_real_puzzles_survive():
    puzzles = load_rows(shared_path("data", "sudoku", "4x4_test_sudoku.csv"))["Puzzle"]
    assert puzzles[1] == "0140432014020000"
    assert {len(puzzle) for puzzle in puzzles} == {16}


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("rows.jsonl", b'{"a": 1}\n{"a": ', ", line 2"),
        ("rows.jsonl", b'{"a": 1}\n{"a": "x"}', ""),
        ("rows.csv", b"a,b\n1,2\n3\n", ", row 1"),
        ("rows.csv", b"a,b\n", ""),
        ("rows.csv", b"", ""),
        ("rows.txt", b" \n", ""),
        ("rows.txt", b"caf\xe9", ", line 1"),
        ("rows.txt.gz", gzip.compress(b"a\nb\n", mtime=0)[:-3], ", after line 2"),
        ("rows.parquet", b"PAR1", ""),
        ("rows.pdf", b"x", ""),
    ],
)
def test_errors_name_the_source_that_cannot_be_loaded(tmp_path, name, content, where):
    path = tmp_path / name
    path.write_bytes(content)
    with raises(DataError, where=f"{path}{where}") as caught:
        load_rows(path)
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.parquet", "folder/none"])
def test_missing_files(tmp_path, name):
    with raises(DataError, where=str(tmp_path / name)):
        load_rows(tmp_path / name)


def test_directories(tmp_path):
    with raises(DataError, where=str(tmp_path)):
        load_rows(tmp_path)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "rows.jsonl").write_text('{"a": 1}\n{"a": ')
    with raises(DataError, where=f"{tmp_path}/files/rows.jsonl, line 2"):
        load_rows(tmp_path / "files")
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved")
    with raises(DataError, where=str(tmp_path / "saved")):
        load_rows(tmp_path / "saved")


def test_empty_datasets(tmp_path):
    empty = Dataset.from_dict({"a": []})
    empty.save_to_disk(tmp_path / "saved")
    empty.to_parquet(tmp_path / "rows.parquet")
    for name in ("saved", "rows.parquet"):
        with raises(DataError, where=str(tmp_path / name)):
            load_rows(tmp_path / name)


def test_other_names_are_loaded_from_the_hub(monkeypatch):
    asked = []

    def answer(*arguments, **options):
        asked.append((arguments, options))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", answer)
    assert list(load_rows("owner/rows:main", split="test")) == ROWS
    assert list(load_rows("rows")) == ROWS
    assert asked == [
        (("owner/rows", "main"), {"split": "test", "streaming": False}),
        (("rows", None), {"split": "train", "streaming": False}),
    ]


@pytest.mark.parametrize(
    "error",
    [
        datasets.exceptions.DatasetNotFoundError("gone"),
        ConnectionError("offline"),
        ValueError("Unknown split 'train'"),
    ],
)
def test_errors_of_the_hub(monkeypatch, error):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with raises(DataError, where="owner/rows") as caught:
        load_rows("owner/rows")
    assert caught.value.__cause__ is error


def test_a_truncated_parquet_file_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    Dataset.from_list(ROWS).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])
    for streaming in (False, True):
        with raises(DataError, where=str(path)) as caught:
            load_rows(path, streaming=streaming)
        assert caught.value.remedy


@pytest.mark.parametrize("blank", ["", "\n"])
def test_a_streamed_text_file_is_split_like_a_loaded_one(blank, tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(f"One\n{blank}\ntwo\nthree\n")
    assert list(load_rows(path, streaming=True)) == list(load_rows(path))


def test_a_stream_is_read_lazily(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    stream = iter(load_rows(path, streaming=True))
    assert [row["a"] for row in islice(stream, 2)] == [1, 2]
    with raises(DataError, where=f"{path}, line 3"):
        next(stream)


CONTENTS = {
    "txt": "One\ntwo\n\n007\n",
    "jsonl": (
        '{"text": "007", "day": "2024-01-01", "id": 123456789012345678901234567890}\n{"text": "b", '
        '"other": "\\ud800"}\n'
    ),
    "json": '[{"text": "1e5", "id": 123456789012345678901234567890}, {"text": null, "id": "a"}]',
    "csv": "text,number\n007,NA\n1e5,\n",
    "tsv": "text\tnumber\n007\t1\n",
}


@each_once("suffix, packed", [*CONTENTS, *map(str.upper, CONTENTS)], [False, True])
def test_a_file_reads_the_same_alone_in_a_folder_and_in_a_stream(suffix, packed, tmp_path):
    content, name = CONTENTS[suffix.lower()].encode(), f"train-0.{suffix}{'.gz' * packed}"
    (tmp_path / "rows").mkdir()
    for path in (tmp_path / name, tmp_path / "rows" / name):
        path.write_bytes(gzip.compress(content) if packed else content)
    alone = list(load_examples(tmp_path / name))
    assert alone and all(isinstance(row["text"], str | None) for row in alone)
    assert list(load_examples(tmp_path / "rows")) == alone
    for source in (tmp_path / name, tmp_path / "rows"):
        assert list(load_rows(source, streaming=True)) == alone
        assert [row for _, row in load_records(source)] == alone
        mixture = load_mixture([DataSource(path=str(source), text_column="text")] * 2, seed=0)
        assert {row["text"] for row in mixture} == {row["text"] for row in alone}
    (tmp_path / "rows" / name.replace("train", "test")).write_bytes((tmp_path / name).read_bytes())
    assert (
        list(load_examples(tmp_path / "rows", split="test"))
        == alone
        == list(load_examples(tmp_path / "rows"))
    )
    with raises(DataError, where=str(source)):
        load_examples(tmp_path / "rows", split="other")


@pytest.mark.parametrize("name", ["train-1.parquet", "train-1.PARQUET", "other.Parquet"])
def test_a_parquet_file_reads_the_same_in_a_folder(name, tmp_path, monkeypatch):
    (tmp_path / "rows [1]").mkdir()
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows [1]" / name)
    monkeypatch.chdir(tmp_path)
    for source in (tmp_path / "rows [1]" / name, tmp_path / "rows [1]", "rows [1]"):
        assert list(load_rows(source)) == list(load_rows(source, streaming=True)) == ROWS


@partly_slow("beside", [[], ["a.csv"], ["a.csv", "b.csv"], ["a.txt"]], 3)
@pytest.mark.parametrize(
    "name",
    [
        "z.csv.xz",
        "z.csv.bz2",
        "z.txt.bz2",
        "z.jsonl.zst",
        "z.csv.zip",
        "z.zip",
        "z.ndjson",
        "z.NDJSON",
        "z.arrow",
    ],
)
def test_a_kind_that_is_refused_alone_is_refused_in_a_folder(name, beside, tmp_path):
    home = tmp_path / "rows"
    home.mkdir()
    pack = {"xz": lzma.compress, "bz2": bz2.compress}.get(name.rpartition(".")[2], bytes)
    (home / name).write_bytes(pack(b"text\n007\n"))
    for other in beside:
        (home / other).write_text("text\n007\n")
    for source in (home / name, home):
        for read in (
            load_rows,
            load_examples,
            lambda source: list(load_records(source)),
            lambda source: load_rows(source, streaming=True),
        ):
            with raises(DataError, where=str(home / name)) as caught:
                read(source)
            assert (
                Path(caught.value.where or "").name == name
                and caught.value.remedy
                and "are read" in caught.value.remedy
            )


def test_a_folder_of_another_kind_names_a_file(tmp_path):
    (tmp_path / "notes.odt").write_text("a")
    with raises(DataError, where=str(tmp_path / "notes.odt")):
        load_rows(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    assert list(load_rows(tmp_path)) == [{"text": "a"}]


def test_the_files_that_a_readme_names_are_read(tmp_path):
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: b.jsonl\n---\n"
    )
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    assert list(load_rows(tmp_path)) == [{"text": "b"}]


def every_way(source, **how):
    """The rows of a source, by every function that reads them."""
    loaded = list(load_rows(source, **how))
    assert list(load_rows(source, streaming=True, **how)) == loaded
    assert list(load_examples(source, **how)) == loaded
    assert [row for _, row in load_records(source, **how)] == loaded
    return loaded


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_patterns_name_the_files_that_datasets_finds(tmp_path, suffix, monkeypatch):
    for name in ("b", "a", "deep/er/c", "[x]", ".hidden"):
        file = tmp_path / f"{name}.{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        save = Dataset.from_list([{"text": name}, {"text": "again"}])
        save.to_json(file) if suffix == "jsonl" else save.to_parquet(file)
    (tmp_path / "notes.md").write_text("not read")
    for pattern, count in (("*", 3), ("**/*", 4), ("[ab]", 2), ("deep/**/c", 1), ("?", 2)):
        source = f"{tmp_path}/{pattern}.{suffix}"
        kind = "json" if suffix == "jsonl" else suffix
        expected = datasets.load_dataset(kind, data_files=source, split="train")
        assert every_way(source) == list(expected) and len(expected) == 2 * count
    assert every_way(f"{tmp_path}/[x].{suffix}") == [{"text": "[x]"}, {"text": "again"}]  # a path
    monkeypatch.chdir(tmp_path)
    assert len(every_way(f"deep/**/*.{suffix}")) == 2
    for wrong in (f"none*.{suffix}", "deep/er/**c", "deep/*"):
        with raises(DataError, where=wrong):
            load_rows(wrong)


SPLITS = ("train", "train[:2]", "train[-25%:]", "test[1:]+train[:50%]", "train+test", "all", "train[:99]")
WRONG_SPLITS = ("validation", "train+other", "train[:2", "train[:0]", "train[2:1]")


def each_kind(folder):
    """A folder, a pattern, and a saved dataset of the same two splits, of each kind of file."""
    rows = {"train": [{"text": f"a{number}"} for number in range(5)], "test": [{"text": "b"}, {"text": "c"}]}
    DatasetDict({name: Dataset.from_list(rows[name]) for name in rows}).save_to_disk(folder / "saved")
    yield folder / "saved"
    for suffix in ("jsonl", "parquet"):
        (folder / suffix).mkdir()
        for name, start, stop in (("train-0", 0, 3), ("train-1", 3, 5), ("test", 0, 2)):
            some = Dataset.from_list(rows[name.partition("-")[0]][start:stop])
            (some.to_json if suffix == "jsonl" else some.to_parquet)(folder / suffix / f"{name}.{suffix}")
        yield from (folder / suffix, f"{folder}/{suffix}/*", f"{folder}/*{suffix[1:]}/t*.{suffix}")


def test_splits_are_those_of_datasets_in_every_kind_of_source(tmp_path):
    sources = [*each_kind(tmp_path)]
    expected = {
        split: list(
            datasets.load_dataset(str(tmp_path / "jsonl"), split=split, cache_dir=tmp_path / "theirs")
        )
        for split in SPLITS
    }
    for source in sources:
        assert {split: every_way(source, split=split) for split in SPLITS} == expected
    for source in sources[:3]:
        for split in WRONG_SPLITS:
            with raises(DataError, where=str(source)):
                load_examples(source, split=split)


@pytest.mark.parametrize("suffix", ["txt", "csv", "json", "parquet", "saved"])
def test_one_file_or_saved_dataset_is_the_split_train(suffix, tmp_path):
    path, rows = tmp_path / f"test.{suffix}", [{"text": f"a{number}"} for number in range(5)]
    if suffix == "txt":
        path.write_text("\n".join(row["text"] for row in rows))
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        dataset = Dataset.from_list(rows)
        {"csv": dataset.to_csv, "parquet": dataset.to_parquet, "saved": dataset.save_to_disk}[suffix](path)
    assert every_way(path) == every_way(path, split="all") == rows
    assert every_way(path, split="train[1:3]+train[-1:]") == [*rows[1:3], rows[-1]]
    for split in ("test", "train+test"):
        with raises(DataError, where=str(path)):
            load_rows(path, split=split)
    with raises(DataError, where=str(path)):
        load_mixture([DataSource(path=str(path), split="test")], seed=0)


def test_files_of_a_pattern_whose_names_are_of_one_split_are_it_and_may_be_called_train(tmp_path):
    for name in ("test-1", "test-2", "more"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    for pattern, count in (("test-*", 2), ("*", 3)):
        source = f"{tmp_path}/{pattern}.jsonl"
        assert len(every_way(source)) == len(every_way(source, split="test")) == count
    (tmp_path / "train.jsonl").write_text('{"text": "a"}')
    with pytest.warns(UnmaskWarning, match=r"names are of no split are not read: more\.jsonl"):
        assert list(load_rows(f"{tmp_path}/*.jsonl")) == [{"text": "a"}]


def test_configs_and_splits_of_a_folder_are_those_of_datasets(tmp_path, monkeypatch):
    home = tmp_path / "some" / "rows"
    home.mkdir(parents=True)
    for name in ("a", "b", "c", "d"):
        (home / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    (home / "d.csv").write_text("text\nd\n")
    (home / "README.md").write_text(
        "---\nconfigs:\n- config_name: easy\n  data_files: [{split: train, path: a.jsonl}, "
        "{split: test, path: [b.jsonl, c.jsonl]}]\n- config_name: hard\n  data_files: d.jsonl\n---\n"
    )
    monkeypatch.chdir(tmp_path)
    for folder in (str(home), "some/rows", "./some/rows"):
        for config, split in (("easy", "train"), ("easy", "test"), ("hard", "train")):
            expected = datasets.load_dataset(folder, config, split=split)
            assert every_way(f"{folder}:{config}", split=split) == list(expected)
        for wrong, split in ((f"{folder}:none", "train"), (f"{folder}:hard", "test"), (folder, "train")):
            with raises(DataError, where=wrong) as caught:
                load_rows(wrong, split=split)
        assert f"has several configs: easy, hard. Name one, as {folder}:easy" in str(caught.value)


def test_files_of_a_folder_are_read_in_turn_and_those_of_another_kind_are_named(tmp_path):
    home = tmp_path / "rows"
    home.mkdir()
    (home / "a.txt").write_text("One\ntwo\n\nthree\n")
    (home / "b.txt").write_text("x\ny\n")
    (home / "README.md").write_text("# Notes\n")
    expected = [{"text": "One\ntwo"}, {"text": "three"}, {"text": "x"}, {"text": "y"}]
    assert list(load_rows(home)) == list(load_rows(home, streaming=True)) == expected
    (home / "rows.csv").write_text("text\nb\n")
    with pytest.warns(UnmaskWarning, match=r"only files of one kind are read, \.txt, but not rows\.csv"):
        assert list(load_rows(home)) == expected


@pytest.mark.parametrize("value", ["123456789012345678901234567890", r'"\ud800"'])
def test_a_value_that_no_table_can_hold_is_no_traceback(value, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "a", "other": {value}}}')
    with raises(DataError, where=str(path)):
        load_rows(path)


# Mixtures


def write_sources(folder):
    """Write 300 documents of a, and 200 of b, whose text column has another name and is not the only one."""
    (folder / "a.txt").write_text("\n".join(f"a{index}" for index in range(300)))
    (folder / "b.jsonl").write_text(
        "\n".join(json.dumps({"content": f"b{index}", "id": index}) for index in range(200))
    )
    return [
        DataSource(path=str(folder / "a.txt"), weight=3),
        DataSource(path=str(folder / "b.jsonl"), weight=1.0, text_column="content"),
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_keeps_its_weights_and_all_rows(streaming, tmp_path):
    sources = write_sources(tmp_path)
    mixed = load_mixture(sources, seed=0, streaming=streaming)
    assert list(mixed) == list(load_mixture(sources, seed=0, streaming=streaming))
    assert list(mixed) != list(load_mixture(sources, seed=1, streaming=streaming))
    rows = list(mixed)
    assert {row["text"] for row in rows} == {f"a{i}" for i in range(300)} | {f"b{i}" for i in range(200)}
    assert {tuple(row) for row in rows} == {("text",)}
    for part in (rows, rows[: len(rows) // 2]):  # from beginning to end
        assert sum(row["text"][0] == "a" for row in part) / len(part) == pytest.approx(0.75, abs=0.06)
    assert list(load_mixture(sources, seed=0, streaming=streaming, max_rows=10)) == rows[:10]


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_that_cannot_be_mixed_are_named(streaming, tmp_path):
    for name, row in [("text", {"text": "a"}), ("story", {"story": "a"}), ("number", {"text": 5})]:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))

    def mix(*names, **more):
        sources = [DataSource(path=str(tmp_path / f"{name}.jsonl"), **more) for name in names]
        return load_mixture(sources, seed=0, streaming=streaming)

    with raises(DataError, where=f"{tmp_path}/text.jsonl and {tmp_path}/story.jsonl"):
        mix("text", "story")
    with raises(DataError, where=f"{tmp_path}/text.jsonl and {tmp_path}/number.jsonl"):
        mix("text", "number")
    with raises(DataError, where=str(tmp_path / "text.jsonl")):
        mix("text", text_column="story")
    with raises(DataError, where=str(tmp_path / "absent.jsonl")):
        mix("text", "absent")


def test_a_file_of_held_out_rows_is_read_whole_whatever_the_split_of_the_others(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(6)))
    source = str(tmp_path / "rows.jsonl")
    for held_out in (source, [DataSource(path=source)]):
        data = DataConfig(train=source, eval=held_out, split="train[:2]")
        assert [row["text"] for row in read_rows(data)] == ["0", "1"]
        assert sorted(row["text"] for row in read_rows(data, held_out=True)) == [*"012345"]
