"""Reinforcement learning of DiffusionGemma: its draws are replayed given what was predicted before each step."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
import torch

import unmask
from tests.diffusion_gemma import CANVAS, loaded
from tests.rl.methods.rollouts import keys, plan
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.log_probs import view_log_probs
from unmask.generation.rollout import cut_at_end, make_rollout

PROMPTS = [[4, 5, 6], [7], [9, 8, 7, 6, 5]]
SETTINGS = {"max_denoising_steps": 4, "entropy_bound": 6.0, "confidence_threshold": 1.5, "t_max": 1.2}


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    lm = loaded(tmp_path_factory.mktemp("gemma") / "model")
    config = SamplerConfig(max_new_tokens=2 * CANVAS + 3, trace=True, **SETTINGS)
    generation = unmask.generate(lm, PROMPTS, config)
    return lm, generation, make_rollout(lm, cut_at_end(lm, generation)).whole()


def log_probs(lm, rollout, views, chunk=None):
    with torch.no_grad():
        return view_log_probs(lm, rollout.ids_BT, rollout.document_BT, views, chunk=chunk)


@pytest.mark.parametrize("chunk", [None, 1])
def test_replayed_log_probs_are_those_that_the_sampler_recorded(sampled, chunk):
    lm, generation, rollout = sampled
    views = plan("cj-grpo", rollout)
    log_prob_BMT = log_probs(lm, rollout, views, chunk)
    compared = 0
    for row, trace in enumerate(generation.trace):
        for _, steps in groupby(trace.canvas_steps, lambda step: step.start):
            for number, step in enumerate(steps):
                for place, (token, log_prob) in enumerate(zip(step.kept, step.log_probs, strict=True)):
                    if token >= 0:
                        at = row, number, len(generation.prompts[row]) + step.start + place
                        assert views.target_BMT[at] and views.replaced.token_BMT[at] == token
                        assert log_prob_BMT[at].item() == pytest.approx(log_prob, abs=1e-4)
                        compared += number > 0
    assert compared > 30
    first = views.replaced._replace(step_BMT=torch.zeros_like(views.replaced.step_BMT))
    unconditioned_BMT = log_probs(lm, rollout, replace(views, replaced=first), chunk)
    assert (unconditioned_BMT - log_prob_BMT)[:, 1:].abs().max() > 0.05


def test_sampled_steps_are_conditioned_on_all_before_them(sampled):
    lm, _, rollout = sampled
    every, some = plan("cj-grpo", rollout), plan("agrpo", rollout, keys(rollout), samples=2)
    whole_BMT, part_BMT = log_probs(lm, rollout, every), log_probs(lm, rollout, some)
    for row in range(len(PROMPTS)):
        for view in range(some.count):
            step = int(some.replaced.step_BMT[row, view, 0])
            torch.testing.assert_close(part_BMT[row, view], whole_BMT[row, step], rtol=1e-5, atol=1e-5)
