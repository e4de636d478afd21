"""Stored rows are those that are made, are made once, and only if nothing that they depend on has changed."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import string
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset
from transformers import AutoTokenizer

from tests.errors import raises
from tests.helpers import examples
from tests.training.tiny_runs import make
from unmask.data.characters import character_tokenizer
from unmask.data.pairs import RowLimits, pack, pair_rows, preference_rows
from unmask.data.report import DataReport
from unmask.data.row_store import MANIFEST, ROWS, TOKENS, content_of, file_hash, rows_hash, stored_rows
from unmask.data.rows import iter_text_rows
from unmask.data.sources import FilePart, FileRows, load_rows
from unmask.errors import ConfigError, DataError

TOKENIZER = character_tokenizer(string.ascii_lowercase)
TEXTS = ["abc", "", "hello", "z" * 30]
LIMITS = RowLimits(40)
PAIRS = [{"prompt": "ab", "completion": "cd"}, {"prompt": "a", "completion": "b" * 9}]

words = st.text(string.ascii_lowercase, min_size=1, max_size=9)
corpora = st.lists(words | st.just(""), min_size=1, max_size=8).filter(any)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "unmask"


def folders(home: Path) -> list[Path]:
    return [path for path in home.iterdir() if path.is_dir()]


def texts(source=TEXTS, tokenizer=TOKENIZER, max_length=4, **more) -> Dataset:
    return stored_rows(partial(iter_text_rows, tokenizer, source, max_length, **more), TOKENS)


def pairs(source=PAIRS, limits=LIMITS, *, skip=False, tokenizer=TOKENIZER, **more) -> Dataset:
    report = DataReport("train_dataset", skip=skip)
    return stored_rows(partial(pair_rows, tokenizer, source, limits, report, **more), TOKENS, report)


@examples(20)
@given(corpora, st.integers(2, 9), st.booleans())
def test_stored_rows_are_those_that_are_made(corpus, max_length, packed):
    for _ in range(2):  # made, then read
        expected = list(iter_text_rows(TOKENIZER, corpus, max_length, packed=packed))
        rows = texts(corpus, max_length=max_length, packed=packed)
        assert isinstance(rows, Dataset) and list(rows) == expected


def test_every_kind_of_row_is_stored_as_it_is(home):
    preferences = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    for rows_of, types in (
        (
            lambda report: partial(preference_rows, TOKENIZER, preferences, RowLimits(9), report),
            {"chosen": TOKENS, "rejected": TOKENS},
        ),
        (lambda report: partial(pair_rows, TOKENIZER, PAIRS, RowLimits(20), report), TOKENS),
        (lambda report: partial(pack, [*pairs()], 30), TOKENS),
    ):
        report = DataReport("train_dataset")
        assert [*stored_rows(rows_of(report), types)] == [*rows_of(DataReport("train_dataset"))()]


def test_rows_are_made_again_only_if_something_has_changed(home):
    def count(**more):
        pairs(**more)
        return len(folders(home))

    assert count() == count() == count(source=[*PAIRS]) == 1
    padding = character_tokenizer(string.ascii_lowercase)
    padding(TEXTS, padding=True, truncation=True, max_length=3)  # leaves its traces in a tokenizer
    assert count(tokenizer=padding) == 1
    other, without_bos, parsing, templated = (character_tokenizer(string.ascii_lowercase) for _ in range(4))
    other = character_tokenizer(string.ascii_lowercase[::-1])
    without_bos.bos_token, parsing.parse_special_tokens = None, True
    templated.chat_template = "{{ messages }}"
    changes = [
        {"source": PAIRS[::-1]},
        {"source": [PAIRS[0]]},
        {"source": [row | {"tools": None} for row in PAIRS]},
        {"limits": RowLimits(41)},
        {"limits": RowLimits(40, truncate_prompt=True)},
        {"skip": True},
        {"ends": (TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("z"))},
        {"learn": "last"},
        *({"tokenizer": tokenizer} for tokenizer in (other, without_bos, parsing, templated)),
    ]
    for number, change in enumerate(changes, start=2):
        assert count(**change) == number, change


def test_a_template_that_writes_the_date_is_rendered_anew_each_day(home, monkeypatch):
    dated = character_tokenizer(string.ascii_lowercase)
    dated.chat_template = "{{ strftime_now('%d') }}"
    pairs(tokenizer=dated)

    class Tomorrow:
        @staticmethod
        def today():
            return "tomorrow"

    monkeypatch.setattr("unmask.data.row_store.date", Tomorrow)
    pairs()
    assert len(folders(home)) == 2
    pairs(tokenizer=dated)
    assert len(folders(home)) == 3


def test_a_file_that_changes_is_read_again(home, tmp_path):
    path = tmp_path / "rows.jsonl"

    def write(rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(PAIRS)
    first = pairs(FileRows((FilePart((str(path),)),)))
    stat = path.stat()
    write([PAIRS[0], PAIRS[1] | {"completion": "c" * 9}])  # as long as before, and at the same time
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    second = pairs(FileRows((FilePart((str(path),)),)))
    assert first[0] == second[0] and first[1] != second[1]
    assert len(pairs(FileRows((FilePart((str(path),)),), max_rows=1))) == 1


def test_an_old_file_is_hashed_once_until_it_changes(home, tmp_path, monkeypatch):
    path, now = tmp_path / "rows.jsonl", time.time_ns()
    path.write_text("ab")
    monkeypatch.setattr("time.time_ns", lambda: now + 10**11)
    first = file_hash(path)
    with monkeypatch.context() as patched:
        patched.setattr("hashlib.file_digest", None)
        assert file_hash(path) == first
    stat = path.stat()
    time.sleep(0.05)  # a step of the clock
    path.write_text("ac")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_hash(path) == hashlib.sha256(b"ac").hexdigest() != first


def test_a_dataset_whose_file_was_replaced_is_read_again(tmp_path):
    folder = tmp_path / "saved"
    Dataset.from_dict({"prompt": ["a"], "completion": ["b"]}).save_to_disk(folder)
    first = [*pairs(datasets.load_from_disk(str(folder)))]
    (data,) = folder.glob("*.arrow")
    Dataset.from_dict({"prompt": ["a"], "completion": ["c"]}).save_to_disk(tmp_path / "other")
    data.write_bytes(next((tmp_path / "other").glob("*.arrow")).read_bytes())  # state.json is the first one's
    assert [*pairs(datasets.load_from_disk(str(folder)))] != first


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, number: rows.filter(number_is(number), new_fingerprint="same", keep_in_memory=True),
        lambda rows, number: rows.select([number, 3], new_fingerprint="same"),
        lambda rows, number: rows.select(range(number, 4), new_fingerprint="same"),
        lambda rows, number: rows.map(
            lambda row: {"completion": "ab"[number]}, new_fingerprint="same", keep_in_memory=True
        ),
        lambda rows, number: with_column(rows, [{"completion": "ab"[number]}] * 4),
    ],
)
def test_datasets_with_the_fingerprint_of_others_are_read(change, tmp_path):
    """`datasets` may not notice that the code of a function has changed."""
    path = tmp_path / "rows.parquet"
    Dataset.from_list([{"prompt": letter, "completion": letter} for letter in "abcd"]).to_parquet(path)
    found = []
    for number in (0, 1):
        rows = change(datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache")), number)
        found.append((rows._fingerprint, [row["input_ids"] for row in pairs(rows)]))
        assert found[-1][1] == [row["input_ids"] for row in pairs([*rows])]
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]


def number_is(number):
    return lambda row: row["prompt"] == "ab"[number]


def with_column(rows, others):
    """Rows with columns that are in memory."""
    both = datasets.concatenate_datasets(
        [rows.remove_columns("completion"), Dataset.from_list(others)], axis=1
    )
    both._fingerprint = "same"
    return both


def test_a_tokenizer_finds_the_rows_of_its_copy(home, tmp_path):
    for name in ("one", "two"):
        TOKENIZER.save_pretrained(tmp_path / name)
        texts(tokenizer=AutoTokenizer.from_pretrained(tmp_path / name))
    assert len(folders(home)) == 1


@pytest.mark.slow
def test_another_process_reads_the_rows_of_this_one(home):
    script = f"""
import tests.conftest, datasets
datasets.config.HF_DATASETS_CACHE = {str(home.parent)!r}
import tests.data.test_row_store as t
t.texts(); t.pairs(); t.pairs(datasets.Dataset.from_list(t.PAIRS))
"""
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], check=True)
        assert len(folders(home)) == 2
    texts(), pairs(), pairs(Dataset.from_list(PAIRS))
    assert len(folders(home)) == 2


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
def test_damaged_rows_are_made_again(name, damage, home):
    expected = [*texts()]
    (folder,) = folders(home)
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
    assert [*texts()] == expected and len(folders(home)) == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file")
    with raises(ConfigError, where="HF_DATASETS_CACHE"):
        texts()


def test_without_caching_rows_are_kept_only_for_this_process(home):
    datasets.disable_caching()
    try:
        assert [*texts()] == [*texts()] and not home.exists()
    finally:
        datasets.enable_caching()


@pytest.mark.slow
def test_processes_that_need_the_same_rows_at_once_make_them_once(home):
    script = f"""
import tests.conftest, datasets
datasets.config.HF_DATASETS_CACHE = {str(home.parent)!r}
import tests.data.test_row_store as t
class Texts(list):
    def __iter__(self):
        print("pass")
        return super().__iter__()
texts = Texts(["abcdef"] * 20_000)
t.texts(texts)
"""
    started = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    passes = [process.communicate()[0].count("pass") for process in started]
    assert sorted(passes) == [1, 2]  # to hash the texts, and by one of them to make the rows
    assert len(folders(home)) == 1


def test_rows_that_cannot_be_made_leave_no_files(home):
    with raises(DataError, where="train_dataset, row 1"):
        texts(["abc", 5])
    with raises(DataError, where="train_dataset"):
        texts([""])
    assert not folders(home)


def test_several_processes_make_the_rows_of_one(home):
    many = [row | {"prompt": "a" * (index % 7 + 1)} for index in range(700) for row in PAIRS]
    many[650] = {"prompt": "a"}
    report, other = (DataReport("train_dataset", skip=True) for _ in range(2))
    alone = [*pair_rows(TOKENIZER, many, RowLimits(40), report)]
    assert [*pair_rows(TOKENIZER, many, RowLimits(40), other, processes=2)] == alone
    assert report.to_dict() == other.to_dict()
    with raises(DataError, where="train_dataset, row 650"):
        [*pair_rows(TOKENIZER, many, RowLimits(40), DataReport("train_dataset", skip=False), processes=2)]
    corpus = [row["prompt"] for row in many]
    assert [*iter_text_rows(TOKENIZER, corpus, 9, processes=2)] == [*iter_text_rows(TOKENIZER, corpus, 9)]


def test_the_report_of_stored_rows_is_that_of_made_ones():
    bad = [*PAIRS, {"prompt": "a"}, {"prompt": "a" * 99, "completion": "b"}]
    first, second = pairs(bad, skip=True), pairs(bad, skip=True)
    assert first.report is not second.report and first.content == second.content
    assert first.report.to_dict() == second.report.to_dict()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(home):
    class Corpus:
        def __init__(self, documents):
            self.documents = documents

        def __len__(self):
            return self.documents

        def __iter__(self):
            return (f"{'abcdefghij' * 6}" for _ in range(self.documents))

    def peak(documents):
        tracemalloc.start()
        rows = texts(Corpus(documents), max_length=32)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(rows) > documents and rows.cache_files  # on disk, not in memory
        return most

    peak(500)  # and what is loaded once
    assert peak(2400) < 1.3 * peak(600)


def test_stored_rows_are_readable_by_others(home):
    texts()
    (folder,) = folders(home)
    assert folder.stat().st_mode & 0o755 == 0o755


# What rows depend on besides the values that are passed.


def written(tmp_path, name, text):
    """A module that is imported anew."""
    (tmp_path / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


TOOL = 'def weather(city: str) -> str:\n    """{}\n\n    Args:\n        city: A city.\n    """\n    return city\n'


def test_rows_of_changed_code_are_made_again(home, tmp_path, monkeypatch):
    """Of a tool, of a function of a dataset in memory, and of a lazy one."""
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "code").mkdir()
    made = []
    for word in ("old", "new"):
        tools = written(tmp_path / "code", "own_tools", TOOL.format(word))
        changes = written(
            tmp_path / "code", "own_changes", f"def change(row):\n    return {{'prompt': '{word}'}}\n"
        )
        data = Dataset.from_list(PAIRS)
        rewritten = {"prompt": [word] * 2, "completion": [row["completion"] for row in PAIRS]}
        lazy = data.with_transform(lambda _, rewritten=rewritten: rewritten)
        made.append([[*pairs(data.map(changes.change))], [*pairs(lazy)]])
        before = len(folders(home))
        pairs([row | {"tools_of_another": [tools.weather]} for row in PAIRS])
        assert len(folders(home)) == before + 1
    for old, new in zip(*made, strict=True):
        assert [row["input_ids"] for row in old] != [row["input_ids"] for row in new]


CODE = {
    "own_tok/__init__.py": "",
    "own_tok/words/__init__.py": "LOW = 1",
    "own_tok/words/tables.py": "TABLE = {'a': 1}",
    "own_tok/text/__init__.py": "",
    "own_tok/text/clean.py": "from ..words.tables import TABLE\nfrom own_lone import LIMIT\n",
    "own_lone.py": "def limit():\n    import own_late.part\nLIMIT = 1",
    "own_late/part.py": "X = 1",
    "own_tok/models/tokenizer.py": """
from transformers import PreTrainedTokenizerFast
from ..text.clean import TABLE
from .. import words
class Own(PreTrainedTokenizerFast):
    pass
""",
}


def test_rows_are_made_again_if_any_module_of_a_tokenizer_has_changed(home, tmp_path, monkeypatch):
    """Also one that is imported from another folder, or only later; but no other module."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    TOKENIZER.save_pretrained(tmp_path / "saved")

    def count():
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        own = importlib.import_module("own_tok.models.tokenizer").Own
        texts(tokenizer=own.from_pretrained(tmp_path / "saved"))
        return len(folders(home))

    for name, text in CODE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count() == count() == 1
    for number, name in enumerate(CODE, start=2):
        (tmp_path / name).write_text(CODE[name] + "\n# changed\n")
        assert count() == count() == number, name
    (tmp_path / "own_elsewhere.py").write_text("")
    assert count() == len(CODE) + 1


def test_the_values_of_a_mapping_count(home):
    def rows(variables):
        yield {"ids": [len(variables)]}

    for thinking in (True, False):
        stored_rows(partial(rows, variables={"thinking": thinking}), {"ids": ["int32"]})
    assert len(folders(home)) == 2
    assert rows_hash([2, 3]) != rows_hash([23])


def test_rows_that_are_packed_have_the_report_of_their_own_source(tmp_path):
    bad = [*PAIRS, {"prompt": "", "completion": ""}]
    for rows, read in ((bad, 3), (PAIRS, 2)):  # the same rows are left
        trainer = make("sft", tmp_path, rows=rows, packing=True, bad_rows="skip")
        assert trainer.train_dataset.report.read == read


def test_a_dataset_derived_from_stored_rows_is_another(home):
    stored = pairs()
    others = [stored.remove_columns("documents"), stored.remove_columns("maskable")]
    assert content_of(stored) and not any(map(content_of, others))
    for other in others:
        stored_rows(partial(pack_nothing, other), {"ids": ["int32"]})
    assert len(folders(home)) == 3


def pack_nothing(rows):
    yield {"ids": [len(rows)]}


def test_errors_of_the_source_are_its_own(home):
    def rows():
        yield {"ids": [1]}
        raise ConnectionError("service went away")

    with pytest.raises(ConnectionError, match="service went away"):
        stored_rows(partial(rows), {"ids": ["int32"]})
    assert not folders(home)


def test_a_file_that_changes_while_it_is_read_is_refused(home, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(PAIRS[0]) + "\n")
    rows = FileRows((FilePart((str(path),)),))
    assert len(rows) == 1
    path.write_text(json.dumps(PAIRS[1]) + "\n")
    with raises(DataError, where=str(path)):
        rows[0]


def test_a_parquet_file_that_changes_is_read_again(tmp_path):
    path = tmp_path / "rows.parquet"
    found = []
    for prompt in ("cat", "dog"):
        Dataset.from_dict({"prompt": [prompt], "completion": ["b"]}).to_parquet(path)
        os.utime(path, ns=(10**18, 10**18))
        found.append(load_rows(path)[0]["prompt"])
    assert found == ["cat", "dog"]


def test_what_a_killed_process_left_is_removed(home):
    texts()
    (folder,) = folders(home)
    (folder / MANIFEST).unlink()
    abandoned = home / f".{folder.name}.killed"
    abandoned.mkdir()
    texts()
    assert not abandoned.exists()


def test_datasets_by_index_and_values_of_any_kind_are_taken():
    rows = [row | {"unread": (index for index in [1])} for row in PAIRS]
    assert [*pairs(Subset(rows, [1]))] == [*pairs([PAIRS[1]])]
