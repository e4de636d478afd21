"""DiffusionGemma's tokens are those of `generate` of transformers, by `naive` and by the engine."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unmask
from tests.diffusion_gemma import ALPHABET, CANVAS, exact, exact_models, generated, loaded
from tests.generation.cases import canvas_batches, in_company
from tests.helpers import examples
from unmask.config.sampler import SamplerConfig
from unmask.generation import naive
from unmask.generation.requests import make_infill_requests, make_requests, without_ends
from unmask.models.diffusion_lm import DiffusionLM

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning"
)  # of what transformers imports

WIDE = 32
SETTINGS: list[dict[str, float]] = [
    {"max_denoising_steps": 1},
    {"max_denoising_steps": 7, "entropy_bound": 0.5},
    {"entropy_bound": 2.0, "t_min": 0.1, "t_max": 0.3, "max_denoising_steps": 16},
    {"entropy_bound": 8.0, "confidence_threshold": 1.0, "t_max": 3.0, "max_denoising_steps": 16},
    {},
    {"stability_threshold": 1, "confidence_threshold": 0.9, "max_denoising_steps": 16},
    {"stability_threshold": 3, "max_denoising_steps": 16, "confidence_threshold": 2.0, "entropy_bound": 20.0},
    {
        "stability_threshold": 2,
        "confidence_threshold": 0.5,
        "t_max": 0.02,
        "t_min": 0.01,
        "max_denoising_steps": 16,
    },
    {"t_min": 0.0, "t_max": 0.4, "max_denoising_steps": 12},
    {"entropy_bound": 1e-9, "t_min": 1.0, "t_max": 1.5, "max_denoising_steps": 9},
    {
        "entropy_bound": 4.0,
        "stability_threshold": 1,
        "confidence_threshold": 1.5,
        "t_max": 1.2,
        "max_denoising_steps": 16,
    },
    {
        "t_min": 0.3,
        "t_max": 0.5,
        "entropy_bound": 1.0,
        "confidence_threshold": 0.3,
        "max_denoising_steps": 20,
    },
]
LENGTHS = (1, 3, 8, 9, 16, 21, 30, 32, 45)


def prompts(count):
    letters = torch.randint(len(ALPHABET), (count, 64), generator=torch.Generator().manual_seed(1)).tolist()
    texts = ["".join(ALPHABET[letter] for letter in row) for row in letters]
    return [text[: LENGTHS[number % len(LENGTHS)]] for number, text in enumerate(texts)]


def made(settings, tokens, **more):
    given = {"entropy_bound": 0.1, "t_max": 0.8, "seed": 3, "stop_at_eos": False} | settings | more
    return SamplerConfig(max_new_tokens=tokens, **given)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return exact_models(tmp_path_factory.mktemp("wide"), canvas=WIDE)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    return exact_models(tmp_path_factory.mktemp("narrow"))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (number not in (0, 1)))
        for number, each in enumerate(SETTINGS)
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(settings, wide):
    """12 settings of 9 prompts of 96 tokens, 10,368 in all: by the engine in one batch, and by `naive`."""
    (lm, model), texts, config = wide, prompts(9), made(settings, 3 * WIDE)
    with exact():
        together = unmask.generate(lm, texts, config)
        for number, text in enumerate(texts):
            [request] = make_requests(lm, [text], config)
            assert [together.tokens[number]] == generated(model, lm, [request], config)
            if number in (2, 8):
                assert naive.complete(lm, [request], config).tokens[0] == together.tokens[number]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("model"))


def test_rows_with_left_padding_are_those_of_transformers(narrow):
    """All of them take as many steps."""
    (lm, model), texts = narrow, prompts(9)
    config = made({"max_denoising_steps": 5, "confidence_threshold": 1e-9}, 3 * CANVAS)
    with exact():
        expected = generated(model, lm, make_requests(lm, texts, config), config)
        assert unmask.generate(lm, texts, config).tokens == expected


def test_a_text_ends_with_the_canvas_of_its_end_token(narrow):
    config = made({"max_denoising_steps": 3, "t_max": 3.0, "stop_at_eos": True}, 6 * CANVAS)
    (lm, model), texts, ended = narrow, prompts(9), 0
    with exact():
        found = unmask.generate(lm, texts, config)
        for text, tokens in zip(texts, found.tokens, strict=True):
            [expected] = generated(model, lm, make_requests(lm, [text], config), config)
            end = expected.index(lm.eos_token_id) + 1 if lm.eos_token_id in expected else len(expected)
            assert tokens == expected[:end]
            ended += end < len(expected)
    assert ended > 1


def test_canvases_are_whole_and_results_are_cut(lm):
    """As in transformers, where 3 new tokens are those of a whole canvas."""
    config = made({"max_denoising_steps": 3}, CANVAS + 3)
    whole = unmask.generate(lm, prompts(3), config.model_copy(update={"max_new_tokens": 2 * CANVAS}))
    found = unmask.generate(lm, prompts(3), config.model_copy(update={"trace": True}))
    assert found.tokens == [tokens[: CANVAS + 3] for tokens in whole.tokens]
    assert [len(trace.canvas) for trace in found.trace] == [2 * CANVAS] * 3
    assert found.tokens == naive.generate(lm, prompts(3), config).tokens


@given(batch=canvas_batches(ALPHABET), size=st.integers(1, 3))
@examples(20)
def test_sequences_have_the_tokens_of_the_naive_sampler_in_any_company(lm, batch, size):
    in_company(lm, batch, size, 1e-4)


def test_gaps_are_filled_on_a_canvas_around_what_is_given(lm):
    mask = lm.tokenizer.mask_token
    texts = [f"ab{mask * 2}cd{mask}", f"{mask}hello{mask * 9}x", f"a{mask}bcdefghijklmnop{mask}q"]
    config = SamplerConfig(max_denoising_steps=6, t_max=1.0)
    found, allowed = unmask.infill(lm, texts, config), without_ends(lm, config)
    expected = naive.complete(lm, make_infill_requests(lm, texts, allowed), allowed)
    assert found.tokens == expected.tokens
    for request, filled in zip(make_infill_requests(lm, texts, allowed), found.tokens, strict=True):
        given = zip(request.ids, filled, request.hidden, strict=True)
        assert all(is_hidden or before == after for before, after, is_hidden in given)
        assert lm.mask_token_id not in filled


def test_a_step_is_conditioned_on_the_last_prediction(lm):
    """Without it tokens would differ."""
    config, shape = made({"max_denoising_steps": 8}, 4 * CANVAS), lm.model.get_input_embeddings().weight.shape
    with mock.patch.object(
        DiffusionLM, "mean_embeddings", lambda _, share_NV: share_NV.new_zeros(len(share_NV), shape[1])
    ):
        without = unmask.generate(lm, prompts(9), config)
    assert without.tokens != unmask.generate(lm, prompts(9), config).tokens
