"""Whether a completion is greedy, compared with decoding it."""

from __future__ import annotations

import pytest

from tests import toy
from unmask import SamplerConfig, generate
from unmask.evaluation.greedy import is_greedy


@pytest.mark.parametrize("kind", [*toy.KINDS, "causal"])
def test_it_is_what_generation_writes(kind):
    lm = toy.toy(attention=("causal", None, True)) if kind == "causal" else toy.toy(kind)
    for seed in range(6):
        prompt = toy.random_row(3, seed).tolist()
        written = generate(lm, [prompt], SamplerConfig(max_new_tokens=5, stop_at_eos=False)).tokens[0]
        assert is_greedy(lm, prompt, written)
        for place in range(5):
            other = [
                (token + 1) % toy.VOCABULARY if index == place else token
                for index, token in enumerate(written)
            ]
            assert not is_greedy(lm, prompt, other)


def test_it_leaves_the_model_as_it_was():
    lm = toy.toy()
    lm.model.train()
    is_greedy(lm, [4], [5, 4])
    assert lm.model.training
