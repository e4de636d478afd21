"""Frames: what each step changes makes the final text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.generation.cases import PATTERNS, configs, prompt_lists
from tests.helpers import partly_slow
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.generation import sampler
from unmask.generation.frames import Frame, replay, watch
from unmask.generation.output import Generation
from unmask.generation.requests import make_infill_requests, make_requests


def check(lm, request, config) -> tuple[list[Frame], Generation]:
    """The frames of a request: they make its text, and never change what they said is final."""
    *frames, generation = watch(lm, request, config.model_copy(update={"trace": True}))
    final: list[int] = []
    for number, frame in enumerate(frames, start=1):
        ids = replay(request.ids, frames[:number], lm.mask_token_id)
        assert ids[: len(final)] == final
        assert frame.step >= number - 1
        final = ids[: frame.num_final]
        assert lm.mask_token_id not in final[request.start :] or frame is frames[-1]
    assert ids == [*request.ids[: request.start], *generation.trace[0].canvas]
    return frames, generation


@partly_slow("attention, block_size", PATTERNS, 0, 2, 4)
@given(st.data())
def test_frames_of_any_settings_make_the_text(attention, block_size, data):
    lm = float64_lm("phi", attention, block_size)
    config, [prompt, *_] = data.draw(configs(attention, block_size)), data.draw(prompt_lists(1))
    prompt = [token for token in prompt if token != lm.mask_token_id] or [4]
    [request] = make_requests(lm, [prompt], config)
    _, generation = check(lm, request, config)
    assert generation.tokens == sampler.generate(lm, [prompt], config).tokens


def test_each_step_is_a_frame():
    lm = float64_lm("phi", "bidirectional", None)
    config = SamplerConfig(max_new_tokens=6, tokens_per_step=2, remasking="random", stop_at_eos=False)
    frames, generation = check(lm, make_requests(lm, [[4, 5]], config)[0], config)
    assert [frame.step for frame in frames] == [1, 2, 3] and [len(frame.revealed) for frame in frames] == [
        2,
        2,
        2,
    ]
    probabilities = {each.position: each.log_prob for frame in frames for each in frame.revealed}
    assert [probabilities[2 + place] for place in range(6)] == generation.log_probs[0]


def test_frames_of_drafts_and_infilled_texts():
    lm = float64_lm("phi", "block_causal", 4)
    config = SamplerConfig(num_speculative_tokens=2, temperature=0.7)
    mask = lm.mask_token_id
    check(lm, make_infill_requests(lm, [[4, mask, mask, 5, mask, 6]], config)[0], config)


def test_frames_of_self_speculation():
    lm = float64_lm("phi", "block_causal", 4, causal_context=True)
    config = SamplerConfig(mode="self-speculative", max_new_tokens=9, temperature=0.8)
    frames, _ = check(lm, make_requests(lm, [[4, 5, 6]], config)[0], config)
    assert all(not frame.hidden for frame in frames)
