"""Repair: how many tokens are hidden again, against ReMDM's formulas by hand, and which."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.generation.cases import Watch, revisions
from tests.helpers import examples
from tests.tiny import float64_lm
from unmask.config.revise import ReviseConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation import naive, sampler
from unmask.generation.engine.engine import Engine
from unmask.generation.requests import make_requests
from unmask.generation.revise import doubts, loop_counts, plan_revisions, present_log_probs


def expected_by_remdm(alpha_t: float, alpha_s: float, size: int, revise: ReviseConfig) -> float:
    """The expected number of tokens that ReMDM hides: each visible one with probability sigma_t (for conf, in
    total)."""
    most = min(1.0, (1 - alpha_s) / alpha_t)
    sigma = {
        "cap": min(revise.eta, most),
        "rescale": revise.eta * most,
        "conf": revise.eta * most / (alpha_t * size),
    }
    return sigma[revise.schedule] * alpha_t * size


@pytest.mark.parametrize("eta", [0.008, 0.3, 1.0])
@pytest.mark.parametrize("schedule", ["cap", "rescale", "conf"])
def test_the_numbers_hidden_are_those_of_remdm(schedule, eta):
    """Up to the fraction that is carried to the next step."""
    size, revise = 1000, ReviseConfig(schedule=schedule, eta=eta)
    counts = [10] * 100
    kept, hide = plan_revisions(counts, revise)
    assert kept == counts
    exact = [0.0] + [expected_by_remdm(step / 100, (step + 1) / 100, size, revise) for step in range(1, 100)]
    for step in range(100):
        assert abs(sum(hide[: step + 1]) - sum(exact[: step + 1])) < 1
    assert (sum(hide) > 0) == (sum(exact) >= 1)


def test_the_numbers_by_hand():
    # min(0.5 v, h): 2 of 4, min(4, 4), nothing at the end
    assert plan_revisions([4, 4, 4, 4], ReviseConfig(eta=0.5))[1] == [0, 2, 4, 0]
    # half of min(4, 8), min(8, 4)
    assert plan_revisions([4, 4, 4, 4], ReviseConfig(eta=0.5, schedule="rescale"))[1] == [0, 2, 2, 0]
    # 1, then 4 / 8 carried
    assert plan_revisions([4, 4, 4, 4], ReviseConfig(eta=1.0, schedule="conf"))[1] == [0, 1, 0, 0]
    # 0.5, 0.5 + 1, 1.5 of which one fits, 0
    assert plan_revisions([1] * 5, ReviseConfig(eta=0.5))[1] == [0, 0, 1, 1, 0]


def test_a_loop_hides_and_reveals_the_same_number():
    revise = ReviseConfig(schedule="loop", eta=0.25, t_on=0.6, t_off=0.2, alpha_on=0.8)
    counts = loop_counts(10, 10, revise)
    assert counts == [2, 2, 2, 2, 0, 0, 0, 0, 1, 1]
    assert plan_revisions(counts, revise) == (counts, [0, 0, 0, 0, 2, 2, 2, 2, 0, 0])  # min(0.25 * 8, 2)
    weak = ReviseConfig(schedule="loop", eta=0.0625, t_on=0.6, t_off=0.2, alpha_on=0.8)
    # every other step would do nothing
    assert plan_revisions(counts, weak) == ([2, 2, 2, 2, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 0, 0])


@given(st.integers(1, 30), st.integers(1, 40), revisions(["loop"]))
def test_a_loop_completes_the_block(size, steps, revise):
    counts, hide = plan_revisions(loop_counts(size, steps, revise), revise)
    assert sum(counts) == size and len(counts) <= steps
    check_plan(counts, hide)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), revisions(["cap", "rescale", "conf"]))
def test_only_visible_tokens_are_hidden_and_none_at_the_last_step(counts, revise):
    kept, hide = plan_revisions(counts, revise)
    assert kept == counts
    check_plan(counts, hide)


def check_plan(counts: list[int], hide: list[int]) -> None:
    assert (
        hide[0] == hide[-1] == 0 and min(count + again for count, again in zip(counts, hide, strict=True)) > 0
    )
    visible = 0
    for count, again in zip(counts, hide, strict=True):
        assert 0 <= again <= visible and visible + count + again <= sum(counts)
        visible += count


def rank(revise: ReviseConfig, seed: int = 0) -> torch.Tensor:
    """The doubts at three tokens with probabilities 0.5, 0.9 and 0.01."""
    prob_N = torch.tensor([0.5, 0.9, 0.01], dtype=torch.float64)
    logits_NV = torch.stack([prob_N.log(), (1 - prob_N).log()], 1)
    keys = [torch.full((3,), value) for value in (seed, 7)]
    return doubts(
        present_log_probs(logits_NV, torch.zeros(3, dtype=torch.long)), revise, 0, *keys, torch.arange(3)
    )


def test_the_least_probable_tokens_are_hidden_first():
    priority_N = rank(ReviseConfig())
    assert priority_N.argsort(descending=True).tolist() == [2, 0, 1]
    assert rank(ReviseConfig(below=0.5)).isfinite().tolist() == [False, False, True]
    assert rank(ReviseConfig(below=0.91)).isfinite().all()


@pytest.mark.slow
def test_the_draw_is_in_proportion_to_the_exponential():
    """The first of a draw without replacement, as in ReMDM's conf: exp(-probability), here divided by a
    temperature."""
    count, revise = 4000, ReviseConfig(schedule="conf", temperature=0.5)
    first = (
        torch.bincount(torch.tensor([int(rank(revise, seed).argmax()) for seed in range(count)]), minlength=3)
        / count
    )
    weight_N = (-torch.tensor([0.5, 0.9, 0.01]) / 0.5).exp()
    assert torch.allclose(first, weight_N / weight_N.sum(), atol=4 / math.sqrt(count) / 2)


def test_a_token_that_context_contradicts_is_hidden_and_filled_in_again(monkeypatch):
    """The present probability decides, not that of the time of revealing."""
    lm = float64_lm("phi", "bidirectional", eos_bias=-9.0)
    config = SamplerConfig(
        max_new_tokens=6, tokens_per_step=2, revise={"eta": 0.5}, trace=True, stop_at_eos=False
    )
    seen = []
    logits = lm.logits
    monkeypatch.setattr(
        lm,
        "logits",
        lambda ids_BT, **rest: (
            seen.append((ids_BT[0].tolist(), logits(ids_BT, **rest)[0])),
            seen[-1][1][None],
        )[1],
    )
    naive.generate(lm, [[4, 7]], config)
    ids, logits_TV = seen[1]
    visible = [at for at in range(2, 8) if ids[at] != lm.mask_token_id]
    values = {at: float(logits_TV[at].log_softmax(-1)[ids[at]]) for at in visible}
    hidden = [at for at in visible if seen[2][0][at] == lm.mask_token_id]
    earlier = {at: float(seen[0][1][at].log_softmax(-1)[ids[at]]) for at in visible}
    assert len(visible) == 2 and sum(token == lm.mask_token_id for token in seen[2][0]) == 2
    assert hidden == [min(visible, key=values.__getitem__)] != [min(visible, key=earlier.__getitem__)]


@pytest.mark.parametrize("logit_shift", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "attention, block_size",
    [("bidirectional", None), ("block_causal", 3), pytest.param("block_causal", 4, marks=pytest.mark.slow)],
)
@examples(6)
@given(data=st.data())
def test_the_engine_revises_by_quality_as_the_naive_sampler_does(logit_shift, attention, block_size, data):
    """Beside sequences that do not revise, or do by probability."""
    context, time = data.draw(st.booleans()) and attention == "block_causal", data.draw(st.booleans())
    lm = float64_lm(
        "phi",
        attention,
        block_size,
        logit_shift,
        eos_bias=-9.0,
        causal_context=context,
        time_embedding=time,
        quality_head=True,
    )
    engine, expected = Engine(lm, batch_size=3), {}
    for by in ("quality", "probability", None, "quality"):
        revise = by and data.draw(revisions(["cap", "rescale", "loop"])).model_copy(update={"by": by})
        guidance, temperature = data.draw(st.sampled_from([0.0, 0.7])), data.draw(st.sampled_from([0.0, 0.8]))
        config = SamplerConfig(
            max_new_tokens=9, steps=7, temperature=temperature, cfg_scale=guidance, revise=revise
        )
        requests = make_requests(lm, [[4, 5], [4, 5], [6, 7, 8]], config)
        traces = naive.complete(lm, requests, config.model_copy(update={"trace": True})).trace
        expected |= dict(zip([engine.submit(request, config) for request in requests], traces, strict=True))
    results = dict(engine.run())
    for ticket, trace in expected.items():
        assert (results[ticket].canvas, results[ticket].steps) == (trace.canvas, trace.steps)


@pytest.mark.parametrize("attention, block_size", [("bidirectional", None), ("block_causal", 4)])
def test_visible_positions_are_computed_only_where_some_may_be_hidden(attention, block_size):
    lm = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    plain = SamplerConfig(max_new_tokens=8, tokens_per_step=2, block_size=block_size or 8, stop_at_eos=False)
    heads = {}
    for name, revise in (("off", None), ("on", ReviseConfig(eta=0.5))):
        with Watch(lm) as watch:
            heads[name] = (
                sampler.generate(lm, [[4, 5, 6, 7]], plain.model_copy(update={"revise": revise}))
                and watch.heads
            )
    # 1: the prompt's pass
    assert heads["off"] == (8 + 6 + 4 + 2 if attention == "bidirectional" else 2 * (4 + 2) + 1)
    # Visible at the four steps: 0, 2, 4, 6. At the last one, and so at the second of a block of two steps,
    # nothing can be hidden again.
    assert heads["on"] - heads["off"] == (2 + 4 if attention == "bidirectional" else 0)


def test_a_request_of_other_settings_is_refused():
    lm = float64_lm("phi", "bidirectional")
    (request,) = make_requests(lm, ["ab"], SamplerConfig(max_new_tokens=4))
    with raises(GenerationError, where="config"):
        Engine(lm).submit(request, SamplerConfig(max_new_tokens=4, revise={}))


def test_more_steps_than_tokens_are_for_a_loop():
    lm = float64_lm("phi", "bidirectional", eos_bias=-9.0)
    config = SamplerConfig(max_new_tokens=4, steps=9, revise={"schedule": "loop", "eta": 1.0})
    generation = sampler.generate(lm, ["ab"], config)
    assert (
        generation.forward_passes == [9]
        and len(generation.tokens[0]) == 4
        and lm.mask_token_id not in generation.tokens[0]
    )
