"""Frames: what each step changes makes the final text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.diffusion_gemma import ALPHABET, CANVAS, loaded
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
        hides = lm.mask_token_id in final[request.start :] and lm.noise == "masked"
        assert not hides or frame is frames[-1]
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


def test_frames_of_canvases_of_random_tokens(tmp_path):
    """A frame has each prediction of the current canvas, and hides none again. Nothing of it is final."""
    bidirectional = float64_lm("phi", "bidirectional").with_noise("uniform")
    blocks = float64_lm("phi", "block_causal", 4, logit_shift=False).with_noise("uniform")
    for lm in (bidirectional, blocks, loaded(tmp_path)):
        config = SamplerConfig(max_new_tokens=13, max_denoising_steps=4, t_max=2.0, stop_at_eos=False)
        [request] = make_requests(lm, ["abc"], config)
        frames, generation = check(lm, request, config)
        assert not any(frame.hidden for frame in frames)
        begun = {start: False for start, _ in request.blocks}
        for frame in frames[:-1]:
            positions = {each.position for each in frame.revealed}
            start, stop = next(block for block in request.blocks if block[0] <= max(positions) < block[1])
            assert begun[start] or positions >= {*range(start, stop)}
            begun[start] = True
            assert frame.num_final in (start, stop)
        last = {each.position: each for frame in frames for each in frame.revealed}
        assert [last[request.start + at].log_prob for at in range(13)] == generation.log_probs[0]
        # a frame has what would be committed after it
        once = lm, ["abc"], config.model_copy(update={"max_denoising_steps": 1})
        shown = [each for each in frames[0].revealed if each.position < request.end]
        expected = sampler.generate(*once)
        assert [each.token for each in shown] == expected.tokens[0][: len(shown)]
        assert [each.log_prob for each in shown] == expected.log_probs[0][: len(shown)]


def test_frames_of_a_mask_token_that_is_predicted(tmp_path):
    """To DiffusionGemma it is a token like any other."""
    lm = loaded(tmp_path, vocab_size=len(ALPHABET) + 8)
    config = SamplerConfig(max_new_tokens=CANVAS, max_denoising_steps=2, allowed_tokens=[lm.mask_token_id])
    [request] = make_requests(lm, ["abc"], config)
    frames, generation = check(lm, request, config)
    assert generation.tokens[0] == [lm.mask_token_id] * CANVAS
    assert not any(frame.hidden for frame in frames)
    shown = {each.position for frame in frames for each in frame.revealed}
    assert shown == {*range(request.start, request.length)}
