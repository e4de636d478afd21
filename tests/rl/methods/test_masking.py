"""Masking strategies replace a method's plan: by the same rules, with the weights that the method's loss
needs."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations

import pytest
import torch

from tests.errors import raises
from tests.generation.cases import PATTERNS, every_pattern
from tests.helpers import each_once, partly_slow
from tests.rl.methods.rollouts import keys, made_up, rollout_of, stopping
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, equal, settings, weights
from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import MaskRNG, Views
from unmask.errors import ConfigError, TrainingError
from unmask.rl.config import GRPOConfig
from unmask.rl.methods import METHODS, get_method, masking
from unmask.rl.methods.base import settings_of
from unmask.rl.methods.masking import (
    STRATEGIES,
    Adaptive,
    Diffusion,
    MaskingStrategy,
    Optimized,
    find_masking,
    weighted_views,
    weights_by_rate,
)
from unmask.rl.trainer import GRPOTrainer

PARTS = ("hidden_BMT", "target_BMT", "weight_BMT")
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
REPLACEABLE = [name for name, method in METHODS.items() if not method.separable]


def config(**more):
    """Settings with three views, if the method counts them."""
    counted = more.get("masking") not in ("coupled", "optimized") or "samples" in settings_of(
        get_method(more["method"])
    )
    return GRPOConfig(
        **{"output_dir": "unused", "use_cpu": True} | ({"samples": 3} if counted else {}) | more
    )


def same(one: Views, other: Views) -> bool:
    return all(torch.equal(getattr(one, part), getattr(other, part)) for part in PARTS)


@cache
def sampled(attention="bidirectional", block_size=None):
    return rollout_of(
        stopping(attention, block_size), block_size=2 if attention == "bidirectional" else None
    )[1]


@every_strategy
@every_pattern
def test_only_the_completion_is_scored_where_it_is_hidden_and_all_behind_it_is_hidden(
    name, attention, block_size
):
    rollout = sampled(attention, block_size)
    assert rollout.beyond_BT.any()
    settings = config(masking=name, method="coupled-grpo")
    views = find_masking(settings).plan(rollout, MaskRNG(0, keys(rollout)), settings, 0.5)
    assert views.target_BMT.any((1, 2)).all() and (views.weight_BMT > 0).equal(views.target_BMT)
    assert not (views.target_BMT & ~rollout.completion_BT[:, None]).any()
    assert torch.equal(views.hidden_BMT, views.target_BMT | rollout.beyond_BT[:, None])


@every_strategy
def test_plans_follow_from_the_completion_and_its_key_alone(name):
    rollout, settings = sampled(), config(masking=name, method="coupled-grpo")
    strategy, key_B = find_masking(settings), keys(rollout) * 1000
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate()
    views = strategy.plan(rollout, MaskRNG(0, key_B), settings, 0.5)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert same(views, strategy.plan(rollout, MaskRNG(0, key_B), settings, 0.5))
    for row in range(len(key_B)):  # by itself, by a strategy that has seen nothing yet
        at = slice(row, row + 1)
        alone = find_masking(settings).plan(rollout.select(at), MaskRNG(0, key_B[at]), settings, 0.5)
        assert same(alone, views.select(at))
    others = {
        str(strategy.plan(rollout, MaskRNG(0, key_B, iteration), settings, 0.5).hidden_BMT.tolist())
        for iteration in range(3)
    }
    assert len(others) == 3


@each_once(
    "attention, block_size, name, method",
    PATTERNS,
    [("diffusion", "bgpo"), ("block", "spg"), ("coupled", "coupled-grpo"), ("optimized", "espo")],
)
def test_a_strategy_is_the_plan_of_the_method_that_it_is_named_after(name, method, attention, block_size):
    rollout, settings = sampled(attention, block_size), config(masking=name, method=method)
    draw = MaskRNG(3, keys(rollout), 1)  # below the number of patterns
    # strategies hide nothing of prompts
    own = config(method=method, **({"prompt_mask_rate": 0.0} if method == "spg" else {}))
    assert same(
        find_masking(settings).plan(rollout, draw, settings, 0.5), own.build_method().plan(rollout, draw)
    )


@every_pattern
def test_tokens_weigh_what_the_loss_takes_them_to_weigh(attention, block_size):
    rollout = sampled(attention, block_size)
    for method in REPLACEABLE:
        settings = config(method=method)
        views = Diffusion().plan(rollout, MaskRNG(0, keys(rollout)), settings, 0.5)
        assert views.count == 3
        if get_method(method).estimator == "token":
            torch.testing.assert_close(views.weight_BMT.sum(1), views.target_BMT.any(1).float())
            assert (
                (views.weight_BMT.amax(1) == views.weight_BMT.where(views.target_BMT, 1.0).amin(1))
                .logical_or(~views.target_BMT.any(1))
                .all()
            )
        elif get_method(method).estimator == "mean":
            torch.testing.assert_close(views.weight_BMT.sum(2), torch.ones(len(rollout.ids_BT), 3))
        else:  # every view of k of L tokens adds up to L: to the completion, whatever is hidden of each group
            length_BM = rollout.completion_BT.sum(1, keepdim=True).expand(-1, 3)
            torch.testing.assert_close(views.weight_BMT.sum(2) * 3, length_BM.float())


@every_pattern
@pytest.mark.parametrize("progress", [0.0, 0.25, 1.0])
def test_the_mask_rate_follows_progress(attention, block_size, progress):
    rollout = sampled(attention, block_size)
    settings = config(masking="adaptive", mask_rate=[0.2, 1.0])
    group_BT = rollout.noised_groups_BT
    views = find_masking(settings).plan(rollout, MaskRNG(0, keys(rollout)), settings, progress)
    weighted = Adaptive(0.2, 1.0, adaptive_loss=True).plan(
        rollout, MaskRNG(0, keys(rollout)), settings, progress
    )
    assert torch.equal(views.target_BMT, weighted.target_BMT)
    for row, group_T in enumerate(group_BT):
        for group in group_T.unique()[group_T.unique() >= 0]:
            size = int((group_T == group).sum())
            count = max(1, round((0.2 + 0.8 * progress) * size))
            assert views.target_BMT[row, :, group_T == group].sum(1).tolist() == [count] * 3
            target_MT = weighted.target_BMT[row] & (group_T == group)
            assert weighted.weight_BMT[row][target_MT].tolist() == pytest.approx(
                [size / count / 3] * 3 * count
            )


@pytest.mark.parametrize("method", REPLACEABLE)
def test_optimized_plans_are_those_of_the_key_modulo_the_patterns(method, monkeypatch):
    """They are equal bit for bit in any order of calls: the table is only a cache."""
    rate = {"prompt_mask_rate": 0.5} if "prompt_mask_rate" in settings_of(get_method(method)) else {}
    settings = config(method=method, num_iterations=2, **rate)
    calls, drawn = [], masking.drawn_patterns
    monkeypatch.setattr(masking, "drawn_patterns", lambda *place: calls.append(place) or drawn(*place))
    strategy = Optimized(patterns=4)
    short, long = sampled(), rollout_of(stopping("bidirectional"), max_new_tokens=32)[1]
    for rollout in (short, long, short.select(slice(2, 4)), long):
        key_B = torch.arange(len(rollout.ids_BT)) + 10**12
        for iteration in (0, 1):
            views = strategy.plan(rollout, MaskRNG(7, key_B, iteration), settings, 0.5)
            assert same(views, settings.build_method().plan(rollout, MaskRNG(7, key_B % 4, iteration)))
    stats = strategy.get_cache_stats()
    assert len(set(calls)) == len(calls) == stats["misses"] == stats["size"] > 0
    assert stats["hits"] >= stats["misses"] and stats["rate"] == stats["hit_rate"] == stats["hits"] / (
        stats["hits"] + stats["misses"]
    )


@each_once(
    "method, attention, block_size",
    [name for name in REPLACEABLE if get_method(name).estimator == "token"],
    PATTERNS,
)
def test_with_adaptive_loss_optimized_hides_the_same_and_each_token_weighs_one_over_its_mask_rate(
    method, attention, block_size
):
    rollout = sampled(attention, block_size)
    plain, weighted = (
        config(method=method, masking="optimized", adaptive_loss=given) for given in (False, True)
    )
    draw = MaskRNG(0, keys(rollout), 1)
    views, own = (find_masking(settings).plan(rollout, draw, settings, 0.5) for settings in (weighted, plain))
    assert views.hidden_BMT.equal(own.hidden_BMT) and views.target_BMT.equal(own.target_BMT)
    assert views.weight_BMT.dtype == torch.float32 and not views.weight_BMT[~views.target_BMT].any()
    group_BT = rollout.noised_groups_BT
    for row, view, position in views.target_BMT.nonzero().tolist():
        there_T = group_BT[row] == group_BT[row, position]
        rate = float(views.target_BMT[row, view, there_T].sum() / there_T.sum())
        assert float(views.weight_BMT[row, view, position]) == pytest.approx(1 / rate / views.count)


class EverySet(MaskingStrategy):
    """Every number k of hidden tokens equally often, and every set of k tokens equally often."""

    def plan(self, rollout, draw, config, progress):
        [position] = {tuple(row.nonzero().flatten().tolist()) for row in rollout.completion_BT}
        times = math.lcm(*(math.comb(len(position), count) for count in range(1, len(position) + 1)))
        sets = []
        for count in range(1, len(position) + 1):
            sets += list(combinations(position, count)) * (times // math.comb(len(position), count))
        hidden_MT = torch.zeros(len(sets), rollout.ids_BT.shape[1], dtype=torch.bool)
        for view, chosen in enumerate(sets):
            hidden_MT[view, list(chosen)] = True
        return weighted_views(rollout, hidden_MT.expand(len(rollout.ids_BT), -1, -1), config)


def test_weights_of_one_over_the_mask_rate_estimate_the_elbo_without_bias():
    """Compared with the mean over all orders of the summed log-probabilities, each with the later tokens of
    the order hidden."""
    rollout = sampled().select(slice(0, 1))
    length = 4
    completion_BT = torch.zeros_like(rollout.completion_BT)
    completion_BT[:, -length:] = True
    rollout = replace(rollout, completion_BT=completion_BT, group_BT=torch.zeros_like(rollout.group_BT))
    position = completion_BT[0].nonzero().flatten().tolist()
    rng = random.Random(0)
    sets = [chosen for count in range(1, length + 1) for chosen in combinations(position, count)]
    log_probs = {(one, chosen): rng.uniform(-9, 0) for chosen in sets for one in chosen}
    orders = list(permutations(position))
    elbo = sum(
        log_probs[one, tuple(sorted(order[at:]))] for order in orders for at, one in enumerate(order)
    ) / len(orders)
    sums = {}
    views = EverySet().plan(rollout, MaskRNG(0, keys(rollout)), config(method="wd1"), 0.5)
    for adaptive_loss in (False, True):
        weight_BMT = weights_by_rate(rollout, views.target_BMT) if adaptive_loss else views.weight_BMT
        sums[adaptive_loss] = sum(
            float(weight_BMT[0, view, one])
            * log_probs[one, tuple(views.target_BMT[0, view].nonzero().flatten().tolist())]
            for _, view, one in views.target_BMT.nonzero().tolist()
        )
    assert sums[True] == pytest.approx(elbo, rel=1e-5)
    assert sums[False] != pytest.approx(elbo, rel=1e-2)


def test_adaptive_loss_is_refused_where_the_loss_weighs_by_the_rate_itself():
    for method in REPLACEABLE:
        if get_method(method).estimator != "token":
            with raises(ConfigError, where="adaptive_loss"):
                config(method=method, masking="optimized", adaptive_loss=True)


def test_document_a_reads_the_hit_rate_before_the_first_step_and_after_training(tmp_path):
    made = trainer(
        tmp_path,
        masking="optimized",
        adaptive_loss=True,
        max_steps=2,
        num_iterations=2,
        method="coupled-grpo",
    )
    cache_stats = made.masking_strategy.get_cache_stats()
    assert f"Cache hit rate: {cache_stats['hit_rate']:.2f}" == "Cache hit rate: 0.00"
    made.train()
    cache_stats = made.masking_strategy.get_cache_stats()
    assert cache_stats == made.get_cache_stats() and cache_stats["misses"] > 0
    assert cache_stats["hit_rate"] == cache_stats["hits"] / (cache_stats["hits"] + cache_stats["misses"])
    assert isinstance(made.masking_strategy, Optimized) and made.masking_strategy.adaptive_loss


def test_the_table_is_bounded(monkeypatch):
    monkeypatch.setattr(masking, "TABLES", 3)
    rollout, strategy = sampled(), Optimized()
    for iteration in range(5):
        draw = MaskRNG(0, keys(rollout), iteration)
        strategy.plan(rollout, draw, config(method="coupled-grpo"), 0.0)
    assert strategy.get_cache_stats() == {"hits": 0, "misses": 10, "rate": 0.0, "hit_rate": 0.0, "size": 3}


@every_strategy
def test_a_strategy_is_refused_where_its_views_are_not_what_the_loss_needs(name):
    for method in METHODS:
        separable, weighs = get_method(method).separable, get_method(method).estimator
        if not separable and weighs in STRATEGIES[name].estimators:
            assert isinstance(find_masking(config(method=method, masking=name)), STRATEGIES[name])
            continue
        with raises(ConfigError, where="masking"):
            config(method=method, masking=name)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"masking": "difusion"}, "masking"),
        ({"masking": "adaptive", "mask_rate": [0.5]}, "mask_rate"),
        ({"masking": "adaptive", "mask_rate": [0.0, 0.5]}, "mask_rate"),
        ({"masking": "diffusion", "mask_rate": [0.2, 0.5]}, "mask_rate"),
        ({"adaptive_loss": True}, "adaptive_loss"),
        ({"masking": "diffusion", "adaptive_loss": True}, "adaptive_loss"),
    ],
)
def test_settings_without_a_meaning_are_refused(given, where):
    with raises(ConfigError, where=where):
        config(**given)


@partly_slow("name", STRATEGIES, 3)
def test_a_setting_of_plans_is_refused_where_the_strategy_does_not_read_it(name):
    rollout = sampled()
    for method in REPLACEABLE:
        if get_method(method).estimator not in STRATEGIES[name].estimators:
            continue
        given = {"output_dir": "unused", "use_cpu": True, "method": method, "masking": name}
        for setting, value in {"samples": 5, "prompt_mask_rate": 0.9, "segments": 2, "shrink": 3}.items():
            plain, changed = GRPOConfig(**given), GRPOConfig(**given)
            setattr(changed, setting, value)
            plans = [
                find_masking(args).plan(rollout, MaskRNG(0, keys(rollout)), args, 0.5)
                for args in (plain, changed)
            ]
            with nullcontext() if not same(*plans) else raises(ConfigError, where=setting):
                GRPOConfig(**given, **{setting: value})


def test_what_the_strategy_of_a_trainer_does_not_read_is_refused_there(tmp_path):
    trainer(tmp_path, Diffusion(), samples=3)
    for strategy, given, where in [
        (None, {"samples": 3}, "samples"),
        (Diffusion(), {"prompt_mask_rate": 0.5}, "prompt_mask_rate"),
    ]:
        with raises(ConfigError, where=where):
            trainer(tmp_path, strategy, **given)


class Halves(MaskingStrategy):
    """A user's strategy: each token in one of two views."""

    def __init__(self):
        self.calls, self.planned = [], []

    def plan(self, rollout, draw, config, progress):
        position_BT = torch.arange(rollout.ids_BT.shape[1]).expand_as(rollout.ids_BT)
        first_B1T = (draw.uniform(position_BT, 1, RngStream.MASK) < 0.5) & rollout.completion_BT[:, None]
        self.calls.append((draw.iteration, progress))
        self.planned.append(
            weighted_views(
                rollout, torch.cat([first_B1T, ~first_B1T & rollout.completion_BT[:, None]], 1), config
            )
        )
        return self.planned[-1]

    def get_cache_stats(self):
        return {"hits": 3 * len(self.calls), "misses": len(self.calls), "rate": 0.75, "size": 0}


def ranks(completions, **_):
    return [float(rank) for rank in range(len(completions))]


def trainer(folder, strategy=None, lm=None, kind=GRPOTrainer, **more):
    shape = {"num_generations": 2, "max_completion_length": 4, "epsilon": 0.2}
    return kind(
        lm or llama_lm(), ranks, GRPOConfig(**settings(folder, **shape) | more), PAIRS, masking=strategy
    )


def test_a_strategy_of_ones_own_plans_what_the_trainer_scores(tmp_path):
    strategy, used = Halves(), []

    class Noting(GRPOTrainer):
        def loss_on(self, batch, *rest):
            used.append(batch.views)
            return super().loss_on(batch, *rest)

    made = trainer(tmp_path, strategy, kind=Noting, max_steps=4, num_iterations=2)
    before = weights(made.lm)
    made.train()
    assert strategy.calls == [(0, 0.0), (1, 0.0), (0, 0.5), (1, 0.5)]
    assert [id(views) for views in used] == [id(views) for views in strategy.planned]
    assert not equal(weights(made.lm), before)
    assert made.get_cache_stats()["hits"] == 12
    assert made.state.log_history[0]["masks/reuse_rate"] == 0.75


class Wrong(MaskingStrategy):
    """Correct views with one defect."""

    def __init__(self, change):
        self.change = change

    def plan(self, rollout, draw, config, progress):
        return self.change(Diffusion().plan(rollout, draw, config, progress), rollout)


@pytest.mark.parametrize(
    "change",
    [
        lambda views, rollout: None,
        lambda views, rollout: replace(views, weight_BMT=views.weight_BMT[:, :1]),
        lambda views, rollout: views.select(slice(1, None)),
        lambda views, rollout: views.select(slice(None), slice(0)),
        lambda views, rollout: replace(views, hidden_BMT=views.hidden_BMT[:, 0]),
        lambda views, rollout: replace(views, target_BMT=views.target_BMT.long()),
        lambda views, rollout: replace(views, weight_BMT=views.target_BMT),
        lambda views, rollout: replace(views, hidden_BMT=views.hidden_BMT & ~views.target_BMT),
        lambda views, rollout: weighted_views(rollout, (rollout.document_BT > 0)[:, None], GRPOConfig()),
    ],
)
def test_a_plan_that_a_loss_cannot_read_is_refused(change, tmp_path):
    made = trainer(tmp_path, Wrong(change), max_steps=1, samples=2)
    with raises(TrainingError, where="plan of Wrong"):
        made.train()


@pytest.mark.parametrize("strategy", ["diffusion", Diffusion, object()])
def test_what_is_no_strategy_is_refused(strategy, tmp_path):
    with raises(ConfigError, where="masking"):
        trainer(tmp_path, strategy)
    with raises(ConfigError, where="patterns"):
        Optimized(patterns=0)


def test_without_a_strategy_nothing_is_kept(tmp_path):
    made = trainer(tmp_path, max_steps=1)
    made.train()
    assert made.get_cache_stats() == {"hits": 0, "misses": 0, "rate": 0.0, "hit_rate": 0.0, "size": 0}
    assert "masks/reuse_rate" not in made.state.log_history[0]


@every_strategy
def test_the_first_update_has_a_ratio_of_one_and_a_run_resumes_bit_for_bit(name, tmp_path):
    shape = {"masking": name, "num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = trainer(tmp_path, **shape)
    straight.train()
    ratios = [line["ratio"] for line in straight.state.log_history if "ratio" in line]
    assert ratios[0] == ratios[2] == 1 and ratios[1] != 1
    resumed = trainer(tmp_path, **shape)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert equal(weights(resumed.lm), weights(straight.lm))
    rates = [line["masks/reuse_rate"] for line in straight.state.log_history if "masks/reuse_rate" in line]
    # of each inner iteration the numbers are drawn once
    assert rates == ([0.0, 0.5] if name == "optimized" else [])


def test_a_causal_model_and_a_second_strategy_are_refused(tmp_path):
    with raises(ConfigError, where="masking"):
        trainer(tmp_path, masking="diffusion", lm=llama_lm("causal"))
    with raises(ConfigError, where="masking"):
        trainer(tmp_path, Halves(), method="cj-grpo")
    with raises(ConfigError, where="masking"):
        trainer(tmp_path, Adaptive(), method="espo")
    with raises(ConfigError, where="masking"):
        trainer(tmp_path, Halves(), masking="block")


@pytest.mark.parametrize("by", [-30.0, 30.0])
def test_a_ratio_of_tokens_that_weigh_by_their_mask_rate_is_bounded(by):
    """A token that is hidden alone, of eight, has weight 8: its 30 nats are 240, whose exponential overflows
    float32."""
    settings = config(method="uni-grpo", masking="optimized", adaptive_loss=True, beta=0.1)
    assert (
        settings.log_ratio_clamp == 20.0
        and config(method="uni-grpo", masking="optimized").log_ratio_clamp is None
    )
    rollout = sampled("bidirectional", None)
    views = Optimized(adaptive_loss=True).plan(rollout, MaskRNG(1, keys(rollout)), settings, 0.0)
    assert views.weight_BMT.max() * abs(by) > 88
    scores, _ = made_up(rollout, views, settings)
    policy_BMT = torch.where(views.target_BMT, scores.policy_BMT.detach() + by, 0).float().requires_grad_()
    total = settings.build_method().loss(replace(scores, policy_BMT=policy_BMT)).total
    assert total < 1e20 and torch.autograd.grad(total, policy_BMT)[0].abs().max() < 1e20
