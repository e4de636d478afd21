"""The log-probabilities of a prompt's tokens are those with which the model writes them from left to
right."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import unmask
from tests import enumeration
from tests.diffusion_gemma import loaded, published_model
from tests.errors import raises
from tests.helpers import each_once
from tests.tiny import KINDS, float64_lm, toy_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation import prompt_log_probs as module
from unmask.generation.prompt_log_probs import prompt_log_probs


def measured(lm, ids, top=0):
    return prompt_log_probs(lm, ids, top, lambda part: part())


@each_once("kind, tokens_per_pass", list(KINDS), [1, 30, 10_000])
def test_they_are_those_of_a_text_written_from_left_to_right(kind, tokens_per_pass, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_PER_PASS", tokens_per_pass)
    lm = toy_lm(kind)
    config = SamplerConfig(
        max_new_tokens=11,
        remasking="left_to_right",
        temperature=2.0,
        stop_at_eos=False,
        top_log_probs=3,
        trace=True,
    )
    for seed in range(3):
        written = unmask.generate(lm, [[4]], config.model_copy(update={"seed": seed}))
        found = measured(lm, [4, *written.tokens[0]], top=3)
        assert found.tokens == [4, *written.tokens[0]] and found.log_probs[0] is found.top[0] is None
        assert found.log_probs[1:] == pytest.approx(written.log_probs[0], abs=1e-9)
        [trace] = written.trace
        assert [[token for token, _ in each] for each in found.top[1:]] == trace.top_ids
        assert [[value for _, value in each] for each in found.top[1:]] == [
            pytest.approx(each, abs=1e-9) for each in trace.top_log_probs
        ]


def test_a_causal_model_gives_those_of_transformers():
    lm, ids = (
        toy_lm(attention=("causal", None, True)),
        enumeration.random_row(20, seed=3).clamp_min(1).tolist(),
    )
    model = AutoModelForCausalLM.from_config(
        copy.copy(lm.config), dtype=torch.float64, attn_implementation="eager"
    )
    model.load_state_dict(lm.model.state_dict())
    passes = []
    found = prompt_log_probs(lm, ids, 1, lambda part: passes.append(part) or part())
    logits_TV = model.eval()(torch.tensor([ids])).logits[0, :-1].detach()
    logits_TV[:, lm.mask_token_id] = -torch.inf
    log_prob_TV = logits_TV.log_softmax(-1)
    expected = log_prob_TV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert found.log_probs[1:] == pytest.approx(expected, abs=1e-9) and len(passes) == 1
    assert [most[0] for most in found.top[1:]] == [
        (int(row.argmax()), pytest.approx(float(row.max()), abs=1e-9)) for row in log_prob_TV
    ]


def test_a_token_that_is_the_most_probable_one_has_its_very_number():
    """Clients compare the two to know whether a text is greedy."""
    for kind in KINDS:
        lm = toy_lm(kind)
        greedy = unmask.generate(
            lm, [[4]], SamplerConfig(max_new_tokens=8, remasking="left_to_right", stop_at_eos=False)
        )
        found = measured(lm, [4, *greedy.tokens[0]], top=1)
        assert found.log_probs[1:] == [most[0][1] for most in found.top[1:]]


def test_short_prompts():
    assert measured(toy_lm(), []).log_probs == [] and measured(toy_lm(), [4], 1).top == [None]


def test_with_uniform_noise_they_are_those_of_the_causal_reading(tmp_path):
    """Of DiffusionGemma that of its encoder, which transformers reads here."""
    lm, ids = loaded(tmp_path), [1, 7, 9, 4, 11, 5, 5]
    found, model = measured(lm, ids, top=1), published_model()
    with torch.no_grad():
        hidden_TD = model.model.encoder(input_ids=torch.tensor([ids])).last_hidden_state[0, :-1]
        cap = model.config.text_config.final_logit_softcapping
        log_prob_TV = (torch.tanh(model.lm_head(hidden_TD) / cap) * cap).log_softmax(-1)
    expected = log_prob_TV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert found.log_probs[1:] == pytest.approx(expected, abs=1e-5) and found.log_probs[0] is None
    assert [most[0][0] for most in found.top[1:]] == log_prob_TV.argmax(-1).tolist()
    assert found == measured(lm.as_causal(), ids, top=1)
    blocks = float64_lm("phi", "block_causal", 4, causal_context=True, logit_shift=False)
    for each in (blocks.with_noise("uniform"), blocks.as_causal()):
        assert measured(each, [1, 7, 4, 5]) == measured(blocks.as_causal(), [1, 7, 4, 5])


@pytest.mark.parametrize("pattern", [("bidirectional", None), ("block_causal", 4)], ids=str)
def test_uniform_noise_alone_hides_no_later_tokens(pattern):
    with raises(GenerationError, where="prompt log-probabilities"):
        measured(float64_lm("phi", *pattern).with_noise("uniform"), [4, 5, 6])
