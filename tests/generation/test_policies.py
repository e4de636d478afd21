"""Tokens are drawn from the exact distribution, filters keep the most likely ones, and each remasking ranks by
its measure."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.errors import raises
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import RngStream, uniform
from unmask.errors import ConfigError, GenerationError
from unmask.generation.policies import (
    GivenTokens,
    best,
    count_remasked,
    decide,
    draw,
    first_by_priority,
    keep_likely,
    num_accepted,
    penalize_and_ban,
)

ORDERS = get_args(SamplerConfig.model_fields["remasking"].annotation)
LAST = 1 - 2.0**-53  # the greatest number that `uniform` gives
seeds = st.integers(0, 2**32)
noises = st.sampled_from([0.0, 2.0**-53, LAST]) | st.floats(0, LAST)


def random_logits(seed: int, rows: int, width: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Logits [rows, width] in which one token, like the mask token, is never predicted."""
    logits_NV = 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    logits_NV[:, seed % width] = -torch.inf
    return logits_NV


def decide_rows(logits_NV: torch.Tensor, first_key: int = 0, **settings):
    rows = len(logits_NV)
    zero_N = torch.zeros(rows, dtype=torch.long)
    return decide(
        logits_NV, SamplerConfig(**settings), torch.arange(first_key, first_key + rows), zero_N, zero_N
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_probability_one_half_is_drawn_half_of_the_time(dtype):
    """Low-precision noise fails here: 2,000 unlikely tokens together are as likely as the likely one."""
    tail, rows, rounds = 2000, 2000, 8
    logits_NV = torch.zeros(1, tail + 1, dtype=dtype)
    logits_NV[:, 700] = math.log(tail)
    counts = torch.zeros(tail + 1)
    for round_ in range(rounds):
        decision = decide_rows(logits_NV.expand(rows, -1), first_key=round_ * rows, temperature=1.0)
        counts += torch.bincount(decision.token_N, minlength=tail + 1)
        torch.testing.assert_close(
            decision.log_prob_N.exp(), torch.where(decision.token_N == 700, 0.5, 0.5 / tail).to(dtype)
        )
    total = rows * rounds
    assert abs(counts[700] - total / 2) < 5 * math.sqrt(total / 4)
    tail_counts = torch.cat([counts[:700], counts[701:]])
    expected = tail_counts.sum() / tail
    chi_square = ((tail_counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - (tail - 1)) < 5 * math.sqrt(2 * (tail - 1))


@given(
    st.lists(st.sampled_from([0.0, 5e-324]) | st.floats(0, 1e3), min_size=1, max_size=12).filter(any), noises
)
def test_tokens_of_weight_zero_are_never_drawn(weights, noise):
    token = draw(
        torch.tensor([weights], dtype=torch.float64), torch.tensor([noise], dtype=torch.float64)
    ).item()
    assert weights[token] > 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any))
def test_evenly_spaced_noise_draws_tokens_in_proportion_to_their_weights(weights):
    grain = 16
    uniform_N = (torch.arange(grain * sum(weights), dtype=torch.float64) + 0.5) / (grain * sum(weights))
    tokens_N = draw(torch.tensor(weights, dtype=torch.float64).expand(len(uniform_N), -1), uniform_N)
    assert torch.bincount(tokens_N, minlength=len(weights)).tolist() == [grain * weight for weight in weights]
    assert (tokens_N.diff() >= 0).all()


def test_a_number_at_a_boundary_draws_the_next_token_that_has_a_weight():
    weights_NV = torch.tensor([[0.0, 0.0, 1.0, 0.0, 1.0, 0.0]], dtype=torch.float64).expand(3, -1)
    assert draw(weights_NV, torch.tensor([0.0, 0.5, LAST], dtype=torch.float64)).tolist() == [2, 4, 4]


@given(seeds, st.integers(1, 700), st.integers(1, 40))
def test_best_is_the_first_of_equal_maxima(seed, width, values):
    logits_NV = torch.randint(values, (5, width), generator=torch.Generator().manual_seed(seed)).double()
    logits_NV[0, : width // 2] = -torch.inf
    assert best(logits_NV).tolist() == [row.index(max(row)) for row in logits_NV.tolist()]


@given(seeds, st.integers(2, 9), st.integers(0, 10), st.floats(0.01, 1.0))
def test_filters_keep_the_most_likely(seed, width, top_k, top_p):
    logits_NV = random_logits(seed, 3, width)
    kept_NV = keep_likely(logits_NV.softmax(-1), top_k, top_p)
    for logits_V, kept_V in zip(logits_NV, kept_NV, strict=True):
        probs = logits_V.softmax(-1).tolist()
        first = sorted(range(width), key=lambda token: -probs[token])[: top_k or width]
        whole = sum(probs[token] for token in first)
        expected, mass = [0.0] * width, 0.0
        for token in first:
            if mass < top_p * whole:
                expected[token] = probs[token]
            mass += probs[token]
        assert kept_V.tolist() == pytest.approx(expected, abs=1e-15)
        assert kept_V.argmax() == logits_V.argmax() and kept_V.max() > 0


@given(
    seeds,
    st.integers(1, 12),
    st.sampled_from([0.15, 0.5, 0.85, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.2, 1.0]),
)
def test_filters_are_those_of_transformers(seed, top_k, top_p, min_p):
    logits_NV = random_logits(seed, 3, 9)
    theirs_NV = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits_NV))
    theirs_NV = MinPLogitsWarper(min_p)(None, theirs_NV)
    assert torch.equal(keep_likely(logits_NV.softmax(-1), top_k, top_p, min_p) > 0, theirs_NV > -torch.inf)


def test_filters_keep_the_first_of_equally_likely_tokens():
    weight_NV = torch.tensor([[1.0, 3.0, 3.0, 3.0, 1.0]])
    assert (keep_likely(weight_NV, 2, 1.0) > 0).tolist() == [[False, True, True, False, False]]
    assert (keep_likely(weight_NV, 0, 0.2) > 0).tolist() == [[False, True, False, False, False]]
    assert (keep_likely(weight_NV, 0, 0.5) > 0).tolist() == [[False, True, True, False, False]]


@given(
    seeds,
    st.sampled_from([0.0, 1.0]),
    st.sampled_from(ORDERS),
    st.booleans(),
    st.sets(st.integers(0, 4), min_size=1, max_size=3),
)
def test_the_tokens_to_reveal_last_have_no_confidence(seed, temperature, remasking, filtered, last):
    """The order of the others stays, by the confidence they had; with `filtered_confidence`, by that among
    the other tokens alone."""
    logits_NV = random_logits(seed, 6, 5)
    settings = {
        "remasking": remasking,
        "temperature": temperature,
        "filtered_confidence": filtered and remasking not in ("random", "left_to_right"),
    }
    before, after = (
        decide_rows(logits_NV, **settings),
        decide_rows(logits_NV, **settings, reveal_last=sorted(last)),
    )
    assert torch.equal(after.token_N, before.token_N) and torch.equal(after.log_prob_N, before.log_prob_N)
    expected_N = before.priority_N
    if settings["filtered_confidence"]:
        others_NV = logits_NV.index_fill(1, torch.tensor(sorted(last)), -torch.inf)
        # temperature 0 counts as 1
        expected_N = decide_rows(others_NV, remasking=remasking, filtered_confidence=True).priority_N
        if remasking == "low_confidence":
            expected_N = others_NV.log_softmax(-1).gather(1, after.token_N[:, None])[:, 0].float()
    is_last_N = torch.tensor([token in last for token in after.token_N.tolist()])
    assert (after.priority_N[is_last_N] == torch.finfo(torch.float32).min).all()
    torch.testing.assert_close(after.priority_N[~is_last_N], expected_N[~is_last_N])


@pytest.mark.parametrize("remasking", ["low_confidence", "margin", "entropy"])
def test_a_token_without_a_confidence_is_revealed_last(remasking):
    """A given token need not be among those that the filters keep, and these may be all of `reveal_last`."""
    config = SamplerConfig(remasking=remasking, filtered_confidence=True, top_k=1, reveal_last=[0])
    logits_NV, zero_N = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), torch.zeros(2, dtype=torch.long)
    given = GivenTokens(torch.tensor([1, 2]), None, None, logits_NV)
    priority_N = decide(logits_NV, config, zero_N, zero_N, zero_N, given=given).priority_N
    assert priority_N[0] == torch.finfo(torch.float32).min < priority_N[1]


@pytest.mark.parametrize(
    "rule", [{"threshold": 1e-9}, {"factor": 0.5}, {"remasking": "entropy", "entropy_bound": 50.0}]
)
def test_parallel_rules_reveal_the_last_tokens_last(rule):
    """All others at once; where no other is hidden, one at a time."""
    config = SamplerConfig(reveal_last=[0], **rule)
    logits_NV = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    zero_N = torch.zeros(4, dtype=torch.long)
    priority_N = decide(logits_NV, config, zero_N, zero_N, zero_N).priority_N
    count_B = num_accepted(priority_N[None], config)
    assert first_by_priority(priority_N[None], count_B).tolist() == [[False, True, False, True]]
    priority_N[[1, 3]] = -torch.inf
    assert first_by_priority(priority_N[None], num_accepted(priority_N[None], config)).tolist() == [
        [True, False, False, False]
    ]


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}])
def test_narrow_settings_are_greedy(settings):
    logits_NV = random_logits(3, 40, 11)
    decision = decide_rows(logits_NV, **({"temperature": 1.0} | settings))
    assert torch.equal(decision.token_N, logits_NV.argmax(-1))


@given(
    seeds,
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from(ORDERS),
    st.integers(0, 4),
    st.floats(0.05, 1),
)
def test_log_probs_are_of_the_model_under_all_settings(seed, temperature, remasking, top_k, top_p):
    logits_NV = random_logits(seed, 5, 7)
    decision = decide_rows(logits_NV, remasking=remasking, temperature=temperature, top_k=top_k, top_p=top_p)
    expected_N = torch.stack(
        [row_V.log_softmax(-1)[token] for row_V, token in zip(logits_NV, decision.token_N, strict=True)]
    )
    torch.testing.assert_close(decision.log_prob_N, expected_N)
    assert decision.log_prob_N.isfinite().all() and decision.priority_N.isfinite().all()
    if temperature == 0:
        assert torch.equal(decision.token_N, logits_NV.argmax(-1))


@given(seeds, st.sampled_from([0.0, 1.0]))
def test_priorities(seed, temperature):
    logits_NV = random_logits(seed, 6, 5)
    by_order = {
        remasking: decide_rows(logits_NV, remasking=remasking, temperature=temperature)
        for remasking in ORDERS
    }
    probs = logits_NV.softmax(-1).tolist()
    best = [sorted(row, reverse=True) for row in probs]
    expected = {
        "low_confidence": by_order["low_confidence"].log_prob_N.tolist(),
        "margin": [row[0] - row[1] for row in best],
        "entropy": [sum(p * math.log(p) for p in row if p > 0) for row in probs],
        "random": uniform(0, torch.arange(6), stream=RngStream.ORDER).tolist(),
        "left_to_right": [0.0] * 6,  # ties go to the lower position
    }
    for remasking, decision in by_order.items():
        assert decision.priority_N.tolist() == pytest.approx(expected[remasking])
        # the remasking orders, it does not choose tokens
        assert torch.equal(decision.token_N, by_order["random"].token_N)


@given(
    seeds,
    st.sampled_from([0.0, 0.6, 1.7]),
    st.sampled_from([0, 3]),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([None, [1, 2, 4, 5]]),
)
def test_filtered_priorities_are_those_of_the_filtered_distribution(seed, temperature, top_k, top_p, allowed):
    """Ye et al. 2025 (Dream): after temperature and filters, and at temperature 0 after the filters alone."""
    logits_NV = random_logits(seed, 6, 6)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "allowed_tokens": allowed}
    allowed_V = torch.tensor([allowed is None or token in allowed for token in range(6)])
    kept_NV = keep_likely(
        (logits_NV.masked_fill(~allowed_V, -torch.inf) / (temperature or 1.0)).softmax(-1), top_k, top_p
    )
    probs = (kept_NV / kept_NV.sum(-1, keepdim=True)).tolist()
    for remasking in ("low_confidence", "margin", "entropy"):
        decision = decide_rows(
            logits_NV, remasking=remasking, filtered_confidence=True, trace=True, **settings
        )
        best = [sorted(row, reverse=True) for row in probs]
        expected = {
            "low_confidence": [
                math.log(row[token]) for row, token in zip(probs, decision.token_N.tolist(), strict=True)
            ],
            "margin": [row[0] - row[1] for row in best],
            "entropy": [sum(p * math.log(p) for p in row if p > 0) for row in probs],
        }
        assert decision.priority_N.tolist() == pytest.approx(expected[remasking], abs=1e-6)
        plain = decide_rows(logits_NV, remasking=remasking, trace=True, **settings)
        for field in ("token_N", "log_prob_N", "sampled_log_prob_N", "entropy_N"):  # only the order changes
            assert torch.equal(getattr(decision, field), getattr(plain, field))


@pytest.mark.parametrize("remasking", ORDERS)
def test_rounding_does_not_rank_equal_positions(remasking):
    """All positions of an empty canvas can be equal: their order must not depend on the last bit of a
    float64."""
    logits_NV = random_logits(1, 1, 6).repeat(5, 1) * (1 + torch.arange(5)[:, None] * 2.0**-52)
    priorities = decide_rows(logits_NV, remasking=remasking).priority_N
    assert priorities.dtype == torch.float32
    assert len(set(priorities.tolist())) == (5 if remasking == "random" else 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_predictions_are_an_error(temperature):
    logits_NV = random_logits(0, 3, 6)
    logits_NV[1, 4] = torch.nan
    with raises(GenerationError, where="model"):
        decide_rows(logits_NV, temperature=temperature)


def test_noise_is_keyed_by_sequence_step_position_and_seed():
    def tokens(seed=0, key=0, step=0, position=0):
        settings = SamplerConfig(temperature=1.0, seed=seed)
        of = [torch.tensor(value).expand(3) for value in (key, step, position)]
        decision = decide(torch.zeros(3, 10**5), settings, *of)
        # nothing else matters, such as the place in the batch
        assert len(set(decision.token_N.tolist())) == 1
        return decision.token_N[0].item()

    assert len({tokens(), tokens(seed=1), tokens(key=1), tokens(step=1), tokens(position=1)}) == 5
    assert tokens() == tokens()


@given(
    st.lists(
        st.lists(st.sampled_from([-math.inf, 0.0, 0.5, 1.0]), min_size=5, max_size=5), min_size=1, max_size=4
    ),
    st.data(),
)
def test_the_first_by_priority_and_then_by_position(priorities, data):
    counts = [data.draw(st.integers(0, 6)) for _ in priorities]
    chosen_BT = first_by_priority(torch.tensor(priorities), torch.tensor(counts))
    for row, count, chosen_T in zip(priorities, counts, chosen_BT, strict=True):
        ranked = sorted(
            (position for position in range(5) if row[position] > -math.inf),
            key=lambda position: -row[position],
        )
        assert chosen_T.nonzero().flatten().tolist() == sorted(ranked[:count])


def priorities(rows: list[list[float]]) -> torch.Tensor:
    """Priorities [B, W], padded with -inf for positions that are not hidden."""
    width = max(map(len, rows)) + 1
    return torch.tensor([row + [-math.inf] * (width - len(row)) for row in rows])


@given(
    st.lists(
        st.lists(st.sampled_from([0.95, 0.9, 0.9 - 1e-6, 0.5, 0.5 - 1e-6]), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    )
)
def test_a_threshold_reveals_all_that_reach_it_or_exactly_one(probs):
    """It does not reveal all positions that nearly equal the best (Fast-dLLM, Wu et al. 2025)."""
    priority_BW = priorities([[math.log(p) for p in row] for row in probs])
    expected = [max(1, sum(p >= 0.9 - 1e-9 for p in row)) for row in probs]
    assert num_accepted(priority_BW, SamplerConfig(threshold=0.9 - 1e-9)).tolist() == expected


def test_a_factor_raises_the_bar_for_each_further_token():
    """Of n revealed together the n-th must be at least 1 - factor / (n + 1) probable."""
    priority_BW = priorities(
        [[math.log(p) for p in row] for row in ([0.9, 0.75, 0.5], [0.9, 0.6, 0.76], [0.1, 0.1])]
    )
    assert num_accepted(priority_BW, SamplerConfig(factor=1.0)).tolist() == [2, 2, 1]


def test_an_entropy_bound_holds_for_the_sum():
    priority_BW = priorities([[-0.1, -0.3, -0.2], [-0.05, -0.05], [-2.0, -3.0]])
    assert num_accepted(priority_BW, SamplerConfig(remasking="entropy", entropy_bound=0.35)).tolist() == [
        2,
        2,
        1,
    ]


tenths = st.integers(0, 40).map(lambda number: number / 10)


@given(st.lists(tenths, min_size=1, max_size=7), tenths.map(lambda bound: bound + 0.05))
def test_the_rule_of_the_eb_sampler_leaves_the_largest_entropy_out(entropies, bound):
    """The largest set whose entropies sum to at most the bound without their maximum (Ben-Hamu et al. 2025),
    over all sets."""
    sets = [
        chosen for size in range(1, len(entropies) + 1) for chosen in itertools.combinations(entropies, size)
    ]
    largest = max(len(chosen) for chosen in sets if sum(chosen) - max(chosen) <= bound)
    config = SamplerConfig(remasking="entropy", entropy_bound=bound, entropy_rule="sum-minus-max")
    assert num_accepted(priorities([[-entropy for entropy in entropies]]), config).tolist() == [largest]
    with pytest.raises(ConfigError) as raised:
        SamplerConfig(remasking="entropy", entropy_rule="sum-minus-max")
    assert raised.value.where == "entropy_rule"


def test_tokens_that_are_revealed_last_wait_for_the_eb_sampler_too():
    lowest = torch.finfo(torch.float32).min
    config = SamplerConfig(remasking="entropy", entropy_bound=1.0, entropy_rule="sum-minus-max")
    assert num_accepted(
        priorities([[-0.1, lowest, lowest], [-torch.inf, lowest, lowest]]), config
    ).tolist() == [1, 1]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.floats(0, 0.99))
def test_remasking_hides_only_revealed_tokens_and_never_at_the_last_step(counts, remask):
    again = [count_remasked(counts, step, remask) for step in range(len(counts))]
    assert again[0] == again[-1] == 0
    hidden = sum(counts)
    for step, count in enumerate(counts):
        assert 0 <= again[step] <= sum(counts[:step]) and count + again[step] <= hidden
        hidden -= count


@given(seeds, st.sampled_from([1.0, 0.7, 1.4]), st.sampled_from([0, 3]), st.sampled_from([1.0, 0.6]))
def test_records_are_those_of_the_distributions(seed, temperature, top_k, top_p):
    logits_NV = random_logits(seed, 4, 7)
    decision = decide_rows(logits_NV, temperature=temperature, top_k=top_k, top_p=top_p, trace=True)
    probs_NV = logits_NV.softmax(-1)
    torch.testing.assert_close(decision.entropy_N, torch.special.entr(probs_NV).sum(-1))
    kept_NV = keep_likely((logits_NV / temperature).softmax(-1), top_k, top_p)
    expected_N = (
        (kept_NV / kept_NV.sum(-1, keepdim=True)).log().gather(1, decision.token_N[:, None]).squeeze(1)
    )
    torch.testing.assert_close(decision.sampled_log_prob_N, expected_N)
    greedy = decide_rows(logits_NV, trace=True)
    assert (greedy.sampled_log_prob_N == 0).all()


@given(seeds, st.sampled_from([0.0, 1.0]))
def test_only_allowed_tokens_are_drawn(seed, temperature):
    logits_NV = random_logits(seed, 30, 9)
    gone = seed % 9
    allowed = [token for token in (1, 2, 5) if token != gone]
    decision = decide_rows(logits_NV, temperature=temperature, allowed_tokens=[1, 2, 5], forbidden_tokens=[7])
    assert set(decision.token_N.tolist()) <= set(allowed)
    decision = decide_rows(logits_NV, temperature=temperature, forbidden_tokens=[0, 3])
    assert not {0, 3, gone} & set(decision.token_N.tolist())
    expected_N = logits_NV.log_softmax(-1).gather(1, decision.token_N[:, None]).squeeze(1)
    torch.testing.assert_close(decision.log_prob_N, expected_N)  # still the model's own


def test_repetition_is_penalized_as_transformers_does_it():
    logits_NV = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids_NT = torch.randint(0, 11, (5, 6), generator=torch.Generator().manual_seed(1))
    present_NV = torch.zeros(5, 11, dtype=torch.bool).scatter_(1, ids_NT, True)
    expected_NV = RepetitionPenaltyLogitsProcessor(1.7)(ids_NT, logits_NV.clone())
    torch.testing.assert_close(
        penalize_and_ban(logits_NV, SamplerConfig(repetition_penalty=1.7), present_NV), expected_NV
    )


@pytest.mark.parametrize("width", [1, 255, 256, 257, 700])
def test_drawing_by_groups_covers_the_whole_vocabulary(width):
    """Evenly spaced noise draws each token once, in order, for a vocabulary of any size."""
    uniform_N = (torch.arange(width, dtype=torch.float64) + 0.5) / width
    for dtype in (torch.float32, torch.float64):
        assert draw(torch.ones(width, width, dtype=dtype), uniform_N).tolist() == list(range(width))
