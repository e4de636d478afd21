"""`generate` with the arguments of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, TextStreamer

import unmask
from tests.errors import raises
from tests.tiny import KINDS, llama_lm
from unmask.errors import ConfigError, GenerationError

IDS = torch.tensor([[4, 5, 6], [7, 8, 9]])
DRAWN = {"max_new_tokens": 12, "do_sample": True, "seed": 3}


@pytest.fixture(params=KINDS)
def lm(request):
    attention, block_size, shift = KINDS[request.param]
    return llama_lm(attention, block_size=block_size, logit_shift=shift)


@pytest.mark.parametrize("given", ["argument", "list", "generation config"])
def test_texts_end_where_they_are_told_to(lm, given):
    whole = lm.generate(IDS, **DRAWN, eos_token_id=None)
    assert whole.shape == (2, 15)
    end, pad = int(whole[0, 5]), 1
    if given == "generation config":
        config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
        made = lm.generate(IDS, config, **DRAWN)
    else:
        made = lm.generate(IDS, **DRAWN, eos_token_id=end if given == "argument" else [end], pad_token_id=pad)
    for row, expected in zip(made[:, 3:].tolist(), whole[:, 3:].tolist(), strict=True):
        stop = expected.index(end) + 1 if end in expected else len(expected)
        assert row[:stop] == expected[:stop] and set(row[stop:]) <= {pad}
    assert made.shape[1] < 15 or end not in whole[1, 3:]


def test_the_models_own_ends_stay(lm):
    expected = lm.generate(IDS, **DRAWN)
    for own in (lm.model.generation_config, GenerationConfig(bos_token_id=1), None):
        assert lm.generate(IDS, own, **DRAWN).equal(expected)
    assert lm.generate(IDS, **DRAWN, eos_token_id=lm.model.generation_config.eos_token_id).equal(expected)


def test_settings_of_a_generation_config_act(lm):
    lm.model.generation_config.max_new_tokens = 4
    made = lm.generate(IDS, GenerationConfig(remasking="random"))
    assert made.shape[1] <= 7 and made.equal(lm.generate(IDS, remasking="random"))


def test_the_output_is_an_object_if_asked_for(lm):
    made = lm.generate(IDS, max_new_tokens=4, return_dict_in_generate=True)
    assert made.sequences.equal(lm.generate(IDS, max_new_tokens=4, return_dict_in_generate=False))


def test_what_has_no_meaning_is_refused_by_name():
    lm = llama_lm("bidirectional")
    given = {"streamer": TextStreamer(lm.tokenizer), "assistant_model": lm.model, "output_scores": True}
    for name, value in given.items():
        with raises(ConfigError, where=name):
            lm.generate(IDS, **{name: value})
    with raises(ConfigError, where="generate"):
        lm.generate(IDS, output_score=False)
    with raises(ConfigError, where="generation_config"):
        lm.generate(IDS, unmask.SamplerConfig())
    lm.generate(IDS, max_new_tokens=1, output_scores=False, streamer=None, synced_gpus=False)


@pytest.mark.parametrize("given", ["ab", [[1, 4]], torch.tensor([1, 4]), None])
def test_other_prompts_are_refused(given):
    with raises(GenerationError, where="input_ids"):
        llama_lm("bidirectional").generate(given)
    with pytest.raises(unmask.UnmaskError):
        llama_lm("bidirectional").generate(input_ids=given)
