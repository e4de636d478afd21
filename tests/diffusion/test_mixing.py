"""Noise with random tokens, compared with its definition: bounds by sums over all texts that a model can see,
likelihoods by the differential equation of the reverse process, and published formulas.

Shapes: T tokens, W kinds of tokens with the mask token last, N texts of L tokens.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from tests import enumeration
from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import toy_lm
from unmask.diffusion.likelihood import elbo, exact_log_likelihood
from unmask.diffusion.log_probs import noise_groups, sum_over_views, view_log_probs
from unmask.diffusion.mixing import Mixing, RandomTokens, negative_divergence, replaced
from unmask.diffusion.schedules import Noise, get_schedule
from unmask.diffusion.views import MaskRNG, mixed_views, random_views
from unmask.errors import ConfigError, GenerationError

MIXINGS = [Mixing("uniform"), Mixing("hybrid", 0.1), Mixing("hybrid", 0.5)]
PATTERNS = {"bidirectional": ("bidirectional", None, False), "blocks of two": ("block_causal", 2, False)}
mixings = pytest.mark.parametrize("mixing", MIXINGS, ids=str)


def gidd(r, p_uniform):
    """alpha and the probabilities of the mask token and of random tokens at GIDD's time r (its eqs. 7-9)."""
    c = 2 * p_uniform / (1 - p_uniform) * np.sqrt(r * (1 - r))
    return (1 - r) / (1 + c), r / (1 + c), c / (1 + c)


@pytest.mark.parametrize("p_uniform", [0.01, 0.1, 0.2, 0.5, 0.9])
def test_hybrid_noise_is_that_of_gidd(p_uniform):
    r = np.linspace(1e-4, 1 - 1e-4, 99)
    alpha, masked, _ = gidd(r, p_uniform)
    found = Mixing("hybrid", p_uniform).masking(torch.tensor(1 - alpha)).share
    assert found.numpy() == pytest.approx(masked, rel=1e-9)
    assert max(gidd(r, p_uniform)[2]) == pytest.approx(p_uniform, rel=1e-3)


@mixings
def test_masks_come_at_their_rate(mixing):
    level, step = torch.linspace(0.01, 0.99, 99, dtype=torch.float64), 1e-6
    slope = (mixing.masking(level + step).share - mixing.masking(level - step).share) / (2 * step)
    found = mixing.masking(level)
    torch.testing.assert_close(found.rate, slope + found.share / (1 - level), rtol=1e-6, atol=1e-6)


def transition(mixing, level, size):
    """q_s(z | x) [z, x] for tokens and the mask token, and the rates [z] of jumps to z."""
    masked, rate = (float(each) for each in mixing.masking(torch.tensor(level, dtype=torch.float64)))
    q = np.zeros((size + 1, size))
    q[:size] = (level - masked) / size + (1 - level) * np.eye(size)
    q[size] = masked
    jumps = np.append(np.full(size, (1 / (1 - level) - rate) / size), rate)
    return q, jumps


class Enumerated:
    """A model's predictions of L tokens after a prompt, for all that it can see of them."""

    def __init__(self, lm, row, positions):
        self.tokens, self.positions = RandomTokens.of(lm), positions
        allowed = [token for token in range(self.tokens.rows) if token not in lm.never_predicted]
        self.seen = [*allowed, lm.mask_token_id]
        self.texts = list(itertools.product(range(len(self.seen)), repeat=len(positions)))
        stop = positions[-1] + 1
        ids = row[:stop].repeat(len(self.texts), 1)
        ids[:, positions] = torch.tensor([[self.seen[token] for token in text] for text in self.texts])
        prediction = lm.logits(ids).softmax(-1)[:, positions][..., allowed]
        self.prediction = prediction.detach().numpy()  # [texts, L, size]
        self.clean = [allowed.index(token) for token in row[positions].tolist()]

    def bound(self, mixing, points=200):
        """The integral of the bound's definition."""
        nodes, weights = np.polynomial.legendre.leggauss(points)
        return sum(
            weight / 2 * self._at(mixing, (node + 1) / 2) for node, weight in zip(nodes, weights, strict=True)
        )

    def _at(self, mixing, level):
        q, jumps = transition(mixing, level, len(self.seen) - 1)
        total = 0.0
        for text, prediction in zip(self.texts, self.prediction, strict=True):
            likely = np.prod([q[z, x] for z, x in zip(text, self.clean, strict=True)])
            for z, x, p in zip(text, self.clean, prediction, strict=True) if likely else ():
                expected = q @ p
                some = q[:, x] > 0
                kl = (q[some, x] * np.log(q[some, x] / expected[some])).sum()
                r = q[z, x] / expected[z]
                total -= likely * jumps[z] / q[z, x] * (kl + r - np.log(r) - 1)
        return total

    def log_likelihood(self, mixing, edge=1e-6):
        """The log-probability of the clean text after the reverse process, by its differential equation."""
        size, length = len(self.seen) - 1, len(self.positions)
        index = {text: number for number, text in enumerate(self.texts)}
        prior, _ = transition(mixing, 1 - edge, size)
        start = np.array([np.prod([prior[z].mean() for z in text]) for text in self.texts])
        neighbors = np.array(
            [
                [[index[(*text[:i], y, *text[i + 1 :])] for y in range(size + 1)] for i in range(length)]
                for text in self.texts
            ]
        )
        seen = np.array(self.texts)

        def slope(time, share):
            q, jumps = transition(mixing, 1 - time, size)
            expected = self.prediction @ q.T  # [texts, L, W]
            here = np.take_along_axis(expected, seen[..., None], 2)
            rates = np.where(here > 0, jumps[seen][..., None] * expected / np.maximum(here, 1e-300), 0)
            flow = share[:, None, None] * rates
            change = np.zeros_like(share)
            np.add.at(change, neighbors, flow)
            return change - flow.sum((1, 2))

        found = solve_ivp(slope, (edge, 1 - edge), start, method="LSODA", rtol=1e-8, atol=1e-12)
        return np.log(found.y[index[tuple(self.clean)], -1])


@pytest.fixture(scope="module")
def toys():
    with torch.no_grad():
        row = enumeration.random_row(4, seed=2)
        lm = toy_lm(attention=PATTERNS["bidirectional"])
        return lm, row, Enumerated(lm, row, [2, 3])


def test_the_definitions_give_the_known_likelihood_of_masked_noise(toys):
    lm, row, known = toys
    maskable = (torch.arange(4) >= 2)[None]
    exact = exact_log_likelihood(lm, row[None], None, maskable).item()
    assert known.log_likelihood(Mixing("masked")) == pytest.approx(exact, abs=1e-4)
    table = enumeration.conditionals(lm, row, [2, 3])
    assert known.bound(Mixing("masked")) == pytest.approx(enumeration.lower_bound(table), abs=1e-6)


@partly_slow("mixing", MIXINGS, 0, 1, ids=str)
def test_the_bound_lies_below_the_exact_likelihood(toys, mixing):
    *_, known = toys
    assert known.bound(mixing) < known.log_likelihood(mixing) - 1e-3


def estimates(lm, row, mixing, count, **plan):
    """Estimates of the bound, each of one row of views."""
    maskable = (torch.arange(len(row)) >= 2)[None]
    group = noise_groups(lm, maskable, None)
    draw, noise = (
        MaskRNG(0, torch.arange(count)),
        Noise(get_schedule(plan.pop("schedule", "linear")), low=1e-5),
    )
    every = count, len(row)
    views = mixed_views(
        row.expand(every), group.expand(every), draw, noise, mixing, RandomTokens.of(lm), **plan
    )
    with torch.no_grad():
        found = view_log_probs(lm, row.expand(every), None, views, chunk=20_000)
    return sum_over_views(found, views).sum(1).double()


PLANS = [
    {},
    {"num_views": 2, "complementary": True},
    {"num_views": 2, "exact_count": True},
    {"num_views": 3},
    {"num_views": 4, "exact_count": True, "complementary": True},
    {"schedule": "cosine"},
]


@partly_slow("plan", PLANS, 0, ids=str)
@partly_slow("mixing", MIXINGS, 1, ids=str)
@partly_slow("kind", PATTERNS, 0)
def test_the_mean_of_the_estimates_is_the_bound(kind, mixing, plan):
    lm = toy_lm(attention=PATTERNS[kind]).with_noise(mixing.name, mixing.p_uniform)
    row, count = enumeration.random_row(4, seed=2), 8_000
    with torch.no_grad():
        groups = enumeration.groups(lm, 2, 4)
        expected = sum(Enumerated(lm, row, positions).bound(mixing) for positions in groups)
    found = estimates(lm, row, mixing, count, **plan)
    error = (found.mean() - expected) / (found.std() / count**0.5)
    assert abs(error) < 4.5


@partly_slow("samples", [1, 2, 3, 8], 0, 2)
@partly_slow("mixing", MIXINGS, 1, ids=str)
def test_the_bound_of_a_completion_is_estimated_without_bias(mixing, samples):
    """And its standard error is right."""
    lm = toy_lm(attention=PATTERNS["bidirectional"]).with_noise(mixing.name, mixing.p_uniform)
    row, count = enumeration.random_row(4, seed=2), 4000
    maskable = (torch.arange(4) >= 2).expand(count, -1)
    with torch.no_grad():
        expected = Enumerated(lm, row, [2, 3]).bound(mixing)
        draw = MaskRNG(0, torch.arange(count))
        found = elbo(lm, row.expand(count, -1), None, maskable, draw, samples=samples)
    values = found.value_B.double()
    assert abs((values.mean() - expected) / (values.std() / count**0.5)) < 4.5
    if samples == 8:
        variance = found.standard_error_B.double().square().mean().item()
        assert variance == pytest.approx(values.var().item(), rel=0.2)
    else:
        assert found.standard_error_B.isnan().all()


PUBLISHED = json.loads((Path(__file__).parent / "data" / "published_mixing.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED["of"])
def test_losses_are_those_of_the_published_code(name):
    """The authors' losses and gradients, for the same logits and noised tokens (the data names the code)."""
    record, time_B = PUBLISHED["of"][name], torch.tensor(PUBLISHED["time"], dtype=torch.float64)
    p_uniform = record["p_uniform"]
    mixing = Mixing("uniform") if p_uniform is None else Mixing("hybrid", p_uniform)
    kept, step = time_B, 1e-6
    speed = torch.ones_like(time_B)
    if p_uniform is not None:  # GIDD's times are not noise levels
        kept, above, below = (torch.tensor(gidd(time_B.numpy() + d, p_uniform)[0]) for d in (0, step, -step))
        kept, speed = 1 - kept, (below - above) / (2 * step)
    clean_BT, seen_BT = torch.tensor(PUBLISHED["clean"]), torch.tensor(record["seen"])
    logits = torch.tensor(PUBLISHED["logits"], dtype=torch.float64)[..., : 8 + (p_uniform is not None)]
    tokens = RandomTokens(8, (), 8)
    level_B1T = kept[:, None, None].expand(-1, 1, clean_BT.shape[1])
    hidden, kind = (seen_BT != clean_BT)[:, None], torch.where(seen_BT == 8, 0.0, 1.0)[:, None]
    found, weight = replaced(
        clean_BT, hidden, level_B1T, kind, ((seen_BT + 0.5) / 8)[:, None], mixing, tokens
    )
    assert found.ids_BMT[:, 0].equal(seen_BT)
    logits.requires_grad_()
    rows = logits if p_uniform is None else logits.index_fill(-1, torch.tensor(8), -torch.inf)
    planes = (each.flatten() for each in found)
    (value,) = negative_divergence(rows.flatten(0, 1), clean_BT.flatten(), *planes, (1.0, 8))
    loss = -(weight[:, 0] * speed[:, None]).flatten() * value
    loss.sum().backward()
    assert loss.tolist() == pytest.approx(np.ravel(record["loss"]).tolist(), rel=1e-6, abs=1e-8)
    assert logits.grad.sum((0, 1)).tolist() == pytest.approx(record["gradient"], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("noise", ["masked", "uniform"])
def test_views_of_another_kind_of_noise_are_refused(noise):
    row, group = torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)
    lm, draw = toy_lm(), MaskRNG(0, torch.arange(1))
    views = random_views(group, draw, Noise())
    if noise == "masked":
        views = mixed_views(row, group, draw, Noise(), Mixing("uniform"), RandomTokens.of(lm))
    with raises(ConfigError, where="views"):
        view_log_probs(lm.with_noise(noise), row, None, views)


def test_an_exact_likelihood_is_refused():
    lm, row = toy_lm().with_noise("uniform"), enumeration.random_row(4)[None]
    with raises(GenerationError, where="estimator='exact'"):
        exact_log_likelihood(lm, row, None, torch.ones_like(row).bool())


def test_pairs_of_an_odd_number_are_refused():
    group, draw = torch.zeros(1, 4, dtype=torch.long), MaskRNG(0, torch.arange(1))
    plan = (group, group, draw, Noise(), Mixing("uniform"), RandomTokens(6, (), 6))
    with raises(ConfigError, where="num_views"):
        mixed_views(*plan, num_views=3, complementary=True)
