"""Text that a tokenizer does not know is counted, named, and refused above a limit, by every trainer."""

from __future__ import annotations

import copy
import json
import re
import timeit
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.errors import raises
from tests.helpers import shared_path
from tests.tiny import LLAMA_ALPHABET, byte_lm, llama_lm
from tests.training.tiny_runs import PAIRS, PREFERENCES, ROLLOUT, TEXTS, settings, share_of_a
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.data.characters import character_tokenizer
from unmask.data.special_tokens import encode_texts
from unmask.data.unknown_tokens import UnknownTokens
from unmask.errors import DataError
from unmask.models.model_files import read_tokenizer
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.supervised.pretrain import PretrainConfig, PretrainTrainer
from unmask.supervised.sft import SFTConfig, SFTTrainer

LACKING = {"text": "0101", "prompt": "01", "completion": "10", "chosen": "1", "rejected": "00"}


def counted(tokenizer: PreTrainedTokenizerBase, texts: list[str], limit: float = 1.0) -> UnknownTokens:
    unknown = UnknownTokens(limit)
    for text, ids in zip(texts, encode_texts(tokenizer, texts), strict=True):
        unknown.count(tokenizer, ids, text)
    return unknown


@given(st.lists(st.text(alphabet=LLAMA_ALPHABET + "xyz", max_size=30), min_size=1, max_size=20))
def test_the_fraction_is_that_of_characters_that_the_tokenizer_lacks(texts):
    unknown, every = counted(character_tokenizer(LLAMA_ALPHABET), texts), "".join(texts)
    assert unknown.unknown == sum(character in "xyz" for character in every) and unknown.tokens == len(every)
    assert set(unknown.examples) == set(every) & set("xyz")


@pytest.mark.parametrize("limit", [0.0, 0.01, 0.25])
def test_up_to_the_limit_is_accepted(limit):
    tokenizer, lacking = character_tokenizer("a"), round(100 * limit)
    counted(tokenizer, ["a" * (100 - lacking) + "b" * lacking], limit).check("corpus.txt")
    with raises(DataError, where="corpus.txt"):
        counted(tokenizer, ["a" * (99 - lacking) + "b" * (lacking + 1)], limit).check("corpus.txt")


def test_the_limit_that_the_error_names_is_enough():
    texts = ["abracadabra" * 7]
    with raises(DataError, where="here") as error:
        counted(character_tokenizer("abr"), texts, 0.01).check("here")
    named = re.search(r"max_unknown=([\d.]+\d)", str(error.value))
    counted(character_tokenizer("abr"), texts, float(named[1])).check("here")


def test_unknown_words_are_named_most_frequent_first_and_not_all():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    unknown = counted(tokenizer, ["a cat and a cat " + " ".join(f"word{number}" for number in range(30))])
    assert unknown.examples[0] == "cat" and len(unknown.examples) == 8
    with raises(DataError, where="here"):
        unknown.limit = 0.5
        unknown.check("here")


def byte_level(**special: str) -> PreTrainedTokenizerBase:
    vocabulary = {
        character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.mark.parametrize(
    "special",
    [{}, {"unk_token": "<|end|>", "eos_token": "<|end|>", "bos_token": "<|end|>"}],
    ids=["none", "as GPT-2"],
)
def test_byte_level_tokenizers_know_every_text(special):
    tokenizer = byte_level(**special)
    unknown = UnknownTokens(0.0)
    unknown.count(
        tokenizer,
        [*tokenizer("ähm 再见 🙂")["input_ids"], tokenizer.convert_tokens_to_ids("<|end|>") or 0],
        "ähm 再见 🙂",
    )
    unknown.check("here")
    assert unknown.fraction == 0 and unknown.tokens > 10


def test_a_tokenizer_that_falls_back_to_bytes_knows_every_text():
    assert counted(read_tokenizer(str(shared_path("models", "stories260K"))), ["ähm 再见 🙂"]).fraction == 0


def grpo(model: Any, args: GRPOConfig, train_dataset: Any) -> Any:
    return GRPOTrainer(model, share_of_a, args, train_dataset)


TRAINERS: dict[str, tuple[Callable[..., Any], Any, str, list[dict[str, str]]]] = {
    "pretrain": (PretrainTrainer, PretrainConfig, "causal", TEXTS),
    "convert text": (ConvertTrainer, ConvertConfig, "causal", TEXTS),
    "convert pairs": (ConvertTrainer, ConvertConfig, "causal", PAIRS),
    "sft": (SFTTrainer, SFTConfig, "bidirectional", PAIRS),
    "dpo": (DPOTrainer, DPOConfig, "bidirectional", PREFERENCES),
    "grpo": (grpo, GRPOConfig, "bidirectional", PAIRS),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_refuses_text_that_its_tokenizer_lacks_unless_a_setting_allows_it(name, tmp_path):
    trainer, config, attention, known = TRAINERS[name]
    rows = known * 2 + [{key: LACKING[key] for key in known[0]}]
    more = {"grpo": ROLLOUT, "convert text": {"stages": [{}]}, "convert pairs": {"stages": [{}]}}.get(
        name, {}
    )
    with raises(DataError, where="train_dataset"):
        trainer(llama_lm(attention), args=config(**settings(tmp_path), **more), train_dataset=rows)
    args = config(**settings(tmp_path), **more, max_unknown=1.0)
    trainer(llama_lm(attention), args=args, train_dataset=rows)


@pytest.mark.parametrize(
    ("bad_rows", "where"), [("error", "train_dataset, row 0"), ("skip", "train_dataset")]
)
def test_preferences_that_only_look_the_same_to_the_tokenizer_are_refused_for_what_it_lacks(
    bad_rows, where, tmp_path
):
    rows = [{"prompt": "abc", "chosen": "10", "rejected": "01"}]
    with raises(DataError, where=where):
        DPOTrainer(llama_lm(), args=DPOConfig(**settings(tmp_path), bad_rows=bad_rows), train_dataset=rows)


class Stream:
    """Rows that can be gone over again, without a length."""

    def __init__(self, rows: list[dict[str, str]]):
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


@pytest.mark.parametrize("clean", [0, 300])
def test_a_stream_is_refused_as_soon_as_too_much_of_it_is_unknown(clean, tmp_path):
    rows = Stream([{"text": "abcd"}] * clean + [{"text": "0101"}] * 300 + [{"text": "abcd"}] * 100_000)
    with raises(DataError, where="train_dataset"):
        PretrainTrainer(
            llama_lm("causal"),
            PretrainConfig(**settings(tmp_path, max_length=64, max_steps=30)),
            train_dataset=rows,
        ).train()


def test_rows_of_unknown_text_are_refused_also_if_they_are_stored(tmp_path):
    rows, run = [{"text": "0101"}], settings(tmp_path / "run")
    PretrainTrainer(llama_lm("causal"), PretrainConfig(**run, max_unknown=1.0), train_dataset=rows)
    with raises(DataError, where="train_dataset"):
        PretrainTrainer(llama_lm("causal"), PretrainConfig(**run), train_dataset=rows)


def test_the_report_says_how_much_is_unknown(tmp_path, capsys):
    trainer = SFTTrainer(
        llama_lm(),
        SFTConfig(**settings(tmp_path, disable_tqdm=False), max_unknown=0.5),
        train_dataset=[*PAIRS, {"prompt": "a", "completion": "x1x"}],
    )
    found = trainer.train_dataset.report.to_dict()["unknown_tokens"]
    assert found["examples"] == ["x", "1"] and 0 < found["fraction"] < 0.1
    assert f"{found['fraction']:.2%}" in capsys.readouterr().out


def test_counting_takes_little_beside_encoding():
    tokenizer = character_tokenizer(LLAMA_ALPHABET)
    texts = [LLAMA_ALPHABET * 20] * 300

    def count() -> None:
        unknown = UnknownTokens()
        for text, ids in zip(texts, encoded, strict=True):
            unknown.count(tokenizer, ids, text)

    encoded = encode_texts(tokenizer, texts)
    took = min(timeit.repeat(lambda: encode_texts(tokenizer, texts), number=1, repeat=3))
    assert min(timeit.repeat(count, number=1, repeat=3)) < took / 4


RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"


@pytest.mark.parametrize(
    ("texts", "parse", "warns"),
    [
        ([RENDERED] * 3, False, True),
        ([RENDERED] * 3, True, False),
        ([RENDERED, "hi", "yo"], False, False),
        (["hi<|im_end|>", "yo</s>\n"], False, False),
        (['{"a": 1}', "a < b > c"], False, False),
    ],
)
def test_rendered_texts_are_warned_of_once_also_when_their_rows_are_stored(texts, parse, warns):
    tokenizer = copy.deepcopy(byte_lm().tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.parse_special_tokens = parse
    found, again = counted(tokenizer, texts), UnknownTokens()
    again.restore(json.loads(json.dumps(found.state())))
    for each in (found, again):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            each.check("train_dataset")
            each.check("train_dataset")
        assert [str(one.message)[:80] for one in caught] == warns * [
            "train_dataset: the special tokens that the texts spell (<|im_start|>, <|im_end|>"
        ]
