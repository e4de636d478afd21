"""Every task has fixed splits, accepts its gold answers, rejects corrupted ones, and gives a verdict for any
text."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.helpers import REPOSITORY, partly_slow
from unmask.data.sources import read_problems
from unmask.errors import ConfigError, DataError, UnmaskError
from unmask.rewards.verdict import Verdict
from unmask.tasks import Puzzle, Task, as_puzzle, get_rewards, get_task, split_of

NAMES = ("sudoku", "sudoku9", "countdown", "copy", "sort", "shuffle", "count")
every_task = pytest.mark.parametrize("name", NAMES)
seeds = st.integers(0, 2**32)


@every_task
@partly_slow("split", ["train", "test"], 1)
def test_rows_are_solved_distinct_and_of_their_split(name, split):
    task = get_task(name)
    rows = task.generate(split, 300, seed=3)
    assert len(rows) == len({row["prompt"] for row in rows}) == 300
    for row in rows:
        assert task.verify(row["completion"], row) == Verdict(1.0, "ok")
        assert split_of(row["group"]) == split
        assert set(row["prompt"] + row["completion"]) <= set(task.alphabet)
        assert len(row["completion"]) < task.max_completion
        assert {"prompt", "completion", "group", *task.columns} == set(row)


@every_task
@settings(max_examples=20)
@given(seed=seeds, count=st.integers(0, 12), more=st.integers(0, 8))
def test_a_seed_fixes_the_rows_and_a_smaller_count_is_their_beginning(name, seed, count, more):
    task = get_task(name)
    rows = task.generate("train", count, seed)
    assert len(rows) == count
    assert task.generate("train", count + more, seed)[:count] == rows


@every_task
def test_seeds_and_splits_differ(name):
    task = get_task(name)
    assert len({str(task.generate(split, 5, seed)) for split in ("train", "test") for seed in range(3)}) == 6


@every_task
def test_generating_leaves_the_global_generator_alone(name):
    state = random.getstate()
    get_task(name).generate("train", 5, 0)
    assert random.getstate() == state


@every_task
@given(seed=seeds)
def test_a_corruption_is_well_formed_and_wrong(name, seed):
    task = get_task(name)
    rng = random.Random(seed)
    for row in task.generate("train", 3, seed % 50):
        verdict = task.verify(task.corrupt(row, rng), row)
        assert verdict.status == "wrong" and not verdict.solved
        assert 0 < verdict.value < 1


@every_task
def test_demonstrations_are_wrong_as_often_as_asked(name):
    task, rng = get_task(name), random.Random(0)
    rows = task.generate("train", 400, 0)
    for rate in (0.0, 0.3, 1.0):
        mistakes = sum(not task.verify(task.demonstrate(row, rng, rate), row).solved for row in rows)
        assert abs(mistakes / len(rows) - rate) < (0.1 if 0 < rate < 1 else 1e-9)  # 4 standard deviations


@every_task
@given(
    text=st.one_of(st.text(max_size=40), st.text(alphabet="0123456789+-*/(). \n\0", max_size=40)), seed=seeds
)
def test_any_text_gets_a_verdict(name, text, seed):
    task = get_task(name)
    row = task.generate("test", 1, seed % 20)[0]
    verdict = task.verify(text, row)
    assert 0 <= verdict.value <= 1
    assert verdict.solved == (verdict.value == 1) == (verdict.status == "ok")
    assert verdict.value == 0 or verdict.status != "malformed"


@every_task
@pytest.mark.parametrize(
    "around", [" {}x", "{}\n{}", "{}=", "{}\0", "answer: {}", "{}" * 3, "<answer>{}", "<answer>{}x</answer>"]
)
def test_a_right_answer_with_garbage_is_not_solved(name, around):
    task = get_task(name)
    row = task.generate("test", 1, 0)[0]
    assert not task.verify(around.replace("{}", row["completion"]), row).solved


@every_task
@pytest.mark.parametrize(
    "around", ["{}", " {}\n", "<answer>{}</answer>", "It is this: <answer>\n{} </answer>."]
)
def test_a_right_answer_stands_alone_or_in_the_tags(name, around):
    task = get_task(name)
    row = task.generate("test", 1, 0)[0]
    assert task.verify(around.replace("{}", row["completion"]), row).solved


@every_task
@pytest.mark.parametrize("text", ["(" * 16_000, "1" * 10**6, "\0" * 20_000, "\ud800", "1234" * 10_000])
def test_hostile_text_is_malformed(name, text):
    task = get_task(name)
    assert task.verify(text, task.generate("test", 1, 0)[0]) == Verdict(0.0, "malformed")


@every_task
@pytest.mark.parametrize("chat", [False, True])
def test_the_reward_functions_judge_each_row_by_its_own_columns(name, chat):
    task = get_task(name)
    rows = task.generate("train", 20, 0)
    prompts, completions = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    columns = {column: [row[column] for row in rows] for column in task.columns}

    def said(texts):
        return [[{"role": "assistant", "content": text}] for text in texts] if chat else texts

    (strict,), (partial,) = task.rewards(), get_rewards(f"{name}/partial")
    assert (
        strict(prompts, said(completions), completion_ids=[[1]] * 20, trainer_state=None, **columns)
        == [1.0] * 20
    )
    shifted = completions[1:] + completions[:1]
    verdicts = [task.verify(completion, row) for completion, row in zip(shifted, rows, strict=True)]
    assert partial(prompts, said(shifted), **columns) == [verdict.value for verdict in verdicts] != [1.0] * 20
    assert strict(prompts, said(shifted), **columns) == [float(verdict.solved) for verdict in verdicts]
    assert [v.status for v in strict.verdicts(said(shifted), **columns)] == [
        verdict.status for verdict in verdicts
    ]
    with raises(DataError, where=f"the reward {name}"):
        strict(prompts, completions, answer=completions)


def test_shapings_have_names():
    names = [reward.name for reward in get_rewards("gsm8k/published")]
    assert names == [
        "xml_count",
        "soft_format",
        "strict_format",
        "integer",
        "correctness",
    ]
    with raises(ConfigError, where="rewards"):
        get_rewards("multiple_choice/published")
    with raises(ConfigError, where="rewards"):
        get_rewards("sudoku/partal")
    with raises(ConfigError, where="task"):
        as_puzzle(get_task("gsm8k"))


def test_problems_are_posed_as_text_and_as_conversations():
    task = get_task("countdown")
    first, second, row = task.generate("train", 3, 0)
    assert task.posed(row) == row
    assert (
        task.posed(row, "plain", [first])["prompt"]
        == f"{first['prompt']}{first['completion']}\n\n{row['prompt']}"
    )
    chat = task.posed(row, "chat", [first, second])
    assert [turn["role"] for turn in chat["prompt"]] == ["user", "assistant"] * 2 + ["user"]
    assert (
        task.instructions in chat["prompt"][-1]["content"]
        and f"Target: {row['target']}" in chat["prompt"][-1]["content"]
    )
    assert (
        task.verify(chat["completion"][0]["content"], row).solved
        and task.verify(chat["prompt"][1]["content"], first).solved
    )
    assert {**chat, "prompt": row["prompt"], "completion": row["completion"]} == row


@given(st.text(max_size=30))
def test_the_split_is_a_function_of_the_group(group):
    assert split_of(group) == split_of(group) in ("train", "test")


def test_about_a_quarter_is_test():
    share = sum(split_of(str(number)) == "test" for number in range(4000)) / 4000
    assert 0.25 < share < 0.31


def test_unknown_names_are_answered_with_the_nearest():
    with raises(ConfigError, where="task"):
        get_task("sudoko")
    with raises(ConfigError, where="sudoku"):
        get_task("sudoku").generate("validation", 1, 0)


def test_a_task_of_one_s_own_is_one_small_class(monkeypatch):
    monkeypatch.setattr(Task, "registered", dict(Task.registered))

    class Echo(Puzzle):
        name, fields, columns, alphabet, max_completion = "echo", ("word",), ("word",), "ab", 2

        def draw(self, split, rng):
            word = rng.choice("ab")
            return self.row({"word": word}, "")

        def row(self, record, where):
            return {
                "prompt": record["word"],
                "completion": record["word"],
                "group": record["word"],
                "word": record["word"],
            }

        def verify(self, completion, row):
            return Verdict(1.0, "ok") if completion == row["word"] else Verdict(0.0, "wrong")

        def corrupt(self, row, rng):
            return "b" if row["word"] == "a" else "a"

    task = get_task("echo")
    assert isinstance(task, Echo)
    assert get_rewards("echo")[0](["a", "b"], ["a", "a"], word=["a", "b"]) == [1.0, 0.0]
    assert next(task.rows([("row 1", {"word": "b"})]))["completion"] == "b"
    with raises(DataError, where="row 1"):
        list(task.rows([("row 1", {"words": "b"})]))
    assert len(task.generate("train", 2, 0)) == 2
    with raises(ConfigError, where="echo, train"):
        task.generate("train", 3, 0)
    monkeypatch.setattr(Echo, "draw", lambda self, split, rng: {"word": "a"})
    with raises(ConfigError, where="echo"):
        task.generate("train", 1, 0)


def test_the_task_of_the_documentation(monkeypatch, tmp_path):
    monkeypatch.setattr(Task, "registered", dict(Task.registered))
    text = (REPOSITORY / "docs" / "tasks.md").read_text()
    (source,) = re.findall(
        r"## A task of your own\n\nA task is a class in a file:\n\n```python\n(.*?)```", text, re.DOTALL
    )
    exec(source, {"__name__": "documentation"})
    (tmp_path / "capitals.jsonl").write_text('{"country": "Peru", "capital": "Lima"}\n')
    (row,) = read_problems(get_task("capitals"), str(tmp_path / "capitals.jsonl"), None, split="train")
    assert row["prompt"] + row["completion"] == "The capital of Peru is Lima"
    (reward,) = get_rewards("capitals")
    assert reward([""] * 3, [" Lima", "Quito", ""], capital=["Lima"] * 3) == [1.0, 0.0, 0.0]


FAULTY = """
from unmask.rewards.verdict import OK
from unmask.tasks import Task

class Arguments(Task):
    name, fields, columns = "capitals", ("country", "capital"), ("capital",)

    def __init__(self, number):
        pass

    def row(self, record, where):
        return {"prompt": record["country"], "completion": record["capital"], "group": "", "capital": record["capital"]}

    def verify(self, completion, row):
        return OK

class Raises(Arguments):
    def __init__(self):
        pass

    def row(self, record, where):
        return {"prompt": record["land"]}

class Groupless(Raises):
    def row(self, record, where):
        return {"prompt": record["country"], "completion": ""}

class Number(Raises):
    def verify(self, completion, row):
        return 1.0
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    monkeypatch.setattr(Task, "registered", dict(Task.registered))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY)


RECORD = ("cities.jsonl, line 3", {"country": "Peru", "capital": "Lima"})


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("Arguments", "faulty.py:Arguments"),
        ("Raises", "cities.jsonl, line 3"),
        ("Groupless", "cities.jsonl, line 3, as Groupless.row returns it"),
    ],
)
def test_a_task_that_cannot_be_made_or_read_a_row_is_one_error(name, where, faulty):
    with raises(UnmaskError, where=where):
        list(get_task(f"faulty.py:{name}").rows([RECORD]))


def test_what_verify_returns_has_to_be_a_verdict(faulty):
    with pytest.raises(TypeError, match=r"returned 1\.0: return OK, WRONG or Verdict"):
        get_task("faulty.py:Number").verify_all(["Lima"], [{}])


def test_a_file_without_a_class_is_answered_with_its_tasks(faulty):
    with raises(ConfigError, where="faulty.py"):
        get_task("faulty.py")


def test_a_built_in_task_keeps_its_name(faulty, tmp_path):
    built_in = type(get_task("gsm8k"))
    (tmp_path / "named.py").write_text(FAULTY.replace('"capitals"', '"gsm8k"'))
    (tmp_path / "heir.py").write_text("from unmask.tasks import GSM8K\nclass Own(GSM8K): pass")
    for target, where in (("named.py:Number", "named.py:Number"), ("heir.py:Own", "Own")):
        with raises(ConfigError, where=where):
            get_task(target)
    assert type(get_task("gsm8k")) is built_in


def test_tasks_and_rewards_import_no_torch():
    code = "import sys, unmask.tasks, unmask.rewards.http, unmask.sandbox.ocaml\n"
    code += "sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_task_may_be_meant_as_ones_own():
    with raises(ConfigError, where="task"):
        get_task("capitals")
    with raises(ConfigError, where="capitals.py"):
        get_task("capitals.py")
