"""Lists of letters: what is right and what is not, and the loss of parallel decoding under a model whose
predictions are exact."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch

from tests.errors import raises
from tests.helpers import read_task
from tests.tiny import build_lm, tokenizer_of
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, DataError
from unmask.generation.naive import generate
from unmask.rewards.verdict import Verdict
from unmask.tasks import Copy, Count, Shuffle, Sort, get_task

ROW = {"letters": "k d b e"}
NAMES = ("copy", "sort", "shuffle", "count")


@pytest.mark.parametrize(
    ("name", "answer", "value", "status"),
    [
        ("copy", "k d b e", 1, "ok"),
        ("copy", "k d b b", 3 / 4, "wrong"),
        ("copy", "k d b", 3 / 4, "wrong"),
        ("copy", "k d b e k", 4 / 5, "wrong"),
        ("copy", "k d b e k d b e", 4 / 8, "wrong"),
        ("copy", "k  d b e", 0, "malformed"),
        ("copy", "k\td b e", 0, "malformed"),
        ("copy", "kdbe", 0, "malformed"),
        ("copy", "K D B E", 0, "malformed"),
        ("copy", "к d b e", 0, "malformed"),  # the first letter is Cyrillic
        ("copy", "k d b e=", 0, "malformed"),
        ("copy", "<answer>k d b e</answer><answer>d k b e</answer>", 0, "malformed"),
        ("sort", "b d e k", 1, "ok"),
        ("sort", "b d k e", 2 / 4, "wrong"),
        ("sort", "b", 1 / 4, "wrong"),
        ("shuffle", "b d e k", 1, "ok"),
        ("shuffle", "k d b e", 0, "wrong"),
        ("shuffle", "b d e", 3 / 4, "wrong"),
        ("shuffle", "b d e e", 3 / 4, "wrong"),
        ("shuffle", "b d e k k", 4 / 5, "wrong"),
        ("shuffle", "b d e k b d e k", 4 / 8, "wrong"),
        ("shuffle", "k d b e x", 4 / 5, "wrong"),
        ("shuffle", "k", 1 / 4, "wrong"),
        ("count", "b1 d1 e1 k1", 1, "ok"),
        ("count", "k1 d1 b1 e1", 1 / 4, "wrong"),
        ("count", "b1 d1 e1 k2", 3 / 4, "wrong"),
        ("count", "b1 d1 e1 k01", 0, "malformed"),
        ("count", "b1 d1 e1 k1 a0", 0, "malformed"),
        ("count", "b1,d1,e1,k1", 0, "malformed"),
        ("count", "b\u0661 d1 e1 k1", 0, "malformed"),  # the first digit is Arabic
    ],
)
def test_only_right_answers_are_solved(name, answer, value, status):
    assert get_task(name).verify(answer, ROW) == Verdict(pytest.approx(value), status)


@pytest.mark.parametrize("letters", ["b a b b", "a b"])
def test_letters_that_repeat(letters):
    row = {"letters": letters}
    assert Count().verify(" ".join(f"{letter}{letters.count(letter)}" for letter in "ab"), row).solved
    right = {" ".join(order) for order in permutations(letters.split())} - {letters}
    assert all(Shuffle().verify(answer, row).solved for answer in right)
    assert not Shuffle().verify("a a b b", row).solved and not Shuffle().verify(letters, row).solved


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_answer_or_that_of_another_row_solves_nothing(name):
    task = get_task(name)
    rows = task.generate("test", 50, 0)
    for other in rows[:10]:
        solved = [row for row in rows if task.verify(other["completion"], row).solved]
        assert all(row["group"] == other["group"] for row in solved)


def test_shuffles_are_uniform_over_the_other_orders():
    letters, counts = ["a", "b", "c"], dict.fromkeys(permutations("abc"), 0)
    for row in Shuffle(min_letters=3, max_letters=3).generate("train", 4000, 0):
        order = sorted(row["letters"].split())
        counts[tuple(letters[order.index(letter)] for letter in row["completion"].split())] += (
            row["letters"].split() == order
        )
    assert counts.pop(("a", "b", "c")) == 0
    total = sum(counts.values())
    assert (
        all(abs(count - total / 5) < 4 * math.sqrt(total * 0.16) for count in counts.values()) and total > 300
    )


@pytest.mark.parametrize("name", NAMES)
def test_files_are_read_and_malformed_ones_name_the_row(tmp_path, name):
    path = tmp_path / "letters.jsonl"
    path.write_text('{"letters": "b a b"}\n')
    (row,) = read_task(get_task(name), path)
    assert row["prompt"] == "b a b=" and get_task(name).verify(row["completion"], row).solved
    for letters in ('"b"', '"b b"', '"a b c d e f g h i"', '"ab c"', '"a B"', "3", '"a  b"'):
        path.write_text(f'{{"letters": {letters}}}\n')
        with raises(DataError, where=f"{path}, line 1, key 'letters'"):
            read_task(get_task(name), path)


def test_settings_are_checked():
    for task, options in (
        (Copy, {"min_letters": 1}),
        (Sort, {"max_letters": 27}),
        (Count, {"min_letters": 9}),
    ):
        with raises(ConfigError, where=task.name):
            task(**options)


# --- a model whose prediction of every hidden token is exact, given the prompt and the visible tokens ---

SIZES = {"width": 4, "layers": 1, "heads": 1, "dtype": torch.float64}
LENGTH = 2 * len(ROW["letters"].split())


@pytest.fixture(scope="module")
def lists():
    """A task's right answers to its prompt, and a DiffusionLM that predicts the exact marginals of the
    uniform distribution over them."""

    def make(answers):
        tokenizer = tokenizer_of(Copy.alphabet)
        lm = build_lm("gpt2", tokenizer, logit_shift=False, **SIZES)
        answers_NT = torch.tensor(
            [
                [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
                for answer in answers
            ]
        )
        start = len(tokenizer.encode(ROW["letters"] + "="))

        def logits(ids_BT, hidden_BT):
            prob_TV = torch.zeros(ids_BT.shape[1], len(tokenizer) + 1, dtype=torch.float64)
            agree_NT = (answers_NT == ids_BT[0, start:]) | hidden_BT[0, start:]
            left_NT = answers_NT[agree_NT.all(1)]
            # nothing right is left: any prediction is as good
            left_NT = left_NT if len(left_NT) else answers_NT
            for place, tokens_N in enumerate(left_NT.T):
                prob_TV[start + place] = tokens_N.bincount(minlength=len(tokenizer) + 1) / len(tokens_N)
            return prob_TV.log()[None]

        lm.logits = logits
        return lm

    return make


def exact_solved(answers, tokens_per_step):
    """The probability that an answer is right if each step draws its tokens independently, each from its
    exact marginal."""
    total = 0.0
    for answer in answers:
        prob = 1.0
        for start in range(0, LENGTH, tokens_per_step):
            left = [other for other in answers if other[:start] == answer[:start]]
            for place in range(start, min(start + tokens_per_step, len(answer))):
                prob *= sum(other[place] == answer[place] for other in left) / len(left)
        total += prob
    return total


def solved_fraction(task, lm, tokens_per_step, count):
    config = SamplerConfig(
        max_new_tokens=LENGTH, tokens_per_step=tokens_per_step, remasking="left_to_right", temperature=1.0
    )
    texts = generate(lm, [ROW["letters"] + "="] * count, config, keys=list(range(count))).texts
    return sum(task.verify(text, ROW).solved for text in texts) / count


def test_parallel_decoding_loses_on_shuffle_as_computed_exactly(lists):
    answers = [
        " ".join(order) for order in permutations(ROW["letters"].split()) if " ".join(order) != ROW["letters"]
    ]
    lm = lists(answers)
    exact = {tokens: exact_solved(answers, tokens) for tokens in (1, 4, 8)}
    # one step for all: 23 orders of four letters, of probability 5/23 at their place in the prompt and 6/23
    # elsewhere
    derangements = {0: 9, 1: 8, 2: 6}  # orders of four letters by how many stay
    assert exact[8] == pytest.approx(
        sum(n * 5**stay * 6 ** (4 - stay) for stay, n in derangements.items()) / 23**4
    )
    assert exact[1] == pytest.approx(1.0) and exact[8] < 0.11 < 0.35 < exact[4] < 0.42
    assert solved_fraction(Shuffle(), lm, 1, 10) == 1.0
    for tokens in (4, 8):
        assert abs(solved_fraction(Shuffle(), lm, tokens, 40) - exact[tokens]) < 4 * math.sqrt(
            exact[tokens] * (1 - exact[tokens]) / 40
        )


def test_parallel_decoding_loses_nothing_where_the_answer_follows_from_the_prompt(lists):
    for task in (Copy(), Sort()):
        answer = " ".join(task.solution(ROW["letters"].split(), None))
        assert solved_fraction(task, lists([answer]), 8, 2) == 1.0
