"""A rollout holds completions up to their end, and the blocks in which they were decoded."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from tests.rl.methods.rollouts import LENGTH, PROMPTS, rollout_of, stopping
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.log_probs import noise_groups
from unmask.generation.rollout import cut_at_end, decoding_blocks, make_rollout
from unmask.generation.sampler import generate


def sampled(stop_at_eos: bool):
    lm = stopping("bidirectional")
    return lm, generate(
        lm,
        PROMPTS,
        SamplerConfig(max_new_tokens=LENGTH, temperature=1.0, trace=True, stop_at_eos=stop_at_eos),
    )


def test_a_whole_canvas_is_cut_behind_its_first_end():
    lm, whole = sampled(stop_at_eos=False)
    cut = cut_at_end(lm, whole)
    ended = 0
    for row in range(len(PROMPTS)):
        tokens = cut.tokens[row]
        end = len(tokens)
        assert tokens == whole.tokens[row][:end] and len(whole.tokens[row]) == LENGTH
        assert lm.eos_token_id not in tokens[:-1]
        assert tokens[-1] == lm.eos_token_id or end == LENGTH
        assert cut.log_probs[row] == whole.log_probs[row][:end] and cut.steps[row] == whole.steps[row][:end]
        assert cut.texts[row] == lm.tokenizer.decode(tokens, skip_special_tokens=True)
        ended += end < LENGTH
    assert ended > 1 and cut.trace == whole.trace and cut.prompts == whole.prompts
    rollout = make_rollout(lm, cut, slice(None))
    assert rollout.completion_BT.sum(1).tolist() == [len(tokens) for tokens in cut.tokens]
    assert torch.equal(rollout.revealed_BT, (rollout.document_BT > 0) & ~rollout.prompt_BT)


@pytest.mark.parametrize("stop_at_eos", [False, True])
def test_any_end_token_ends_a_completion(stop_at_eos):
    lm, (_, whole) = copy.copy(stopping("bidirectional")), sampled(stop_at_eos=False)
    other = Counter(tokens[0] for tokens in whole.tokens if tokens[0] != lm.eos_token_id).most_common(1)[0][0]
    lm.eos_token_ids = (lm.eos_token_id, other)
    made = generate(
        lm,
        PROMPTS,
        SamplerConfig(max_new_tokens=LENGTH, temperature=1.0, trace=True, stop_at_eos=stop_at_eos),
    )
    cut = cut_at_end(lm, made)
    assert sum(tokens[-1] == other for tokens in cut.tokens) > 0 and cut.trace == whole.trace
    for tokens, text, canvas in zip(cut.tokens, cut.texts, whole.tokens, strict=True):
        ends = [at for at, token in enumerate(canvas, start=1) if token in lm.eos_token_ids]
        assert tokens == canvas[: min([*ends, LENGTH])]
        assert text == lm.tokenizer.decode(
            [token for token in tokens if token not in lm.eos_token_ids], skip_special_tokens=True
        )
    rollout = make_rollout(lm, cut, slice(None))
    assert rollout.completion_BT.sum(1).tolist() == [len(tokens) for tokens in cut.tokens]


def test_what_stopped_at_its_end_is_left_as_it_is():
    lm, stopped = sampled(stop_at_eos=True)
    assert cut_at_end(lm, stopped) == stopped


@pytest.mark.parametrize("block_size", [None, 2, 4])
def test_decoding_blocks_count_from_the_completion(block_size):
    _, rollout = rollout_of(stopping("bidirectional"), block_size=block_size)
    for row, prompt in enumerate(PROMPTS):
        expected = [-1] * len(prompt) + [at // (block_size or LENGTH) for at in range(LENGTH)]
        assert rollout.block_BT[row].tolist() == expected + [-1] * (rollout.block_BT.shape[1] - len(expected))


@pytest.mark.parametrize(("attention", "size"), [("block_causal", 3), ("causal", 1)])
def test_the_decoding_blocks_of_a_model_by_blocks_are_those_of_its_attention(attention, size):
    lm = stopping(attention, size if attention == "block_causal" else None)
    _, rollout = rollout_of(lm)
    for row, prompt in enumerate(PROMPTS):
        first = len(prompt) // size
        expected = [at // size - first for at in range(len(prompt), len(prompt) + LENGTH)]
        assert rollout.block_BT[row][rollout.block_BT[row] >= 0].tolist() == expected


def test_blocks_do_not_depend_on_padding_or_on_neighbors():
    lm = float64_lm("phi", "block_causal", 3)
    document_BT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0], [1] * 8])
    canvas_BT = torch.zeros(3, 8, dtype=torch.bool)
    canvas_BT[0, 4:], canvas_BT[1, 2:6] = True, True  # the third row has no completion
    blocks_BT = decoding_blocks(lm, canvas_BT, noise_groups(lm, canvas_BT, document_BT), None)
    assert blocks_BT.tolist() == [[-1, -1, -1, -1, 0, 1, 1, 1], [-1, -1, 0, 1, 1, 1, -1, -1], [-1] * 8]


def test_the_log_probs_of_another_sampler_are_kept_where_asked_for():
    lm, generation = sampled(stop_at_eos=True)
    rollout = make_rollout(lm, generation, slice(1, 4), sampled=True)
    assert make_rollout(lm, generation, slice(1, 4)).sampled_BT is None
    for row, (prompt, trace) in enumerate(zip(generation.prompts[1:4], generation.trace[1:4], strict=True)):
        end = len(prompt) + len(trace.canvas)
        assert rollout.sampled_BT[row, len(prompt) : end].tolist() == pytest.approx(trace.sampled_log_probs)
        assert not rollout.sampled_BT[row, : len(prompt)].any() and not rollout.sampled_BT[row, end:].any()
    part = rollout.select(slice(1, 2))
    assert torch.equal(part.sampled_BT, rollout.sampled_BT[1:2]) and torch.equal(
        part.ids_BT, rollout.ids_BT[1:2]
    )
