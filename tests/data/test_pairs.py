"""Rows of prompts and completions: no token is lost or repeated, and an end token is trained on only if there is
one."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.helpers import shared_path
from tests.models.configurations import tiny_lm
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.data.encoding import encode_pair, encode_prompt
from unmask.data.formats import SPEAKERS, UNPAIRED
from unmask.data.pairs import RowLimits, pack, pair_rows, preference_rows
from unmask.data.report import DataReport
from unmask.data.rows import Collator, TokenRow
from unmask.diffusion.log_probs import view_log_probs
from unmask.diffusion.views import Views
from unmask.errors import DataError
from unmask.generation.requests import make_requests
from unmask.models.chat_template import TEMPLATES

TOKENIZER = character_tokenizer(string.ascii_lowercase)
BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
CHAT = character_tokenizer(string.printable)
CHAT.chat_template = TEMPLATES["simple"]
MASKED = character_tokenizer(string.ascii_lowercase)
MASKED.add_special_tokens({"mask_token": "<|mask|>"})
MASKED.parse_special_tokens = True

words = st.text(string.ascii_lowercase, min_size=1, max_size=9)
pairs = st.lists(st.tuples(words, words), min_size=1, max_size=4).map(
    lambda both: [{"prompt": p, "completion": c} for p, c in both]
)
blocks = st.integers(1, 6)
GOOD = {"prompt": "ab", "completion": "cd"}
PREFERRED = {"prompt": "ab", "chosen": "cd", "rejected": "ce"}


def ids_of(text: str) -> list[int]:
    return [BOS, *TOKENIZER(text, add_special_tokens=False)["input_ids"], EOS]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Made(list[Any]):
    """Rows and the report of making them."""

    report: DataReport


def listed(make: Any, tokenizer: Any, rows: Any, limits: RowLimits | None, skip: bool, **more: Any) -> Made:
    report = DataReport("train_dataset", skip=skip)
    found = Made(make(tokenizer, rows, limits or RowLimits(40), report, **more))
    found.report = report
    return found


def made(
    rows: Sequence[Any],
    limits: RowLimits | None = None,
    *,
    skip: bool = False,
    tokenizer: Any = TOKENIZER,
    packed: bool = False,
    **more: Any,
) -> Made:
    found = listed(pair_rows, tokenizer, rows, limits, skip, **more)
    return Made(pack(found, (limits or RowLimits(40)).max_length)) if packed else found


@given(pairs, st.none() | st.integers(10, 14), blocks)
def test_the_completion_and_the_eos_tokens_after_it_are_learnt(pairs, canvas_length, block_size):
    rows = made(pairs, RowLimits(40, canvas_length, block_size))
    for index, (row, pair) in enumerate(zip(rows, pairs, strict=True)):
        prompt, completion = ids_of(pair["prompt"])[:-1], ids_of(pair["completion"])[1:]
        whole = len(prompt + completion)
        end = len(prompt) + canvas_length if canvas_length else -(-whole // block_size) * block_size
        beyond = [EOS] * (end - whole)
        assert row["input_ids"] == prompt + completion + beyond
        assert row["maskable"] == [False] * len(prompt) + [True] * len(completion + beyond)
        assert row["documents"] == [1] * end
        assert row["sample_id"] == index


@given(words, words, blocks.filter(lambda size: size > 1), st.integers(0, 4))
def test_a_row_ends_where_the_sampler_stops(prompt, completion, block_size, more):
    """The sampler of a block-causal model fills the block that has the EOS, up to the number of new
    tokens."""
    lm = tiny_lm("llama", "block_causal", block_size)
    prompt, completion = (
        "".join("abcdefghijkl"[ord(c) % 12] for c in prompt),
        "".join("abcdefghijkl"[ord(c) % 12] for c in completion),
    )
    [row] = made(
        [{"prompt": prompt, "completion": completion}],
        RowLimits(64, None, block_size),
        tokenizer=lm.tokenizer,
    )
    at = len(encode_prompt(lm.tokenizer, prompt)) + len(completion)
    assert row["input_ids"].index(EOS) == at
    [request] = make_requests(lm, [prompt], SamplerConfig(max_new_tokens=len(completion) + block_size + more))
    [stop] = [stop for start, stop in request.blocks if start <= at < stop]
    assert len(row["input_ids"]) == stop


@given(words, words, st.integers(2, 25), blocks, st.booleans(), st.booleans())
def test_a_truncated_text_has_no_end_token(
    prompt, completion, max_length, block_size, truncate_prompt, truncate_completion
):
    limits = RowLimits(max_length, None, block_size, truncate_prompt, truncate_completion)
    report = DataReport("train_dataset", skip=True)
    asked, answer = ids_of(prompt)[:-1], ids_of(completion)[1:]
    try:
        [row] = pair_rows(TOKENIZER, [{"prompt": prompt, "completion": completion}], limits, report)
    except DataError:
        assert report.dropped == {"too long": [0]} and len(asked + answer) > max_length
        # the beginning of sequence and a token
        assert not (truncate_prompt and max_length - len(answer) >= 2)
        assert not (truncate_completion and max_length // block_size * block_size > len(asked))
        return
    ids = row["input_ids"]
    learnt = [token for token, is_trained in zip(ids, row["maskable"], strict=True) if is_trained]
    cut = report.truncated["completion"]
    assert len(ids) <= max_length
    assert (
        report.truncated == {"completion": 1}
        if cut
        else report.truncated["prompt"] == (len(asked + answer) > max_length)
    )
    if cut:
        assert EOS not in ids and ids[: len(asked)] == asked and len(ids) % block_size == 0
        assert answer[: len(learnt)] == learnt and 0 < len(learnt) < len(answer)
    else:
        beyond = len(learnt) - len(answer)
        assert learnt == answer + [EOS] * beyond
        assert beyond < block_size and (len(ids) % block_size == 0 or len(ids) == max_length)
        kept = ids[: len(ids) - len(learnt)]
        assert kept[0] == BOS and (kept == asked or (len(kept) > 1 and asked[1 - len(kept) :] == kept[1:]))


@given(st.lists(words, min_size=2, max_size=7), st.integers(1, 60), blocks)
def test_only_whole_answers_of_a_truncated_conversation_are_learnt(texts, max_length, block_size):
    messages = [turn("user" if index % 2 == 0 else "assistant", text) for index, text in enumerate(texts)]
    report = DataReport("train_dataset", skip=True)
    try:
        [row] = pair_rows(
            CHAT,
            [{"messages": messages}],
            RowLimits(max_length, None, block_size, truncate_prompt=True),
            report,
            learn="all",
        )
    except DataError:
        assert report.dropped == {"too long": [0]}
        return
    learnt = "".join(
        CHAT.decode([token]) if is_trained else "\0"
        for token, is_trained in zip(row["input_ids"], row["maskable"], strict=True)
    )
    answers = [f"{text}</s>" for text in texts[1::2]]
    found = [part for part in learnt.split("\0") if part]
    assert found[-1].startswith(answers[-1]) and set(found[-1].removeprefix(answers[-1])) <= set("</s>")
    assert found[:-1] == answers[len(answers) - len(found) : -1]
    whole = CHAT.apply_chat_template(messages[: len(texts) // 2 * 2], tokenize=False).removesuffix("\n\n")
    assert bool(report.truncated) != CHAT.decode(row["input_ids"]).startswith(whole)


def test_messages_become_pairs():
    chat = {"prompt": [turn("user", "ab")], "completion": [turn("assistant", "c")]}
    prompt, completion = encode_pair(CHAT, chat["prompt"], chat["completion"])
    for row in (chat, {"messages": chat["prompt"] + chat["completion"]}):
        [row] = made([row], tokenizer=CHAT, learn="last")
        assert row["input_ids"] == prompt + completion
        assert row["maskable"] == [False] * len(prompt) + [True] * len(completion)
    [whole] = made([{"messages": chat["prompt"] + chat["completion"]}], tokenizer=CHAT)
    assert whole["input_ids"] == prompt + completion and whole["maskable"] == [False] + [True] * (
        len(prompt + completion) - 1
    )


BAD = {
    "a column is missing": ({"prompt": "a"}, ""),
    "without a value": ({"prompt": "a", "completion": None}, ""),
    "empty": ({"prompt": "a", "completion": " \n"}, ", completion"),
    "too long": ({"prompt": "a" * 20, "completion": "b" * 19}, ""),
    "mask token in the text": ({"prompt": "a", "completion": "<|mask|>"}, ""),
    "another format": ({"text": "a"}, ""),
    "wrong type": ({"prompt": "a", "completion": 3}, ", completion"),
    "not valid Unicode": ({"prompt": "a", "completion": "\udc80"}, ", text"),
    "malformed JSON": (DataError("malformed JSON", where="line 2", reason="malformed JSON"), ", line 2"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_an_error_or_is_skipped_and_counted(reason):
    bad, where = BAD[reason]
    with raises(DataError, where=f"train_dataset, row 1{where}"):
        made([GOOD, bad, GOOD], tokenizer=MASKED)
    report = DataReport("train_dataset", skip=True)
    rows = [*pair_rows(MASKED, [GOOD, bad, GOOD, bad], RowLimits(40), report)]
    assert rows == made([GOOD, GOOD], tokenizer=MASKED)
    assert (report.read, report.kept, report.dropped) == (4, 2, {reason: [1, 3]})
    if reason not in ("another format", "a column is missing", "malformed JSON"):
        with raises(DataError, where="train_dataset"):
            made([bad], skip=True, tokenizer=MASKED)


def test_errors_that_concern_every_row_are_never_skipped():
    chat = [{"messages": [turn("user", "a"), turn("assistant", "b")]}]
    with raises(DataError, where="train_dataset, row 0"):
        made(chat, skip=True, learn="all")
    endless = character_tokenizer("ab")
    endless.eos_token = None
    with raises(DataError, where="train_dataset, row 0"):
        made([{"prompt": "a", "completion": "b"}], skip=True, tokenizer=endless)


def test_a_canvas_must_hold_the_completion():
    with raises(DataError, where="train_dataset, row 1"):
        made([GOOD, {"prompt": "a", "completion": "abcde"}], RowLimits(40, 5))
    with raises(DataError, where="train_dataset, row 0"):
        made([GOOD], RowLimits(12, 10))
    assert len(made([GOOD], RowLimits(13, 10))) == 1
    [row] = made([GOOD], RowLimits(12, 10, truncate_prompt=True))
    assert row["input_ids"] == [BOS, *ids_of("bcd")[1:], *[EOS] * 7]


@given(st.lists(st.tuples(words, words), min_size=1, max_size=30), st.none() | st.integers(10, 12), blocks)
def test_packed_rows_hold_every_row_once_and_waste_little(texts, canvas_length, block_size):
    limits = RowLimits(30, canvas_length, block_size)
    examples = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    apart, together = made(examples, limits), made(examples, limits, packed=True)
    found = []
    for number, row in enumerate(together):
        assert row["sample_id"] == number and len(row["input_ids"]) <= 30
        assert row["documents"] == sorted(row["documents"]) and set(row["documents"]) == set(
            range(1, max(row["documents"]) + 1)
        )
        for document in set(row["documents"]):
            part = [at for at, other in enumerate(row["documents"]) if other == document]
            found.append(([row["input_ids"][at] for at in part], [row["maskable"][at] for at in part]))
    assert sorted(found) == sorted((row["input_ids"], row["maskable"]) for row in apart)
    assert sum(len(row["input_ids"]) <= 15 for row in together) <= 1  # two rows half full would have been one


def test_packing_takes_the_best_fit():
    lengths = [[7, 3], [6, 4], [5]]
    rows = [
        {"input_ids": [n] * n, "documents": [1] * n, "maskable": [False] + [True] * (n - 1), "sample_id": 0}
        for n in (3, 4, 5, 6, 7)
    ]
    assert [sorted({*row["input_ids"]}, reverse=True) for row in pack(rows, 10)] == lengths


@pytest.mark.parametrize(
    ("attention", "block_size", "shift"),
    [("bidirectional", None, False), ("block_causal", 3, False), ("causal", None, True)],
)
def test_packed_examples_have_the_log_probs_of_single_ones(attention, block_size, shift):
    lm = tiny_lm("llama", attention, block_size, shift=shift)
    limits = RowLimits(64, None, block_size or 1)
    examples = [
        {"prompt": "abc", "completion": "defgh"},
        {"prompt": "l", "completion": "ij"},
        {"prompt": "kk", "completion": "a"},
    ]

    def scores(rows: Sequence[TokenRow]) -> list[torch.Tensor]:
        """Log-probabilities of all trained tokens of each row, all hidden."""
        batch = Collator(0)(rows)
        maskable_B1T = batch["maskable"][:, None]
        with torch.no_grad():
            score_BMT = view_log_probs(
                lm,
                batch["input_ids"],
                batch["documents"],
                Views(maskable_B1T, maskable_B1T, maskable_B1T.float()),
            )
        return [
            score_T[maskable_T]
            for score_T, maskable_T in zip(score_BMT[:, 0], batch["maskable"], strict=True)
        ]

    apart = made(examples, limits, tokenizer=lm.tokenizer)
    together = made(examples, limits, tokenizer=lm.tokenizer, packed=True)
    assert len(together) == 1
    longest_first = sorted(apart, key=lambda row: -len(row["input_ids"]))
    torch.testing.assert_close(
        torch.cat(scores(longest_first)), torch.cat(scores(together)), rtol=0, atol=1e-12
    )


# Preferences


def preferred(
    rows: Sequence[Any], limits: RowLimits | None = None, *, skip: bool = False, tokenizer: Any = TOKENIZER
) -> Any:
    return listed(preference_rows, tokenizer, rows, limits, skip)


@given(
    st.lists(
        st.tuples(words, words, words).filter(lambda texts: texts[1] != texts[2]), min_size=1, max_size=4
    ),
    blocks,
)
def test_the_two_sides_of_a_preference_are_rows_with_the_same_prompt(texts, block_size):
    limits = RowLimits(40, None, block_size)
    rows = preferred([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in texts], limits)
    for side, column in (("chosen", 1), ("rejected", 2)):
        alone = made([{"prompt": text[0], "completion": text[column]} for text in texts], limits)
        for row, other in zip(rows, alone, strict=True):
            assert row[side] == other


@given(words, words, words, st.integers(4, 20))
def test_both_responses_keep_the_same_end_of_a_truncated_prompt(prompt, chosen, rejected, max_length):
    try:
        [row] = preferred(
            [{"prompt": prompt, "chosen": chosen, "rejected": rejected}],
            RowLimits(max_length, truncate_prompt=True),
        )
    except DataError as error:
        assert error.reason == ("chosen equals rejected" if chosen == rejected else "too long")
        # BOS, a token, and EOS
        assert chosen == rejected or 2 + 1 + max(len(chosen), len(rejected)) > max_length
        return
    prompts = []
    for side, answer in ((row["chosen"], chosen), (row["rejected"], rejected)):
        assert len(side["input_ids"]) <= max_length
        start = side["maskable"].index(True)
        prompts.append(side["input_ids"][:start])
        assert side["input_ids"][start:] == ids_of(answer)[1:]  # answers are never cut
    assert prompts[0] == prompts[1]
    whole = ids_of(prompt)[:-1]
    assert prompts[0] == [BOS, *whole[len(whole) - len(prompts[0]) + 1 :]]


@pytest.mark.parametrize(
    ("reason", "bad", "where"),
    [
        ("chosen equals rejected", {"prompt": "a", "chosen": "b", "rejected": "b"}, ", chosen, rejected"),
        ("empty", {"prompt": "a", "chosen": "", "rejected": "b"}, ", chosen"),
        ("empty", {"prompt": " ", "chosen": "a", "rejected": "b"}, ", prompt"),
        ("too long", {"prompt": "a", "chosen": "b" * 38, "rejected": "b"}, ""),
        ("mask token in the text", {"prompt": "a", "chosen": "b", "rejected": "<|mask|>"}, ""),
        ("without a value", {"prompt": "a", "chosen": "b", "rejected": None}, ""),
        ("another format", {"chosen": "b", "rejected": "c"}, ""),
        ("wrong type", {"prompt": "a", "chosen": 4, "rejected": "c"}, ", chosen"),
    ],
)
def test_a_bad_preference_is_an_error_or_is_skipped_and_counted(reason, bad, where):
    with raises(DataError, where=f"train_dataset, row 1{where}"):
        preferred([PREFERRED, bad], tokenizer=MASKED)
    rows = (
        preferred([bad] * 2 + [PREFERRED], skip=True, tokenizer=MASKED)
        if reason != "another format"
        else None
    )
    rows = rows or preferred([PREFERRED, bad, bad], skip=True, tokenizer=MASKED)
    assert rows == preferred([PREFERRED], tokenizer=MASKED)
    [(found, where)] = rows.report.dropped.items()
    assert found == reason and len(where) == 2


def test_each_response_has_its_own_length():
    rows = preferred([{"prompt": "a", "chosen": "bcd", "rejected": "e"}], RowLimits(40, None, 4))[0]
    assert len(rows["chosen"]["input_ids"]) == 8 and len(rows["rejected"]["input_ids"]) == 4


@pytest.mark.slow
def test_the_shared_preferences_are_all_read():
    path = shared_path("data", "preference", "llamafactory_dpo_en_demo.json")
    source = json.loads(path.read_text(encoding="utf-8"))
    texts = [
        one["value"] for row in source for one in (*row["conversations"], row["chosen"], row["rejected"])
    ]
    tokenizer = character_tokenizer("".join(sorted({*"".join(texts), *string.printable})))
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    tokenizer.chat_template = TEMPLATES["simple"]
    rows = preferred(source, RowLimits(20_000), tokenizer=tokenizer)
    assert len(rows) == rows.report.kept == 300
    for row, example in zip(rows, source, strict=True):
        spoken = "".join(
            f"{SPEAKERS[one['from']]}:\n{one['value']}{'</s>' * (one['from'] == 'gpt')}\n\n"
            for one in example["conversations"]
        )
        for side in ("chosen", "rejected"):
            assert (
                tokenizer.decode(row[side]["input_ids"])
                == f"<s>{spoken}assistant:\n{example[side]['value']}</s>"
            )
            assert sum(row[side]["maskable"]) == len(example[side]["value"]) + 1
    lengths = [len(row["chosen"]["input_ids"]) for row in rows]
    short = preferred(source, RowLimits(1024), skip=True, tokenizer=tokenizer)
    cut = preferred(source, RowLimits(1024, truncate_prompt=True), skip=True, tokenizer=tokenizer)
    assert 0 < len(short) < len(cut) < 300 and cut.report.truncated["prompt"] == len(cut) - len(short)
    for found in (short, cut):
        assert found.report.kept + len(found.report.dropped["too long"]) == found.report.read == 300
    assert (
        max(lengths)
        > 1024
        >= max(len(row[side]["input_ids"]) for row in cut for side in ("chosen", "rejected"))
    )


@given(st.lists(st.tuples(words, words, st.booleans()), min_size=1, max_size=4))
def test_unpaired_completions_keep_their_label(texts):
    examples = [{"prompt": prompt, "completion": answer, "label": label} for prompt, answer, label in texts]
    rows = made(examples, formats=UNPAIRED)
    assert [row["label"] for row in rows] == [label for *_, label in texts]
    assert [{name: value for name, value in row.items() if name != "label"} for row in rows] == made(examples)


@pytest.mark.parametrize(
    ("good", "bad"), [(1, 0), (1.0, 0.0), ("1", "0"), ("true", "false"), (" True", "FALSE")]
)
def test_a_label_may_be_a_number_or_text_of_a_table(good, bad):
    rows = made([GOOD | {"label": good}, GOOD | {"label": bad}], formats=UNPAIRED)
    assert [row["label"] for row in rows] == [True, False]


@pytest.mark.parametrize("label", [2, "yes", 0.5, math.nan, [True]])
def test_a_label_is_a_boolean(label):
    examples = [GOOD | {"label": True}, GOOD | {"label": label}]
    with raises(DataError, where="train_dataset, row 1, label"):
        made(examples, formats=UNPAIRED)
    rows = made(examples, formats=UNPAIRED, skip=True)
    assert rows.report.dropped == {"wrong type": [1]}


@pytest.mark.parametrize("learn", ["all", "last"])
def test_the_report_counts_all_learnt_answers(learn):
    turns = [("a", "bb"), ("cc", "ddd"), ("e", "f")]
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    rows = made(
        [{"messages": messages}, {"messages": messages[:2]}], RowLimits(1024), tokenizer=CHAT, learn=learn
    )
    summary = rows.report.to_dict()
    assert summary["answers"] == (4 if learn == "all" else 2)
    learnt = sorted(sum(row["maskable"]) for row in rows)
    assert [summary["tokens"]["completion"][name] for name in ("shortest", "longest")] == [
        learnt[0],
        learnt[-1],
    ]
    assert summary["tokens"]["prompt"]["longest"] == max(
        len(row["maskable"]) - sum(row["maskable"]) for row in rows
    )


@pytest.mark.parametrize(("max_length", "context"), [(10, None), (10, 30), (10, 12), (10, 10)])
def test_what_is_advised_for_a_row_that_is_too_long_works(max_length, context):
    for prompt, completion in (("abcabcabcabc", "abc"), ("a", "abcabcabcabcabc"), ("abcabcabcabcab", "abc")):
        with pytest.raises(DataError) as caught:
            made([{"prompt": prompt, "completion": completion}], RowLimits(max_length, context=context))
        advised, remedy = [], str(caught.value.remedy)
        if found := re.search(r"training\.max_length=(\d+)", remedy):
            assert context is None or int(found[1]) <= context
            advised.append(RowLimits(int(found[1]), context=context))
        else:
            assert f"and the model's context is {context}" in caught.value.what and "remove the row" in remedy
        if "truncation_mode=keep_end" in remedy:
            advised.append(RowLimits(max_length, truncate_prompt=True, context=context))
        for limits in advised:
            assert made([{"prompt": prompt, "completion": completion}], limits)
