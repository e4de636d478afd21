"""A trace holds all that is needed to replay it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.generation.cases import PATTERNS
from tests.helpers import each_once, examples, partly_slow
from tests.tiny import float64_lm, lm_of_tokenizer
from tests.tokenizers import KINDS
from tests.tokenizers import tokenizer as every_kind
from unmask.config.sampler import SamplerConfig
from unmask.generation import naive, sampler
from unmask.generation.output import Trace, make_generation
from unmask.generation.requests import Request, make_requests


@pytest.mark.parametrize("stop_at_eos", [False, True])
def test_completions_are_cut_at_their_first_eos_and_traces_are_not(stop_at_eos):
    lm = float64_lm()
    eos, mask = lm.eos_token_id, lm.mask_token_id
    canvases = [[4, eos, 5, eos, 6, 7], [4, 5, 6, 7, 8, 9], [eos, 4, mask, mask, mask, mask]]
    steps = [[-1 if token == mask else at for at, token in enumerate(ids)] for ids in canvases]
    traces = [Trace(ids, when, [-0.5] * 6, 6) for ids, when in zip(canvases, steps, strict=True)]
    requests = [
        Request([4], [4, *[mask] * 6], [False, *[True] * 6], 1, key, [(1, 7)], [[1] * 6], stop_at_eos)
        for key in range(3)
    ]
    generation = make_generation(lm, requests, traces, SamplerConfig(stop_at_eos=stop_at_eos, trace=True))
    expected = [canvases[0][:2], canvases[1], [eos]] if stop_at_eos else [*canvases[:2], [eos, 4]]
    assert generation.tokens == expected
    assert generation.texts == [
        lm.tokenizer.decode([token for token in tokens if token != eos]) for tokens in expected
    ]
    assert (
        [len(steps) for steps in generation.steps]
        == [len(values) for values in generation.log_probs]
        == list(map(len, expected))
    )
    assert generation.trace == traces
    assert make_generation(lm, requests, traces, SamplerConfig()).trace is None


class Settings(NamedTuple):
    temperature: float
    remasking: str
    steps: int | None
    stop_at_eos: bool


cases = st.builds(
    Settings,
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from(["low_confidence", "margin", "entropy", "random", "left_to_right"]),
    st.none() | st.integers(1, 8),
    st.booleans(),
)


@each_once("logit_shift, attention, block_size", [False, True], PATTERNS)
@partly_slow("generate", [sampler.generate, naive.generate], 0)
@examples(4)
@given(case=cases, decoding_block=st.sampled_from([None, 1, 2, 4, 8]))
def test_a_trace_can_be_replayed(generate, logit_shift, attention, block_size, case, decoding_block):
    """For every state, rebuilt from the trace, the model gives the recorded log-probabilities and the greedy
    tokens."""
    lm = float64_lm("phi", attention, block_size, logit_shift)
    size = decoding_block if attention == "bidirectional" else None
    # every block takes a step
    fewest = 8 // {"causal": 1, "block_causal": block_size}.get(attention, size or 8) + 1
    case = case._replace(steps=case.steps and min(max(case.steps, fewest), 8))
    config = SamplerConfig(max_new_tokens=8, trace=True, block_size=size, **case._asdict())
    prompts = [[4, 5], [6, 7, 8, 9, 4], [5]]
    generation = generate(lm, prompts, config)
    assert generation.denoising_steps == generation.forward_passes
    for request, trace, passes in zip(
        make_requests(lm, prompts, config), generation.trace, generation.forward_passes, strict=True
    ):
        assert passes == trace.forward_passes == max(trace.steps) + 1
        assert [token == lm.mask_token_id for token in trace.canvas] == [step < 0 for step in trace.steps]
        assert all(
            log_prob == 0 for log_prob, step in zip(trace.log_probs, trace.steps, strict=True) if step < 0
        )
        replay(lm, request, trace, config)


@torch.no_grad()
def replay(lm, request: Request, trace: Trace, config: SamplerConfig) -> None:
    start = len(request.prompt)
    plan = [
        (block, count)
        for block, counts in zip(request.blocks, request.counts, strict=True)
        for count in counts
    ]
    for step, ((first, stop), count) in enumerate(plan[: trace.forward_passes]):
        hidden = [start + at for at, revealed in enumerate(trace.steps) if revealed < 0 or revealed >= step]
        revealed = [start + at for at, when in enumerate(trace.steps) if when == step]
        assert len(revealed) == count and all(first <= position < stop for position in revealed)
        ids_T = torch.tensor(request.prompt + trace.canvas)
        ids_T[hidden] = lm.mask_token_id
        log_probs_TV = lm.logits(ids_T[None])[0].log_softmax(-1)
        for position in revealed:
            token, log_prob = trace.canvas[position - start], trace.log_probs[position - start]
            assert log_prob == pytest.approx(log_probs_TV[position, token].item(), abs=1e-10)
            assert config.temperature > 0 or token == log_probs_TV[position].argmax()
        if config.temperature == 0 and config.remasking == "low_confidence":
            best = sorted(
                (position for position in hidden if first <= position < stop),
                key=lambda at: -log_probs_TV[at].max().float(),
            )
            assert sorted(best[:count]) == revealed


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_what_completions_add_to_their_prompts(kind):
    """Also where random bytes make no characters."""
    tokenizer = every_kind(kind)
    lm = lm_of_tokenizer(tokenizer)
    prompts = ["Once upon a time", "then", "", [1, 2], "Once 猫"]
    made = sampler.generate(lm, prompts, SamplerConfig(max_new_tokens=20, temperature=1.0, stop_at_eos=False))
    for prompt, tokens, text in zip(made.prompts, made.tokens, made.texts, strict=True):
        whole, before = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt + tokens, prompt))
        assert text == whole[len(before) :]
        assert not whole.startswith(before) or before + text == whole
