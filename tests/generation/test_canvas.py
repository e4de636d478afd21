"""Canvases of random tokens: the steps are those of transformers, and the engine's tokens those of `naive`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.models.diffusion_gemma import generation_diffusion_gemma as published

import unmask
from tests.errors import raises
from tests.generation.cases import canvas_batches, in_company
from tests.helpers import examples, partly_slow
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import RngStream, uniform
from unmask.errors import ConfigError, GenerationError, ModelError
from unmask.generation import naive, sampler
from unmask.generation.canvas import OF_MASKS, CanvasSettings, random_tokens
from unmask.generation.frames import watch
from unmask.generation.policies import draw
from unmask.generation.prompt_log_probs import prompt_log_probs
from unmask.generation.requests import make_infill_requests, make_requests, without_ends
from unmask.generation.token_ids import generate_ids
from unmask.models.export import export
from unmask.models.load import with_pattern

PATTERNS = {
    "bidirectional": ("bidirectional", None, False),
    "with a shift": ("bidirectional", None, True),
    "blocks": ("block_causal", 4, False),
    "blocks with a shift": ("block_causal", 4, True),
}


def canvas_lm(kind="bidirectional"):
    attention, block_size, shift = PATTERNS[kind]
    return float64_lm("phi", attention, block_size, logit_shift=shift).with_noise("uniform")


def by_transformers(lm, request, config):
    """The canvas by the denoising step of transformers, with the keyed random numbers in place of its own,
    and the steps that it took."""
    settings, (start, stop) = CanvasSettings.of(lm, config), request.blocks[0]
    position_N, rows = torch.arange(start, stop), len(lm.model.get_output_embeddings().weight)
    key_N, count = torch.full_like(position_N, request.key), stop - start
    passes = 0

    def randint(**_):
        return random_tokens(lm, config.seed, key_N, torch.full_like(key_N, passes), position_N)[None]

    def multinomial(share_NV, **_):
        step_N = torch.full_like(key_N, passes - 1)
        how = {"step": step_N, "position": position_N, "stream": RngStream.TOKEN}
        return draw(share_NV, uniform(config.seed, key_N, **how))[:, None]

    def decoder_forward(decoder_input_ids, **_):
        ids_1T = torch.tensor([request.ids])
        ids_1T[0, start:stop] = decoder_input_ids[0]
        return SimpleNamespace(logits=lm.logits(ids_1T)[:, start:stop])

    weight = lm.model.get_input_embeddings().weight
    model = SimpleNamespace(
        config=SimpleNamespace(text_config=SimpleNamespace(vocab_size=rows)),
        model=SimpleNamespace(decoder=SimpleNamespace(embed_tokens=SimpleNamespace(weight=weight))),
    )
    bound = published.EntropyBoundSamplerConfig(entropy_bound=settings.entropy_bound)
    steps = settings.max_denoising_steps
    drawn = published.EntropyBoundSampler(bound, count, rows, steps)
    heat = published.LinearTemperatureScheduleLogitsProcessor(settings.t_min, settings.t_max, steps)
    stopping = published.StableAndConfidentStoppingCriteria(
        settings.stability_threshold, settings.confidence_threshold
    )
    with mock.patch("torch.randint", randint), mock.patch("torch.multinomial", multinomial):
        canvas = best = drawn.initialize_canvas(1, torch.device("cpu"))
        logits, finished = None, torch.zeros(1, dtype=torch.bool)
        for step in reversed(range(1, steps + 1)):
            passes += 1
            canvas, best, logits, finished = published.DiffusionGemmaGenerationMixin._denoising_step(
                *(model, decoder_forward, canvas, best, torch.tensor([request.ids]), None, logits, {}, None),
                *(finished, step, drawn, LogitsProcessorList([heat]), stopping),
            )
            if finished.all():
                break
    return best[0].tolist(), passes


SETTINGS = [
    {},
    {"max_denoising_steps": 1},
    {"max_denoising_steps": 7, "entropy_bound": 0.5},
    {"entropy_bound": 2.0, "t_min": 0.1, "t_max": 0.3},
    {"entropy_bound": 8.0, "confidence_threshold": 1.0, "t_max": 3.0},
    {"stability_threshold": 0, "confidence_threshold": 0.9},
    {"stability_threshold": 3, "confidence_threshold": 2.0, "entropy_bound": 20.0},
    {"stability_threshold": 2, "confidence_threshold": 0.5, "t_min": 0.01, "t_max": 0.02},
    {"t_min": 0.0, "t_max": 0.4, "max_denoising_steps": 12},
    {"entropy_bound": 1e-9, "t_min": 1.0, "t_max": 1.5},
    {"entropy_bound": 4.0, "stability_threshold": 1, "confidence_threshold": 1.5, "t_max": 1.2},
    {"t_min": 0.3, "t_max": 0.5, "entropy_bound": 1.0, "confidence_threshold": 0.3},
]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of what transformers imports
@partly_slow("settings", SETTINGS, 1, 3, 5, 6, 8, ids=str)
@torch.no_grad()
def test_tokens_and_steps_are_those_of_transformers(settings):
    lm = canvas_lm()
    for seed, prompt in enumerate(("abc", "f", "deadbeef")):
        given = settings | {"entropy_bound": settings.get("entropy_bound", 0.1), "seed": seed, "t_max": 0.8}
        config = SamplerConfig(max_new_tokens=16, stop_at_eos=False, **given | settings)
        [request] = make_requests(lm, [prompt], config)
        found = naive.complete(lm, [request], config)
        expected, passes = by_transformers(lm, request, config)
        assert found.tokens[0] == expected and found.forward_passes == [passes]


@partly_slow("kind", PATTERNS, 0, 3)
@given(batch=canvas_batches("abcdef"), size=st.integers(1, 3))
@examples(25)
def test_sequences_have_the_tokens_of_the_naive_sampler_in_any_company(kind, batch, size):
    for trace, expected, config in in_company(canvas_lm(kind), batch, size, 1e-9):
        assert trace.forward_passes == expected.forward_passes
        assert trace.top_ids == expected.top_ids
        assert len(trace.canvas_steps) == (trace.forward_passes if config.trace else 0)
        if config.trace:
            assert trace.entropies == pytest.approx(expected.entropies, abs=1e-9)
            assert_same_steps(trace.canvas_steps, expected.canvas_steps)
            check_steps(trace)


def assert_same_steps(found, expected):
    for step, other in zip(found, expected, strict=True):
        assert step.log_probs == pytest.approx(other.log_probs, abs=1e-9)
        assert replace(step, log_probs=[]) == replace(other, log_probs=[])


def check_steps(trace):
    """Each step shows what the one before it kept; the last one of a canvas keeps nothing."""
    for step, after in itertools.pairwise([*trace.canvas_steps, None]):
        if after is None or after.start != step.start:
            assert set(step.kept) == {-1} and not any(step.log_probs)
            continue
        assert max(step.kept) >= 0
        kept = [token >= 0 for token in step.kept]
        assert all(seen == token for token, seen, k in zip(step.kept, after.shown, kept, strict=True) if k)
        assert all(
            log_prob <= 0 and (k or log_prob == 0) for log_prob, k in zip(step.log_probs, kept, strict=True)
        )


def test_gaps_of_given_length_are_filled_on_a_canvas():
    lm, mask = canvas_lm(), canvas_lm().tokenizer.mask_token
    text = f"ab{mask}{mask}cd{mask}"
    config = SamplerConfig(max_denoising_steps=6)
    found = unmask.infill(lm, [text], config)
    allowed = without_ends(lm, config)
    expected = naive.complete(lm, make_infill_requests(lm, [text], allowed), allowed)
    assert found.tokens == expected.tokens
    assert found.texts[0][:2] == "ab" and "cd" in found.texts[0]


def test_the_end_token_ends_a_text():
    lm = float64_lm("phi", "block_causal", 4, logit_shift=False, eos_bias=2.0).with_noise("uniform")
    found = sampler.generate(lm, ["abc"] * 9, SamplerConfig(max_new_tokens=24, max_denoising_steps=4))
    ended = [tokens for tokens in found.tokens if tokens[-1] in lm.eos_token_ids]
    assert ended and all(lm.eos_token_id not in tokens[:-1] for tokens in found.tokens)
    assert min(found.forward_passes) < 4 * 7


@pytest.mark.parametrize(
    "given",
    [
        {"steps": 4},
        {"tokens_per_step": 2},
        {"temperature": 0.7},
        {"threshold": 0.9},
        {"factor": 1.0},
        {"remask_fraction": 0.1},
        {"revise": {"by": "probability"}},
        {"reveal_last": [2]},
        {"block_size": 4},
        {"temperature": 0},
        {"cfg_scale": 1.0},
        {"cache": "dual"},
        {"early_commit": 0.9},
        {"top_forbidden": 2, "constraint": {"regex": "a*"}},
        {"remasking": "random"},
        {"remasking": "entropy"},
    ],
    ids=str,
)
def test_settings_that_need_masks_are_refused_by_name(given):
    name = next(iter(given))
    assert name in OF_MASKS
    with raises(GenerationError, where=name):
        unmask.generate(canvas_lm(), ["abc"], SamplerConfig(max_new_tokens=8, **given))


@pytest.mark.parametrize("name", ["max_denoising_steps", "stability_threshold"])
def test_settings_of_canvases_are_refused_for_masks(name):
    with raises(GenerationError, where=name):
        unmask.generate(
            float64_lm("phi", "bidirectional"), ["abc"], SamplerConfig(max_new_tokens=8, **{name: 2})
        )


def test_the_bound_of_entropies_needs_no_other_setting():
    found = [
        unmask.generate(canvas_lm(), ["abc"], SamplerConfig(max_new_tokens=8, entropy_bound=bound)).tokens
        for bound in (0.1, 4.0)
    ]
    assert found[0] == unmask.generate(canvas_lm(), ["abc"], SamplerConfig(max_new_tokens=8)).tokens
    assert found[0] != found[1]
    with raises(GenerationError, where="entropy_bound"):
        unmask.generate(float64_lm("phi", "bidirectional"), ["abc"], SamplerConfig(entropy_bound=0.1))


@pytest.mark.parametrize("kind", PATTERNS)
def test_frames_end_with_the_log_probabilities_of_the_result(kind):
    lm = canvas_lm(kind)
    for seed in range(4):
        settings = {"max_denoising_steps": 5, "confidence_threshold": 2.0, "stop_at_eos": False}
        config = SamplerConfig(max_new_tokens=12, seed=seed, **settings)
        [request] = make_requests(lm, ["abc"], config)
        *frames, result = watch(lm, request, config)
        last = {each.position: each for frame in frames for each in frame.revealed}
        seen = [last[position] for position in range(request.start, request.length)]
        assert [each.token for each in seen] == result.tokens[0]
        assert [each.log_prob for each in seen] == result.log_probs[0]


@pytest.mark.parametrize(
    "given", [{"t_max": 1e-40, "t_min": 0}, {"t_max": 9e-7, "t_min": 0}, {"t_min": 1e-9}], ids=str
)
def test_temperatures_that_no_number_holds_are_refused_by_name(given):
    with raises(ConfigError, where=next(iter(given))):
        SamplerConfig(**given)
    coldest = SamplerConfig(max_new_tokens=8, t_min=0, t_max=1e-6)
    assert unmask.generate(canvas_lm(), ["abc"], coldest).tokens[0]


def test_temperatures_must_fall():
    with raises(GenerationError, where="t_min"):
        unmask.generate(canvas_lm(), ["abc"], SamplerConfig(max_new_tokens=8, t_min=0.9))


def test_models_of_hybrid_noise_write_with_masks():
    lm, config = float64_lm("phi", "bidirectional"), SamplerConfig(max_new_tokens=8, steps=4)
    found = unmask.generate(lm.with_noise("hybrid", 0.1), ["abc"], config)
    assert found.tokens == unmask.generate(lm, ["abc"], config).tokens
    with raises(GenerationError, where="length"):
        unmask.infill(lm.with_noise("hybrid", 0.1), ["ab<gap>cd"], length="auto")


def test_what_reads_masks_is_refused(tmp_path):
    lm = canvas_lm()
    with raises(GenerationError, where="length"):
        unmask.infill(lm, ["ab<gap>cd"], length="auto")
    with raises(GenerationError, where="prompt log-probabilities"):
        prompt_log_probs(lm, [4, 5, 6], 1, lambda scored: scored())
    with raises(ModelError, where="layout"):
        export(lm, tmp_path, "llada")


def test_the_temperature_of_a_stock_model_is_no_setting_of_a_canvas():
    lm, given = canvas_lm(), torch.tensor([[4, 5, 6]])
    penalized = generate_ids(lm, given, max_new_tokens=8, repetition_penalty=9.0, seed=1)
    lm.model.generation_config.update(do_sample=True, temperature=0.7, repetition_penalty=9.0)
    assert generate_ids(lm, given, max_new_tokens=8, seed=1).equal(penalized)
    assert generate_ids(lm, given, max_new_tokens=8, do_sample=True).shape[1] > 3
    with raises(ConfigError, where="do_sample"):
        generate_ids(lm, given, max_new_tokens=8, do_sample=False)
    with raises(GenerationError, where="temperature"):
        generate_ids(lm, given, max_new_tokens=8, temperature=0.7)


def test_a_model_read_as_causal_has_no_noise(tmp_path):
    lm = canvas_lm()
    lm.save(tmp_path)
    assert unmask.load(tmp_path).noise == "uniform"
    assert "| noise | uniform" in (tmp_path / "README.md").read_text()
    assert lm.as_causal().noise == with_pattern(lm, "causal").noise == "masked"
    assert unmask.load(tmp_path, attention="causal").noise == "masked"
    assert unmask.load(tmp_path, attention="block_causal", block_size=4).noise == "uniform"
