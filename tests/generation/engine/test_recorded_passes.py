"""Recorded passes give the same tokens: here they are called again, with the memory of a graph; on a GPU they
are graphs."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.generation.cases import configs, every_pattern, prompt_lists
from tests.generation.test_sampler import assert_same
from tests.helpers import examples, partly_slow
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation import sampler
from unmask.generation.engine import recorded_passes
from unmask.generation.engine.kv_cache import CacheMemory, SlotCache
from unmask.generation.engine.recorded_passes import num_rows, passes_of


class Again:
    """In place of a graph: the call itself, which reads the same memory."""

    def __init__(self, call, pool):
        self.replay = call
        call()
        made.append(self)

    supports = staticmethod(lambda device: True)


made: list[Again] = []


@pytest.fixture(autouse=True)
def called_again(monkeypatch):
    made.clear()
    monkeypatch.setattr(recorded_passes, "Graph", Again)
    monkeypatch.setattr(recorded_passes, "COLUMNS", 8)


def recorded(lm):
    same = lm.bind(lm.model)
    same.cuda_graphs = True
    return same


@every_pattern
@partly_slow("logit_shift", [False, True], 1)
@examples(8)
@given(data=st.data())
def test_any_settings_give_the_same_tokens(attention, block_size, logit_shift, data):
    lm = float64_lm("phi", attention, block_size, logit_shift)
    config, prompts = (
        data.draw(configs(attention, block_size)),
        data.draw(prompt_lists(shortest=int(logit_shift))),
    )
    expected, graphs = sampler.generate(lm, prompts, config), recorded(lm)
    for _ in range(2):
        assert_same(sampler.generate(graphs, prompts, config), expected)


@pytest.mark.parametrize("attention, block_size", [("bidirectional", None), ("block_causal", 4)])
def test_few_passes_are_recorded_and_used_again(attention, block_size):
    lm = recorded(float64_lm("phi", attention, block_size))
    config = SamplerConfig(max_new_tokens=32, block_size=4, stop_at_eos=False)
    first = sampler.generate(lm, [[4, 5, 6]] * 2, config)
    count = len(made)
    assert 0 < count <= (4 if attention == "bidirectional" else 24) < max(first.forward_passes)
    for seen in range(2):
        assert sampler.generate(lm, [[4, 5, 6]] * 2, config).tokens == first.tokens
        assert seen == 0 or len(made) == count
        count = len(made)


def test_graphs_of_weights_that_moved_are_forgotten():
    lm = recorded(float64_lm("gpt2", "bidirectional"))
    lm.model = copy.deepcopy(lm.model)
    config = SamplerConfig(max_new_tokens=8, stop_at_eos=False)
    sampler.generate(lm, [[4, 5, 6]], config)
    first = passes_of(lm)
    sampler.generate(lm, [[4, 5, 6]], config)
    assert passes_of(lm) is first and len(first) > 0
    weight = next(lm.model.parameters())
    weight.data = weight.data.clone()
    sampler.generate(lm, [[4, 5, 6]], config)
    assert passes_of(lm) is not first


def test_graphs_of_layers_that_were_replaced_are_forgotten():
    lm = recorded(float64_lm("gpt2", "bidirectional"))
    lm.model = copy.deepcopy(lm.model)
    norm = lm.model.get_submodule("transformer.ln_f")
    config = SamplerConfig(max_new_tokens=8, stop_at_eos=False)
    sampler.generate(lm, [[4, 5, 6]], config)
    first = passes_of(lm)
    norm.forward = MethodType(type(norm).forward, norm)  # as Liger does it
    sampler.generate(lm, [[4, 5, 6]], config)
    second = passes_of(lm)
    norm.forward = MethodType(type(norm).forward, norm)
    sampler.generate(lm, [[4, 5, 6]], config)
    assert second is not first and passes_of(lm) is second


def test_at_most_a_quarter_more_rows_are_computed():
    for count in range(1, 300):
        assert count <= num_rows(count) <= (count if count <= 8 else 1.25 * count)


def test_a_model_that_is_not_on_a_gpu_is_refused(monkeypatch):
    monkeypatch.undo()
    with raises(GenerationError, where="cuda_graphs"):
        sampler.generate(
            recorded(float64_lm("gpt2", "bidirectional")), [[4, 5]], SamplerConfig(max_new_tokens=4)
        )


def test_a_pass_that_cannot_be_recorded_is_one_clear_error(monkeypatch):
    class Refused(Again):
        def __init__(self, call, pool):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(recorded_passes, "Graph", Refused)
    lm = recorded(float64_lm("phi", "block_causal", 4))
    lm.model = copy.deepcopy(lm.model)
    with raises(GenerationError, where="cuda_graphs"):
        sampler.generate(lm, [[4, 5]], SamplerConfig(max_new_tokens=12, stop_at_eos=False))


def test_the_next_cache_has_all_that_graphs_read_of_the_one_before():
    memory = CacheMemory()
    first = SlotCache(memory)
    first.reserve(2, 8)
    at = torch.zeros(1, 1, 3, dtype=torch.long)
    first.begin_pass([0], at, at, 8).update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    memory.keep(first)
    tables, heads = first.stored, first.heads
    second = SlotCache(memory)
    second.reserve(2, 8)
    assert second.stored == []  # the first one is in use
    del first
    third = SlotCache(memory)
    third.reserve(1, 6)
    assert third.stored is tables and third.heads is heads and third.shape == (2, 8)
    assert not third.stored[0][0].any()
