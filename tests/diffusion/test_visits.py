"""Times of successive rows are evenly spread, for any batch size."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from unmask.diffusion.rng import Stream, uniform
from unmask.diffusion.schedules import Noise, get_schedule
from unmask.diffusion.views import Draw, random_views

SUCCESSIVE = 64


def visited(start, count, groups=1, seed=0, views=1):
    """The times [N, V] of successive sequences and their groups, recovered from masks whose random numbers are all equal."""
    group = torch.arange(groups).expand(count, -1)
    draw = Draw(seed, torch.zeros(count, dtype=torch.long), rows_before_B=torch.arange(start, start + count))
    noise = Noise(replace(get_schedule("linear"), mask_rate=torch.ones_like, weight=lambda t: t), low=0.0)
    return random_views(group, draw, noise, num_views=views).weight_BMT.double().transpose(1, 2).flatten(0, 1) * views


def star_discrepancy(times):
    ordered, count = times.sort().values, len(times)
    rank = torch.arange(count) / count
    return max((rank + 1 / count - ordered).max(), (ordered - rank).max()).item()


def test_times_of_successive_rows_are_spread_more_evenly_than_random_ones():
    keys, seeds = torch.arange(200)[:, None], range(20)
    random = [star_discrepancy(times) for times in uniform(0, keys, position=torch.arange(SUCCESSIVE), stream=Stream.TIME)]
    typical = sum(random) / len(random)
    for start in (0, 1, 64, 999):
        assert sum(star_discrepancy(visited(start, SUCCESSIVE, seed=seed)[:, 0]) for seed in seeds) / len(seeds) < typical / 3
        blocks = [star_discrepancy(visited(start, SUCCESSIVE // 16, groups=16, seed=seed)[:, 0]) for seed in seeds]
        assert sum(blocks) / len(seeds) < 0.4 * typical
    for view in range(4):  # within its stretch of time
        assert star_discrepancy(visited(0, SUCCESSIVE, views=4)[:, view] * 4 - view) < typical / 2


def test_they_are_uniform_over_seeds_and_the_same_however_a_run_is_cut_into_batches():
    one = torch.stack([visited(5, 1, seed=seed)[0, 0] for seed in range(400)])
    assert star_discrepancy(one) < 1.6 / math.sqrt(400)
    whole = visited(10, 12, groups=3, views=2)
    assert torch.equal(torch.cat([visited(10 + start, 4, groups=3, views=2) for start in (0, 4, 8)]), whole)
    assert torch.equal(torch.cat([visited(10 + start, 1, groups=3, views=2) for start in range(12)]), whole)
