"""Mode self-speculative: the tokens of the causal reading, whatever the drafts are."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import MistralConfig, MistralForCausalLM

from tests.generation.tiny_models import PROMPTS, prompt_lists, stock, tiny
from unmask.config.run import SamplerConfig
from unmask.config.sampler import OF_DENOISING
from unmask.errors import ConfigError, GenerationError
from unmask.generation import naive, sampler, speculation
from unmask.models.load import make_diffusion

MODE = "self-speculative"
DISTRIBUTIONS = [([0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.2, 0.6, 0.0, 0.1]), ([0.9, 0.1, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25, 0.0])]


def draws(target_V: torch.Tensor, drafted_V: torch.Tensor, count: int = 100_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of many keys, and which of them are their drafts."""
    config, key_N = SamplerConfig(mode=MODE, temperature=1.0), torch.arange(count)
    position_N = torch.full_like(key_N, 3)
    drafted_NV = drafted_V.expand(count, -1)
    draft_N = speculation.draw_drafts(drafted_NV, config, key_N, position_N)
    decision, accepted_N = speculation.verify(target_V.log().expand(count, -1), drafted_NV, draft_N, config, key_N, position_N)
    return decision.token_N, accepted_N


def p_value(token_N: torch.Tensor, target_V: torch.Tensor) -> float:
    counts_V = torch.bincount(token_N, minlength=len(target_V))
    assert (counts_V[target_V == 0] == 0).all()
    return chisquare(counts_V[target_V > 0], len(token_N) * target_V[target_V > 0]).pvalue


@pytest.mark.parametrize("target, drafted", DISTRIBUTIONS)
def test_a_verified_token_has_the_distribution_of_the_causal_reading(target, drafted):
    target_V, drafted_V = torch.tensor(target, dtype=torch.float64), torch.tensor(drafted, dtype=torch.float64)
    token_N, accepted_N = draws(target_V, drafted_V)
    assert p_value(token_N, target_V) > 1e-3
    overlap = float(torch.minimum(target_V, drafted_V).sum())  # the largest chance that any rule can have (Leviathan et al. 2023)
    assert abs(float(accepted_N.double().mean()) - overlap) < 5 * math.sqrt(overlap * (1 - overlap) / len(token_N))


def test_a_draft_of_the_same_distribution_is_always_kept():
    target_V = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    assert draws(target_V, target_V, 1000)[1].all()


def test_without_a_draft_the_token_is_drawn():
    target_V = torch.tensor([0.3, 0.0, 0.7], dtype=torch.float64)
    config, key_N = SamplerConfig(mode=MODE, temperature=1.0), torch.arange(20_000)
    none_NV, zero_N = torch.zeros(len(key_N), 3, dtype=torch.float64), torch.zeros_like(key_N)
    decision, accepted_N = speculation.verify(target_V.log().expand(len(key_N), -1), none_NV, zero_N, config, key_N, zero_N)
    assert not accepted_N.any() and p_value(decision.token_N, target_V) > 1e-3


def causal_greedy(lm, prompts, **settings) -> list[list[int]]:
    """Completions token by token, each from the last row of a plain pass."""
    return naive.generate(lm.as_causal(), prompts, SamplerConfig(**settings)).tokens


@pytest.mark.parametrize("family", ["phi", "gpt2"])
@pytest.mark.parametrize("logit_shift", [False, True])
@settings(max_examples=5)
@given(data=st.data())
def test_greedy_tokens_are_those_of_causal_decoding(logit_shift, family, data):
    block_size, bias = data.draw(st.integers(2, 8)), data.draw(st.sampled_from([-9.0, 0.0, 2.0]))
    lm = tiny(family, "block_causal", block_size, logit_shift, causal_context=True, eos_bias=bias, time_embedding=data.draw(st.booleans()))
    prompts, same = data.draw(prompt_lists(1)), {"max_new_tokens": data.draw(st.integers(1, 12)), "stop_at_eos": data.draw(st.booleans())}
    generation = sampler.generate(lm, prompts, SamplerConfig(mode=MODE, batch_size=3, **same))
    assert generation.tokens == causal_greedy(lm, prompts, **same)


@pytest.mark.slow
@pytest.mark.parametrize("logit_shift, block_size", [(True, 4), (False, 8)])
def test_greedy_tokens_of_a_thousand_prompts(logit_shift, block_size):
    lm = tiny("phi", "block_causal", block_size, logit_shift, causal_context=True)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 10, (1 + n % 7,), generator=generator).tolist() for n in range(1000)]
    generation = sampler.generate(lm, prompts, SamplerConfig(mode=MODE, max_new_tokens=12, batch_size=250))
    assert generation.tokens == sampler.generate(lm.as_causal(), prompts, SamplerConfig(max_new_tokens=12, batch_size=250)).tokens
    assert sum(generation.forward_passes) < sum(map(len, generation.tokens))


def enumerated(lm, prompt, letters, length, temperature) -> dict[tuple[int, ...], float]:
    """The probability of each text of these letters, by the causal reading."""
    texts = list(itertools.product(letters, repeat=length))
    ids_BT = torch.tensor([[*prompt, *text] for text in texts])
    logits_BTV = lm.as_causal().logits(ids_BT)[:, len(prompt) :, letters] / temperature
    index_BT1 = torch.tensor([[letters.index(token) for token in text] for text in texts])[..., None]
    log_prob_B = logits_BTV.log_softmax(-1).gather(2, index_BT1).sum((1, 2))
    return dict(zip(texts, log_prob_B.exp().tolist(), strict=True))


def chi_square(generation, expected) -> float:
    counts = Counter(map(tuple, generation.tokens))
    assert counts.keys() <= expected.keys()
    return chisquare([counts[text] for text in expected], [len(generation.tokens) * chance for chance in expected.values()]).pvalue


@pytest.mark.parametrize("logit_shift", [False, True])
def test_sampled_texts_have_the_distribution_of_the_causal_reading(logit_shift, monkeypatch):
    """Against enumeration; and the test notices if all drafts are kept."""
    lm, letters, prompt = tiny("phi", "block_causal", 4, logit_shift, causal_context=True), [4, 6, 9], [5, 4, 7]
    config = SamplerConfig(mode=MODE, max_new_tokens=3, temperature=1.3, allowed_tokens=letters, batch_size=2000, seed=4)
    expected = enumerated(lm, prompt, letters, 3, 1.3)
    generation = sampler.generate(lm, [prompt] * 2000, config)
    assert chi_square(generation, expected) > 1e-3
    assert 0.1 < generation.accepted_drafts < 0.95

    def keep_all(*args):
        decision, _ = speculation.verify(*args)
        there_N = args[1].sum(-1) > 0
        return decision._replace(token_N=torch.where(there_N, args[2], decision.token_N)), there_N

    monkeypatch.setattr("unmask.generation.engine.speculate.verify", keep_all)
    assert chi_square(sampler.generate(lm, [prompt] * 2000, config), expected) < 1e-6


def test_log_probabilities_are_those_of_the_causal_reading():
    lm = tiny("phi", "block_causal", 4, True, causal_context=True, eos_bias=-9.0)
    generation = sampler.generate(lm, PROMPTS, SamplerConfig(mode=MODE, max_new_tokens=9, temperature=1.5, top_k=4, trace=True))
    for prompt, tokens, log_probs, trace in zip(generation.prompts, generation.tokens, generation.log_probs, generation.trace, strict=True):
        logits_TV = lm.as_causal().logits(torch.tensor([prompt + tokens]))[0, len(prompt) :]
        token_T1 = torch.tensor(tokens)[:, None]
        torch.testing.assert_close(torch.tensor(log_probs).double(), logits_TV.log_softmax(-1).gather(1, token_T1).squeeze(1))
        kept_TV = logits_TV.masked_fill(logits_TV < logits_TV.topk(4).values[:, -1:], -torch.inf)
        drawn_T = (kept_TV / 1.5).log_softmax(-1).gather(1, token_T1).squeeze(1)
        torch.testing.assert_close(torch.tensor(trace.sampled_log_probs).double(), drawn_T)


def test_right_drafts_save_passes():
    """Every position predicts the same: after a first pass without drafts, each verifies all of them and adds one token."""
    model, tokenizer = stock()
    model.get_output_embeddings().weight.data.zero_()
    lm = make_diffusion(model, tokenizer, attention="block_causal", block_size=4, causal_context=True)
    for drafts, passes in ((0, 1 + 4), (1, 1 + 8), (6, 1 + 3)):  # of 17 tokens: 1 + 16 by 4, by 2 and by 7
        config = SamplerConfig(mode=MODE, max_new_tokens=17, drafts=drafts, stop_at_eos=False)
        generation = sampler.generate(lm, PROMPTS, config)
        assert generation.forward_passes == [passes] * len(PROMPTS) and generation.accepted_drafts == 1.0
        assert generation.denoising_steps == generation.forward_passes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_stops_at_the_end_token(temperature):
    lm = tiny("phi", "block_causal", 4, True, causal_context=True, eos_bias=1.5)
    config = SamplerConfig(mode=MODE, max_new_tokens=12, temperature=temperature, trace=True)
    generation = sampler.generate(lm, [[4, 5, n % 6 + 4, lm.eos_token_id] for n in range(20)], config)
    ended = [trace for trace, tokens in zip(generation.trace, generation.tokens, strict=True) if tokens[-1] == lm.eos_token_id]
    assert len(ended) > 5
    for trace in ended:
        end = trace.canvas.index(lm.eos_token_id) + 1
        assert trace.canvas[end:] == [lm.mask_token_id] * (12 - end) and trace.steps[end:] == [-1] * (12 - end)


def test_sliding_windows_apply_as_in_the_causal_model():
    _, tokenizer = stock()
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer), "sliding_window": 4}
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "initializer_range": 0.4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**heads, **shape, **ends)).double().eval()
    lm = make_diffusion(model, tokenizer, attention="block_causal", block_size=4, causal_context=True)
    prompts, same = [[4, 5, 6, 7, 8, 9, 4, 4, 5], [9, 9]], {"max_new_tokens": 12, "stop_at_eos": False}
    assert sampler.generate(lm, prompts, SamplerConfig(mode=MODE, **same)).tokens == causal_greedy(lm, prompts, **same)


CHANGED = {
    **{"steps": 4, "tokens_per_step": 2, "schedule": "dream", "block_size": 4, "sub_block_size": 2, "policy": "left_to_right"},
    **{"threshold": 0.9, "factor": 1.0, "entropy_bound": 0.5, "remask": 0.2, "order_temperature": 0.5, "filtered_confidence": True},
    **{"reveal_last": [2], "guidance": 1.0, "constraint": {"regex": "a"}, "cache": "dual", "refresh_interval": 2, "early_commit": 0.5},
    "revise": {"by": "probability"},
}


@pytest.mark.parametrize("name", OF_DENOISING)
def test_settings_of_denoising_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name}: has no effect with mode 'self-speculative'. Leave it out"):
        SamplerConfig(mode=MODE, **{name: CHANGED[name]})


@pytest.mark.parametrize(
    "attention, block_size, context, what",
    [
        ("causal", None, False, "needs a model that reads finished blocks from left to right"),
        ("bidirectional", None, False, "needs a model that reads finished blocks from left to right"),
        ("block_causal", 4, False, "needs a model that reads finished blocks from left to right"),
        ("block_causal", 1, True, "drafts blocks, and this one's are of one token"),
    ],
)
def test_models_without_a_causal_context_are_refused(attention, block_size, context, what):
    lm = tiny("phi", attention, block_size, causal_context=context)
    with pytest.raises(GenerationError, match=f"mode: 'self-speculative' {what}.*Use mode 'denoise', or a model of `unmask convert"):
        sampler.generate(lm, ["a"], SamplerConfig(mode=MODE, max_new_tokens=4))


def test_gaps_and_empty_prompts_are_refused():
    lm = tiny("phi", "block_causal", 4, False, causal_context=True)
    with pytest.raises(GenerationError, match=r"mode: .*the text after a gap would not be read. Use mode 'denoise'"):
        sampler.infill(lm, [f"a{lm.tokenizer.mask_token}b"], SamplerConfig(mode=MODE))
    with pytest.raises(GenerationError, match="the prompt is empty"):
        sampler.generate(lm, [[]], SamplerConfig(mode=MODE, max_new_tokens=4))


def test_drafts_that_are_nan_are_an_error():
    logits_NV = torch.zeros(2, 5)
    logits_NV[1, 3] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(GenerationError, match="predictions are NaN"):
            speculation.probabilities(logits_NV, SamplerConfig(mode=MODE, temperature=temperature), None)
