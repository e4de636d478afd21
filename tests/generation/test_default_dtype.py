"""Weights are loaded in other threads, which changes torch's default dtype meanwhile: requests do not depend
on it."""

from __future__ import annotations

import pytest
import torch

from unmask.config.sampler import SamplerConfig
from unmask.generation.requests import step_counts


@pytest.mark.parametrize("schedule", ["even", "dream", "ancestral"])
def test_steps_do_not_depend_on_the_default_dtype(schedule):
    config = SamplerConfig(steps=100, max_new_tokens=300, schedule=schedule)
    expected, before = step_counts([300], config), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert step_counts([300], config) == expected
    finally:
        torch.set_default_dtype(before)
