"""Constraints on canvases of random tokens: never invalid, never stuck, and the most probable text."""

from __future__ import annotations

import itertools
import json
import re
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

import unmask
from tests.diffusion_gemma import loaded
from tests.errors import raises
from tests.generation.constraints.test_sampling import regexes
from tests.generation.test_canvas import PATTERNS, canvas_lm
from tests.helpers import chi_square_is_likely, each_once, partly_slow
from tests.tiny import build_lm
from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation import naive
from unmask.generation.canvas import propose
from unmask.generation.constraints.decide import texts_given, windows_of
from unmask.generation.requests import make_infill_requests, make_requests, without_ends
from unmask.generation.sampler import generate, infill

pytest.importorskip("outlines_core")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning"
)  # of what transformers imports

ANYTHING = ConstraintConfig(regex="(?s:.*)")
JSON_ALPHABET = '{}[]":,-.0123456789abtruefalsn '
PROMPTS = ["abc", "f"]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def json_models(tmp_path_factory):
    plain = build_lm("phi", JSON_ALPHABET, "block_causal", 8, logit_shift=False).with_noise("uniform")
    return plain, loaded(tmp_path_factory.mktemp("json"), alphabet=JSON_ALPHABET)


def config_of(**settings):
    given = {"max_denoising_steps": 4, "confidence_threshold": 1.0, "entropy_bound": 1.0}
    return SamplerConfig(**given | settings)


forms = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 14),
        "max_denoising_steps": st.integers(1, 6),
        "entropy_bound": st.sampled_from([0.0, 0.1, 1.0, 4.0, 50.0]),
        "t_min": st.sampled_from([0.0, 0.3]),
        "t_max": st.floats(0.5, 3),
        "stability_threshold": st.integers(0, 2),
        "confidence_threshold": st.sampled_from([0.005, 0.5, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 3]),
        "top_p": st.sampled_from([1.0, 0.7]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 2.0]),
        "forbidden_tokens": st.sampled_from([None, None, [5]]),
        "stop_at_eos": st.booleans(),
        "seed": st.integers(0, 9),
    }
)


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=pytest.mark.slow)])
@partly_slow("kind", ["bidirectional", "blocks", "DiffusionGemma"], 0, 2)
def test_random_settings_give_no_invalid_text(kind, count, gemma):
    lm, done = gemma if kind == "DiffusionGemma" else canvas_lm(kind), 0

    @hypothesis.settings(
        deadline=None,
        max_examples=count,
        database=None,
        derandomize=True,
        suppress_health_check=[*HealthCheck],
    )
    @given(pattern=regexes(), settings=forms)
    def hold(pattern, settings):
        nonlocal done
        config = SamplerConfig(**settings, constraint={"regex": pattern})
        try:
            found = generate(lm, PROMPTS, config)
        except GenerationError as error:
            assume("no text" not in str(error))  # of this length, or with the tokens that are allowed
            raise
        assert all(re.fullmatch(pattern, text) for text in found.texts), (pattern, found.texts)
        assert max(found.forward_passes) <= config.max_denoising_steps * 5
        done += 1

    hold()
    assert done >= count


FORMS = [
    ({"choice": ["true", "false", "[1,2]"]}, lambda text: text in ("true", "false", "[1,2]")),
    ({"grammar": 'start: "[" start? "]"'}, lambda text: "[]" in text and json.loads(text) is not None),
    ({"json": True}, lambda text: json.loads(text) is not None),
    (
        {
            "json_schema": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": ["true", "nu"]}},
                "required": ["a"],
                "additionalProperties": False,
            }
        },
        lambda text: isinstance(json.loads(text)["a"], int),
    ),
]


@partly_slow("constraint, is_valid", FORMS, 1, 3, ids=[next(iter(form)) for form, _ in FORMS])
def test_every_kind_of_constraint_is_met(constraint, is_valid, json_models):
    for lm in json_models:
        for seed in range(3):
            config = config_of(max_new_tokens=21, constraint=constraint, seed=seed, t_max=1.5)
            found = generate(lm, ["a", "b"], config)
            assert all(map(is_valid, found.texts)), found.texts
            assert found.tokens == naive.generate(lm, ["a", "b"], config).tokens


def accepted(lm, pattern, width, *, stops=False):
    """All canvases that a pattern accepts; `stops`: anything may follow the end token, else end tokens and
    padding."""
    names = lm.tokenizer.convert_ids_to_tokens(list(range(lm.vocab_size)))
    found, every = [], [token for token in range(lm.vocab_size) if token not in lm.never_predicted]
    for tokens in itertools.product(every, repeat=width):
        end = next((at for at, token in enumerate(tokens) if token == 2), width)
        text, rest = "".join(names[token] for token in tokens[:end]), set(tokens[end:])
        if min(tokens[:end], default=4) > 3 and (stops or rest <= {0, 2}) and re.fullmatch(pattern, text):
            found.append(tokens)
    return found


@each_once(
    "pattern, kind, width, stops",
    ["(a|bc|[d-f]a?)+", "[^a]*a[^a]*", "ab|cd"],
    [("bidirectional", 4), ("blocks", 5), ("blocks with a shift", 5)],
    [True, False],
)
def test_a_step_proposes_what_enumeration_gives(pattern, kind, width, stops):
    """The most probable text that is accepted, entropies given that it is, and a text that is accepted."""
    lm, steps = canvas_lm(kind), list[tuple]()
    every = accepted(lm, pattern, width, stops=stops)

    def watched(lm, logits_NV, config, temperature_N, *where):
        found = propose(lm, logits_NV, config, temperature_N, *where)
        steps.append((logits_NV, logits_NV / temperature_N[:, None], where[2] - 6, found))
        return found

    for prompt, seed in (("abcde", 0), ("fedcb", 1)):  # six tokens with BOS, so that blocks are two
        settings = {"max_denoising_steps": 5, "seed": seed, "stop_at_eos": stops, "trace": True}
        config = config_of(max_new_tokens=width, constraint={"regex": pattern}, **settings)
        [request], last = make_requests(lm, [prompt], config), dict[int, tuple]()
        assert request.start == 6
        steps.clear()
        with mock.patch.object(naive, "propose", watched):
            [trace] = naive.complete(lm, [request], config).trace
        for number, (logits_NV, own_NV, index_N, found) in enumerate(steps):
            start, best = int(index_N[0]), found.decision.token_N
            stop, known = start + len(best), tuple(trace.canvas[:start])
            texts = sorted({text[start:stop] for text in every if text[:start] == known})
            token_NF = torch.tensor(texts).T
            log_prob_F = own_NV.log_softmax(-1).gather(1, token_NF).sum(0)
            assert tuple(best.tolist()) == texts[int(log_prob_F.argmax())]
            assert tuple(found.drawn_N.tolist()) in texts
            share_F = log_prob_F.softmax(0)
            share_NV = torch.zeros_like(own_NV).scatter_add(1, token_NF, share_F.expand_as(token_NF))
            assert torch.allclose(found.entropy_N, torch.special.entr(share_NV).sum(-1), atol=1e-7)
            last[start] = number, best.tolist(), logits_NV.log_softmax(-1).gather(1, best[:, None])[:, 0]
        for start, (number, tokens, log_prob_N) in last.items():
            at = slice(start, start + len(tokens))
            assert trace.canvas[at] == tokens and trace.steps[at] == [number] * len(tokens)
            assert trace.log_probs[at] == pytest.approx(log_prob_N.tolist())


@pytest.mark.slow
def test_texts_are_drawn_from_the_distribution_given_the_constraint():
    lm, count = canvas_lm(), 1500
    [request] = make_requests(lm, ["abc"], config_of(max_new_tokens=3, constraint={"regex": "(a|bc)+"}))
    [window] = windows_of(request.gaps, request.blocks[0], request.ids, request.hidden, lm.device)
    chance = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(3, lm.vocab_size, generator=chance, dtype=torch.float64)
    every = accepted(lm, "(a|bc)+", 3, stops=True)
    log_prob_F = logits_NV.log_softmax(-1).gather(1, torch.tensor(every).T).sum(0)
    drawn_F = torch.zeros(len(every), dtype=torch.float64)
    for _ in range(count):
        uniform_N = torch.rand(3, generator=chance, dtype=torch.float64)
        found = texts_given(window, logits_NV, uniform_N, SamplerConfig())
        drawn_F[every.index(tuple(found.drawn_N.tolist()))] += 1
    assert len(every) > 4 and chi_square_is_likely(drawn_F, log_prob_F.softmax(0))


@pytest.mark.parametrize("kind", ["bidirectional", "blocks", "DiffusionGemma"])
def test_positions_that_decide_one_another_have_equal_entropies(kind, gemma):
    """Rounding, which differs by machine and company, must not say which of them are kept."""
    lm = gemma if kind == "DiffusionGemma" else canvas_lm(kind)
    seen = list[torch.Tensor]()

    def watched(*given):
        seen.append(propose(*given).entropy_N)
        return propose(*given)

    for seed in range(9):
        config = config_of(max_new_tokens=4, constraint={"regex": "abac|cdbd|efff"}, seed=seed, t_max=2.0)
        with mock.patch.object(naive, "propose", watched):
            naive.generate(lm, ["abcdefa"], config)  # eight tokens with BOS
    blocks = [entropy_N[:4].tolist() for entropy_N in seen]
    assert all(len(set(entropies)) == 1 for entropies in blocks)
    assert len({entropies[0] for entropies in blocks}) > 5


@partly_slow("kind", PATTERNS, 0, 3)
def test_a_constraint_that_allows_everything_changes_no_token(kind):
    """Of a model that gives other special tokens than EOS no probability."""
    lm = canvas_lm(kind).frozen_copy()
    lm.model.get_output_embeddings().bias[[0, 1, 3]] = -torch.inf
    for seed, filters in enumerate([{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3, "t_max": 2.0}, {}, {}]):
        config = config_of(max_new_tokens=12, seed=seed, trace=True, **filters)
        free = generate(lm, PROMPTS, config)
        found = generate(lm, PROMPTS, config.model_copy(update={"constraint": ANYTHING}))
        assert (found.tokens, found.steps, found.log_probs) == (free.tokens, free.steps, free.log_probs)
        for one, other in zip(found.trace, free.trace, strict=True):
            assert one.entropies == pytest.approx(other.entropies, abs=1e-7)


GAPS = "a(b|cd?)|ccc"


@pytest.mark.parametrize("kind", [*PATTERNS, "DiffusionGemma"])
def test_every_gap_of_a_text_meets_the_constraint(kind, gemma):
    lm = gemma if kind == "DiffusionGemma" else canvas_lm(kind)
    mask = lm.tokenizer.mask_token
    texts = [f"a{mask * 2}b{mask * 3}c", f"bb{mask * 2}", f"b{mask * 3}{'abcdef' * 2}{mask * 2}a"]
    config = config_of(constraint={"regex": GAPS})
    found, filled = infill(lm, texts, config), without_ends(lm, config)
    assert found.tokens == naive.complete(lm, make_infill_requests(lm, texts, filled), filled).tokens
    for text, written in zip(texts, found.texts, strict=True):
        pattern = re.sub("_+", f"({GAPS})", text.replace(mask, "_"))
        assert re.fullmatch(pattern, written), written
        assert len(written) == len(text.replace(mask, "_"))


@pytest.mark.parametrize("kind", [*PATTERNS, "DiffusionGemma"])
def test_the_text_around_gaps_meets_it_with_them(kind, gemma):
    """Gaps apart from one another agree, also in different canvases."""
    lm = gemma if kind == "DiffusionGemma" else canvas_lm(kind)
    mask = lm.tokenizer.mask_token
    texts = [f"a{mask * 2}d{mask * 2}c{mask}", f"a{mask * 11}c{mask * 2}"]
    config = config_of(constraint={"regex": "a(b|cc)?d*(bda|c[ef]c)f*", "over": "text"})
    found, filled = infill(lm, texts, config), without_ends(lm, config)
    assert found.tokens == naive.complete(lm, make_infill_requests(lm, texts, filled), filled).tokens
    assert all(re.fullmatch("a(b|cc)?d*(bda|c[ef]c)f*", text) for text in found.texts), found.texts


def test_a_text_ends_within_the_tokens_that_are_shown(gemma):
    """Not in the rest of the last canvas, which is free."""
    config = config_of(max_new_tokens=3, constraint={"regex": "ab{2,}|cd+"}, t_max=2.0, trace=True)
    found = unmask.generate(gemma, PROMPTS, config)
    assert all(re.fullmatch("abb|cdd?", text) for text in found.texts)
    assert [len(trace.canvas) for trace in found.trace] == [8, 8]
    with raises(GenerationError, where="constraint for prompt 0"):
        unmask.generate(gemma, PROMPTS, config.model_copy(update={"max_new_tokens": 1}))


@pytest.mark.parametrize("generated", [naive.generate, generate])
def test_a_text_without_any_probability_is_an_error(generated):
    lm = canvas_lm().frozen_copy()
    lm.model.get_output_embeddings().bias[4] = -torch.inf
    with raises(GenerationError, where="constraint"):
        generated(lm, ["b"], config_of(max_new_tokens=3, constraint={"regex": "a+"}))
    lm.model.get_output_embeddings().bias[4] = torch.nan
    with raises(GenerationError, where="model"):
        generated(lm, ["b"], config_of(max_new_tokens=3, constraint={"regex": "a+"}))


@pytest.mark.parametrize("kind", ["bidirectional", "blocks"])
def test_tokens_that_are_known_are_penalized(kind):
    """Those of the prompt and of finished blocks, and not those that the canvas shows."""
    lm, seen = canvas_lm(kind), list[tuple]()

    def watched(lm, logits_NV, *where):
        seen.append((logits_NV, where[4]))
        return propose(lm, logits_NV, *where)

    config = config_of(max_new_tokens=8, max_denoising_steps=1, repetition_penalty=3.0, stop_at_eos=False)
    with mock.patch.object(naive, "propose", watched):
        found = naive.generate(lm, ["abd"], config)
    assert found.tokens == generate(lm, ["abd"], config).tokens
    known, tokens = {1, 4, 5, 7}, list[int]()
    for logits_NV, position_N in seen:
        at = torch.tensor(sorted(known))
        own_NV = logits_NV.index_copy(1, at, (logits_NV / 3).minimum(logits_NV * 3)[:, at])
        tokens += own_NV.argmax(-1).tolist()
        assert tokens == found.tokens[0][: len(tokens)] and int(position_N[-1]) == 3 + len(tokens)
        known |= set(tokens)
    assert len(seen) == (1 if kind == "bidirectional" else 2)
