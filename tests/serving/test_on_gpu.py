"""On a GPU: the scheduler's thread computes there, and its answers are those of a CPU."""

from __future__ import annotations

import asyncio

from tests.helpers import GPU, needs_gpu
from tests.serving.scheduling import CONFIG, outline, scheduling, traces, works
from tests.tiny import float64_lm
from unmask.generation.output import Trace
from unmask.models.diffusion_lm import DiffusionLM

pytestmark = needs_gpu
PROMPTS = ["abc", "f", "fedcba"]
CONFIGS = [CONFIG, CONFIG.model_copy(update={"temperature": 0.0, "max_new_tokens": 12})]


def test_requests_in_company_have_the_answers_of_a_cpu() -> None:
    async def run(lm: DiffusionLM) -> list[list[Trace]]:
        async with scheduling(lm, batch_size=4) as scheduler:
            return await asyncio.gather(
                *[
                    traces(scheduler.submit("tiny", works(lm, PROMPTS, config), owner="a"))
                    for config in CONFIGS
                ]
            )

    lm = float64_lm("gpt2", "block_causal", 4)
    there = lm.frozen_copy()
    there.model.to(GPU)
    for found, expected in zip(asyncio.run(run(there)), asyncio.run(run(lm)), strict=True):
        assert outline(found) == outline(expected)
