"""The most probable tokens of each position when it was revealed: of the engine, the naive sampler and the
definition."""

from __future__ import annotations

import pytest
import torch

import unmask
from tests.errors import raises
from tests.generation.cases import PROMPTS, every_pattern, in_company
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError
from unmask.generation.engine.engine import Engine
from unmask.generation.requests import make_infill_requests, make_requests

SETTINGS = [
    {"top_log_probs": 3, "temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"top_log_probs": 20, "tokens_per_step": 2},
    {"top_log_probs": 1, "threshold": 0.3, "forbidden_tokens": [5]},
    {"top_log_probs": 2, "remask_fraction": 0.5, "stop_at_eos": False},
]


@every_pattern
def test_sequences_with_any_number_of_them_share_passes(attention, block_size):
    lm = float64_lm("phi", attention, block_size, eos_bias=1.0)
    configs = [SamplerConfig(max_new_tokens=7, **settings) for settings in SETTINGS]
    prompts = list(zip(PROMPTS[:3], (0, 0, 1), strict=True))
    batch = [(prompt, config, steps) for config in configs for prompt, steps in prompts]
    for trace, other, _ in in_company(lm, batch, 4):
        assert trace.top_ids == other.top_ids
        assert [len(each) for each in trace.top_log_probs] == [len(each) for each in trace.top_ids]
        for mine, theirs in zip(trace.top_log_probs, other.top_log_probs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-10)


def test_they_are_those_of_the_model_at_temperature_1():
    lm, mask = float64_lm("phi", "bidirectional", None), float64_lm().mask_token_id
    config = SamplerConfig(temperature=0.5, top_log_probs=4, steps=1, trace=True)
    ids = [4, mask, 5, mask]
    [trace] = unmask.infill(lm, [ids], config).trace
    logits_TV = lm.logits(torch.tensor([ids]), hidden_BT=torch.tensor([[token == mask for token in ids]]))[0]
    top = logits_TV.log_softmax(-1).topk(4)
    for position in range(4):
        hidden = position in (1, 3)
        assert trace.top_ids[position] == (top.indices[position].tolist() if hidden else [])
        assert trace.top_log_probs[position] == pytest.approx(
            top.values[position].tolist() if hidden else [], abs=1e-10
        )


def test_a_slot_that_is_used_again_has_none_of_the_sequence_before():
    lm = float64_lm("phi", "bidirectional", None, eos_bias=-9.0)
    engine, mask = Engine(lm, batch_size=1), lm.mask_token_id
    config = SamplerConfig(top_log_probs=2)
    for ids in ([4, mask, mask, mask], [4, 5, mask, 6]):
        engine.submit(make_infill_requests(lm, [ids], config)[0], config)
    traces = [trace for _, trace in engine.run()]
    assert [len(each) for each in traces[1].top_ids] == [0, 0, 2, 0]


def test_without_the_setting_there_are_no_tables():
    lm = float64_lm("phi", "bidirectional", None)
    engine, config = Engine(lm), SamplerConfig(max_new_tokens=3)
    engine.submit(make_requests(lm, ["ab"], config)[0], config)
    [(_, trace)] = engine.run()
    assert (trace.top_ids, trace.top_log_probs, engine.slots.top_id_SCK.numel()) == ([], [], 0)


def test_drafts_of_self_speculation_have_none():
    with raises(ConfigError, where="top_log_probs"):
        SamplerConfig(mode="self-speculative", top_log_probs=3)
