"""Requests with any settings share passes, enter and leave between steps, and do not affect each other."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.generation.cases import PATTERNS, Watch, configs, every_pattern, in_company, prompt_lists
from tests.helpers import each_once, examples, partly_slow
from tests.models.configurations import tiny_lm
from tests.tiny import add_to_logits, float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation import naive
from unmask.generation.engine.engine import Engine
from unmask.generation.engine.sequence import SequenceState
from unmask.generation.requests import make_requests
from unmask.models.diffusion_lm import DiffusionLM


def check_concurrent(lm: DiffusionLM, shortest: int, data: st.DataObject) -> None:
    """Requests of prompts of at least this length, of which some are submitted later, and some canceled, have
    the tokens of the naive sampler."""
    engine = Engine(
        lm,
        batch_size=data.draw(st.integers(1, 4)),
        max_batch_tokens=data.draw(st.sampled_from([None, 40, 60])),
    )
    expected, results, canceled, drafting = {}, {}, set(), set()
    for prompts in data.draw(st.lists(prompt_lists(shortest), min_size=1, max_size=3)):
        config = data.draw(configs(lm.attention, lm.block_size))
        # drafts beside sequences of these
        if (lm.block_size or 1) > 1 and not (config.cfg_scale or config.remask_fraction or config.revise):
            config = config.model_copy(update={"num_speculative_tokens": data.draw(st.integers(0, 3))})
        requests = make_requests(lm, prompts, config)
        traces = naive.complete(lm, requests, config).trace
        tickets = [engine.submit(request, config) for request in requests]
        expected |= dict(zip(tickets, traces, strict=True))
        drafting |= set(tickets) if config.num_speculative_tokens else set()
        for _ in range(data.draw(st.integers(0, 3))):
            results |= dict(engine.step())
        if data.draw(st.booleans()):
            canceled |= {ticket for ticket in tickets[:1] if engine.cancel(ticket)}
    results |= dict(engine.run())
    assert results.keys() == expected.keys() - canceled
    for ticket, trace in results.items():
        assert (trace.canvas, trace.steps) == (expected[ticket].canvas, expected[ticket].steps)
        saved = expected[ticket].forward_passes - trace.forward_passes
        assert saved == 0 or (saved > 0 and ticket in drafting)
    assert engine.slots.count == 0 and not engine.running and not engine.waiting


@each_once("logit_shift, attention, block_size", [False, True], PATTERNS)
@examples(4)
@given(data=st.data())
def test_concurrent_requests_do_not_change_each_other(logit_shift, attention, block_size, data):
    """Each has its own settings; some are submitted later, some are canceled."""
    bias, context, time = (
        data.draw(st.sampled_from([-9.0, 0.0, 2.0])),
        data.draw(st.booleans()),
        data.draw(st.booleans()),
    )
    parts = {
        "causal_context": context and attention == "block_causal",
        "time_embedding": time and attention != "causal",
    }
    lm = float64_lm("phi", attention, block_size, logit_shift, eos_bias=bias, **parts)
    check_concurrent(lm, int(logit_shift), data)


@partly_slow("name", ["qwen3_5_text", "granitemoehybrid", "lfm2"], 0)
@pytest.mark.parametrize("block_size, logit_shift, context", [(4, True, False), (3, False, True)])
@examples(4)
@given(data=st.data())
def test_so_it_is_with_recurrent_layers(name, block_size, logit_shift, context, data):
    lm = tiny_lm(name, "block_causal", block_size, shift=logit_shift, causal_context=context)
    add_to_logits(lm, {lm.eos_token_id: data.draw(st.sampled_from([-9.0, 2.0]))})
    check_concurrent(lm, int(logit_shift), data)


@every_pattern
def test_a_cancelled_request_frees_its_slot_at_once(attention, block_size):
    lm = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    config = SamplerConfig(max_new_tokens=6)
    engine = Engine(lm, batch_size=1)
    first, second = (engine.submit(request, config) for request in make_requests(lm, ["ab", "ba"], config))
    engine.step()
    assert [sequence.ticket for sequence in engine.running] == [first]
    assert engine.cancel(first) and engine.slots.count == 0
    engine.step()
    assert [sequence.ticket for sequence in engine.running] == [second]
    assert not engine.cancel(first) and not engine.cancel(99)
    assert [ticket for ticket, _ in engine.run()] == [second]
    assert not engine.cancel(second)


@every_pattern
def test_memory_is_bounded_by_the_configuration(attention, block_size):
    lm = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    drafts = 2 * block_size if (block_size or 1) > 1 else 0
    config = SamplerConfig(max_new_tokens=8, num_speculative_tokens=2 if drafts else 0)
    engine = Engine(lm, batch_size=9, max_batch_tokens=30 + drafts)
    prompts = [[4], [4] * 2, [4] * 20, [4], [4] * 5, [4] * 22]
    tickets = [engine.submit(request, config) for request in make_requests(lm, prompts, config)]
    finished = []
    while engine.waiting or engine.running:
        finished += [ticket for ticket, _ in engine.step()]
        rows, columns = engine.slots.ids_SC.shape
        assert rows * columns <= 30 + drafts
        if engine.slots.cache is not None:
            assert engine.slots.cache.shape == (rows, columns)
    assert sorted(finished) == tickets
    with raises(GenerationError, where="max_batch_tokens"):
        engine.submit(make_requests(lm, [[4] * 23], config)[0], config)


@pytest.mark.parametrize("attention, block_size", PATTERNS[:4])
def test_a_shared_prompt_is_computed_once(attention, block_size):
    lm = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    config = SamplerConfig(max_new_tokens=4, temperature=1.0)
    prompts = [[4, 5, 6, 7, 8] * 4] * 6 + [[6, 5] * 8] * 3
    engine = Engine(lm, batch_size=4)
    for request in make_requests(lm, prompts, config):
        engine.submit(request, config)
    with Watch(lm) as watch:
        results = dict(engine.run())
    steps = sum(trace.forward_passes for trace in results.values())
    # two prompts; at most twice each, where those that had it in work are gone
    assert watch.rows <= steps + 2 + 2


@pytest.mark.parametrize("attention, block_size", PATTERNS[:4])
def test_reused_prompt_tokens_are_counted(attention, block_size):
    """Of 23 tokens those in whole blocks are shared, also with later requests while a sequence with this
    prompt is running."""
    lm = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    config = SamplerConfig(max_new_tokens=4, temperature=1.0)
    requests = make_requests(lm, [[4, 5, 6, 7, 8] * 4 + [4] * 3] * 9, config)
    engine, steps = Engine(lm, batch_size=4), 0
    with Watch(lm) as watch:
        for late in (requests[:3], requests[3:7], requests[7:]):
            for request in late:
                engine.submit(request, config)
            steps += sum(trace.forward_passes for _, trace in engine.step())
        steps += sum(trace.forward_passes for _, trace in engine.run())
    whole = 23 - 23 % (block_size or 1)
    assert engine.prompt_tokens == 9 * 23
    assert engine.prompt_tokens_shared == (9 - (watch.rows - steps)) * whole >= 6 * whole
    assert engine.prompt_reuse == engine.prompt_tokens_shared / engine.prompt_tokens


@each_once("attention, block_size, logit_shift", PATTERNS[:4], [False, True])
@examples(3)
@given(data=st.data())
def test_sharing_prompts_changes_no_token(logit_shift, attention, block_size, data):
    """Prompts share some or all of their tokens; some are guided, one is all mask tokens. Some are submitted
    when others are ahead, canceled or finished."""
    parts = (
        {"causal_context": data.draw(st.booleans()), "time_embedding": data.draw(st.booleans())}
        if block_size
        else {}
    )
    lm = float64_lm(
        "phi", attention, block_size, logit_shift, eos_bias=data.draw(st.sampled_from([-9.0, 2.0])), **parts
    )
    prompt, engine, expected, results = [4, 5, 6, 7, 8, 9, 4, 5, 6], Engine(lm, batch_size=4), {}, {}
    pool = [prompt, prompt, prompt[:7], [*prompt[:7], 9, 6], [*prompt[:8], 9], [lm.mask_token_id] * 9]
    for _ in range(3):
        guidance = data.draw(st.sampled_from([0.0, 0.0, 0.7])) if block_size else 0.0
        drafts = data.draw(st.integers(0, 2)) if (block_size or 1) > 1 and not guidance else 0
        config = SamplerConfig(
            max_new_tokens=3, temperature=1.0, cfg_scale=guidance, num_speculative_tokens=drafts, trace=True
        )
        prompts = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=4))
        requests = make_requests(lm, prompts, config, [data.draw(st.integers(0, 99)) for _ in prompts])
        tickets = [engine.submit(request, config) for request in requests]
        expected |= dict(zip(tickets, naive.complete(lm, requests, config).trace, strict=True))
        for _ in range(data.draw(st.integers(0, 3))):
            results |= dict(engine.step())
        if data.draw(st.booleans()):
            engine.cancel(tickets[0])
    results |= dict(engine.run())
    for ticket, trace in results.items():
        assert (trace.canvas, trace.steps) == (expected[ticket].canvas, expected[ticket].steps)
        assert trace.log_probs == pytest.approx(expected[ticket].log_probs, abs=1e-10)


@pytest.mark.parametrize("attention, block_size", PATTERNS[:4])
def test_committing_needs_no_extra_pass(attention, block_size):
    lm = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    config = SamplerConfig(max_new_tokens=24)
    engine = Engine(lm)
    for request in make_requests(lm, [[4] * 9, [5] * 8, [6] * 10], config):
        engine.submit(request, config)
    steps = max(trace.forward_passes for _, trace in engine.run())
    assert steps == 24 and engine.num_forward_passes <= steps + 2  # the prompts', of different lengths


@pytest.mark.parametrize("guidances", list(itertools.product((0.0, 0.7), repeat=3)))
def test_some_sequences_are_guided_while_others_draft(guidances):
    lm = float64_lm("phi", "block_causal", 4, eos_bias=-9.0)
    settings = [
        {"cfg_scale": guidance} if guidance else {"num_speculative_tokens": 2} for guidance in guidances
    ]
    configs = [SamplerConfig(max_new_tokens=7, temperature=1.0, trace=True, **given) for given in settings]
    in_company(lm, [([4, 5, 6, 7, 8, 9, 4, 5, 6], config, 0) for config in configs], 64)


@each_once("attention, block_size, logit_shift", PATTERNS[2:4], [False, True])
@examples(8)
@given(data=st.data())
def test_drafts_change_no_token(logit_shift, attention, block_size, data):
    lm = float64_lm(
        data.draw(st.sampled_from(["phi", "gpt2"])),
        attention,
        block_size,
        logit_shift,
        eos_bias=data.draw(st.sampled_from([-9.0, 2.0])),
    )
    prompts = data.draw(prompt_lists(int(logit_shift)))
    config = data.draw(configs(attention, block_size)).model_copy(
        update={"remask_fraction": 0.0, "revise": None, "cfg_scale": 0.0}
    )
    requests = make_requests(lm, prompts, config)
    engine, results = Engine(lm, batch_size=config.batch_size), {}
    for request in requests:
        engine.submit(
            request, config.model_copy(update={"num_speculative_tokens": data.draw(st.integers(0, 4))})
        )
    results = dict(engine.run())
    for ticket, expected in enumerate(naive.complete(lm, requests, config).trace):
        assert (results[ticket].canvas, results[ticket].steps) == (expected.canvas, expected.steps)
        assert results[ticket].log_probs == pytest.approx(expected.log_probs, abs=1e-10)
        assert results[ticket].forward_passes <= expected.forward_passes


def test_confirmed_drafts_save_passes():
    lm = float64_lm("phi", "block_causal", 4, eos_bias=-99.0)
    requests = make_requests(lm, ["abcde"], SamplerConfig(max_new_tokens=19))
    passes = {}
    for drafts in (0, 1, 3):
        engine = Engine(lm)
        engine.submit(requests[0], SamplerConfig(max_new_tokens=19, num_speculative_tokens=drafts))
        passes[drafts] = dict(engine.run())[0].forward_passes
    assert passes[0] == 19 > passes[1] >= passes[3] >= 10


def test_equal_states_are_computed_once():
    lm = float64_lm("phi", "bidirectional", eos_bias=-9.0)
    config = SamplerConfig(max_new_tokens=6)
    engine = Engine(lm)
    for request in make_requests(lm, ["ab"] * 5, config):
        engine.submit(request, config)
    with Watch(lm) as watch:
        texts = [trace.canvas for _, trace in engine.run()]
    assert watch.rows == 6 and all(text == texts[0] for text in texts)
    drawn = SamplerConfig(max_new_tokens=6, temperature=2.0)
    for request in make_requests(lm, ["ab"] * 5, drawn):
        engine.submit(request, drawn)
    with Watch(lm) as watch:
        list(engine.run())
    assert 6 < watch.rows <= 26  # all alike at first


def test_nan_predictions_are_an_error():
    lm = float64_lm("gpt2", "bidirectional")
    head = lm.model.get_output_embeddings()
    engine = Engine(lm)
    config = SamplerConfig(max_new_tokens=4)
    engine.submit(make_requests(lm, ["ab"], config)[0], config)
    kept = head.bias.detach().clone()
    with torch.no_grad():
        head.bias[1] = torch.nan
    try:
        with raises(GenerationError, where="model"):
            engine.step()
    finally:
        with torch.no_grad():
            head.bias.copy_(kept)


@every_pattern
def test_a_freed_slot_keeps_no_nan_keys(attention, block_size):
    plain = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    lm = plain.bind(copy.deepcopy(plain.model))
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[3] = torch.nan
    config = SamplerConfig(max_new_tokens=8, forbidden_tokens=[3], trace=True)
    engine = Engine(lm)
    bad = engine.submit(make_requests(lm, [[4, 3, 5, 6, 7, 8]], config)[0], config)
    with raises(GenerationError, where="model"):
        engine.step()
    assert engine.cancel(bad)
    requests = make_requests(lm, [[4, 5], [6] * 12], config)
    tickets = [engine.submit(request, config) for request in requests]
    results = dict(engine.run())
    assert [results[ticket].canvas for ticket in tickets] == [
        trace.canvas for trace in naive.complete(lm, requests, config).trace
    ]


def test_finished_requests_are_returned_once_despite_interruptions(monkeypatch):
    lm, config = (
        float64_lm("phi", "block_causal", 4, eos_bias=-9.0),
        SamplerConfig(max_new_tokens=6, num_speculative_tokens=2, trace=True),
    )
    requests = make_requests(lm, ["ab", "ba", "cdef"], config)
    expected = [trace.canvas for trace in naive.complete(lm, requests, config).trace]
    engine = Engine(lm)
    tickets = [engine.submit(request, config) for request in requests]
    results = dict([next(engine.run())])  # and no more of them for now
    results |= dict(engine.run())
    assert [results[ticket].canvas for ticket in tickets] == expected
    for failing in range(1, 12):
        calls, whole = [], SequenceState.__dict__["counts"].fget
        results, engine = {}, Engine(lm)

        def fail(self, calls=calls, whole=whole, failing=failing):
            calls.append(self)
            if len(calls) == 9 * failing:
                raise KeyboardInterrupt
            return whole(self)

        tickets = [engine.submit(request, config) for request in requests]
        with monkeypatch.context() as patch:
            patch.setattr(SequenceState, "counts", property(fail))
            with contextlib.suppress(KeyboardInterrupt):
                for ticket, trace in engine.run():
                    results[ticket] = trace
        results |= dict(engine.run())
        assert [results[ticket].canvas for ticket in tickets] == expected


def test_states_of_recurrent_layers_survive_an_interrupted_pass(monkeypatch):
    lm = tiny_lm("qwen3_5_text", "block_causal", 3, shift=True)
    config = SamplerConfig(max_new_tokens=9, steps=6)
    expected = naive.generate(lm, [[5, 6, 7, 8, 9]], config).tokens
    last, calls = lm.model.model.layers[-1].mlp, itertools.count()
    forward = last.forward

    def interrupted(hidden_BTD):
        if next(calls) % 2:
            raise KeyboardInterrupt
        return forward(hidden_BTD)

    monkeypatch.setattr(last, "forward", interrupted)
    engine = Engine(lm)
    engine.submit(make_requests(lm, [[5, 6, 7, 8, 9]], config)[0], config)
    finished = []
    while engine.running or engine.waiting or engine.finished:
        with contextlib.suppress(KeyboardInterrupt):
            finished += [trace.canvas for _, trace in engine.run()]
    assert finished == expected


@pytest.mark.parametrize("shift", [False, True])
def test_states_of_an_interrupted_step_are_not_those_of_a_prompt(shift, monkeypatch):
    lm = tiny_lm("qwen3_5_text", "block_causal", 4, shift=shift)
    config = SamplerConfig(max_new_tokens=8, tokens_per_step=2, stop_at_eos=False, trace=True)
    (request,) = make_requests(lm, [[5, 6, 7, 8]], config)
    expected = naive.complete(lm, [request], config).trace[0].canvas
    engine = Engine(lm)
    tickets = [engine.submit(request, config)]
    engine.step()
    engine.step()  # the first block ends
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr("unmask.generation.engine.engine.reveal", interrupted)
        engine.step()
    tickets.append(engine.submit(request, config))  # of the same prompt
    results = dict(engine.run())
    assert [results[ticket].canvas for ticket in tickets] == [expected, expected]


def test_drafts_of_a_finished_block_are_dropped(monkeypatch):
    lm, config = (
        float64_lm("phi", "block_causal", 4, eos_bias=-9.0),
        SamplerConfig(max_new_tokens=9, num_speculative_tokens=2),
    )
    (request,) = make_requests(lm, ["ab"], config)
    engine, begun = Engine(lm), set()

    def stop(*_):
        raise KeyboardInterrupt

    engine.submit(request, config)
    while engine.waiting or engine.running:
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            # between a step and the drafts that follow from it
            patch.setattr("unmask.generation.engine.drafts.confirmed", stop)
            engine.step()
        for sequence in engine.running:
            if sequence.step == 0:
                assert sequence.draft is None
                begun.add(sequence.block)
        engine.step()
    assert begun


def test_an_engine_refuses_requests_that_it_cannot_run():
    lm, config = float64_lm("phi", "causal"), SamplerConfig(max_new_tokens=4)
    with raises(GenerationError, where="batch_size"):
        Engine(lm, batch_size=0)
    (request,) = make_requests(lm, ["ab"], config)
    with raises(GenerationError, where="config"):
        Engine(lm).submit(request, SamplerConfig(max_new_tokens=4, threshold=0.5))
    with raises(GenerationError, where="cfg_scale"):
        Engine(lm).submit(request, SamplerConfig(max_new_tokens=4, cfg_scale=1.0))


@pytest.mark.parametrize("attention, block_size", PATTERNS[:4])
def test_a_deterministic_request_copies_no_keys_from_shared_passes(attention, block_size):
    plain = float64_lm("phi", attention, block_size, eos_bias=-9.0)
    lm = plain.bind(copy.deepcopy(plain.model).float())
    prompts, shared = [[4, 5, 6, 7, 8] * 4, [5, 6, 7] * 5], SamplerConfig(max_new_tokens=8)
    apart = shared.model_copy(update={"deterministic": True})
    engine = Engine(lm)
    for request in make_requests(lm, prompts, shared):
        engine.submit(request, shared)
    engine.step()
    requests = make_requests(lm, prompts, apart)
    tickets = [engine.submit(request, apart) for request in requests]
    results = dict(engine.run())
    for ticket, request in zip(tickets, requests, strict=True):
        alone = Engine(lm)
        alone.submit(request, apart)
        assert results[ticket].log_probs == next(alone.run())[1].log_probs


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sequences_may_use_different_numbers_of_drafts(temperature):
    """In the same step: some go on from predictions of a draft, others from those of the state itself."""
    lm = float64_lm("phi", "block_causal", 4, eos_bias=-torch.inf)
    prompts = [
        [4 + (start + index) % 6 for index in range(length)]
        for start, length in enumerate((5, 9, 3, 16, 8, 9))
    ]
    config = SamplerConfig(max_new_tokens=12, num_speculative_tokens=2, temperature=temperature, trace=True)
    requests = make_requests(lm, prompts, config)
    engine = Engine(lm)
    tickets = [engine.submit(request, config) for request in requests]
    results = dict(engine.run())
    expected = naive.complete(lm, requests, config)
    assert [results[ticket].canvas for ticket in tickets] == [trace.canvas for trace in expected.trace]
