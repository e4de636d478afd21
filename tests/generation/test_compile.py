"""A compiled model gives the same tokens, and one graph serves all lengths and numbers of rows."""

from __future__ import annotations

import copy

import pytest

from tests.generation.cases import PATTERNS, PROMPTS
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.generation import sampler

pytestmark = pytest.mark.usefixtures("dynamo_as_it_was")


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention, block_size",
    [pytest.param(*pattern, marks=[pytest.mark.nightly] * (pattern[1] in (1, 3))) for pattern in PATTERNS],
)
def test_few_graphs_serve_a_whole_generation(attention, block_size):
    plain, graphs = float64_lm("phi", attention, block_size, eos_bias=-9.0), []
    config = SamplerConfig(
        max_new_tokens=12, temperature=0.7, tokens_per_step=2 if attention != "causal" else None
    )
    lm = plain.bind(copy.deepcopy(plain.model))

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    lm.compile(backend=backend, fullgraph=True)
    assert sampler.generate(lm, PROMPTS, config).tokens == sampler.generate(plain, PROMPTS, config).tokens
    assert 1 <= len(graphs) <= 5  # the first pass, those of one position, of one sequence, and all others
    sampler.generate(lm, PROMPTS[:3], config.model_copy(update={"max_new_tokens": 9}))
    assert len(graphs) <= 5
