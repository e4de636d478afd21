"""The search for the lengths of gaps, on models whose probabilities are known."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.errors import raises
from tests.generation.cases import Watch
from tests.helpers import shared_path
from tests.tiny import float64_lm
from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation import sampler
from unmask.generation.gap_lengths import WINDOW, GapScorer, _segments, best, find_lengths, search
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs

LETTERS = range(4, 10)  # of the tiny models
CONFIG = SamplerConfig()


class Markov(DiffusionLM):
    """A Markov chain over tokens, read as a diffusion model: each hidden token has its exact distribution
    given the visible ones."""

    step_VV: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor) -> Markov:
        """Letters that follow letters with these probabilities; the first one is any letter."""
        lm = copy.copy(float64_lm("phi", "bidirectional", logit_shift=False))
        lm.__class__ = cls
        lm.step_VV = torch.zeros(lm.config.vocab_size, lm.config.vocab_size).double()
        lm.step_VV[LETTERS[0] : LETTERS[-1] + 1, LETTERS[0] : LETTERS[-1] + 1] = rows
        return lm

    def forward(self, inputs: ForwardInputs, cache: object = None) -> torch.Tensor:
        real_BT = (inputs.layout.document_BT > 0).expand_as(inputs.ids_BT)
        logits_BTV = torch.full((*inputs.ids_BT.shape, len(self.step_VV)), -torch.inf).double()
        for logits_TV, ids_T, real_T in zip(logits_BTV, inputs.ids_BT, real_BT, strict=True):
            logits_TV[real_T] = self._conditionals(ids_T[real_T].tolist())
        return logits_BTV.flatten(0, 1)[inputs.index_N]

    def _conditionals(self, ids: list[int]) -> torch.Tensor:
        """log p(token | visible tokens elsewhere) [T, V], by forward and backward sums."""
        size = len(self.step_VV)
        seen = [
            torch.eye(size).double()[token] if token != self.mask_token_id else torch.ones(size).double()
            for token in ids
        ]
        letter_V = torch.zeros(size).double()
        letter_V[LETTERS[0] : LETTERS[-1] + 1] = 1 / len(LETTERS)
        forward = itertools.accumulate(
            seen[:-1], lambda state_V, seen_V: (state_V * seen_V) @ self.step_VV, initial=letter_V
        )
        backward = itertools.accumulate(
            seen[:0:-1],
            lambda state_V, seen_V: self.step_VV @ (state_V * seen_V),
            initial=torch.ones(size).double(),
        )
        both_TV = torch.stack([*forward]) * torch.stack([*backward]).flip(0)
        return (both_TV / both_TV.sum(1, keepdim=True)).log()


def distances(rows: torch.Tensor, before: int, after: int, longest: int) -> list[float]:
    """log p(after, L tokens later | before), by enumeration of the chain, for L from 1."""
    powers = itertools.accumulate(itertools.repeat(rows, longest + 1), torch.matmul)
    return [float(power[before - LETTERS[0], after - LETTERS[0]].log()) for power in powers][1:]


@pytest.mark.parametrize("seed", range(6))
def test_scores_are_the_posterior_of_the_length_where_the_model_is_exact(seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(6, generator=generator).double().pow(4)
    weights /= weights.sum()
    # both sides of a gap are as probable at any place
    rows = torch.stack([weights.roll(shift) for shift in range(6)])
    before, after = (
        torch.randint(4, 10, (size,), generator=generator).tolist() for size in (1 + seed % 3, 1 + seed % 4)
    )
    (found,) = find_lengths(Markov.of(rows), [[before, after]], CONFIG, 9, "<gap>")
    exact = distances(rows, before[-1], after[0], 9)
    scores = found.gaps[0].scores
    assert len(scores) == 3 and max(exact) - min(exact) > 0.1
    assert found.gaps[0].length == 1 + exact.index(max(exact))
    for one, other in itertools.combinations(scores, 2):
        assert scores[one] - scores[other] == pytest.approx(exact[one - 1] - exact[other - 1], abs=1e-9)


def slow(stay: float) -> torch.Tensor:
    """Each letter is followed by itself, or by the next one in a circle: the distance of two letters has one
    most likely length."""
    return stay * torch.eye(6).double() + (1 - stay) * torch.eye(6).double().roll(1, 1)


@pytest.mark.parametrize("stay", [0.55, 0.7, 0.78])
def test_the_most_likely_length_is_found(stay):
    lm, pairs = Markov.of(slow(stay)), [(4, letter) for letter in LETTERS]
    found = find_lengths(lm, [[[a], [b]] for a, b in pairs], CONFIG, 20, "<gap>")
    likeliest = [1 + max(range(20), key=distances(slow(stay), a, b, 20).__getitem__) for a, b in pairs]
    assert [text.gaps[0].length for text in found] == likeliest and len(set(likeliest)) > 3


@given(data=st.data())
def test_the_best_length_is_found_if_it_is_in_the_better_half_of_each_round(data):
    choices = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=60, unique=True).map(sorted))
    heights, tokens, tried = data.draw(st.permutations(choices)), [], []

    def score(lengths, first, last):
        tokens.append((first, last))
        tried.append(len(lengths))
        return [(last - first) * heights[choices.index(length)] for length in lengths]

    scores = search(choices, score)
    assert best(scores) == choices[heights.index(max(heights))] and sorted(scores) == list(scores)
    assert tokens == [(0, 2), (2, 4), (4, 8)]
    assert tried == [len(choices), -(-len(choices) // 2), -(-len(choices) // 4)] and len(scores) == tried[-1]
    assert all(score == 8 * heights[choices.index(length)] for length, score in scores.items())


def test_of_equal_scores_the_shortest_is_best():
    assert best({8: 0.5, 2: 0.5, 1: 0.0}) == 2
    assert list(search(range(1, 65), lambda lengths, *_: [0.0] * len(lengths))) == [*range(1, 17)]


TEXTS = [[[4, 5, 6], [7, 8]], [[4], [5, 9, 6], [7, 7]], [[9, 4, 5, 6, 7, 8], [4, 4, 4]]]


@pytest.mark.parametrize("logit_shift", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0, "tokens_per_step": 2, "trace": True}, {"threshold": 0.2}]
)
def test_the_result_is_that_of_the_same_text_with_the_lengths_told(logit_shift, settings):
    lm, config = float64_lm("phi", "bidirectional", logit_shift=logit_shift), SamplerConfig(**settings)
    found = sampler.infill(lm, TEXTS, config, length="auto", max_gap=7)
    canvases = []
    for segments, gaps in zip(TEXTS, found.gaps, strict=True):
        canvas = list(segments[0])
        for gap, segment in zip(gaps, segments[1:], strict=True):
            assert gap.start == len(canvas) and gap.length == best(gap.scores)
            canvas += [lm.mask_token_id] * gap.length + segment
        canvases.append(canvas)
    told = sampler.infill(lm, canvases, config)
    assert found.prompts == canvases and replace(found, gaps=None) == told


def test_a_length_does_not_depend_on_other_texts():
    lm = float64_lm("phi", "bidirectional")
    together = sampler.infill(lm, [*TEXTS, TEXTS[0]], length="auto", max_gap=9)
    for number, text in enumerate([*TEXTS, TEXTS[0]]):
        (alone,) = sampler.infill(lm, [text], length="auto", max_gap=9).gaps
        assert together.gaps[number] == alone


def test_the_search_costs_less_than_to_try_all_lengths():
    lm = float64_lm("phi", "bidirectional")
    with Watch(lm) as watch:
        (found,) = find_lengths(lm, TEXTS[:1], CONFIG, 30, "<gap>")
    (gap,) = found.gaps
    assert watch.rows == gap.forward_passes == 30 * 4 + 15 * 1 and len(gap.scores) == 8
    assert watch.heads == watch.rows  # each predicts one token


def test_padding_changes_no_score():
    lm = float64_lm("phi", "bidirectional")
    scorer = GapScorer(lm, [1, 4, 5, 6], [7, 8, 9], (4, 3))
    lengths = [1, 3, 20]
    alone = [score for length in lengths for score in scorer.scores([length], 0, 4)]
    assert scorer.scores(lengths, 0, 4) == pytest.approx(alone, abs=1e-9)


def test_tokens_are_predicted_from_the_gap_on_with_the_rest_of_the_window_hidden():
    scorer = GapScorer(float64_lm("phi", "bidirectional"), [4] * 19, [5] * 20, (19, 20))
    near, far = [18 - n for n in range(WINDOW)], [22 + n for n in range(WINDOW)]
    assert [*scorer.views(3, 0, 1)] == [(near, 18), (far, 22)]
    assert [*scorer.views(3, 1, 3)] == [(near[1:], 17), (near[2:], 16), (far[1:], 23), (far[2:], 24)]


def test_nothing_beyond_another_gap_is_compared():
    lm = float64_lm("phi", "bidirectional")
    mask = lm.mask_token_id
    scorer = GapScorer(lm, [1, 4, mask, mask, 5, 6], [7, mask, 8, mask, 9], (2, 3))
    assert scorer.sides == ([5, 4], [0, 2])


def test_a_text_is_cut_at_its_marks_before_it_is_tokenized():
    lm = float64_lm("phi", "bidirectional")
    mask, bos = lm.mask_token_id, lm.tokenizer.bos_token_id
    marked = sampler.infill(
        lm, ["ab[gap]cd" + lm.tokenizer.mask_token + "e"], length="auto", max_gap=9, gap_mark="[gap]"
    )
    listed = sampler.infill(lm, [[[bos, 4, 5], [6, 7, mask, 8]]], length="auto", max_gap=9)
    assert marked == listed and marked.tokens[0][-2] != mask


def test_no_token_reaches_over_a_mark():
    lm = copy.copy(float64_lm("phi", "bidirectional"))
    lm.tokenizer = AutoTokenizer.from_pretrained(shared_path("models", "stories260K"))
    lm.tokenizer.mask_token = "<mask>"
    first, second = _segments(lm, "Once upon a ti<gap>me, there was", "<gap>", "text 0")
    assert lm.tokenizer.decode(first, skip_special_tokens=True) == "Once upon a ti"
    assert "".join(lm.tokenizer.convert_ids_to_tokens(second)) == "me,▁there▁was"


def test_a_gap_at_the_start_and_several_gaps():
    lm = float64_lm("phi", "bidirectional", logit_shift=False)
    generation = sampler.infill(lm, [[[], [4, 5], [6]]], SamplerConfig(seed=3), length="auto", max_gap=5)
    (gaps,), (tokens,) = generation.gaps, generation.tokens
    assert gaps[0].start == 0 and gaps[1].start == gaps[0].length + 2
    assert tokens[gaps[0].length : gaps[1].start] == [4, 5] and tokens[-1] == 6
    assert len(tokens) == 3 + gaps[0].length + gaps[1].length and lm.mask_token_id not in tokens


def test_a_gap_holds_no_end_token():
    lm = float64_lm("phi", "bidirectional", eos_bias=9.0)
    generation = sampler.infill(lm, TEXTS, SamplerConfig(temperature=1.0), length="auto", max_gap=9)
    assert lm.eos_token_id not in itertools.chain(*generation.tokens)


def test_only_lengths_that_fit_the_constraint_are_tried():
    pytest.importorskip("outlines_core")
    lm, config = (
        float64_lm("phi", "bidirectional"),
        SamplerConfig(constraint=ConstraintConfig(regex="(ab){2,5}|f")),
    )
    generation = sampler.infill(lm, TEXTS, config, length="auto", max_gap=9)
    for gap in itertools.chain(*generation.gaps):
        assert gap.length in {1, 4, 6, 8} and set(gap.scores) <= {1, 4, 6, 8}
    for text, gaps in zip(generation.texts, generation.gaps, strict=True):
        assert re.fullmatch("(ab){2,5}|f", text[gaps[0].start : gaps[0].start + gaps[0].length])
    with raises(GenerationError, where="constraint for text 0"):
        sampler.infill(
            lm, TEXTS, SamplerConfig(constraint=ConstraintConfig(choice=["abcde"])), length="auto", max_gap=3
        )


@pytest.mark.parametrize(
    "text",
    [
        "abc",
        "ab<ga",
        "",
        "ab<gap>",
        "ab<gap><gap>c",
        "ab<gap>c<gap>",
        "<gap>",
        [[4, 5]],
        [4, 5],
        [{"role": "user", "content": "a<gap>b"}],
        [[4], [99]],
        [[], [4]],
        [[4] * 20, [5] * 12],
        [[4] * 20, [5] * 5, [5] * 5],
        [[4] * 20, [5] * 20],
    ],
)
def test_texts_that_cannot_be_searched_are_refused(text):
    with raises(GenerationError, where="text 0"):
        sampler.infill(float64_lm("phi", "bidirectional", logit_shift=True), [text], length="auto", max_gap=9)


def test_searches_that_cannot_be_made_are_refused():
    lm = float64_lm("phi", "bidirectional")
    for mark in ("", lm.tokenizer.mask_token, lm.tokenizer.mask_token[1:3]):
        with raises(GenerationError, where="gap_mark"):
            sampler.infill(lm, ["ab<gap>c"], length="auto", gap_mark=mark)
    with raises(GenerationError, where="max_gap"):
        sampler.infill(lm, ["ab<gap>c"], length="auto", max_gap=0)
    with raises(GenerationError, where="texts"):
        sampler.infill(lm, "ab<gap>c", length="auto", max_gap=9)
    for attention, block_size in (("causal", None), ("block_causal", 4)):
        with raises(GenerationError, where="length"):
            sampler.infill(float64_lm("phi", attention, block_size), ["ab<gap>c"], length="auto", max_gap=9)
    with raises(GenerationError, where="length"):
        sampler.infill(lm, ["ab<gap>c"], length="any")
    with raises(GenerationError, where="text 0"):
        sampler.infill(lm, ["ab<gap>c"])
