"""Patterns, prompts and settings on which sampling is tested, a check of the engine by `naive`, and a counter of
what its passes compute."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
from hypothesis import strategies as st

from tests.helpers import partly_slow
from tests.tiny import float64_lm
from unmask.config.revise import ReviseConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation import naive
from unmask.generation.engine.engine import Engine
from unmask.generation.requests import make_requests

PATTERNS = [
    ("causal", None),
    ("block_causal", 1),
    ("block_causal", 3),
    ("block_causal", 4),
    ("bidirectional", None),
]
PROMPTS = ["abc", "f", "abc", "fedcba", "dd", "f", "abc", "be"]
every_pattern = partly_slow("attention, block_size", PATTERNS, 0, 2, 4)


def prompt_lists(shortest: int):
    """Lists of prompts of any token ids, EOS and the mask token included."""
    ids = st.integers(0, float64_lm().mask_token_id)
    return st.lists(st.lists(ids, min_size=shortest, max_size=6), min_size=1, max_size=5)


def revisions(schedules: list[str]):
    """Settings of `revise`."""
    values = {"eta": st.sampled_from([0.2, 0.5, 1.0]), "temperature": st.sampled_from([0.0, 0.0, 1.0])}
    below = st.none() | st.sampled_from([0.2, 0.9])
    return st.builds(ReviseConfig, schedule=st.sampled_from(schedules), below=below, **values)


@st.composite
def configs(draw, attention: str, block_size: int | None):
    """Any settings that are valid together and for the model."""
    size = draw(st.integers(1, 9))
    divisors = [None, *(d for d in range(1, size + 1) if size % d == 0)]
    decoding_block = {"causal": [None, 1], "block_causal": [None, block_size]}.get(attention, divisors)
    shared = {
        "max_new_tokens": size,
        "block_size": draw(st.sampled_from(decoding_block)),
        "sub_block_size": draw(st.none() | st.integers(1, block_size)) if block_size else None,
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.0, 1.5])),
        "top_k": draw(st.sampled_from([0, 0, 1, 4])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.8, 0.3])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.5, 0.7])),
        "forbidden_tokens": draw(st.sampled_from([None, None, [3], [0, 4]])),
        "allowed_tokens": draw(st.sampled_from([None, None, None, [1, 2, 5, 6]])),
        "reveal_last": draw(st.sampled_from([None, None, [float64_lm().eos_token_id], [1, 2, 4, 5]])),
        "cfg_scale": 0.0 if attention == "causal" else draw(st.sampled_from([0.0, 0.0, 0.7])),
        "stop_at_eos": draw(st.booleans()),
        "seed": draw(st.integers(-1, 2)),
        "batch_size": draw(st.integers(1, 4)),
        "trace": True,
    }
    rule = draw(
        st.sampled_from(["steps", "steps", "tokens_per_step", "threshold", "factor", "entropy_bound"])
    )
    if rule == "entropy_bound":
        bound, filtered = draw(st.sampled_from([0.0, 0.5, 3.0])), draw(st.booleans())
        left_out = draw(st.sampled_from(["sum", "sum-minus-max"]))
        return SamplerConfig(
            entropy_bound=bound,
            entropy_rule=left_out,
            remasking="entropy",
            filtered_confidence=filtered,
            **shared,
        )
    if rule in ("threshold", "factor"):
        bar = draw(st.sampled_from([0.05, 0.2, 0.5, 1.0]))
        return SamplerConfig(filtered_confidence=draw(st.booleans()), **{rule: bar}, **shared)
    remasking = draw(st.sampled_from(["low_confidence", "margin", "entropy", "random", "left_to_right"]))
    schedule, remask = (
        draw(st.sampled_from(["even", "even", "dream", "ancestral"])),
        draw(st.sampled_from([0.0, 0.0, 0.3, 0.6])),
    )
    revise = None
    if (
        not remask
        and attention != "causal"
        and 1 not in (block_size, shared["block_size"], shared["sub_block_size"])
    ):
        revise = draw(st.none() | revisions(["cap", "rescale", "conf", *["loop"] * (schedule == "even")]))
    unit = {"causal": 1, "bidirectional": shared["block_size"] or size}.get(attention, block_size)
    # with a logit shift the first token is one
    parts = 1 + math.ceil(unit / shared["sub_block_size"]) if shared["sub_block_size"] else 1
    fewest = min(size, math.ceil(size / unit) * parts) if rule == "steps" else 1  # every block takes a step
    return SamplerConfig(
        **{rule: draw(st.none() | st.integers(fewest, size))},
        remasking=remasking,
        order_temperature=0.0
        if remasking in ("random", "left_to_right")
        else draw(st.sampled_from([0.0, 0.0, 0.5])),
        filtered_confidence=remasking not in ("random", "left_to_right") and draw(st.booleans()),
        schedule=schedule,
        remask_fraction=remask,
        revise=revise,
        **shared,
    )


FORMS = [
    {"regex": "(ab|c)*d"},
    {"regex": "[^a]*a[^a]*"},
    {"choice": ["ab", "cd", "fed"]},
    {"regex": "[a-f]+"},
]


def canvas_batches(alphabet: str):
    """Prompts, each with settings of canvases and the number of steps of an engine that follow."""
    settings = {
        "max_new_tokens": st.integers(1, 16),
        "max_denoising_steps": st.integers(1, 9),
        "entropy_bound": st.floats(0.01, 6),
        "t_max": st.floats(0.5, 2),
        "stability_threshold": st.integers(0, 2),
        "confidence_threshold": st.floats(0.01, 2),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.7]),
        "constraint": st.sampled_from([None, None, *(FORMS if find_spec("outlines_core") else [])]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.5, 0.7]),
        "forbidden_tokens": st.sampled_from([None, None, [4]]),
        "allowed_tokens": st.sampled_from([None, None, None, [0, 2, 4, 5, 6, 7]]),
        "stop_at_eos": st.booleans(),
        "seed": st.integers(0, 5),
        "trace": st.booleans(),
        "top_log_probs": st.sampled_from([0, 2]),
    }
    configs = st.fixed_dictionaries(settings).map(lambda fields: SamplerConfig(**fields))
    prompts = st.text(alphabet, min_size=1, max_size=12)
    return st.lists(st.tuples(prompts, configs, st.integers(0, 3)), min_size=1, max_size=4)


def in_company(lm, batch, size, close=1e-10):
    """The trace by an engine of this batch size, that by `naive`, and the settings of each entry of a batch
    (`canvas_batches`) whose constraint a text can meet. Tokens, steps and log-probabilities agree."""
    engine, expected, found = Engine(lm, batch_size=size), {}, {}
    for key, (prompt, config, steps) in enumerate(batch):
        try:
            [request] = make_requests(lm, [prompt], config, [key])
        except GenerationError as error:
            assert config.constraint is not None and error.where.startswith("constraint")
            continue
        [trace] = naive.complete(lm, [request], config.model_copy(update={"trace": True})).trace
        expected[engine.submit(request, config)] = trace, config
        for _ in range(steps):
            found |= dict(engine.step())
    found |= dict(engine.run())
    assert found.keys() == expected.keys()
    for ticket, (trace, _) in expected.items():
        assert (found[ticket].canvas, found[ticket].steps) == (trace.canvas, trace.steps)
        assert found[ticket].log_probs == pytest.approx(trace.log_probs, abs=close)
    return [(found[ticket], *other) for ticket, other in expected.items()]


class Watch:
    """Counts the batch rows of a model's passes, and the positions at which its head is computed."""

    def __init__(self, lm):
        self.rows = self.heads = 0
        head = lm.model.get_output_embeddings()
        self.hooks = [
            lm.model.register_forward_pre_hook(self.see, with_kwargs=True),
            head.register_forward_hook(lambda module, args, out: self.compute(out)),
        ]

    def see(self, model, args, kwargs):
        self.rows += len(kwargs["input_ids"])

    def compute(self, logits_NV):
        self.heads += logits_NV.shape[:-1].numel()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
