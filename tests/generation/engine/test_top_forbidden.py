"""The most probable tokens that a constraint forbids at revealed positions: of the engine, the naive sampler,
and a list of all texts."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.generation.cases import PATTERNS, PROMPTS, in_company
from tests.helpers import partly_slow
from tests.tiny import FLOAT64_ALPHABET, float64_lm
from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError
from unmask.generation import naive
from unmask.generation.engine.engine import Engine
from unmask.generation.frames import Frame, replay, watch
from unmask.generation.requests import make_infill_requests, make_requests

pytest.importorskip("outlines_core")

LETTERS = range(4, 4 + len(FLOAT64_ALPHABET))
SETTINGS = [
    {"constraint": {"regex": "(ab|c)*d"}, "top_forbidden": 3, "temperature": 1.0},
    {"temperature": 0.7, "top_log_probs": 2},
    {"constraint": {"regex": "[^a]*a[^a]*"}, "top_forbidden": 20, "tokens_per_step": 2},
    {"constraint": {"regex": "[^a]*a[^a]*"}, "temperature": 1.0},
    {"constraint": {"regex": "[abc]*f"}, "top_forbidden": 1, "top_log_probs": 4, "remask_fraction": 0.5},
]


def canvases(lm, pattern: str, width: int) -> np.ndarray:
    """All that match: what follows an end token may be anything."""
    names = lm.tokenizer.convert_ids_to_tokens(list(range(lm.config.vocab_size)))
    found = []
    for tokens in itertools.product(
        sorted({*range(lm.config.vocab_size)} - {lm.mask_token_id}), repeat=width
    ):
        written = tokens[: tokens.index(lm.eos_token_id)] if lm.eos_token_id in tokens else tokens
        if all(token in LETTERS for token in written) and re.fullmatch(
            pattern, "".join(names[token] for token in written)
        ):
            found.append(tokens)
    return np.array(found)


@pytest.mark.parametrize("pattern", ["(a|bc|[d-f]a?)+", "[^a]*a[^a]*", "(ab){1,2}"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0},
        {"tokens_per_step": 2, "temperature": 1.3, "remasking": "random"},
        {"remask_fraction": 0.5, "top_p": 0.5},
    ],
)
@torch.no_grad()
def test_they_are_the_tokens_that_no_text_has_there(pattern, settings):
    lm, width = float64_lm("phi", "bidirectional", eos_bias=1.0), 4
    config = SamplerConfig(
        max_new_tokens=width, constraint=ConstraintConfig(regex=pattern), top_forbidden=20, **settings
    )
    [request] = make_requests(lm, [[4, 5, 6]], config)
    texts_MW, ids, steps = canvases(lm, pattern, width), list(request.ids), 0
    for frame in watch(lm, request, config):
        if not isinstance(frame, Frame):
            break
        log_prob_TV = lm.logits(torch.tensor([ids]))[0].log_softmax(-1)
        visible = [place for place in range(width) if ids[request.start + place] != lm.mask_token_id]
        known = [ids[request.start + place] for place in visible]
        fitting_MW = texts_MW[(texts_MW[:, visible] == known).all(1)]
        for each in frame.revealed:
            allowed = {*fitting_MW[:, each.position - request.start].tolist(), lm.mask_token_id}
            expected = {
                token: float(log_prob_TV[each.position, token])
                for token in {*range(lm.config.vocab_size)} - allowed
            }
            assert dict(each.forbidden) == pytest.approx(expected, abs=1e-10)
            assert [token for token, _ in each.forbidden] == sorted(
                expected, key=lambda token: -expected[token]
            )
            steps += bool(expected)
        ids = replay(ids, [frame], lm.mask_token_id)
    assert steps and lm.mask_token_id not in ids


@partly_slow("attention, block_size", PATTERNS, 2, 4)
def test_sequences_with_any_number_of_them_share_passes(attention, block_size):
    lm = float64_lm("phi", attention, block_size, eos_bias=1.0)
    configs = [SamplerConfig(max_new_tokens=8, **settings) for settings in SETTINGS]
    prompts = list(zip(PROMPTS[:3], (0, 0, 1), strict=True))
    batch = [(prompt, config, steps) for config in configs for prompt, steps in prompts]
    for trace, other, config in in_company(lm, batch, 4):
        assert trace.forbidden_ids == other.forbidden_ids
        assert any(trace.forbidden_ids) == (config.top_forbidden > 0) and all(
            len(ids) <= config.top_forbidden for ids in trace.forbidden_ids
        )
        for mine, theirs in zip(trace.forbidden_log_probs, other.forbidden_log_probs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-10) and -math.inf not in mine


@pytest.mark.parametrize("over", ["gap", "text"])
def test_of_texts_with_gaps_given_positions_have_none(over):
    lm = float64_lm("phi", "bidirectional")
    config = SamplerConfig(
        constraint={"regex": "(ab|c)+d?" if over == "text" else "a?b|cc", "over": over}, top_forbidden=2
    )
    ids = [4, *[lm.mask_token_id] * 2, 5, lm.mask_token_id]
    requests = make_infill_requests(lm, [ids], config)
    engine = Engine(lm)
    engine.submit(requests[0], config)
    [(_, trace)] = engine.run()
    [expected] = naive.complete(lm, requests, config.model_copy(update={"trace": True})).trace
    assert trace.forbidden_ids == expected.forbidden_ids
    assert [len(each) for each in trace.forbidden_ids] == [0, 2, 2, 0, 2]


def test_without_the_setting_there_are_no_tables():
    lm = float64_lm("phi", "bidirectional")
    engine, config = Engine(lm), SamplerConfig(max_new_tokens=3, constraint={"regex": "[ab]+"})
    engine.submit(make_requests(lm, ["ab"], config)[0], config)
    [(_, trace)] = engine.run()
    assert (trace.forbidden_ids, trace.forbidden_log_probs, engine.slots.forbidden_id_SCK.numel()) == (
        [],
        [],
        0,
    )


def test_without_a_constraint_nothing_is_forbidden():
    with raises(ConfigError, where="top_forbidden"):
        SamplerConfig(top_forbidden=3)
