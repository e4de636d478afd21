"""Filling gaps of a length that the model finds: the tokens are those of the naive sampler, and of a model
that is known exactly."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from torch import nn

import unmask
from tests.errors import raises
from tests.generation.cases import Watch
from tests.helpers import each_once, partly_slow
from tests.tiny import float64_causal
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation import naive, sampler, variable_length
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs
from unmask.models.length_tokens import add_length_tokens
from unmask.models.load import make_diffusion

TEXTS = [
    [[1, 4, 5, 6], [7, 8]],
    [[1, 4], [5, 9, 6], [7, 7]],
    [[1, 9, 4, 5, 6, 7, 8], [4, 4, 4]],
    [[1, 4, 5, 6], [7, 8]],
]


def filling_lm(
    expand: float = 0.0, delete: float = 0.0, *, logit_shift: bool | None = None, family: str = "phi"
) -> DiffusionLM:
    """The tiny model with both tokens, whose logits have these biases."""
    lm = add_length_tokens(
        make_diffusion(*float64_causal(family), attention="bidirectional", logit_shift=logit_shift)
    )
    head = lm.model.get_output_embeddings()
    generator = torch.Generator().manual_seed(4)
    head.weight.data[-2:] += 0.3 * torch.randn(
        2, head.weight.shape[1], generator=generator, dtype=head.weight.dtype
    )
    head.bias = nn.Parameter(torch.zeros(len(head.weight), dtype=head.weight.dtype))
    head.bias.data[lm.expand_token_id], head.bias.data[lm.delete_token_id] = expand, delete
    return lm


SETTINGS = [
    {},
    {"tokens_per_step": 3},
    {"temperature": 1.0, "trace": True},
    {"temperature": 0.7, "remasking": "random", "batch_size": 2, "top_k": 6},
    {"temperature": 1.3, "remasking": "left_to_right", "repetition_penalty": 1.5},
    {"temperature": 1.0, "tokens_per_step": 4, "remasking": "margin", "trace": True, "max_batch_tokens": 40},
    {"threshold": 0.25, "temperature": 1.0},
    {"entropy_bound": 2.0, "remasking": "entropy"},
    {"remasking": "entropy", "allowed_tokens": [4, 5, 9], "temperature": 1.0, "order_temperature": 0.5},
    {"filtered_confidence": True, "top_p": 0.8, "deterministic": True},
]


@partly_slow("settings", SETTINGS, 5, 6, 9, ids=str)
def test_the_tokens_are_those_of_the_naive_sampler_alone_and_in_a_batch(settings):
    for seed, biases in enumerate([(2.0, 1.0), (1.0, 2.5)]):
        lm, config = filling_lm(*biases, logit_shift=seed > 0), SamplerConfig(seed=seed, **settings)
        together, one_by_one = (
            sampler.infill(lm, TEXTS, config, length="auto", max_gap=7),
            naive.fill_gaps(lm, TEXTS, config, max_gap=7),
        )
        assert together.tokens == one_by_one.tokens and together.gaps == one_by_one.gaps
        assert together.steps == one_by_one.steps and together.forward_passes == one_by_one.forward_passes
        for found, expected in zip(together.log_probs, one_by_one.log_probs, strict=True):
            assert found == pytest.approx(expected, abs=1e-9)
        for found, expected in zip(together.trace or [], one_by_one.trace or [], strict=True):
            assert found.sampled_log_probs == pytest.approx(expected.sampled_log_probs, abs=1e-9)
            assert found.entropies == pytest.approx(expected.entropies, abs=1e-9)
        alone = sampler.infill(lm, TEXTS[1:2], config, length="auto", max_gap=7)
        assert alone.tokens == together.tokens[1:2] and alone.gaps == together.gaps[1:2]


@pytest.mark.slow
def test_such_settings_reach_gaps_that_grow_and_gaps_that_shrink(monkeypatch):
    monkeypatch.setattr(variable_length, "FIRST_POSITIONS", 3)
    lengths = Counter[int]()
    for biases in ((2.0, 1.0), (1.0, 2.5), (0.5, 0.5)):
        for seed in range(2):
            config, lm = SamplerConfig(seed=seed, temperature=1.0), filling_lm(*biases)
            found = sampler.infill(lm, TEXTS, config, length="auto", max_gap=7)
            assert found.tokens == naive.fill_gaps(lm, TEXTS, config, max_gap=7).tokens
            lengths.update(gap.length for gap in itertools.chain(*found.gaps))
    assert min(lengths) < 3 < max(lengths), lengths


class Known(DiffusionLM):
    """A model of a text 1, x, 8 with the exact probabilities of each x of letters 4 and 5, up to `longest` of
    them."""

    prob: dict[tuple[int, ...], float]
    longest: int

    @classmethod
    def of(cls, prob: dict[tuple[int, ...], float]) -> Known:
        lm = copy.copy(filling_lm(logit_shift=False))
        lm.__class__ = cls
        total = sum(prob.values())
        lm.prob, lm.longest = {text: weight / total for text, weight in prob.items()}, max(map(len, prob))
        return lm

    def forward(self, inputs: ForwardInputs, cache: object = None) -> torch.Tensor:
        real_BT = (inputs.layout.document_BT > 0).expand_as(inputs.ids_BT)
        logits_BTV = torch.full((*inputs.ids_BT.shape, self.config.vocab_size), -torch.inf).double()
        for logits_TV, ids_T, real_T in zip(logits_BTV, inputs.ids_BT, real_BT, strict=True):
            logits_TV[: int(real_T.sum())] = self._targets(ids_T[real_T].tolist()).log()
        if inputs.index_N is None:
            return logits_BTV
        return logits_BTV.flatten(0, 1)[inputs.index_N]

    def _targets(self, ids: list[int]) -> torch.Tensor:
        """The distribution [T, V] of the target of each position, given the visible ones
        (`supervised/variable_length.py`)."""
        prob_TV, canvas = torch.zeros(len(ids), self.config.vocab_size).double(), ids[1:-1]
        # positions with a token for sure
        known = canvas.index(self.expand_token_id) if self.expand_token_id in canvas else len(canvas)
        for text, weight in self.prob.items():
            fits = len(text) >= known if known < len(canvas) else len(text) == known
            if fits and all(
                shown in (token, self.mask_token_id)
                for shown, token in zip(canvas[:known], text, strict=False)
            ):
                targets = [*text, *[self.delete_token_id] * len(canvas)][: len(canvas)]
                if len(text) > len(canvas):
                    targets[-1] = self.expand_token_id
                for place, target in enumerate(targets, start=1):
                    prob_TV[place, target] += weight
        return prob_TV / prob_TV.sum(1, keepdim=True).clamp_min(1e-300)


def every_text(longest: int) -> list[tuple[int, ...]]:
    return [text for length in range(1, longest + 1) for text in itertools.product((4, 5), repeat=length)]


@pytest.mark.slow
def test_in_the_order_of_the_text_the_tokens_have_the_models_distribution():
    generator = torch.Generator().manual_seed(3)
    lm = Known.of({text: float(torch.rand((), generator=generator)) + 0.05 for text in every_text(3)})
    config = SamplerConfig(temperature=1.0, remasking="left_to_right", batch_size=512)
    count = 2000
    filled = sampler.infill(lm, [[[1], [8]]] * count, config, list(range(count)), length="auto", max_gap=3)
    seen = Counter(tuple(tokens[1:-1]) for tokens in filled.tokens)
    assert seen.keys() <= lm.prob.keys()
    assert (
        chisquare([seen[text] for text in lm.prob], [count * weight for weight in lm.prob.values()]).pvalue
        > 1e-3
    )


@pytest.mark.slow
def test_a_drawn_length_has_the_models_distribution_whatever_a_gap_begins_with(monkeypatch):
    """Of texts whose tokens say nothing about the length."""
    weights, count = (1, 3, 2, 1, 4), 800
    lm = Known.of({(4,) * length: weight for length, weight in enumerate(weights, start=1)})
    for first in (1, 5):
        monkeypatch.setattr(variable_length, "FIRST_POSITIONS", first)
        config = SamplerConfig(temperature=1.0, remasking="left_to_right", batch_size=512)
        filled = sampler.infill(
            lm, [[[1], [8]]] * count, config, list(range(count)), length="auto", max_gap=5
        )
        seen = Counter(len(tokens) - 2 for tokens in filled.tokens)
        assert (
            chisquare(
                [seen[n] for n in range(1, 6)], [count * weight / sum(weights) for weight in weights]
            ).pvalue
            > 1e-3
        ), first


@each_once("first, remasking", [1, 4, 8], ["low_confidence", "random", "left_to_right"])
def test_a_length_that_is_more_probable_than_all_others_is_found(first, remasking, monkeypatch):
    """Whatever a gap begins with, and with any number of tokens a step."""
    monkeypatch.setattr(variable_length, "FIRST_POSITIONS", first)
    for weights, best in (
        ([8, 1, 1, 1, 1, 1, 1, 1], 1),
        ([1, 1, 1, 1, 1, 1, 1, 9], 8),
        ([1, 0, 0, 0, 3, 0, 0, 1], 5),
    ):
        lm = Known.of(
            {
                (4, 5, 5, 4, 5, 4, 4, 5)[:length]: weight
                for length, weight in enumerate(weights, start=1)
                if weight
            }
        )
        for tokens_per_step in (None, 3):
            found = infilled(lm, SamplerConfig(remasking=remasking, tokens_per_step=tokens_per_step))
            assert tuple(found.tokens[0][1:-1]) in lm.prob and found.gaps[0][0].length == best


def infilled(lm: DiffusionLM, config: SamplerConfig):
    return sampler.infill(lm, [[[1], [8]]], config, length="auto", max_gap=8)


def test_deletions_of_which_the_model_is_certain_take_one_pass():
    lm = Known.of({(4, 5): 1.0, (4, 5, 4): 0.1, (4,) * 16: 0.1})
    for found in (
        sampler.infill(lm, [[[1], [8]]], length="auto", max_gap=16),
        naive.fill_gaps(lm, [[[1], [8]]], max_gap=16),
    ):
        assert found.tokens == [[1, 4, 5, 8]] and found.forward_passes == [3]


def test_a_length_that_is_all_but_certain_is_settled_before_any_token():
    """Of three tokens the first is most often 5; of any number it is most often 4."""
    lm = Known.of({(4,): 0.09, (4, 5, 5): 0.42, (5, 4, 4): 0.49})
    found, mask = infilled(lm, SamplerConfig(remasking="left_to_right")), lm.mask_token_id
    given = sampler.infill(lm, [[1, mask, mask, mask, 8]], SamplerConfig(remasking="left_to_right"))
    assert found.tokens == given.tokens == [[1, 5, 4, 4, 8]] and found.forward_passes == [4]
    less = infilled(
        Known.of({(4,): 0.11, (4, 5, 5): 0.41, (5, 4, 4): 0.48}), SamplerConfig(remasking="left_to_right")
    )
    assert less.tokens == [[1, 4, 5, 5, 8]]


@pytest.mark.parametrize(
    "delete, expand, length",
    [
        ([0.95, 1.0], 0.0, 0),
        ([0.0, 0.05], 0.02, 2),
        ([0.05, 0.97], 0.0, 1),
        ([0.5, 1.0], 0.0, None),
        ([0.0], 0.95, None),
    ],
)
def test_a_length_is_settled_by_the_probabilities_of_fewer_and_of_more(delete, expand, length):
    assert variable_length.settled_length(delete, expand) == length


@pytest.mark.parametrize(
    "biases, lengths", [((30.0, -30.0), {7}), ((-30.0, 30.0), {1}), ((30.0, 30.0), {1, 2, 3, 4, 5, 6, 7})]
)
def test_a_gap_has_1_to_max_gap_tokens_and_every_run_ends(biases, lengths, monkeypatch):
    for first, settings in itertools.product(
        (1, 3, 7), ({}, {"temperature": 1.0}, {"tokens_per_step": 5, "temperature": 1.0})
    ):
        monkeypatch.setattr(variable_length, "FIRST_POSITIONS", first)
        found = sampler.infill(
            filling_lm(*biases), TEXTS, SamplerConfig(**settings), length="auto", max_gap=7
        )
        assert {gap.length for gap in itertools.chain(*found.gaps)} <= lengths
        assert max(found.forward_passes) <= 2 * 2 * 8


def test_the_result_names_the_gaps_and_what_was_around_them():
    lm = filling_lm(1.0, 1.0)
    with Watch(lm) as watch:
        found = sampler.infill(
            lm, TEXTS[:1], SamplerConfig(temperature=1.0, trace=True), length="auto", max_gap=7
        )
    ((gap,),), (tokens,), (prompt,) = found.gaps, found.tokens, found.prompts
    assert (
        tokens[:4] == [1, 4, 5, 6]
        and tokens[-2:] == [7, 8]
        and (gap.start, gap.length) == (4, len(tokens) - 6)
    )
    assert prompt == [1, 4, 5, 6, *[lm.mask_token_id] * gap.length, 7, 8]
    assert found.forward_passes == [watch.rows] and gap.forward_passes == 0 and gap.scores == {}
    assert not {lm.mask_token_id, lm.expand_token_id, lm.delete_token_id, lm.eos_token_id} & set(tokens[4:-2])
    inside = slice(4, 4 + gap.length)
    assert all(step >= 0 for step in found.steps[0][inside]) and all(
        value < 0 for value in found.trace[0].sampled_log_probs[inside]
    )


def test_mask_tokens_beside_a_gap_stand_for_one_token_each():
    lm = filling_lm(0.0, 3.0)
    text = [[1, 4, lm.mask_token_id, 5], [7, lm.mask_token_id, 8]]
    found = sampler.infill(lm, [text], SamplerConfig(temperature=1.0), length="auto", max_gap=7)
    (gap,) = found.gaps[0]
    assert len(found.tokens[0]) == 7 + gap.length and gap.start == 4
    assert found.tokens == naive.fill_gaps(lm, [text], SamplerConfig(temperature=1.0), max_gap=7).tokens


def test_keys_are_of_the_texts():
    lm, config = filling_lm(0.5, 0.5), SamplerConfig(temperature=1.0)
    same = sampler.infill(lm, [TEXTS[0]] * 2, config, [7, 7], length="auto", max_gap=7).tokens
    assert same[0] == same[1]
    assert same[0] != sampler.infill(lm, [TEXTS[0]], config, [8], length="auto", max_gap=7).tokens[0]
    with raises(GenerationError, where="keys"):
        sampler.infill(lm, [TEXTS[0]] * 2, config, [7], length="auto", max_gap=7)


def test_elsewhere_both_tokens_are_forbidden():
    lm = filling_lm(30.0, 30.0)
    both = {lm.expand_token_id, lm.delete_token_id}
    texts = [[1, 4, *[lm.mask_token_id] * 5, 8]]
    for config in (
        SamplerConfig(max_new_tokens=6),
        SamplerConfig(max_new_tokens=6, temperature=1.0, tokens_per_step=2),
    ):
        for tokens in (
            *unmask.generate(lm, [[1, 4]], config).tokens,
            *sampler.infill(lm, texts, config).tokens,
        ):
            assert not both & set(tokens)
        assert (
            sampler.infill(lm, texts, config).tokens
            == sampler.infill(filling_lm(-30.0, -30.0), texts, config).tokens
        )
    with raises(GenerationError, where="allowed_tokens"):
        unmask.generate(lm, [[1, 4]], SamplerConfig(allowed_tokens=sorted(both)))


def test_lengths_can_still_be_searched():
    lm = filling_lm(1.0, 1.0)
    searched = sampler.infill(lm, TEXTS, length="search", max_gap=7)
    plain = make_diffusion(*float64_causal("phi"), attention="bidirectional")
    expected = sampler.infill(plain, TEXTS, length="auto", max_gap=7)
    assert searched.tokens == expected.tokens
    assert [[(gap.start, gap.length) for gap in gaps] for gaps in searched.gaps] == [
        [(gap.start, gap.length) for gap in gaps] for gaps in expected.gaps
    ]
    assert searched.gaps[0][0].forward_passes > 0


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"steps": 4},
            {"schedule": "dream"},
            {"block_size": 4},
            {"remask_fraction": 0.2},
            {"revise": {"eta": 0.5}},
            {"cfg_scale": 1.0},
        ),
        *({"constraint": {"regex": "a+"}}, {"cache": "prefix"}, {"early_commit": 0.5}),
    ],
    ids=str,
)
def test_settings_that_need_a_length_are_refused(settings):
    (name,) = settings
    with raises(GenerationError, where=name):
        sampler.infill(filling_lm(), TEXTS, SamplerConfig(**settings), length="auto", max_gap=7)


@pytest.mark.parametrize(
    "text",
    [
        [1, 4],
        [[1, 4], []],
        [[1] * 20, [5] * 12],
    ],
)
def test_texts_that_cannot_be_filled_are_refused(text):
    with raises(GenerationError, where="text 0"):
        sampler.infill(filling_lm(), [text], length="auto", max_gap=9)
    with raises(GenerationError, where="max_batch_tokens"):
        sampler.infill(filling_lm(), TEXTS[:1], SamplerConfig(max_batch_tokens=12), length="auto", max_gap=7)


def test_greedy_edits_are_weighed_against_what_may_be_written():
    """An edit is made if it is more probable than all else together that is allowed."""
    lm = filling_lm()
    letter, end, size = 4, lm.eos_token_id, lm.config.vocab_size
    probability_V = torch.full((size,), 1e-9, dtype=torch.float64)
    probability_V[[lm.delete_token_id, end, letter]] = torch.tensor([0.45, 0.4, 0.15], dtype=torch.float64)
    one = torch.zeros(1, dtype=torch.long)
    for forbidden, expected in ((None, end), ([end], lm.delete_token_id)):
        config = SamplerConfig(forbidden_tokens=forbidden)
        decision, _ = variable_length.decide_open(
            lm, probability_V.log()[None], torch.tensor([[False, True]]), config, one, one, one, None
        )
        assert int(decision.token_N) == expected
