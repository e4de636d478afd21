"""Trajectory replay scores every token once, in the state in which it was drawn or shortly before.

Shapes: B completions, M views, T positions, N listed choices.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import unmask
from benchmarks import policy_gradient
from tests.errors import raises
from tests.generation.cases import PATTERNS, every_pattern
from tests.helpers import each_once, examples, partly_slow
from tests.rl.methods.rollouts import (
    LENGTH,
    PROMPTS,
    config,
    keys,
    masks,
    one,
    plan,
    rollout_of,
    states,
    stopping,
    usual,
)
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.log_probs import view_log_probs
from unmask.errors import ConfigError
from unmask.rl.losses import token_weights
from unmask.rl.methods import LossInputs, get_method
from unmask.rl.updates import learnable

ROOT = Path(__file__).parents[3]


def scores_of(lm, rollout, views, chunk=None):
    """The log-probability of every token [B, T]."""
    with torch.no_grad():
        log_prob_BMT = view_log_probs(lm, rollout.ids_BT, rollout.document_BT, views, chunk=chunk)
    return (views.weight_BMT * log_prob_BMT).sum(1)


def assert_the_samplers(generation, rollout, log_prob_BT):
    for log_prob_T, completion_T, sampled in zip(
        log_prob_BT, rollout.completion_BT, generation.log_probs, strict=True
    ):
        assert log_prob_T[completion_T].tolist() == pytest.approx(sampled, abs=1e-10)
        assert (log_prob_T[~completion_T] == 0).all()


def within(rollout, row):
    """The step of every revealed position of a row, counted from the first of its group."""
    steps, groups = rollout.step_BT[row].tolist(), rollout.group_BT[row].tolist()
    first = {}
    for step, group in zip(steps, groups, strict=True):
        if step >= 0:
            first[group] = min(step, first.get(group, step))
    return {
        at: step - first[group]
        for at, (step, group) in enumerate(zip(steps, groups, strict=True))
        if step >= 0
    }


def replayed(rollout, row, order):
    """What the views of a row hide and score, by slow code: `order` says which view a position belongs to."""
    completion, beyond = (
        part_BT[row].nonzero().flatten().tolist() for part_BT in (rollout.completion_BT, rollout.beyond_BT)
    )
    never = {at for at in beyond if at not in order}
    made = []
    for view in sorted({order[at] for at in completion}):
        hidden = {at for at, place in order.items() if place >= view} | never
        made.append((hidden, {at for at in completion if order[at] == view}))
    return made


def sets(views, row):
    """What the views of a row hide and score, but for those that score nothing."""
    pairs = zip(views.hidden_BMT[row], views.target_BMT[row], strict=True)
    return [
        tuple(set(part_T.nonzero().flatten().tolist()) for part_T in pair) for pair in pairs if pair[1].any()
    ]


@each_once("logit_shift, attention, block_size", [False, True], PATTERNS)
@examples(5)
@given(
    remasking=st.sampled_from(["low_confidence", "margin", "entropy", "random", "left_to_right"]),
    steps=st.none() | st.integers(1, 8),
    decoding_block=st.sampled_from([None, 1, 2, 4, 8]),
    stop_at_eos=st.booleans(),
    chunk=st.none() | st.integers(1, 5),
)
def test_scores_are_the_log_probs_of_the_sampler(
    attention, block_size, logit_shift, remasking, steps, decoding_block, stop_at_eos, chunk
):
    lm = stopping(attention, block_size, logit_shift)
    decoding_block = decoding_block if attention == "bidirectional" else None
    unit = {"causal": 1, "block_causal": block_size}.get(attention, decoding_block or LENGTH)
    steps = steps and max(steps, math.ceil(LENGTH / unit))  # every block takes one
    generation, rollout = rollout_of(
        lm, remasking=remasking, steps=steps, block_size=decoding_block, stop_at_eos=stop_at_eos
    )
    views = plan("cj-grpo", rollout)
    rows = [replayed(rollout, row, within(rollout, row)) for row in range(len(PROMPTS))]
    assert [sets(views, row) for row in range(len(PROMPTS))] == rows
    assert views.count <= max(generation.forward_passes)
    assert_the_samplers(generation, rollout, scores_of(lm, rollout, views, chunk))


MERGED = [("step-merge", {"segments": segments}) for segments in (1, 2, 3, 5, 100)] + [
    ("trace-rl", {"shrink": s}) for s in (1, 2, 3, 100)
]
SINGLE = [("cj-grpo", {}), ("dipo", {}), ("just-grpo", {}), ("agrpo", {"samples": 100})]


@every_pattern
@pytest.mark.parametrize(("name", "more"), MERGED + SINGLE)
def test_each_completion_token_is_scored_once_and_stays_revealed(name, more, attention, block_size):
    _, rollout = usual(attention, block_size)
    views = plan(name, rollout, **more)
    assert torch.equal(views.target_BMT.sum(1), rollout.completion_BT.long())
    assert torch.equal(views.weight_BMT, views.target_BMT.float())
    if name != "agrpo":  # whose views are in any order
        assert not (views.hidden_BMT[:, 1:] & ~views.hidden_BMT[:, :-1]).any()


@every_pattern
@pytest.mark.parametrize(("name", "more"), MERGED)
def test_steps_are_merged_in_stretches(name, more, attention, block_size):
    _, rollout = usual(attention, block_size, stop_at_eos=False)
    views = plan(name, rollout, **more)
    for row in range(len(PROMPTS)):
        order = within(rollout, row)
        count = 1 + max(order.values())
        if name == "trace-rl":
            stretches = [
                list(range(at, min(at + more["shrink"], count))) for at in range(0, count, more["shrink"])
            ]
        else:  # as equal as possible
            number = min(more["segments"], count)
            cuts = [math.floor(part * count / number) for part in range(number + 1)]
            stretches = [list(range(*cut)) for cut in itertools.pairwise(cuts)]
            assert max(map(len, stretches)) - min(map(len, stretches)) <= 1 and min(map(len, stretches)) >= 1
        place = {step: index for index, stretch in enumerate(stretches) for step in stretch}
        assert sets(views, row) == replayed(rollout, row, {at: place[step] for at, step in order.items()})


@each_once("segments, attention, block_size", [2, 3, 5], PATTERNS)
def test_a_short_completion_beside_a_long_one_is_divided_as_it_is_alone(attention, block_size, segments):
    _, rollout = usual(attention, block_size)
    views = plan("step-merge", rollout, segments=segments)
    for row in range(len(PROMPTS)):
        own_T = rollout.document_BT[row] > 0
        alone = plan("step-merge", one(rollout, row), segments=segments)
        assert states(views, row, own_T) == states(alone, 0, own_T[own_T])


def assert_same(lm, rollout, one_plan, other_plan):
    """Two plans are the same, and so are their scores."""
    assert all(torch.equal(*parts) for parts in zip(masks(one_plan), masks(other_plan), strict=True))
    assert torch.equal(scores_of(lm, rollout, one_plan), scores_of(lm, rollout, other_plan))


@every_pattern
@pytest.mark.parametrize("stop_at_eos", [False, True])
def test_one_segment_is_diffu_grpo_without_prompt_masks(attention, block_size, stop_at_eos):
    lm, rollout = usual(attention, block_size, stop_at_eos=stop_at_eos)
    assert_same(
        lm,
        rollout,
        plan("step-merge", rollout, segments=1),
        plan("diffu-grpo", rollout, prompt_mask_rate=0.0),
    )


@every_pattern
def test_a_segment_for_every_step_is_cj_grpo_and_trace_rl_with_a_step_in_a_view(attention, block_size):
    lm, rollout = usual(attention, block_size)
    every = plan("cj-grpo", rollout)
    steps = 1 + max(max(within(rollout, row).values()) for row in range(len(PROMPTS)))
    for other in (
        plan("step-merge", rollout, segments=steps),
        plan("trace-rl", rollout, shrink=1),
        plan("dipo", rollout),
    ):
        assert_same(lm, rollout, every, other)
    assert steps == 1 or plan("step-merge", rollout, segments=1).count < every.count


# JustGRPO.


@each_once("stop_at_eos, logit_shift, attention, block_size", [False, True], [False, True], PATTERNS)
def test_just_grpo_replays_what_was_decoded_from_left_to_right(
    attention, block_size, logit_shift, stop_at_eos
):
    lm = stopping(attention, block_size, logit_shift)
    generation, rollout = rollout_of(lm, remasking="left_to_right", stop_at_eos=stop_at_eos)
    views, replay = plan("just-grpo", rollout), plan("cj-grpo", rollout)
    # where blocks that were never begun may be hidden or not
    for row in range(len(PROMPTS)) if attention != "block_causal" else ():
        assert sets(views, row) == sets(replay, row)
    assert_the_samplers(generation, rollout, scores_of(lm, rollout, views))


@every_pattern
def test_just_grpo_scores_each_token_from_those_before_it(attention, block_size):
    """This holds for any decoding; in a block-causal model the rest of the block is hidden."""
    lm, rollout = usual(attention, block_size)
    log_prob_BT = scores_of(lm, rollout, plan("just-grpo", rollout))
    for row in range(len(PROMPTS)):
        ids_T = rollout.ids_BT[row][rollout.document_BT[row] > 0]
        positions = rollout.completion_BT[row].nonzero().flatten()
        hidden_NT = torch.arange(len(ids_T)) >= positions[:, None]
        with torch.no_grad():
            logits_NTV = lm.logits(torch.where(hidden_NT, lm.mask_token_id, ids_T), hidden_BT=hidden_NT)
        expected_N = logits_NTV.log_softmax(-1)[torch.arange(len(positions)), positions, ids_T[positions]]
        torch.testing.assert_close(log_prob_BT[row, positions], expected_N, rtol=0, atol=1e-10)


# AGRPO.


class Orders:
    """A MaskRNG that lists every order of the steps."""

    def __init__(self, orders):
        self.order_NV = torch.tensor(orders, dtype=torch.float64)

    def per_sequence(self, views, stream):
        assert views == self.order_NV.shape[1]
        return self.order_NV


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 9])
def test_the_mean_over_all_choices_of_steps_is_the_whole_trajectory(samples):
    _, rollout = rollout_of(stopping("bidirectional"), steps=4)
    row = max(
        range(len(PROMPTS)), key=lambda at: len(rollout.step_BT[at][rollout.completion_BT[at]].unique())
    )
    alone = rollout.select(slice(row, row + 1))
    every = plan("cj-grpo", alone)
    assert every.count == 4
    orders = list(itertools.permutations(range(4)))
    repeated = rollout.select(torch.tensor([row] * len(orders)))
    sampled = config("agrpo", samples=samples).build_method().plan(repeated, Orders(orders))
    assert sampled.count == min(samples, 4)
    assert {len(sets(sampled, index)) for index in range(len(orders))} == {sampled.count}
    token_T = -torch.rand(
        rollout.ids_BT.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    token_T.requires_grad_()  # of each token in its own step

    def value_and_gradient(views, part):
        args = config("agrpo", samples=samples)
        log_prob_BMT = torch.where(views.target_BMT, token_T, 0)
        token_weight_BT = token_weights(
            learnable(part, views), args.loss_type, part.step_BT.clamp_min(0), LENGTH
        )
        scores = LossInputs(
            log_prob_BMT,
            log_prob_BMT.detach(),
            None,
            part,
            views,
            torch.full((len(part.ids_BT), 1), 1.5),
            token_weight_BT,
        )
        total = args.build_method().loss(scores).total / len(part.ids_BT)
        return total, torch.autograd.grad(total, token_T)[0]

    for mean, whole in zip(
        value_and_gradient(sampled, repeated), value_and_gradient(every, alone), strict=True
    ):
        torch.testing.assert_close(mean, whole, rtol=1e-6, atol=1e-9)
        assert (whole != 0).any()


def test_steps_are_chosen_by_chance_and_without_repeats():
    _, rollout = rollout_of(stopping("bidirectional"), stop_at_eos=False)
    row = int(rollout.completion_BT.sum(1).argmax())
    count, many = 3, 2000
    repeated = rollout.select(torch.tensor([row] * many))
    views = plan("agrpo", repeated, keys(repeated), samples=count)
    steps = int(rollout.completion_BT[row].sum())
    assert steps > 4 and torch.equal(views.target_BMT.sum((1, 2)), torch.full((many,), count))
    assert views.target_BMT.sum(1).max() == 1
    share_T = views.target_BMT.any(1).float().mean(0)[rollout.completion_BT[row]]
    assert ((share_T - count / steps).abs() < 5 * 0.5 / many**0.5).all()
    torch.testing.assert_close(views.weight_BMT.amax(2), torch.full((many, count), steps / count))


def test_a_completion_of_few_steps_keeps_them_all():
    _, rollout = rollout_of(stopping("bidirectional"))
    views = plan("agrpo", rollout, samples=5)
    for row in range(len(PROMPTS)):
        steps = len(rollout.step_BT[row][rollout.completion_BT[row]].unique())
        assert len(sets(views, row)) == min(5, steps)
        assert views.weight_BMT[row].max().item() == pytest.approx(max(1, steps / 5))


def test_tokens_behind_the_end_are_seen_once_they_were_revealed():
    """The sampler saw them when it drew later tokens of the completion."""
    _, rollout = rollout_of(stopping("bidirectional"), stop_at_eos=False, remasking="random")
    views = plan("cj-grpo", rollout)
    shown_BMT = rollout.beyond_BT[:, None] & ~views.hidden_BMT & views.target_BMT.any(2, keepdim=True)
    assert shown_BMT.any() and not (views.target_BMT & rollout.beyond_BT[:, None]).any()
    fewer = replace(rollout, step_BT=torch.where(rollout.beyond_BT, -1, rollout.step_BT))
    assert not (rollout.beyond_BT[:, None] & ~plan("cj-grpo", fewer).hidden_BMT).any()


# The gradient of the expected reward, on models whose samples are all listed.

KINDS = {
    "bidirectional": ("bidirectional", None),
    "blocks of two": ("block_causal", 2),
    "token by token": ("causal", None),
}
STEPS = {
    "one token a step": {},
    "two tokens a step": {"tokens_per_step": 2},
    "the whole canvas": {"stop_at_eos": False},
}


def listed(kind="bidirectional", temperature=1.0, **sampler):
    """A model, its paths under a sampler, random rewards, and the gradient of their mean."""
    lm = policy_gradient.toy(0, *KINDS[kind])
    paths = policy_gradient.enumerate_paths(lm, SamplerConfig(temperature=temperature, **sampler))
    reward_B = paths.reward(1)
    return lm, paths, reward_B, policy_gradient.exact_gradient(lm, paths, reward_B)


def error(method, lm, paths, reward_B, exact):
    return policy_gradient.difference(exact, policy_gradient.expected_gradient(lm, method, paths, reward_B))


@partly_slow(
    "kind, remasking, more",
    [
        ("bidirectional", "low_confidence", {"tokens_per_step": 2}),
        ("bidirectional", "entropy", {}),
        ("bidirectional", "random", {"block_size": 1}),
        ("blocks of two", "low_confidence", {}),
        ("token by token", "left_to_right", {}),
    ],
    0,
    3,
)
def test_the_listed_paths_are_those_of_the_sampler(kind, remasking, more):
    lm, paths, *_ = listed(kind, remasking=remasking, **more)
    config = SamplerConfig(
        temperature=1.0,
        max_new_tokens=policy_gradient.LENGTH,
        remasking=remasking,
        trace=True,
        batch_size=500,
        **more,
    )
    count, start = 1500, len(policy_gradient.PROMPT)
    generation = unmask.generate(lm, [policy_gradient.PROMPT] * count, config)
    rows = zip(
        paths.rollout.ids_BT[:, start:].tolist(), paths.rollout.step_BT[:, start:].tolist(), strict=True
    )
    number = {tuple(ids + steps): index for index, (ids, steps) in enumerate(rows)}
    sampled = torch.tensor([number[tuple(trace.canvas + trace.steps)] for trace in generation.trace])
    expected = paths.probability_B.detach() * count
    seen = torch.zeros_like(expected).index_add(0, sampled, torch.ones(count, dtype=torch.float64))
    often = expected >= 5  # the others count as one
    pairs = [torch.cat([values[often], values[~often].sum()[None]]).numpy() for values in (seen, expected)]
    assert stats.chisquare(*pairs).pvalue > 1e-4


@pytest.mark.parametrize("remasking", ["low_confidence", "entropy", "random"])
def test_the_exact_gradient_is_the_slope_of_the_expected_reward(remasking):
    lm, _, reward_B, exact = listed(remasking=remasking)
    parameters, size, means = list(lm.model.parameters()), 1e-6, []
    direction = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = torch.nn.utils.parameters_to_vector(parameters).detach()
    for sign in (1, -1):
        torch.nn.utils.vector_to_parameters(start + sign * size * direction, parameters)
        paths = policy_gradient.enumerate_paths(lm, SamplerConfig(temperature=1.0, remasking=remasking))
        means.append((paths.probability_B * reward_B).sum().item())
    assert (means[0] - means[1]) / (2 * size) == pytest.approx((exact @ direction).item(), rel=1e-5)


@each_once("remasking, steps, kind", ["random", "left_to_right", "margin", "entropy"], STEPS, KINDS)
def test_the_gradient_is_exact_where_the_order_does_not_depend_on_the_drawn_tokens(kind, steps, remasking):
    assert error(get_method("exact-gradient")(), *listed(kind, remasking=remasking, **STEPS[steps])) < 1e-9


@pytest.mark.parametrize("block_size", [1, 2])
def test_the_gradient_is_exact_by_decoding_blocks(block_size):
    assert error(get_method("exact-gradient")(), *listed(remasking="random", block_size=block_size)) < 1e-9


def test_the_gradient_is_biased_where_it_does_or_where_tokens_after_the_end_are_left_out():
    assert error(get_method("exact-gradient")(), *listed(remasking="low_confidence")) > 0.05
    assert error(get_method("agrpo")(), *listed(remasking="random")) > 0.01
    # what comes after the end is drawn later
    assert error(get_method("agrpo")(), *listed(remasking="left_to_right")) < 1e-9


def test_the_table_in_the_docs_has_zeros_where_the_gradient_is_exact():
    names = ("exact-gradient", "agrpo", "agrpo`, `after_eos: train", "just-grpo")
    made = policy_gradient.table({name: policy_gradient.methods()[name] for name in names}, range(1))
    docs = (ROOT / "docs" / "rl.md").read_text().splitlines()
    docs = docs[docs.index(made[0]) :]
    assert docs[1] == made[1]
    for line in made[2:]:
        cells, written = (
            line.split(" | "),
            next(row for row in docs if row.startswith(line.split(" | ")[0] + " | ")).split(" | "),
        )
        assert [cell.strip(" |") == "0" for cell in cells] == [cell.strip(" |") == "0" for cell in written]


def test_the_exact_gradient_is_one_setting():
    args = config("exact-gradient")
    assert (args.remasking, args.after_eos, args.loss_type, args.scale_rewards) == (
        "random",
        "train",
        "dr_grpo",
        "leave-one-out",
    )
    biased = {"logprob_temperature": 0.5, "mask_truncated_completions": True, "constraint": {"regex": "a*"}}
    for name, value in (
        {"remasking": "low_confidence", "after_eos": "mask", "loss_type": "dapo", "scale_rewards": "group"}
        | biased
    ).items():
        with pytest.raises(ConfigError) as raised:
            config("exact-gradient", **{name: value})
        assert raised.value.where == name


def test_a_causal_model_takes_the_exact_gradient_as_it_is():
    """Nothing after the end has a part in it, and its order is fixed."""
    config("exact-gradient").refuse_for_causal_models()
    with raises(ConfigError, where="after_eos"):
        config("cj-grpo", after_eos="train").refuse_for_causal_models()
