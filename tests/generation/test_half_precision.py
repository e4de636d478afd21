"""Weights of 16 bits on a CPU: the sampler draws and scores as with those of 32, but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unmask
from tests.helpers import partly_slow
from tests.models.configurations import tiny_lm
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig

PROMPTS = ["abc", "f", "fedcba"]
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "margin": {"remasking": "margin", "temperature": 1.0, "top_p": 0.9},
    "parallel": {"threshold": 0.3, "temperature": 1.0},
    "remask": {"remask_fraction": 0.3, "steps": 6, "temperature": 1.0},
    "guidance": {"cfg_scale": 0.5, "temperature": 0.7},
    "a regex": {"constraint": {"regex": "[abc]{3}d*"}, "temperature": 1.0},
}


MODELS: dict[str, Callable[[], unmask.DiffusionLM]] = {
    "blocks": lambda: float64_lm("gpt2", "block_causal", 4),
    "bidirectional": lambda: float64_lm("gpt2", "bidirectional"),
    "recurrent": lambda: tiny_lm("qwen3_5_text", "block_causal", 4),
}


def rounded(dtype: torch.dtype, lm: unmask.DiffusionLM) -> tuple[unmask.DiffusionLM, unmask.DiffusionLM]:
    """A model in 16 bits, and the same weights in 32."""
    half = lm.frozen_copy()
    half.model.to(dtype)
    full = half.frozen_copy()
    full.model.to(torch.float32)
    return half, full


@partly_slow("dtype", [torch.bfloat16, torch.float16], 0)
@pytest.mark.parametrize("which", SETTINGS)
@partly_slow("model", MODELS, 0)
def test_what_is_drawn_has_the_probabilities_of_32_bits(model, which, dtype):
    half, full = rounded(dtype, MODELS[model]())
    config = SamplerConfig(max_new_tokens=8, **SETTINGS[which])
    found, again = unmask.generate(half, PROMPTS, config), unmask.generate(half, PROMPTS, config)
    assert found.tokens == again.tokens and not any(half.mask_token_id in tokens for tokens in found.tokens)
    assert all(-50 < log_prob <= 0 for log_probs in found.log_probs for log_prob in log_probs)
    assert unmask.log_likelihood(half, PROMPTS, found.texts).tolist() == pytest.approx(
        unmask.log_likelihood(full, PROMPTS, found.texts).tolist(), rel=0.02, abs=0.1
    )
