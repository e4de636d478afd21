"""Drafts that a server verifies give its text."""

from __future__ import annotations

import math

import pytest
import torch

from tests.errors import raises
from tests.generation.cases import PROMPTS
from tests.helpers import partly_slow
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.errors import GenerationError
from unmask.generation import sampler
from unmask.generation.remote.http import RemoteError
from unmask.generation.remote.verify import distribution, leaves_of
from unmask.generation.remote.vllm_client import RemoteLM, read_prompt_log_probs
from unmask.generation.speculation import draft_tree

MODE = {"mode": "self-speculative", "max_new_tokens": 9, "batch_size": 3}


class Served(RemoteLM):
    """A causal model that answers as its server would."""

    def __init__(self, lm, context_length=None):
        self.lm, self.tokenizer, self.context_length, self.tops = lm, lm.tokenizer, context_length, []

    def prompt_log_probs(self, ids, top):
        self.tops.append(top)
        log_prob_TV = self.lm.logits(torch.tensor([ids])).detach().log_softmax(-1)[0]
        assert self.context_length is None or len(ids) < self.context_length
        known = [{}]
        for position, token in enumerate(ids[1:], start=1):
            best = log_prob_TV[position].topk(log_prob_TV.shape[1] if top == -1 else top).indices.tolist()
            known.append({each: float(log_prob_TV[position, each]) for each in {*best, token}})
        return known


def pair():
    return float64_lm("phi", "block_causal", 4, True, causal_context=True), float64_lm(
        "gpt2", "causal", eos_bias=-1.0
    )


@partly_slow("candidates", [1, 3], 1)
@partly_slow("more", [{}, {"forbidden_tokens": [5, 6]}, {"temperature": 1.0, "top_p": 0.9}], 2, ids=str)
def test_the_text_is_that_of_the_model_on_the_server(more, candidates):
    lm, verifier = pair()
    config, server = SamplerConfig(**MODE, num_branches=candidates, **more), Served(verifier)
    found, expected = (sampler.generate(lm, PROMPTS, config, verifier=each) for each in (server, verifier))
    assert (found.tokens, found.forward_passes, found.accepted_drafts) == (
        expected.tokens,
        expected.forward_passes,
        expected.accepted_drafts,
    )
    for one, other in zip(found.log_probs, expected.log_probs, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    assert {*server.tops} == ({-1} if "temperature" in more else {4 if more else 2})


def test_the_rest_of_the_probability_is_spread_evenly():
    half, quarter = math.log(0.5), math.log(0.25)
    assert distribution({1: half, 3: quarter}, 6, never=[5]).exp().tolist() == pytest.approx(
        [0.25 / 3, 0.5, 0.25 / 3, 0.25, 0.25 / 3, 0]
    )
    assert distribution({0: quarter, 1: half, 7: quarter}, 2, never=[]).exp().tolist() == pytest.approx(
        [0.25, 0.5]
    )
    assert distribution({0: quarter, 1: half}, 2, never=[1]).exp().tolist() == pytest.approx([0.25, 0.0])


@pytest.mark.parametrize(("drafts", "candidates"), [(1, 1), (3, 1), (3, 4), (7, 8)])
def test_paths_to_the_leaves_hold_every_node(drafts, candidates):
    tree = draft_tree(drafts, candidates)
    for count in range(1, len(tree.children) + 1):
        paths = leaves_of(tree, count)
        assert {node for path in paths for node in path} == set(range(1, count))
        assert all(
            path == sorted(path) and tree.depth_J[path].tolist() == [*range(1, len(path) + 1)]
            for path in paths
        )


def test_an_answer_is_read_by_token():
    answer = {
        "choices": [
            {"prompt_logprobs": [None, {"7": {"logprob": -0.5, "rank": 1}, "2": {"logprob": -3, "rank": 9}}]}
        ]
    }
    assert read_prompt_log_probs(answer) == [{}, {7: -0.5, 2: -3.0}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_the_mask_token_nor_rows_without_a_token_are_written(temperature):
    lm, verifier = pair()

    class Odd(Served):
        def prompt_log_probs(self, ids, top):
            odd = {lm.mask_token_id: -0.1, lm.config.vocab_size: -0.2}
            return [
                known and {token: log_prob - 3 for token, log_prob in known.items()} | odd
                for known in super().prompt_log_probs(ids, -1)
            ]

    found = sampler.generate(
        lm, PROMPTS, SamplerConfig(**MODE, temperature=temperature), verifier=Odd(verifier)
    )
    assert all(0 <= token < lm.mask_token_id for tokens in found.tokens for token in tokens)


def test_a_text_may_fill_the_servers_context_but_for_a_token():
    lm, verifier = pair()
    config = SamplerConfig(**MODE, stop_at_eos=False)
    sampler.generate(lm, [[4] * 5], config, verifier=Served(verifier, context_length=15))
    with raises(GenerationError, where="verifier"):
        sampler.generate(lm, [[4] * 5], config, verifier=Served(verifier, context_length=14))


def test_a_server_that_answers_with_fewer_is_noticed():
    class Http:
        def call(self, *_, **__):
            return {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -0.5}}]}]}

        def read(self, answer, how):
            return how(answer)

    server = Served(pair()[1])
    server.http, server.model = Http(), "m"
    assert RemoteLM.prompt_log_probs(server, [1, 7], 1) == [{}, {7: -0.5}]
    for top in (2, -1):
        with raises(GenerationError, where="verifier"):
            RemoteLM.prompt_log_probs(server, [1, 7], top)


def test_a_penalty_is_refused():
    lm, verifier = pair()
    with raises(GenerationError, where="repetition_penalty and verifier"):
        sampler.generate(
            lm, PROMPTS, SamplerConfig(**MODE, repetition_penalty=1.5), verifier=Served(verifier)
        )


def test_a_server_with_another_tokenizer_is_refused():
    lm, verifier = pair()
    server = Served(verifier)
    server.tokenizer = character_tokenizer("abcdeg")
    with raises(GenerationError, where="verifier"):
        sampler.generate(lm, PROMPTS, SamplerConfig(**MODE), verifier=server)


def test_a_server_that_gives_too_few_is_named(monkeypatch):
    class Http:
        def call(self, *_, **__):
            raise RemoteError("a vLLM server answered 400: prompt_logprobs of -1 exceeds 20", status=400)

    server = Served(pair()[1])
    server.http, server.model = Http(), "m"
    with raises(GenerationError, where="verifier"):
        RemoteLM.prompt_log_probs(server, [1, 2], -1)
