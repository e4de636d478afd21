"""Rows for losses of single responses: each has a label and a mismatched response."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises
from tests.tiny import llama_lm
from tests.training.tiny_runs import PREFERENCES, settings
from unmask.errors import DataError
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer, UnpairedCollator

LABELLED = [
    {"prompt": "ab", "completion": "cd", "label": True},
    {"prompt": "cafe", "completion": "e", "label": False},
    {"prompt": "h", "completion": "fgfg", "label": True},
]


def rows(
    dataset: list[dict[str, Any]], max_length: int = 32, canvas_length: int | None = None
) -> list[dict[str, Any]]:
    args = DPOConfig(
        **settings(Path("unused"), loss_type="kto", canvas_length=canvas_length) | {"max_length": max_length}
    )
    return list(DPOTrainer.make_rows(llama_lm(), args, dataset, "train_dataset"))


def texts(examples: list[dict[str, Any]], name: str) -> list[tuple[str, str]]:
    """Prompts and responses, without special tokens."""
    decode = llama_lm().tokenizer.decode
    found = []
    for row in (item[name] for item in examples):
        start = row["maskable"].index(True)
        found.append(
            tuple(
                decode(ids, skip_special_tokens=True)
                for ids in (row["input_ids"][:start], row["input_ids"][start:])
            )
        )
    return found


def test_the_mismatched_response_is_that_of_the_nearest_earlier_row_with_another_prompt():
    same = [
        {"prompt": prompt, "completion": text, "label": True}
        for prompt, text in zip("aaabba", "abcdef", strict=True)
    ]
    for first in range(6):
        assert set(texts(rows(same[first:] + same[:first]), "mismatched")) == {("a", "e"), ("b", "c")}


def test_a_data_set_with_one_prompt_is_refused():
    same = [{"prompt": "ab", "completion": "cd", "label": label} for label in (True, False)]
    with raises(DataError, where="train_dataset"):
        rows(same)


def test_the_mismatched_response_is_that_of_the_row_before():
    examples = rows(LABELLED)
    assert texts(examples, "response") == [("ab", "cd"), ("cafe", "e"), ("h", "fgfg")]
    assert texts(examples, "mismatched") == [("ab", "fgfg"), ("cafe", "cd"), ("h", "e")]
    assert [row["desirable"] for row in examples] == [True, False, True]
    ids = [row[name]["sample_id"] for name in ("response", "mismatched") for row in examples]
    assert ids == list(range(6))


def test_a_pair_becomes_two_responses_the_chosen_ones_first():
    examples = rows(PREFERENCES)
    assert len(examples) == 16 and [row["desirable"] for row in examples] == [True] * 8 + [False] * 8
    assert [prompt for prompt, _ in texts(examples, "response")] == [row["prompt"] for row in PREFERENCES] * 2
    assert (
        texts(examples, "response")[3][1] == PREFERENCES[3]["chosen"]
        and texts(examples, "response")[11][1] == PREFERENCES[3]["rejected"]
    )
    assert texts(examples, "mismatched")[4] == (PREFERENCES[4]["prompt"], PREFERENCES[3]["chosen"])


def test_a_mismatched_response_is_cut_to_max_length():
    examples = rows(
        [
            {"prompt": "a", "completion": "bcdefgh", "label": True},
            {"prompt": "abcde", "completion": "f", "label": False},
        ],
        10,
    )
    assert texts(examples, "mismatched")[1] == ("abcde", "bcde")
    assert all(len(row[name]["input_ids"]) <= 10 for row in examples for name in ("response", "mismatched"))


def test_the_canvas_is_filled_in_both_responses():
    examples = rows(LABELLED, canvas_length=6)
    assert {sum(row[name]["maskable"]) for row in examples for name in ("response", "mismatched")} == {6}


def test_a_batch_has_the_responses_and_the_mismatched_ones():
    examples = UnpairedCollator(0)(rows(LABELLED))
    assert examples["desirable"].tolist() == [True, False, True]
    assert examples["input_ids"].shape[0] == examples["mismatched"]["input_ids"].shape[0] == 3
    assert examples["mismatched"]["sample_id"].tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, "train_dataset, row 1, label"),
        ({"prompt": "a", "completion": "b", "label": None}, "train_dataset, row 1"),
        ({"prompt": "a", "label": True}, "train_dataset, row 1"),
        ({"prompt": "a", "completion": "b" * 40, "label": True}, "train_dataset, row 1"),
    ],
)
def test_errors_name_the_bad_row(row, where):
    with raises(DataError, where=where):
        rows([LABELLED[0], row])


@pytest.mark.parametrize("loss_type", ["sigmoid", "kto"])
def test_rows_that_are_too_long_lose_their_end_or_the_beginning_of_their_prompt(loss_type):
    """As TRL cuts them; each response by itself."""
    row = {"prompt": "abcdefgh", "chosen": "abcdefgh", "rejected": "ba"}
    for mode, prompt, sides in (
        ("keep_start", "abcdefgh", ("abc", "ba")),
        ("keep_end", "gh", ("abcdefgh", "ba")),
    ):
        lm = llama_lm()
        more = {"loss_type": loss_type, "max_length": 12, "truncation_mode": mode}
        other = {"prompt": "a", "chosen": "b", "rejected": "c"}
        args = DPOConfig(**settings(Path("unused"), **more))
        made = DPOTrainer.make_rows(lm, args, [row, other], "train_dataset")
        decode = partial(lm.tokenizer.decode, skip_special_tokens=True)
        if loss_type == "sigmoid":
            documents = [
                [
                    token
                    for token, number in zip(made[0]["input_ids"], made[0]["documents"], strict=True)
                    if number == n
                ]
                for n in (1, 2)
            ]
        else:
            documents = [
                item["response"]["input_ids"] for item in made if len(item["response"]["input_ids"]) > 5
            ]
        assert [decode(ids) for ids in documents] == [prompt + side for side in sides]
        assert lm.eos_token_id in documents[1] and (lm.eos_token_id in documents[0]) == (mode == "keep_end")
    with raises(DataError, where="train_dataset, row 0, chosen, rejected"):
        same = row | {"rejected": "abcd"}
        args = DPOConfig(**settings(Path("unused"), max_length=12, truncation_mode="keep_start"))
        DPOTrainer.make_rows(llama_lm(), args, [same], "train_dataset")
