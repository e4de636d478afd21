"""Keyed random numbers: those of the published generator, uniform, and functions of their key only."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unmask.diffusion.rng import RngStream, philox, sequence_key, sequence_keys, uniform

COUNT = 100_000
ids = st.lists(st.integers(0, 50), max_size=6)


def words(text):
    return [torch.tensor(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),  # the known-answer tests of Random123, philox4x32-10
    [
        ("0 0", "0 0 0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff", "ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("a4093822 299f31d0", "243f6a88 85a308d3 13198a2e 03707344", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_words(key, counter, expected):
    assert [f"{int(word):08x}" for word in philox(tuple(words(key)), words(counter))] == expected.split()


def draws(seed=0, count=COUNT, **where):
    return uniform(seed, torch.arange(count), **({"stream": RngStream.MASK} | where))


VARIED = {
    "key": lambda: draws(),
    "position": lambda: uniform(0, torch.tensor(7), position=torch.arange(COUNT), stream=RngStream.MASK),
    "step": lambda: uniform(0, torch.tensor(7), step=torch.arange(COUNT), stream=RngStream.MASK),
    "view": lambda: uniform(0, torch.tensor(7), view=torch.arange(COUNT), stream=RngStream.MASK),
    "seed": lambda: torch.stack(
        [uniform(seed, torch.tensor(7), stream=RngStream.MASK) for seed in range(1000)]
    ),
}


@pytest.mark.parametrize("draw", VARIED.values(), ids=VARIED.keys())
def test_numbers_are_uniform_along_every_axis(draw):
    sample = draw()
    count = len(sample)
    assert sample.dtype == torch.float64 and sample.min() >= 0 and sample.max() < 1
    assert len(sample.unique()) == count
    # Kolmogorov-Smirnov: 2.2 / sqrt(n) is passed by chance once in 8000.
    ordered, steps = sample.sort().values, torch.arange(count) / count
    assert max((ordered - steps).max(), (steps + 1 / count - ordered).max()) < 2.2 / math.sqrt(count)
    following = torch.corrcoef(torch.stack([sample[:-1], sample[1:]]))[0, 1]
    assert abs(following) < 4.5 / math.sqrt(count)


def test_all_53_bits_are_random():
    integers = (draws() * 2.0**53).long()
    assert torch.equal(integers.double() * 2.0**-53, draws())
    shares = torch.stack([(integers >> bit & 1).double().mean() for bit in range(53)])
    assert (shares - 0.5).abs().max() < 5 * 0.5 / math.sqrt(COUNT)


@pytest.mark.slow
def test_streams_seeds_views_steps_and_positions_are_independent():
    samples = [draws(stream=stream) for stream in RngStream] + [
        draws(seed=1),
        draws(view=1),
        draws(step=1),
        draws(position=1),
    ]
    correlation = torch.corrcoef(torch.stack(samples)) - torch.eye(len(samples))
    assert correlation.abs().max() < 5 / math.sqrt(COUNT)
    for one, other in itertools.combinations(samples, 2):
        assert not (one == other).any()


def test_a_number_depends_on_its_own_key_and_place_alone():
    key, position = torch.tensor([5, 2**62 + 3, 17]), torch.arange(4)
    together = uniform(3, key[:, None], step=2, position=position, stream=RngStream.TOKEN, view=1)
    assert together.shape == (3, 4)
    for row, column in itertools.product(range(3), range(4)):
        alone = uniform(3, key[row], step=2, position=int(position[column]), stream=RngStream.TOKEN, view=1)
        assert alone == together[row, column]


@pytest.mark.parametrize("seed", [0, -1, 2**64, 2**200, -(2**63)])
def test_any_integer_is_a_seed(seed):
    sample = draws(seed, 1000)
    assert 0.4 < sample.mean() < 0.6 and not torch.equal(sample, draws(seed + 1, 1000))


def test_all_bits_of_a_key_count():
    keys = torch.tensor([1 << bit for bit in range(63)])
    assert len(uniform(0, keys, stream=RngStream.MASK).unique()) == 63


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    draws()
    assert torch.equal(torch.get_rng_state(), before)


@given(st.lists(ids, max_size=8))
def test_equal_sequences_get_keys_of_their_own(sequences):
    keys = sequence_keys(sequences)
    assert len(set(keys)) == len(sequences) and all(0 <= key < 2**63 for key in keys)


@given(st.lists(ids, min_size=1, max_size=6), st.randoms())
def test_keys_do_not_depend_on_the_order_but_among_equals(sequences, random):
    shuffled = random.sample(sequences, len(sequences))
    assert sorted(zip(sequences, sequence_keys(sequences), strict=True)) == sorted(
        zip(shuffled, sequence_keys(shuffled), strict=True)
    )


@given(ids, ids, st.integers(0, 3), st.integers(0, 3))
def test_a_key_tells_sequences_and_repeats_apart(one, other, first, second):
    assert (sequence_key(one, first) == sequence_key(other, second)) == ((one, first) == (other, second))
    assert sequence_key(one, first) == sequence_key(tuple(one), first)
