"""What holds for every method, and for the rollouts they read."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from tests.generation.conftest import every_pattern
from tests.methods.rollouts import PROMPTS, keys, rollout_of, stopping
from unmask.diffusion.views import Draw
from unmask.errors import ConfigError
from unmask.methods import METHODS, get_method

CONFIG = SimpleNamespace(segments=None, prompt_mask_rate=0.15)


@pytest.mark.parametrize("name", METHODS)
def test_planning_leaves_the_global_generators_alone_and_repeats(name):
    _, rollout = rollout_of(stopping("bidirectional"))
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate()
    first, second = (get_method(name).plan(rollout, Draw(0, keys(rollout)), CONFIG) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert torch.equal(first.hidden_BVT, second.hidden_BVT) and torch.equal(first.scored_BVT, second.scored_BVT)


@pytest.mark.parametrize("name", METHODS)
@every_pattern
def test_a_completion_is_scored_in_full_and_nothing_else(name, attention, block_size):
    _, rollout = rollout_of(stopping(attention, block_size))
    views = get_method(name).plan(rollout, Draw(0, keys(rollout)), CONFIG)
    torch.testing.assert_close(views.weight_BVT.sum(1), rollout.completion_BT.float())
    assert not (views.scored_BVT & ~views.hidden_BVT).any()
    assert not (views.hidden_BVT & (rollout.documents_BT == 0)[:, None]).any()


@every_pattern
def test_a_rollout_is_the_canvas_with_its_parts_told_apart(attention, block_size):
    lm = stopping(attention, block_size)
    generation, rollout = rollout_of(lm, block_size=2 if attention == "bidirectional" else None)
    assert rollout.beyond_BT.any()
    for row, (prompt, tokens, trace) in enumerate(zip(PROMPTS, generation.tokens, generation.trace, strict=True)):
        length = len(prompt) + len(trace.canvas)
        parts = ["prompt"] * len(prompt) + ["completion"] * len(tokens) + ["beyond"] * (len(trace.canvas) - len(tokens))
        for part in ("prompt", "completion", "beyond"):
            mask_T = getattr(rollout, f"{part}_BT")[row]
            assert mask_T.dtype == torch.bool
            assert mask_T[:length].tolist() == [name == part for name in parts] and not mask_T[length:].any()
        assert rollout.ids_BT[row, :length].tolist() == prompt + trace.canvas
        assert rollout.ids_BT[row][rollout.completion_BT[row]].tolist() == tokens
        assert rollout.documents_BT[row].tolist() == [1] * length + [0] * (rollout.ids_BT.shape[1] - length)
        assert rollout.steps_BT[row].tolist() == [-1] * len(prompt) + trace.steps + [-1] * (rollout.ids_BT.shape[1] - length)


def test_unknown_methods_are_refused():
    with pytest.raises(ConfigError, match=r"unknown method 'grpo'.*diffu-grpo, cj-grpo"):
        get_method("grpo")
    assert all(get_method(name).name == name for name in METHODS)
