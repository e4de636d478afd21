"""What holds for every method and its rollouts; token losses compared with slow code.

Shapes: B completions, M views, T positions.
"""

from __future__ import annotations

import random
import re
from dataclasses import fields, replace

import pytest
import torch

from tests.errors import raises
from tests.generation.cases import PATTERNS, every_pattern
from tests.helpers import REPOSITORY, each_once
from tests.rl.methods.rollouts import (
    LENGTH,
    PROMPTS,
    assert_loss,
    clipped,
    config,
    held,
    k3,
    keys,
    made_up,
    masks,
    one,
    padded,
    plan,
    rollout_of,
    states,
    stopping,
    usual,
)
from unmask.config.yaml import parse_yaml
from unmask.diffusion.log_probs import view_log_probs
from unmask.errors import ConfigError
from unmask.rl.config import GRPOConfig
from unmask.rl.methods import METHODS, TokenMethod, get_method, register
from unmask.rl.methods.base import fixed_settings, settings_of

every_method = pytest.mark.parametrize("name", METHODS)
REPLAYS = ["cj-grpo", "step-merge", "trace-rl", "dipo", "agrpo", "exact-gradient", "just-grpo"]
"""The methods whose views follow the sampler."""

# Plans.


@every_method
def test_planning_leaves_the_global_generators_alone_and_repeats(name):
    _, rollout = usual("bidirectional")
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate()
    first, second = (plan(name, rollout) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert all(torch.equal(*parts) for parts in zip(masks(first), masks(second), strict=True))


@every_method
@every_pattern
def test_what_is_scored_is_hidden_and_belongs_to_the_completion(name, attention, block_size):
    _, rollout = usual(attention, block_size)
    views = plan(name, rollout)
    hidden_BMT, target_BMT, weight_BMT = masks(views)
    assert weight_BMT.dtype == torch.float32 and torch.equal(weight_BMT > 0, target_BMT)
    assert not (target_BMT & ~hidden_BMT).any()
    assert not (
        target_BMT & ~(rollout.revealed_BT if name == "espo" else rollout.completion_BT)[:, None]
    ).any()
    clean_BT = (
        rollout.document_BT == 0
        if name in ("diffu-grpo", "wd1", "spg")
        else (rollout.document_BT == 0) | rollout.prompt_BT
    )
    assert not (hidden_BMT & clean_BT[:, None]).any()
    never_BT = rollout.beyond_BT & ~rollout.revealed_BT
    together_BTT = rollout.group_BT[:, None] == rollout.group_BT[:, :, None]
    needed_BMT = (target_BMT[:, :, None] & together_BTT[:, None]).any(3) & never_BT[:, None]
    assert (hidden_BMT | ~needed_BMT).all()  # as when the text was sampled; other blocks are not seen
    assert needed_BMT.any() == (attention == "bidirectional")


@each_once("attention, block_size, name", PATTERNS, METHODS)
def test_the_views_of_a_completion_are_its_own(name, attention, block_size):
    """Whatever else is in the batch, and wherever in it the completion stands: so also on any number of
    devices."""
    _, rollout = usual(attention, block_size)
    views = plan(name, rollout)
    order_B = torch.tensor([3, 5, 0, 4, 1, 2])
    moved = plan(name, rollout.select(order_B), order_B)
    for row in range(len(PROMPTS)):
        own_T = rollout.document_BT[row] > 0
        own = states(views, row, own_T)
        assert own == states(moved, order_B.tolist().index(row), own_T)
        assert own == states(plan(name, one(rollout, row), torch.tensor([row])), 0, own_T[own_T])


@every_method
def test_only_replays_of_the_sampler_are_the_same_for_any_seed_key_and_iteration(name):
    _, rollout = rollout_of(stopping("bidirectional"), stop_at_eos=False)
    more = {} if "num_iterations" in fixed_settings(get_method(name)) else {"num_iterations": 2}
    draws = [{}, {"seed": 1}, {"key_B": keys(rollout) + 10}, {"iteration": 1}]
    plans = {str([part.tolist() for part in masks(plan(name, rollout, **draw, **more))]) for draw in draws}
    assert len(plans) == (1 if name in REPLAYS and name != "agrpo" else 4)


@each_once(
    "attention, block_size, name", [("bidirectional", None), ("block_causal", 3), ("causal", None)], METHODS
)
def test_padding_on_the_left_changes_no_score_and_no_loss(name, attention, block_size):
    lm, rollout = usual(attention, block_size)
    args, views = config(name, **held(name)), plan(name, rollout)
    moved, moved_views = padded(lm, rollout, views)
    if name in REPLAYS:  # others draw by position
        assert all(
            torch.equal(*parts) for parts in zip(masks(plan(name, moved)), masks(moved_views), strict=True)
        )
    with torch.no_grad():
        here, there = (
            view_log_probs(lm, part.ids_BT, part.document_BT, v, chunk=12)
            for part, v in ((rollout, views), (moved, moved_views))
        )
    torch.testing.assert_close(there[..., 3:], here, rtol=0, atol=1e-10)
    losses = []
    for part, its_views, log_prob_BMT in ((rollout, views, here), (moved, moved_views, there)):
        scores, _ = made_up(part, its_views, args)
        others = {"old_BMT": 0.9 * log_prob_BMT, "reference_BMT": 1.1 * log_prob_BMT}
        losses.append(args.build_method().loss(replace(scores, policy_BMT=log_prob_BMT, **others)).total)
    torch.testing.assert_close(*losses, rtol=0, atol=1e-8)


@each_once("end, name", ["mask", "noise", "train"], METHODS)
def test_what_stands_behind_the_end_is_hidden_shown_or_learnt(name, end):
    lm, rollout = usual("bidirectional", stop_at_eos=False)
    tail_BT, rollout = rollout.beyond_BT, rollout.whole() if end == "train" else rollout
    args, views = config(name), plan(name, rollout, end=end)
    scores, _ = made_up(rollout, views, args)
    assert tail_BT.any()
    changed = replace(scores, policy_BMT=torch.where(tail_BT[:, None], -7.0, scores.policy_BMT))
    before, after = (args.build_method().loss(part).total for part in (scores, changed))
    assert (before != after) == (end == "train")
    assert (scores.token_weight_BT[tail_BT] > 0).any() == (end == "train")
    if end == "train" or name in REPLAYS:  # these show what the sampler saw
        return
    noised = plan(name, rollout.whole())  # as if it were the completion's
    assert end == "mask" or torch.equal(views.hidden_BMT, noised.hidden_BMT)
    other_BT = torch.where(tail_BT, 4, rollout.ids_BT)
    with torch.no_grad():
        here, there = (
            view_log_probs(lm, ids_BT, rollout.document_BT, views, chunk=12)
            for ids_BT in (rollout.ids_BT, other_BT)
        )
    assert not torch.equal(rollout.ids_BT, other_BT)
    assert torch.equal(here, there) == (end == "mask" or not get_method(name).partial)


def test_what_was_never_revealed_stays_hidden():
    _, rollout = usual("bidirectional", block_size=2)
    never_BT = rollout.beyond_BT & ~rollout.revealed_BT
    assert never_BT.any()
    for views in (
        plan("coupled-grpo", rollout),
        plan("coupled-grpo", rollout, end="noise"),
        plan("coupled-grpo", rollout.whole()),
    ):
        assert (
            views.hidden_BMT.transpose(1, 2)[never_BT].all()
            and not views.target_BMT.transpose(1, 2)[never_BT].any()
        )


# What defines each method: advantage, clip range, ratio, KL (kind, weight, to what), loss_type. A weight
# that only d1's recipes give is 0 here: they come with the recipes of tasks.
D1 = ("k3", 0.0, "reference")
TABLE = {
    "diffu-grpo": ("none", (0.5, 0.5), "token", D1, "dapo"),
    "uni-grpo": ("group", (0.5, 0.5), "sequence", D1, "grpo"),
    "coupled-grpo": ("leave-one-out", (0.5, 0.5), "token", ("k3", 0.01, "reference"), "dapo"),
    "wd1": ("softmax", None, None, None, "sum"),
    "spg": ("none", None, None, None, "dapo"),
    "espo": ("leave-one-out", (0.2, 0.2), None, ("k2", 1e-3, "reference"), "grpo"),
    "gdpo": ("none", (0.5, 0.5), "sequence", D1, "grpo"),
    "bgpo": ("group", None, None, None, "grpo"),
    "cj-grpo": ("none", (0.5, 0.5), "token", D1, "step"),
    "step-merge": ("none", (0.5, 0.5), "token", D1, "dapo"),
    "trace-rl": ("population", (0.2, 0.2), "token", ("k3", 0.01, "old"), "view"),
    "dipo": ("group", (0.2, 0.28), "token", None, "dapo"),
    "agrpo": ("none", None, None, None, "dr_grpo"),
    "exact-gradient": ("leave-one-out", None, None, None, "dr_grpo"),
    "just-grpo": ("group", None, None, None, "dr_grpo"),
}
OTHERS = {
    "wd1": {"softmax_temperature": 1.0, "prompt_mask_rate": 0.15},
    "diffu-grpo": {"prompt_mask_rate": 0.15},
    "spg": {"samples": 2, "eubo_beta": 1.5, "eubo_share": 0.5},
    "espo": {"samples": 1},
    "bgpo": {"samples": 16, "delta": 3.0, "epsilon": None},
    "trace-rl": {"shrink": 1, "difficulty": [0.2, 0.8]},
    "dipo": {"log_ratio_clamp": 10.0, "filter_zero_std_groups": True},
    "agrpo": {"samples": 8},
    "exact-gradient": {"remasking": "random", "after_eos": "train"},
    "step-merge": {"prompt_mask_rate": 0.0},
    "just-grpo": {"filter_zero_std_groups": True},
    "gdpo": {"samples": 3, "log_ratio_clamp": 20.0},
}
SWITCHES = {
    **{"delta": None, "log_ratio_clamp": None, "stop_at_eos": True, "after_eos": "mask"},
    **{"difficulty": None, "filter_zero_std_groups": False},
}


def test_the_docs_have_every_setting_of_every_method():
    lines = (REPOSITORY / "docs" / "rl.md").read_text(encoding="utf-8").splitlines()
    table = {
        name: dict(re.findall(r"`(\w+): ([^`]+)`", line))
        for line in lines
        for name in METHODS
        if line.startswith(f"| `{name}` (")
    }
    usual_values = {
        each.name: each.metadata.get("otherwise") for each in fields(GRPOConfig) if each.default is None
    }
    assert {
        name: {key: parse_yaml(value, name) for key, value in found.items()} for name, found in table.items()
    } == {
        name: {
            key: value
            for key, value in settings_of(method).items()
            if key in usual_values and value != usual_values[key]
        }
        for name, method in METHODS.items()
    }


@every_method
def test_the_settings_of_a_method_are_those_of_the_table(name):
    advantage, clip, ratio, kl, loss_type = TABLE[name]
    args = config(name)
    assert (args.scale_rewards, args.build_method().loss_type) == (advantage, loss_type)
    if clip is not None:
        assert (args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high) == clip
    assert ratio is None or args.importance_sampling_level == ratio
    assert args.beta == 0 if kl is None else (args.kl, args.beta, args.kl_to) == kl
    assert args.needs_reference == (name in ("coupled-grpo", "espo"))
    for setting, value in (SWITCHES | OTHERS.get(name, {})).items():
        assert getattr(args, setting) == value, setting
    given = {"scale_rewards": "none", "difficulty": [0.1, 0.9], "epsilon": 0.125}
    given = {
        key: value
        for key, value in given.items()
        if key in settings_of(get_method(name)).keys() - fixed_settings(get_method(name))
    }
    # what is given is taken
    assert {setting: getattr(config(name, **given), setting) for setting in given} == given


@every_method
def test_a_method_makes_as_many_views_as_the_table_says(name):
    generation, rollout = rollout_of(stopping("bidirectional"), steps=4)
    steps = 1 + max(max(steps) for steps in generation.steps)
    last = 1 + max(max(trace.steps) for trace in generation.trace)
    tokens = int(rollout.completion_BT.sum(1).max())
    expected = {
        "coupled-grpo": 3,
        "spg": 2,
        "espo": 2,
        "gdpo": 3,
        "bgpo": 16,
        "just-grpo": tokens,
        "agrpo": min(8, steps),
    }
    expected |= dict.fromkeys(["cj-grpo", "trace-rl", "dipo", "exact-gradient"], steps)
    expected["step-merge"] = min(4, last)
    assert plan(name, rollout).count == expected.get(name, 1)


# Losses by tokens.


def token_terms(completion, low, high, beta=0.0, clamp=100.0):
    """The surrogate of each token of a completion, and beta times its KL."""
    terms = {}
    for token in completion.tokens:
        new, old = completion.value(completion.policy, token), completion.value(completion.old, token)
        terms[token] = clipped((new - old).clamp(-clamp, clamp).exp(), completion.advantage, low, high)
        if beta:
            terms[token] = terms[token] + beta * k3(completion.value(completion.reference, token), new)
    return terms


def log_probs(completion):
    return {
        token: -completion.advantage * completion.value(completion.policy, token)
        for token in completion.tokens
    }


def over_tokens(batch, terms):
    return sum(sum(terms(completion).values()) for completion in batch) / sum(
        len(completion.tokens) for completion in batch
    )


def over_completions(batch, terms, divisor):
    return sum(sum(terms(completion).values()) / divisor(completion) for completion in batch) / len(batch)


def over_steps(batch, terms):
    total = 0.0
    for completion in batch:
        by_step = {}
        for token, term in terms(completion).items():
            by_step.setdefault(completion.steps[token], []).append(term)
        total = total + sum(sum(step) / len(step) for step in by_step.values()) / len(by_step)
    return total / len(batch)


def over_views(batch, of_view):
    views = [of_view(completion, tokens) for completion in batch for tokens in completion.hidden if tokens]
    return sum(views) / len(views)


def trace_rl(constant=None):
    """TraceRL's loss: LLaDA's, or with a constant SDAR's."""

    def of_view(completion, tokens):
        plain, held = (token_terms(completion, 0.2, 0.2, beta) for beta in (0.0, 0.01))
        mean = sum(plain[token] for token in tokens) / (constant or len(tokens))
        return mean + sum(held[token] - plain[token] for token in tokens) / (constant or 1)

    return lambda batch, args: over_views(batch, of_view)


TOKEN_LOSSES = {
    "diffu-grpo": lambda batch, args: over_tokens(batch, lambda c: token_terms(c, 0.5, 0.5, 0.04)),
    "coupled-grpo": lambda batch, args: over_tokens(batch, lambda c: token_terms(c, 0.5, 0.5, 0.01)),
    "step-merge": lambda batch, args: over_tokens(batch, lambda c: token_terms(c, 0.5, 0.5, 0.04)),
    "cj-grpo": lambda batch, args: over_steps(batch, lambda c: token_terms(c, 0.5, 0.5, 0.04)),
    "trace-rl": trace_rl(),
    "dipo": lambda batch, args: over_tokens(batch, lambda c: token_terms(c, 0.2, 0.28, clamp=10.0)),
    "wd1": lambda batch, args: over_completions(batch, log_probs, lambda c: 1),
    "agrpo": lambda batch, args: over_completions(batch, log_probs, lambda c: LENGTH),
    "exact-gradient": lambda batch, args: over_completions(batch, log_probs, lambda c: LENGTH),
    "just-grpo": lambda batch, args: over_completions(batch, log_probs, lambda c: LENGTH),
}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_losses_by_tokens_are_their_formulas(name):
    more = {"beta": 0.04} if name in ("diffu-grpo", "step-merge", "cj-grpo") else {}
    assert_loss(name, TOKEN_LOSSES[name], **more)


def test_trace_rl_divides_the_sum_over_a_view_by_a_constant_where_a_model_goes_by_blocks():
    assert_loss("trace-rl", trace_rl(LENGTH), loss_type="view-constant")
    args = GRPOConfig(output_dir="unused", method="trace-rl", use_cpu=True)
    assert args.loss_type is None
    by_blocks = args.build_method("block_causal")
    assert (by_blocks.loss_type, by_blocks.log_ratio_clamp) == ("view-constant", 10.0)
    with raises(ConfigError, where="loss_type"):
        config("coupled-grpo", loss_type="view")


def test_dipo_bounds_the_logarithm_of_a_ratio():
    assert_loss("dipo", TOKEN_LOSSES["dipo"], spread=15.0)


def test_dapo_clips_higher_above_than_below():
    assert_loss(
        "diffu-grpo",
        lambda batch, args: over_tokens(batch, lambda c: token_terms(c, 0.2, 0.28)),
        epsilon=0.2,
        epsilon_high=0.28,
    )


def test_dr_grpo_divides_by_a_constant():
    def by_hand(batch, args):
        return over_completions(batch, lambda c: token_terms(c, 0.5, 0.5), lambda c: LENGTH)

    assert_loss("diffu-grpo", by_hand, loss_type="dr_grpo")


def test_gspo_has_one_ratio_for_a_completion():
    def by_hand(batch, args):
        total = 0.0
        for completion in batch:
            gaps = [
                completion.value(completion.policy, t) - completion.value(completion.old, t)
                for t in completion.tokens
            ]
            ratio = (sum(gaps) / len(gaps)).exp()
            total = total + clipped(ratio, completion.advantage, 0.003, 0.004)
        return total / len(batch)

    assert_loss(
        "diffu-grpo",
        by_hand,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=0.003,
        epsilon_high=0.004,
    )


def test_the_divergence_times_the_ratio_is_that_of_the_policy_whoever_sampled():
    """The same holds for its gradient."""
    logits = torch.randn(
        3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    policy, old, reference = logits.log_softmax(1)
    exact = (policy.exp() * (policy - reference)).sum()
    method = TokenMethod(beta=1.0)
    weight = old.detach().exp()  # the mean over samples
    found = method.surrogate(
        policy - old.detach(), reference - policy, torch.zeros(6), weight, use_bias_correction_kl=True
    ).total
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, exact))
    )


def test_weights_for_another_sampler_weigh_the_surrogate_and_not_the_divergence():
    args = config("diffu-grpo", beta=0.5)
    _, rollout = usual("bidirectional")
    scores, _ = made_up(rollout, plan("diffu-grpo", rollout), args)
    weight_BT = torch.rand(
        rollout.ids_BT.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    plain, held = (TokenMethod(beta=beta).loss(scores) for beta in (0.0, 0.5))
    alone = [
        TokenMethod().loss(replace(scores, token_weight_BT=token_weight_BT)).total
        for token_weight_BT in one_by_one(scores)
    ]
    expected = (torch.stack(alone) * weight_BT[scores.token_weight_BT > 0]).sum() + held.total - plain.total
    torch.testing.assert_close(
        args.build_method().loss(replace(scores, importance_BT=weight_BT)).total, expected
    )


def one_by_one(scores):
    """Weights of which only one at a time is not zero."""
    for place in (scores.token_weight_BT > 0).nonzero():
        token_weight_BT = torch.zeros_like(scores.token_weight_BT)
        token_weight_BT[tuple(place)] = scores.token_weight_BT[tuple(place)]
        yield token_weight_BT


@every_method
def test_what_is_logged_is_of_what_counts(name):
    _, rollout = usual("bidirectional")
    args = config(name)
    scores, _ = made_up(rollout, plan(name, rollout), args)
    loss = args.build_method().loss(scores)
    assert loss.total.dim() == 0 and not (
        loss.kl.requires_grad or loss.ratio.requires_grad or loss.clipped.requires_grad
    )
    # tokens, completions, or these by view
    sizes = {int((scores.token_weight_BT > 0).sum()), 5, 5 * scores.views.count}
    assert len(loss.ratio) == len(loss.clipped) == len(loss.kl) and len(loss.ratio) in sizes


# The registry, and the rollout.


def test_unknown_methods_are_refused():
    with raises(ConfigError, where="method"):
        get_method("agrp")
    assert all(get_method(name).name == name for name in METHODS)


def test_a_method_of_ones_own_is_named_by_a_config(monkeypatch):
    monkeypatch.setattr("unmask.rl.methods.base.METHODS", dict(METHODS))

    @register
    class Mine(get_method("diffu-grpo")):
        name = "mine"
        epsilon: float = 0.125
        loss_type: str = "sum"
        depth: int = 3  # a setting that no config has

    assert get_method("mine") is Mine
    args = config("mine", beta=0.5)
    assert (args.epsilon, args.loss_type, args.beta, args.scale_rewards) == (0.125, "sum", 0.5, "none")
    method = args.build_method()
    assert (method.epsilon, method.beta, method.depth, method.prompt_mask_rate) == (0.125, 0.5, 3, 0.15)


def test_a_default_that_is_no_field_is_refused(monkeypatch):
    """Without an annotation the inherited default would silently stay."""
    monkeypatch.setattr("unmask.rl.methods.base.METHODS", dict(METHODS))
    with raises(ConfigError, where="tests.rl.methods.test_base"):

        @register
        class Mine(TokenMethod):
            name = "mine"
            epsilon = 0.125


@every_pattern
def test_a_rollout_is_the_canvas_with_its_parts_told_apart(attention, block_size):
    lm = stopping(attention, block_size)
    generation, rollout = rollout_of(lm, block_size=2 if attention == "bidirectional" else None)
    assert rollout.beyond_BT.any()
    for row, (prompt, tokens, trace) in enumerate(
        zip(PROMPTS, generation.tokens, generation.trace, strict=True)
    ):
        length = len(prompt) + len(trace.canvas)
        parts = (
            ["prompt"] * len(prompt)
            + ["completion"] * len(tokens)
            + ["beyond"] * (len(trace.canvas) - len(tokens))
        )
        for part in ("prompt", "completion", "beyond"):
            mask_T = getattr(rollout, f"{part}_BT")[row]
            assert mask_T.dtype == torch.bool
            assert mask_T[:length].tolist() == [name == part for name in parts] and not mask_T[length:].any()
        assert rollout.ids_BT[row, :length].tolist() == prompt + trace.canvas
        assert rollout.ids_BT[row][rollout.completion_BT[row]].tolist() == tokens
        assert rollout.document_BT[row].tolist() == [1] * length + [0] * (rollout.ids_BT.shape[1] - length)
        assert rollout.step_BT[row].tolist() == [-1] * len(prompt) + trace.steps + [-1] * (
            rollout.ids_BT.shape[1] - length
        )
