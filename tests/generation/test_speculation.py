"""Mode self-speculative: the tokens of the causal reading, whatever the drafts are."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import MistralConfig, MistralForCausalLM

from tests.errors import raises
from tests.generation.cases import PROMPTS, prompt_lists
from tests.helpers import each_once, examples, partly_slow
from tests.models.configurations import tiny_lm
from tests.tiny import float64_causal, float64_lm
from unmask.config.sampler import DENOISING_FIELDS, SamplerConfig
from unmask.errors import ConfigError, GenerationError
from unmask.generation import naive, sampler, speculation
from unmask.models.load import make_diffusion

MODE = "self-speculative"
DISTRIBUTIONS = [
    ([0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.2, 0.6, 0.0, 0.1]),
    ([0.9, 0.1, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25, 0.0]),
    # a second candidate is kept with a chance of 0.4
    ([0.4, 0.3, 0.2, 0.1, 0.0], [0.6, 0.25, 0.05, 0.1, 0.0]),
]


def draws(
    target_V: torch.Tensor, drafted_V: torch.Tensor, candidates: int = 1, count: int = 100_000
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of many keys, the rank of the candidate that each is, and the candidates."""
    config, key_N = SamplerConfig(mode=MODE, temperature=1.0), torch.arange(count)
    position_N = torch.full_like(key_N, 3)
    draft_NK, drafted_NKV = speculation.draw_drafts(
        drafted_V.log().expand(count, -1), candidates, config, key_N, position_N
    )
    offered = [(key_N, draft_NK[:, rank], drafted_NKV[:, rank]) for rank in range(candidates)]
    decision, rank_N = speculation.verify(
        target_V.log().expand(count, -1), offered, config, key_N, position_N
    )
    return decision.token_N, rank_N, draft_NK


def p_value(token_N: torch.Tensor, target_V: torch.Tensor) -> float:
    counts_V = torch.bincount(token_N, minlength=len(target_V))
    assert (counts_V[target_V == 0] == 0).all()
    return chisquare(counts_V[target_V > 0], len(token_N) * target_V[target_V > 0]).pvalue


def chances(target_V: torch.Tensor, drafted_V: torch.Tensor, candidates: int) -> list[float]:
    """The chance that the token is the candidate of each rank, by the sum over all candidates that may be
    drawn."""
    # the largest chance that any rule can have (Leviathan et al. 2023)
    kept = float(torch.minimum(target_V, drafted_V).sum())
    if candidates == 1:
        return [kept]
    later = torch.zeros(candidates - 1)
    for draft in drafted_V.nonzero().flatten().tolist():
        refused = float(drafted_V[draft] - torch.minimum(target_V, drafted_V)[draft])
        rest_V, others_V = (
            (target_V - drafted_V).clamp_min(0),
            drafted_V.index_fill(0, torch.tensor([draft]), 0),
        )
        if refused > 0 and others_V.sum() > 0:
            later += refused * torch.tensor(
                chances(rest_V / rest_V.sum(), others_V / others_V.sum(), candidates - 1)
            )
    return [kept, *later.tolist()]


@partly_slow("candidates", [1, 2, *(pytest.param(count, marks=pytest.mark.nightly) for count in (3, 6))], 1)
@partly_slow("target, drafted", DISTRIBUTIONS, 2)
def test_a_verified_token_has_the_distribution_of_the_causal_reading(target, drafted, candidates):
    """With six candidates there are more than tokens to draw."""
    target_V, drafted_V = (
        torch.tensor(target, dtype=torch.float64),
        torch.tensor(drafted, dtype=torch.float64),
    )
    token_N, rank_N, draft_NK = draws(target_V, drafted_V, candidates)
    assert p_value(token_N, target_V) > 1e-3
    is_kept_N = rank_N >= 0
    assert (token_N[is_kept_N] == draft_NK[is_kept_N, rank_N[is_kept_N]]).all()
    for rank, chance in enumerate(chances(target_V, drafted_V, candidates)):
        kept = float((rank_N == rank).double().mean())
        assert abs(kept - chance) <= 5 * math.sqrt(chance * (1 - chance) / len(token_N)) + 1e-9


def test_a_draft_of_the_same_distribution_is_always_kept():
    target_V = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    assert (draws(target_V, target_V, count=1000)[1] == 0).all()


def test_candidates_differ_and_are_in_order_at_temperature_0():
    logits_NV = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    one = torch.tensor([7])
    draft_NK, drafted_NKV = speculation.draw_drafts(logits_NV, 3, SamplerConfig(mode=MODE), one, one)
    assert (
        draft_NK.tolist() == [[1, 3, 2]]
        and drafted_NKV.argmax(-1).equal(draft_NK)
        and (drafted_NKV.sum(-1) == 1).all()
    )
    same_N = torch.arange(500)
    draft_NK, _ = speculation.draw_drafts(
        logits_NV.expand(500, -1), 4, SamplerConfig(mode=MODE, temperature=1.0), same_N, same_N
    )
    assert (draft_NK.sort(1).values == torch.arange(4)).all()


@pytest.mark.parametrize("drafts, candidates", [(1, 1), (5, 1), (1, 6), (2, 2), (3, 8), (6, 3)])
def test_a_tree_has_the_likeliest_nodes(drafts, candidates):
    """Against all paths; with one candidate it is a chain."""
    tree = speculation.draft_tree(drafts, candidates)
    paths = [[node for node in range(len(row)) if row[node]] for row in tree.path_JJ.tolist()]
    assert len(paths) == 1 + drafts * candidates
    ranks = [tuple(int(tree.rank_J[node]) + 1 for node in path) for path in paths]
    assert (
        len(set(ranks)) == len(ranks)
        and tree.width <= 2 * candidates - 1
        and list(map(len, ranks)) == sorted(map(len, ranks)) == tree.depth_J.tolist()
    )
    every = (
        path
        for depth in range(drafts + 1)
        for path in itertools.product(range(1, 2 * candidates), repeat=depth)
    )
    costs = sorted(math.prod(3 * rank for rank in path) for path in every)
    assert sorted(math.prod(3 * rank for rank in path) for path in ranks) == costs[: len(ranks)]
    for parent, nodes in enumerate(tree.children):
        assert [paths[node] for node in nodes] == [[*paths[parent], node] for node in nodes]
        assert [int(tree.rank_J[node]) for node in nodes] == list(range(len(nodes)))
    if candidates == 1:
        assert tree.children == [[node + 1] for node in range(drafts)] + [[]]


def test_without_a_draft_the_token_is_drawn():
    target_V = torch.tensor([0.3, 0.0, 0.7], dtype=torch.float64)
    config, key_N = SamplerConfig(mode=MODE, temperature=1.0), torch.arange(20_000)
    none_NV, zero_N = torch.zeros(len(key_N), 3, dtype=torch.float64), torch.zeros_like(key_N)
    for offered in ([], [(key_N, zero_N, none_NV)] * 2):
        decision, rank_N = speculation.verify(
            target_V.log().expand(len(key_N), -1), offered, config, key_N, zero_N
        )
        assert (rank_N == -1).all() and p_value(decision.token_N, target_V) > 1e-3


def causal_greedy(lm, prompts, **settings) -> list[list[int]]:
    """Completions token by token, each from the last row of a plain pass."""
    return naive.generate(lm.as_causal(), prompts, SamplerConfig(**settings)).tokens


@each_once("logit_shift, family", [False, True], ["phi", "gpt2"])
@examples(5)
@given(data=st.data())
def test_greedy_tokens_are_those_of_causal_decoding(logit_shift, family, data):
    block_size, bias = data.draw(st.integers(2, 8)), data.draw(st.sampled_from([-9.0, 0.0, 2.0]))
    lm = float64_lm(
        family,
        "block_causal",
        block_size,
        logit_shift,
        causal_context=True,
        eos_bias=bias,
        time_embedding=data.draw(st.booleans()),
    )
    prompts, same = (
        data.draw(prompt_lists(1)),
        {"max_new_tokens": data.draw(st.integers(1, 12)), "stop_at_eos": data.draw(st.booleans())},
    )
    generation = sampler.generate(
        lm, prompts, SamplerConfig(mode=MODE, batch_size=3, num_branches=data.draw(st.integers(1, 6)), **same)
    )
    assert generation.tokens == causal_greedy(lm, prompts, **same)


@pytest.mark.slow
@pytest.mark.parametrize("logit_shift, block_size, candidates", [(True, 4, 1), (False, 8, 1), (True, 4, 4)])
def test_greedy_tokens_of_a_thousand_prompts(logit_shift, block_size, candidates):
    lm = float64_lm("phi", "block_causal", block_size, logit_shift, causal_context=True)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 10, (1 + n % 7,), generator=generator).tolist() for n in range(1000)]
    generation = sampler.generate(
        lm, prompts, SamplerConfig(mode=MODE, max_new_tokens=12, num_branches=candidates, batch_size=250)
    )
    assert (
        generation.tokens
        == sampler.generate(lm.as_causal(), prompts, SamplerConfig(max_new_tokens=12, batch_size=250)).tokens
    )
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
    return chisquare(
        [counts[text] for text in expected], [len(generation.tokens) * chance for chance in expected.values()]
    ).pvalue


@partly_slow("logit_shift, candidates", [(False, 1), (True, 2), (True, 1), (False, 2), (True, 3)])
def test_sampled_texts_have_the_distribution_of_the_causal_reading(logit_shift, candidates, monkeypatch):
    """Against enumeration; and the test notices if all first candidates are kept."""
    lm, letters, prompt = (
        float64_lm("phi", "block_causal", 4, logit_shift, causal_context=True),
        [4, 6, 9],
        [5, 4, 7],
    )
    config = SamplerConfig(
        mode=MODE,
        max_new_tokens=3,
        temperature=1.3,
        allowed_tokens=letters,
        batch_size=2000,
        seed=4,
        num_branches=candidates,
    )
    expected = enumerated(lm, prompt, letters, 3, 1.3)
    generation = sampler.generate(lm, [prompt] * 2000, config)
    assert chi_square(generation, expected) > 1e-3
    assert 0.1 < generation.accepted_drafts < 0.95

    def keep_all(logits_NV, offered, *rest):
        decision, rank_N = speculation.verify(logits_NV, offered, *rest)
        for index_M, draft_M, drafted_MV in offered[:1]:
            there_M = drafted_MV.sum(-1) > 0
            rank_N[index_M] = there_M.long() - 1
            decision.token_N[index_M] = torch.where(there_M, draft_M, decision.token_N[index_M])
        return decision, rank_N

    monkeypatch.setattr("unmask.generation.engine.speculate.verify", keep_all)
    assert chi_square(sampler.generate(lm, [prompt] * 2000, config), expected) < 1e-6


def test_log_probabilities_are_those_of_the_causal_reading():
    lm = float64_lm("phi", "block_causal", 4, True, causal_context=True, eos_bias=-9.0)
    generation = sampler.generate(
        lm, PROMPTS, SamplerConfig(mode=MODE, max_new_tokens=9, temperature=1.5, top_k=4, trace=True)
    )
    for prompt, tokens, log_probs, trace in zip(
        generation.prompts, generation.tokens, generation.log_probs, generation.trace, strict=True
    ):
        logits_TV = lm.as_causal().logits(torch.tensor([prompt + tokens]))[0, len(prompt) :]
        token_T1 = torch.tensor(tokens)[:, None]
        torch.testing.assert_close(
            torch.tensor(log_probs).double(), logits_TV.log_softmax(-1).gather(1, token_T1).squeeze(1)
        )
        kept_TV = logits_TV.masked_fill(logits_TV < logits_TV.topk(4).values[:, -1:], -torch.inf)
        drawn_T = (kept_TV / 1.5).log_softmax(-1).gather(1, token_T1).squeeze(1)
        torch.testing.assert_close(torch.tensor(trace.sampled_log_probs).double(), drawn_T)


def test_right_drafts_save_passes():
    """Every position predicts the same: after a first pass without drafts, each verifies all of them and adds
    one token."""
    model, tokenizer = float64_causal()
    model.get_output_embeddings().weight.data.zero_()
    lm = make_diffusion(model, tokenizer, attention="block_causal", block_size=4, causal_context=True)
    for drafts, passes in ((0, 1 + 4), (1, 1 + 8), (6, 1 + 3)):  # of 17 tokens: 1 + 16 by 4, by 2 and by 7
        config = SamplerConfig(mode=MODE, max_new_tokens=17, num_speculative_tokens=drafts, stop_at_eos=False)
        generation = sampler.generate(lm, PROMPTS, config)
        assert generation.forward_passes == [passes] * len(PROMPTS) and generation.accepted_drafts == 1.0
        assert generation.denoising_steps == generation.forward_passes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_stops_at_the_end_token(temperature):
    lm = float64_lm("phi", "block_causal", 4, True, causal_context=True, eos_bias=1.5)
    config = SamplerConfig(mode=MODE, max_new_tokens=12, temperature=temperature, trace=True)
    generation = sampler.generate(lm, [[4, 5, n % 6 + 4, lm.eos_token_id] for n in range(20)], config)
    ended = [
        trace
        for trace, tokens in zip(generation.trace, generation.tokens, strict=True)
        if tokens[-1] == lm.eos_token_id
    ]
    assert len(ended) > 5
    for trace in ended:
        end = trace.canvas.index(lm.eos_token_id) + 1
        assert trace.canvas[end:] == [lm.mask_token_id] * (12 - end) and trace.steps[end:] == [-1] * (
            12 - end
        )


def test_sliding_windows_apply_as_in_the_causal_model():
    _, tokenizer = float64_causal()
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer),
        "sliding_window": 4,
    }
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "initializer_range": 0.4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**heads, **shape, **ends)).double().eval()
    lm = make_diffusion(model, tokenizer, attention="block_causal", block_size=4, causal_context=True)
    prompts, same = [[4, 5, 6, 7, 8, 9, 4, 4, 5], [9, 9]], {"max_new_tokens": 12, "stop_at_eos": False}
    for config in (
        SamplerConfig(mode=MODE, **same),
        SamplerConfig(mode=MODE, num_speculative_tokens=7, num_branches=5, **same),
    ):
        generation, expected = sampler.generate(lm, prompts, config), naive.generate(lm, prompts, config)
        assert (
            generation.tokens == causal_greedy(lm, prompts, **same)
            and generation.forward_passes == expected.forward_passes
        )


CHANGED = {
    **{
        "steps": 4,
        "tokens_per_step": 2,
        "schedule": "dream",
        "block_size": 4,
        "sub_block_size": 2,
        "remasking": "left_to_right",
    },
    **{
        "threshold": 0.9,
        "factor": 1.0,
        "entropy_bound": 0.5,
        "remask_fraction": 0.2,
        "order_temperature": 0.5,
        "filtered_confidence": True,
    },
    **{
        "reveal_last": [2],
        "cfg_scale": 1.0,
        "constraint": {"regex": "a"},
        "cache": "dual",
        "refresh_interval": 2,
        "early_commit": 0.5,
    },
    **{"revise": {"by": "probability"}, "top_log_probs": 3, "top_forbidden": 3},
}


def test_more_candidates_take_fewer_passes():
    lm = float64_lm("phi", "block_causal", 4, True, causal_context=True, eos_bias=-9.0)
    passes = []
    for candidates in (1, 2, 4, 8):
        generation = sampler.generate(
            lm, PROMPTS, SamplerConfig(mode=MODE, max_new_tokens=24, num_branches=candidates)
        )
        passes.append(sum(generation.forward_passes))
    assert passes == sorted(passes, reverse=True) and passes[-1] < 0.8 * passes[0]


def test_candidates_are_of_this_mode():
    with raises(ConfigError, where="num_branches"):
        SamplerConfig(num_branches=2)


@pytest.mark.parametrize("name", DENOISING_FIELDS)
def test_settings_of_denoising_are_refused_by_name(name):
    with raises(ConfigError, where=name):
        SamplerConfig(mode=MODE, **{name: CHANGED[name]})


@pytest.mark.parametrize(
    "attention, block_size, context",
    [
        ("causal", None, False),
        ("bidirectional", None, False),
        ("block_causal", 4, False),
        ("block_causal", 1, True),
    ],
)
def test_models_without_a_causal_context_are_refused(attention, block_size, context):
    lm = float64_lm("phi", attention, block_size, causal_context=context)
    with raises(GenerationError, where="mode"):
        sampler.generate(lm, ["a"], SamplerConfig(mode=MODE, max_new_tokens=4))


def test_recurrent_layers_are_refused():
    lm = tiny_lm("qwen3_5_text", "block_causal", 4, causal_context=True)
    with raises(GenerationError, where="mode"):
        sampler.generate(lm, ["abc"], SamplerConfig(mode=MODE))
    drafter = tiny_lm("llama", "block_causal", 4, causal_context=True)
    with raises(GenerationError, where="verifier"):
        sampler.generate(
            drafter, ["abc"], SamplerConfig(mode=MODE, max_new_tokens=8), verifier=tiny_lm("qwen3_5_text")
        )


def test_gaps_and_empty_prompts_are_refused():
    lm = float64_lm("phi", "block_causal", 4, False, causal_context=True)
    with raises(GenerationError, where="mode"):
        sampler.infill(lm, [f"a{lm.tokenizer.mask_token}b"], SamplerConfig(mode=MODE))
    with raises(GenerationError, where="prompt 0"):
        sampler.generate(lm, [[]], SamplerConfig(mode=MODE, max_new_tokens=4))


def test_drafts_that_are_nan_are_an_error():
    logits_NV = torch.zeros(2, 5)
    logits_NV[1, 3] = torch.nan
    for temperature in (0.0, 1.0):
        with raises(GenerationError, where="model"):
            speculation.probabilities(logits_NV, SamplerConfig(mode=MODE, temperature=temperature), None)


def test_a_tree_too_large_for_a_pass_is_refused():
    lm, config = (
        float64_lm("phi", "block_causal", 4, causal_context=True),
        SamplerConfig(mode=MODE, num_speculative_tokens=32, num_branches=32),
    )
    with raises(GenerationError, where="num_speculative_tokens and num_branches"):
        sampler.generate(lm, [[4]], config)
