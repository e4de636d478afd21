"""What holds for every task: fixed splits, right gold answers, wrong corruptions, verdicts for any text."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.errors import ConfigError, DataError
from unmask.tasks import Task, Verdict, get_task, split_of

NAMES = ("sudoku", "countdown")
every_task = pytest.mark.parametrize("name", NAMES)
seeds = st.integers(0, 2**32)


@every_task
@pytest.mark.parametrize("split", ["train", "test"])
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
@given(text=st.one_of(st.text(max_size=40), st.text(alphabet="0123456789+-*/(). \n\0", max_size=40)), seed=seeds)
def test_any_text_gets_a_verdict(name, text, seed):
    task = get_task(name)
    row = task.generate("test", 1, seed % 20)[0]
    verdict = task.verify(text, row)
    assert 0 <= verdict.value <= 1
    assert verdict.solved == (verdict.value == 1) == (verdict.status == "ok")
    assert verdict.value == 0 or verdict.status != "malformed"


@every_task
@pytest.mark.parametrize("around", ["{} ", " {}x", "{}\n{}", "{}=", "{}\0", "answer: {}", "{}" * 3])
def test_a_right_answer_with_garbage_is_not_solved(name, around):
    task = get_task(name)
    row = task.generate("test", 1, 0)[0]
    text = around.replace("{}", row["completion"])
    solved = task.verify(text, row).solved
    assert not solved or (name == "countdown" and text.strip() == row["completion"])  # spaces are arithmetic


@every_task
@pytest.mark.parametrize("text", ["(" * 16_000, "1" * 10**6, "\0" * 20_000, "\ud800", "1234" * 10_000])
def test_hostile_text_is_malformed(name, text):
    task = get_task(name)
    assert task.verify(text, task.generate("test", 1, 0)[0]) == Verdict(0.0, "malformed")


@every_task
def test_the_reward_function_judges_each_row_by_its_own_columns(name):
    task = get_task(name)
    rows = task.generate("train", 20, 0)
    prompts, completions = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    columns = {column: [row[column] for row in rows] for column in task.columns}
    assert task.reward(prompts, completions, completion_ids=[[1]] * 20, trainer_state=None, **columns) == [1.0] * 20
    shifted = completions[1:] + completions[:1]
    expected = [task.verify(completion, row).value for completion, row in zip(shifted, rows, strict=True)]
    assert task.reward(prompts, shifted, **columns) == expected != [1.0] * 20
    with pytest.raises(DataError, match=task.columns[0]):
        task.reward(prompts, completions, answer=completions)


@given(st.text(max_size=30))
def test_the_split_is_a_function_of_the_group(group):
    assert split_of(group) == split_of(group) in ("train", "test")


def test_about_a_quarter_is_test():
    share = sum(split_of(str(number)) == "test" for number in range(4000)) / 4000
    assert 0.25 < share < 0.31


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'sudoko'.*'sudoku'"):
        get_task("sudoko")
    with pytest.raises(ConfigError, match="unknown split 'validation'"):
        get_task("sudoku").generate("validation", 1, 0)


def test_a_task_of_one_s_own_is_one_small_class(monkeypatch):
    monkeypatch.setattr(Task, "_known", dict(Task._known))

    class Echo(Task):
        name, columns, alphabet, max_completion = "echo", ("word",), "ab", 2

        def draw(self, split, rng):
            word = rng.choice("ab")
            return {"prompt": word, "completion": word, "group": word, "word": word}

        def read(self, path):
            return []

        def verify(self, completion, row):
            return Verdict(1.0, "ok") if completion == row["word"] else Verdict(0.0, "wrong")

        def corrupt(self, row, rng):
            return "b" if row["word"] == "a" else "a"

    task = get_task("echo")
    assert isinstance(task, Echo)
    assert task.reward(["a", "b"], ["a", "a"], word=["a", "b"]) == [1.0, 0.0]
    assert len(task.generate("train", 2, 0)) == 2
    with pytest.raises(ConfigError, match="3 different problems asked for, 2 found"):
        task.generate("train", 3, 0)


def test_tasks_and_rewards_import_no_torch():
    code = "import sys, unmask.tasks, unmask.rewards.arithmetic; sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
