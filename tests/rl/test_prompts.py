"""Prompts are drawn by their past rewards: without replacement, reproducibly, and with probabilities by their
weights."""

from __future__ import annotations

import itertools
import math
import statistics

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.training.tiny_runs import equal, make, ranks, weights
from unmask.errors import ConfigError
from unmask.generation.output import Generation, Trace
from unmask.rl.prompts import PromptHistory, PromptRow, PromptRows
from unmask.rl.rewarded import RewardedCompletions

REWARDS = st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(-4, 4)), max_size=40)


def history(seen, target=None):
    made = PromptHistory(10, target)
    for prompt, reward in seen:
        made.add(prompt, math.nan if reward is None else reward)
    return made


@given(seen=REWARDS)
def test_means_are_those_of_the_scored_completions(seen):
    expected = {p: [r for q, r in seen if q == p and r is not None] for p in range(10)}
    assert {p: (len(rs), pytest.approx(statistics.fmean(rs))) for p, rs in expected.items() if rs} == history(
        seen
    ).seen


@given(
    seen=REWARDS,
    target=st.none() | st.floats(-5, 5),
    number=st.integers(0, 12),
    exclude=st.sets(st.integers(0, 9)),
    step=st.integers(0, 2**24),
)
def test_a_draw_has_no_prompt_twice_and_none_that_is_excluded(seen, target, number, exclude, step):
    chosen = history(seen, target).choose(number, 3, step, exclude)
    assert len(chosen) == len(set(chosen)) == min(number, 10 - len(exclude)) and not set(chosen) & exclude
    assert chosen == history(seen, target).choose(number, 3, step, sorted(exclude))


@given(
    means=st.lists(st.floats(0, 1e-3), min_size=10, max_size=10)
    | st.floats(-1e30, 1e30).map(lambda mean: [mean] * 10),
    target=st.floats(-1e6, 1e6),
    exclude=st.sets(st.integers(0, 9)),
    step=st.integers(0, 2**24),
)
def test_what_is_excluded_is_not_drawn_however_far_all_prompts_are_from_the_target(
    means, target, exclude, step
):
    made = history(enumerate(means), target)
    assert set(made.choose(10, 3, step, exclude)) == set(range(10)) - exclude


@pytest.mark.parametrize(("mean", "target"), [(0.0, 0.5), (0.1, 0.5), (-3e38, 0.5), (0.5, 0.5)])
def test_prompts_of_one_mean_are_drawn_evenly(mean, target):
    made = history([(prompt, mean) for prompt in range(10)], target)
    counts = torch.bincount(
        torch.tensor([prompt for step in range(500) for prompt in made.choose(3, 0, step)]), minlength=10
    )
    assert all(count == pytest.approx(150, abs=5 * math.sqrt(150 * 0.7)) for count in counts.tolist())


def test_prompts_come_as_often_as_their_weights_say():
    """For means 0, 1 and 2 and a target of 2: exp(-2 / s), exp(-1 / s), 1, with their deviation s = 1; new
    prompts have weight 1."""
    made = PromptHistory(4, 2.0)
    for prompt in range(3):
        made.add(prompt, float(prompt))
    weights = [math.exp(-2), math.exp(-1), 1.0, 1.0]
    torch.testing.assert_close(made.log_weights().exp(), torch.tensor(weights, dtype=torch.float64))
    steps = 1000
    counts = (
        torch.bincount(torch.tensor([made.choose(1, 0, step)[0] for step in range(steps)]), minlength=4)
        / steps
    )
    for share, weight in zip(counts.tolist(), weights, strict=True):
        expected = weight / sum(weights)
        assert share == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / steps))


def test_without_a_target_all_prompts_weigh_the_same():
    assert (history([(1, 4), (2, -4), (2, 0)]).log_weights() == 0).all()


def test_what_was_seen_is_read_back(tmp_path):
    made = history([(3, 1), (3, 2), (7, -4)], 0.5)
    made.save(tmp_path)
    again = PromptHistory(10, 0.5)
    again.load(tmp_path)
    assert again.seen == made.seen and torch.equal(again.log_weights(), made.log_weights())


def rewarded(ids):
    traces = [Trace([i], [0], [-0.1 * i]) for i in ids]
    generation = Generation(
        [[i] for i in ids],
        [str(i) for i in ids],
        [[i] for i in ids],
        [[0.0]] * len(ids),
        [[0]] * len(ids),
        ids,
        traces,
    )
    value_B = torch.tensor([float(i) for i in ids])
    return RewardedCompletions(
        [PromptRow({}, i, 0) for i in ids],
        generation,
        value_B[:, None],
        value_B,
        {"seen": [f"{i}!" for i in ids]},
    )


def test_rows_are_exchanged_in_all_that_is_known_of_them():
    mixed = rewarded([1, 2, 3, 4]).replaced([1, 2], rewarded([8, 9]))
    for name, expected in vars(rewarded([1, 8, 9, 4])).items():
        assert (
            torch.equal(getattr(mixed, name), expected)
            if isinstance(expected, torch.Tensor)
            else getattr(mixed, name) == expected
        )
    assert mixed.prompt_B.tolist() == [1, 8, 9, 4]


@pytest.mark.parametrize(
    "more", [{}, {"num_iterations": 2}, {"max_resample_rounds": 1, "filter_zero_std_groups": True}]
)
def test_a_stream_of_prompts_is_read_as_far_as_the_run_needs(more, tmp_path):
    """As TRL, the trainer takes a stream, if it knows the number of steps."""
    read = []

    def rows():
        for number in itertools.count():
            read.append(number)
            yield {"prompt": "abcdefgh"[: 1 + number % 8], "number": number}

    stream = datasets.IterableDataset.from_generator(rows)
    trainer = make("grpo", tmp_path / "stream", rows=stream, reward=ranks, **more)
    assert (
        len(read)
        == len(trainer.train_dataset.rows)
        == 4 // more.get("num_iterations", 1) * (2 if "max_resample_rounds" in more else 1)
    )
    trainer.train()
    other = make("grpo", tmp_path / "list", rows=trainer.train_dataset.rows, reward=ranks, **more)
    other.train()
    assert equal(weights(trainer.lm), weights(other.lm))
    with raises(ConfigError, where="max_steps"):
        make("grpo", tmp_path / "endless", rows=stream, max_steps=-1)


DATASETS = st.lists(
    st.dictionaries(st.sampled_from(["a", "b", "sample_id", "repeat"]), st.integers()), min_size=1, max_size=4
)


@given(rows=DATASETS, group=st.integers(1, 3))
def test_rows_have_the_columns_of_all_and_stand_beside_their_places(rows, group):
    rows = [{"prompt": str(index), **row} for index, row in enumerate(rows)]
    made = PromptRows(rows, group)
    names = {name for row in rows for name in row}
    for index, row in enumerate(rows):
        for repeat in range(group):
            found = made[index * group + repeat]
            assert (
                found == PromptRow({name: row.get(name) for name in names}, index, repeat)
                and found.prompt == row["prompt"]
            )
    assert len(made) == len(rows) * group and list(rows[0]) == list(made[0].columns)[: len(rows[0])]
