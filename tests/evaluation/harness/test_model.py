"""The model `unmask` of lm-eval: equal to lm-eval's own model where both read a causal model, and the same
bits in any batch."""

from __future__ import annotations

import itertools
import json
import os
import sys
from functools import cache
from unittest import mock

import lm_eval
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.tasks import TaskManager
from sqlitedict import SqliteDict
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import unmask
from tests.diffusion_gemma import CANVAS, loaded
from tests.errors import raises
from tests.evaluation.harness.local_tasks import TASKS, write_task, write_tasks
from tests.helpers import REPOSITORY, TWO_PROCESSES, examples, partly_slow, run_all, shared_path
from tests.models.configurations import tiny_lm
from tests.tiny import build_causal, float64_lm, toy_lm
from unmask import SamplerConfig
from unmask.errors import ConfigError, DataError, GenerationError
from unmask.evaluation.harness import HarnessLM
from unmask.evaluation.harness.answers import LogLikelihood
from unmask.evaluation.harness.model import read_gen_kwargs, split_settings, text_after_thoughts
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

PAIRS = [(context, continuation) for context in ("ab", "abbab", "") for continuation in ("ba", "abab", "bbb")]
CAUSAL = ("causal", None, True)
LETTERS = [4, 5]  # ids of a and b


def measured(model, pairs=PAIRS, by_question=True):
    requests = [
        Instance(
            "loglikelihood",
            {"context": context},
            (context, continuation),
            0,
            ("task", number // 3 if by_question else None, 1),
        )
        for number, (context, continuation) in enumerate(pairs)
    ]
    return model.loglikelihood(requests, disable_tqdm=True)


def generated(model, contexts, repeats=1, **gen_kwargs):
    requests = [
        Instance("generate_until", {}, (context, gen_kwargs), 0, ("task", number, repeats))
        for number, context in enumerate(contexts)
    ]
    return model.generate_until([request for request in requests for _ in range(repeats)], disable_tqdm=True)


def rolling(model, texts):
    requests = [
        Instance("loglikelihood_rolling", {}, (text,), 0, ("task", number, 1))
        for number, text in enumerate(texts)
    ]
    return model.loglikelihood_rolling(requests, disable_tqdm=True)


def check_equals_hf(folder, rows):
    write_tasks(folder, rows)
    path = shared_path("models", "stories260K")
    options = {"tasks": list(TASKS), "bootstrap_iters": 0, "device": "cpu"}
    ours, theirs = (
        lm_eval.simple_evaluate(
            model=name,
            model_args={"pretrained": str(path), "dtype": "float64"} | more,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            **options,
        )
        for name, more in (("unmask", {}), ("hf", {"softmax_dtype": "float64"}))
    )
    for name in TASKS:
        pairs = list(
            zip(
                *(
                    sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
                    for found in (ours, theirs)
                ),
                strict=True,
            )
        )
        assert len(pairs) == (max(1, rows // 20) if name == "local_wikitext" else rows)
        for own, other in pairs:
            assert own["arguments"] == other["arguments"]
            for found, expected in zip(own["filtered_resps"], other["filtered_resps"], strict=True):
                if isinstance(expected, str):
                    # lm-eval decodes a continuation alone, which drops its first space
                    assert found.removeprefix(" ") == expected
                elif isinstance(expected, float):
                    assert found == pytest.approx(expected, abs=1e-4)
                else:
                    assert found[0] == pytest.approx(expected[0], abs=1e-4) and found[1] == expected[1]
    for name, metrics in theirs["results"].items():
        numbers = {key: value for key, value in metrics.items() if isinstance(value, float)}
        assert numbers and {key: ours["results"][name][key] for key in numbers} == pytest.approx(
            numbers, rel=1e-6
        )


@pytest.mark.slow
def test_a_causal_model_scores_as_lm_evals_own(tmp_path):
    check_equals_hf(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("items", [40, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_causal_model_scores_as_lm_evals_own_on_many_items(items, tmp_path):
    check_equals_hf(tmp_path, items)


RECURRENT = "recurrent layers"


@partly_slow(
    "kind", ["bidirectional", "blocks of three with a shift", "causal without a shift", RECURRENT], 1
)
def test_the_bits_depend_on_neither_batch_size_nor_order(kind):
    lm = tiny_lm("qwen3_5_text", "block_causal", 3, shift=True) if kind == RECURRENT else toy_lm(kind)
    models = [HarnessLM(lm, samples=9, batch_size=size) for size in (1, 3, 8, "auto")]
    expected = measured(models[0])
    texts = rolling(models[0], ["ab" * 20, "b", ""])
    for model in models:
        assert measured(model) == expected
        assert measured(model, PAIRS[::-1])[::-1] == expected
        assert rolling(model, ["", "b", "ab" * 20])[::-1] == texts
    alone = [measured(models[0], PAIRS[start : start + 3])[0] for start in range(0, 9, 3)]
    assert alone == expected[::3]


@pytest.mark.parametrize("kind", ["bidirectional", "blocks of three with a shift"])
def test_texts_depend_on_neither_batch_size_nor_order(kind):
    lm = toy_lm(kind)
    contexts = ["ab", "b", "abbab", "aab", "ab"]
    asked = {"max_gen_toks": 6, "do_sample": True, "temperature": 2.0, "allowed_tokens": LETTERS}
    expected = generated(HarnessLM(lm), contexts, **asked)
    assert len(set(expected)) > 1 and expected[0] == expected[4]
    for size in (1, 3, 8, "auto"):
        assert generated(HarnessLM(lm, batch_size=size), contexts[::-1], **asked)[::-1] == expected


def test_repeats_of_a_request_differ():
    texts = generated(
        HarnessLM(toy_lm()),
        ["ab", "b"],
        repeats=4,
        max_gen_toks=8,
        do_sample=True,
        temperature=2.0,
        allowed_tokens=LETTERS,
    )
    assert len(set(texts[:4])) > 1 and len(set(texts[4:])) > 1


def test_choices_of_a_question_have_common_masks():
    model = HarnessLM(toy_lm(), samples=9)
    same = measured(model, [("ab", "abbab"), ("ab", "abbaa")])
    assert all(isinstance(value, LogLikelihood) and value.differences for value, _ in same)
    other_contexts = [("aab", "abbab"), ("ab", "abbab")]
    apart, together = measured(model, other_contexts, by_question=False), measured(model, other_contexts)
    assert apart[1] != together[1] and measured(model, [("ab", "abbab")])[0] == apart[1]
    # what they have in common is aligned, whichever is first
    longer = measured(model, [("ab", "abbab"), ("ab", "aabbab")])
    assert longer == measured(model, [("ab", "aabbab"), ("ab", "abbab")])[::-1] and longer[0] != same[0]
    # by itself in any question
    assert measured(model, [*other_contexts, ("", "abbab")])[2] == measured(model, [("", "abbab")])[0]


def test_long_contexts_lose_their_beginning():
    for lm, room in ((toy_lm(), 30), (toy_lm(attention=CAUSAL), 31)):
        model = HarnessLM(lm, samples=5)
        long = "ab" * 40
        assert measured(model, [(long, "ba")])[0][1] in (True, False)
        ids = model.tok_encode(long)
        assert (
            model.answer_ids(ids, [4, 5], 3)
            == model.answer_ids(ids[-room:], [4, 5], 3)
            != model.answer_ids(ids[-room + 2 :], [4, 5], 3)
        )
        with raises(GenerationError, where="loglikelihood"):
            measured(model, [("ab", "ab" * 17)])


def test_windows_of_a_text_are_added():
    lm = toy_lm("blocks of three")
    model = HarnessLM(lm, max_length=9)
    ids = model.tok_encode("abbabaabbabb")
    parts = [
        ([model.prefix_token_id], ids[:8]),
        (ids[4:8] if len(ids) == 12 else ids[len(ids) - 9 : 8], ids[8:]),
    ]
    expected = sum(model.estimate_ids(context, some, 0) for context, some in parts)
    assert rolling(model, ["abbabaabbabb"]) == [pytest.approx(expected, abs=1e-9)]


def test_a_request_is_cut_at_its_own_stop_strings():
    model = HarnessLM(toy_lm(), max_new_tokens=12, temperature=2.0, allowed_tokens=LETTERS)
    (whole,) = generated(model, ["ab"])
    assert len(whole) == 12 and set(whole) == {"a", "b"}
    requests = [
        Instance("generate_until", {}, ("ab", {"until": until}), 0) for until in ("a", ["b", "a"], [])
    ]
    assert model.generate_until(requests, disable_tqdm=True) == [whole.partition("a")[0], "", whole]


def test_texts_know_what_they_took():
    (text,) = generated(HarnessLM(toy_lm()), ["ab"], max_gen_toks=8, steps=4, stop_at_eos=False)
    assert (text.tokens, text.steps, text.passes) == (8, 4, 4)


def test_thoughts_are_no_part_of_an_answer():
    """As lm-eval's model `hf` reads them, by text and by id; a special token has no text."""
    lm = toy_lm()
    [whole] = generated(HarnessLM(lm), ["ab"], max_gen_toks=12, stop_at_eos=False, temperature=1.0)
    end = whole[len(whole) // 2]
    for token in (end, lm.tokenizer.convert_tokens_to_ids(end)):
        model = HarnessLM(lm, think_end_token=token)
        [answer] = generated(model, ["ab"], max_gen_toks=12, stop_at_eos=False, temperature=1.0)
        assert answer == postprocess_generated_text(whole, [], end) != whole
    a, b = lm.tokenizer.convert_tokens_to_ids(["a", "b"])
    assert text_after_thoughts(lm, "ab", [a, lm.mask_token_id, b], lm.tokenizer.mask_token) == "b"
    assert text_after_thoughts(lm, "ab", [a, b], lm.tokenizer.mask_token) == "ab"


def test_a_chat_template_is_told_to_think():
    lm = toy_lm()
    lm.tokenizer.chat_template = "{{ messages[0].content }}{{ 'b' if enable_thinking }}{{ more }}"
    message = [{"role": "user", "content": "a"}]
    plain = HarnessLM(lm)
    model = HarnessLM(lm, enable_thinking=True, think_end_token="c", chat_template_args={"more": "d"})
    assert (plain.apply_chat_template(message), model.apply_chat_template(message)) == ("a", "abd")
    assert plain.tokenizer_name != model.tokenizer_name


@pytest.mark.parametrize(
    ("settings", "error", "where"),
    [
        ({"tempature": 1}, ConfigError, "model_args"),
        ({"estimator": "guess"}, ConfigError, "estimator"),
        ({"samples": 0}, ConfigError, "samples"),
        ({"batch_size": "many"}, ConfigError, "batch_size"),
        ({"dtype": "float64"}, ConfigError, "dtype"),
        ({"enable_thinking": True}, ConfigError, "enable_thinking"),
    ],
)
def test_wrong_settings_are_refused(settings, error, where):
    with raises(error, where=where):
        HarnessLM(toy_lm(), **settings)


def test_a_canvas_must_leave_room():
    with raises(GenerationError, where="max_gen_toks"):
        generated(HarnessLM(toy_lm()), ["ab"], max_gen_toks=32)


@partly_slow("kind", ["bidirectional", "whole canvases"], 0)
def test_canvases_of_random_tokens(kind, tmp_path):
    """A bound, texts whose whole canvases fit, and no temperature that their steps do not have."""
    lm = loaded(tmp_path) if kind == "whole canvases" else float64_lm(attention="bidirectional")
    lm = lm.with_noise("uniform")
    model = HarnessLM(lm, samples=8)
    assert model.bounds and model.estimator == "elbo"
    scored = measured(model, [("abc", "de"), ("abc", "ff"), ("b", "ace")])
    assert all(value < 0 < value.standard_error for value, _ in scored)
    long, asked = "abcdef" * 60, {"max_gen_toks": CANVAS + 1, "max_denoising_steps": 2}
    texts = generated(model, ["abc", long], **asked)
    assert generated(model, ["abc", long], do_sample=True, **asked) == texts
    assert generated(model, ["abc", long], do_sample=False, temperature=0.7, **asked) == texts
    assert generated(model, ["abc", long], do_sample=False, temperature=0.0, **asked) == texts
    assert generated(model, ["abc", long], temperature=0.0, **asked) == texts
    config = SamplerConfig(max_new_tokens=CANVAS + 1, max_denoising_steps=2)
    assert texts[0] == unmask.generate(lm, ["abc"], config).texts[0]
    with raises(GenerationError, where="temperature"):
        generated(model, ["abc"], do_sample=True, temperature=0.7, **asked)
    with raises(GenerationError, where="temperature"):
        generated(HarnessLM(lm, samples=8, temperature=0.0), ["abc"], do_sample=False, **asked)


def test_a_chat_template_is_needed_where_one_is_asked_for(tmp_path):
    lm = toy_lm()
    write_task(
        tmp_path,
        "chat",
        TASKS["local_piqa"] | {"doc_to_text": "{{q}}"},
        [{"q": "ab", "choices": ["a", "bb"], "gold": 0}] * 2,
    )
    options = {
        "tasks": ["chat"],
        "bootstrap_iters": 0,
        "apply_chat_template": True,
        "system_instruction": "bab",
    }
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    with raises(DataError, where=None):
        lm_eval.simple_evaluate(model=HarnessLM(lm, samples=5), task_manager=manager, **options)
    turn = "{{ {'system': 'bbb', 'user': 'aba', 'assistant': 'bab'}[m.role] }}{{ m.content }}"
    lm.tokenizer.chat_template = (
        f"{{% for m in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}bab{{% endif %}}"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=HarnessLM(lm, samples=5),
        task_manager=manager,
        num_fewshot=1,
        fewshot_as_multiturn=True,
        cache_requests=True,
        **options,
    )
    first = found["samples"]["chat"][0]
    system, example, question = "bbb" + "bab", "aba" + "ab" + "bab" + "a", "aba" + "ab" + "bab"
    assert first["arguments"][0][0] == system + example + question  # the example is a turn of its own
    json.dumps(first["resps"])


def test_answers_are_kept_in_the_cache(tmp_path, monkeypatch):
    lm = toy_lm()
    documents = [{"q": context, "choices": ["ab", "bba"], "gold": 0} for context in ("ab", "b", "aab")]
    write_task(tmp_path, "small", TASKS["local_piqa"] | {"doc_to_text": "{{q}}"}, documents)

    def run(limit, model):
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        cache = str(tmp_path / "answers")
        return lm_eval.simple_evaluate(
            model=model,
            tasks=["small"],
            task_manager=manager,
            bootstrap_iters=0,
            use_cache=cache,
            limit=limit,
        )

    run(1, HarnessLM(lm, samples=9))  # as if stopped after an item
    calls = []
    score = HarnessLM.answer_ids
    monkeypatch.setattr(
        HarnessLM, "answer_ids", lambda self, *arguments: calls.append(arguments) or score(self, *arguments)
    )
    whole = run(None, HarnessLM(lm, samples=9))
    assert len(calls) == 4
    monkeypatch.undo()
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    fresh = lm_eval.simple_evaluate(
        model=HarnessLM(lm, samples=9), tasks=["small"], task_manager=manager, bootstrap_iters=0
    )
    assert [sample["resps"] for sample in whole["samples"]["small"]] == [
        sample["resps"] for sample in fresh["samples"]["small"]
    ]
    errors = [
        response[0][0].standard_error for sample in whole["samples"]["small"] for response in sample["resps"]
    ]
    assert all(error > 0 for error in errors)  # also of those from the cache


def test_answers_of_another_model_or_setting_are_refused(tmp_path):
    write_task(
        tmp_path,
        "small",
        TASKS["local_piqa"] | {"doc_to_text": "{{q}}"},
        [{"q": "ab", "choices": ["ab", "bba"], "gold": 0}] * 2,
    )

    def run(model):
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        cache = str(tmp_path / "answers")
        return lm_eval.simple_evaluate(
            model=model, tasks=["small"], task_manager=manager, bootstrap_iters=0, use_cache=cache
        )

    first = run(HarnessLM(toy_lm(), samples=9))
    assert run(HarnessLM(toy_lm(), samples=9, batch_size=3))["samples"] == first["samples"]
    # a version that knew fewer settings wrote it
    with SqliteDict(str(tmp_path / "answers_rank0.db"), autocommit=True) as answers:
        answers["unmask"] = {name: value for name, value in answers["unmask"].items() if name != "max_gap"}
    assert run(HarnessLM(toy_lm(), samples=9))["samples"] == first["samples"]
    for model in (
        HarnessLM(toy_lm(seed=1), samples=9),
        HarnessLM(toy_lm(), samples=9, seed=1),
        HarnessLM(toy_lm(), samples=7),
        HarnessLM(toy_lm(), samples=9, max_length=20),
    ):
        with raises(DataError, where=f"use_cache {tmp_path}/answers_rank0.db"):
            run(model)


def test_several_answers_to_a_prompt_are_all_kept(tmp_path):
    """lm-eval's own entries know a request by its text, and have one answer to it."""
    texts = {"doc_to_text": "{{q}}", "doc_to_target": "ab", "repeats": 3}
    asked = {"max_gen_toks": 8, "temperature": 2.0, "allowed_tokens": LETTERS}
    for name, more in (("silent", {}), ("drawn", {"do_sample": True})):
        kwargs = {"generation_kwargs": asked | more}
        write_task(tmp_path, name, TASKS["local_stories"] | texts | kwargs, [{"q": "ab"}, {"q": "b"}])

    def run(name, **options):
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        found = lm_eval.simple_evaluate(
            model=HarnessLM(toy_lm()), tasks=[name], task_manager=manager, bootstrap_iters=0, **options
        )
        return [sample["resps"] for sample in found["samples"][name]]

    for name in ("silent", "drawn"):
        alone, kept = run(name), {"use_cache": str(tmp_path / "answers")}
        assert len(set(alone[0][0])) > 1
        assert run(name, **kept) == alone
        with mock.patch(
            "unmask.evaluation.harness.model.generate", side_effect=AssertionError("was asked again")
        ):
            assert run(name, **kept) == alone


def test_answers_are_kept_by_question(tmp_path):
    """A choice has common masks with the others of its question: what is kept of one question is no answer in
    another one."""
    first = {"q": "ab", "choices": ["abab", "bba"], "gold": 0}
    questions = [first, {"q": "ab", "choices": ["abab", "abba"], "gold": 0}, first | {"gold": 1}]
    write_task(tmp_path, "small", TASKS["local_piqa"] | {"doc_to_text": "{{q}}"}, questions)

    def run(limit=None, **options):
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        model = HarnessLM(toy_lm(), samples=9)
        found = lm_eval.simple_evaluate(
            model=model, tasks=["small"], task_manager=manager, bootstrap_iters=0, limit=limit, **options
        )
        return [sample["resps"] for sample in found["samples"]["small"]]

    alone, kept = run(), {"use_cache": str(tmp_path / "answers")}
    assert alone[0][0] != alone[1][0] and alone[0] == alone[2]  # one request, two questions
    assert run(limit=1, **kept) == alone[:1]
    assert run(**kept) == alone
    with mock.patch.object(HarnessLM, "estimate_ids", side_effect=AssertionError("was asked again")):
        assert run(**kept) == alone


def test_a_loaded_model_is_an_argument(tmp_path):
    """By the registered name, with the model in `model_args`; requests are cached by lm-eval."""
    write_task(
        tmp_path,
        "small",
        TASKS["local_piqa"] | {"doc_to_text": "{{q}}"},
        [{"q": "ab", "choices": ["ab", "bba"], "gold": 0}] * 3,
    )
    lm, found = toy_lm(), []
    for model, more in (
        ("unmask", {"model_args": {"pretrained": lm, "samples": 9}}),
        (HarnessLM(lm, samples=9), {}),
    ):
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        options = {
            "tasks": ["small"],
            "bootstrap_iters": 0,
            "limit": 2,
            "cache_requests": True,
            "log_samples": True,
        }
        found.append(lm_eval.simple_evaluate(model=model, task_manager=manager, **more, **options))
    assert found[0]["samples"] == found[1]["samples"] and len(found[0]["samples"]["small"]) == 2


def test_guidance_is_refused_by_likelihoods():
    model = HarnessLM(toy_lm(), cfg_scale=1.0)
    assert generated(model, ["ab"], max_gen_toks=4)
    for ask in (measured, lambda model: rolling(model, ["ab"])):
        with raises(ConfigError, where="cfg_scale"):
            ask(model)


SCRIPT = """
import atexit, json, os, sys
import lm_eval
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.tasks import TaskManager
import unmask.evaluation.harness
import torch; torch.set_num_threads(1)
from unmask.evaluation.harness import HarnessLM
atexit.register(lambda: open(f"{sys.argv[3]}.at_exit.{os.environ.get('RANK')}", "w").write(str(torch.distributed.is_initialized())))
asked = ["loglikelihood", "generate_until"]
def counted(method):
    def call(self, requests, **more):
        open(f"{sys.argv[3]}.asked.{self.rank}", "a").write("x" * len(requests))
        return method(self, requests, **more)
    return call
for name in asked:
    setattr(HarnessLM, name, counted(getattr(HarnessLM, name)))
found = lm_eval.simple_evaluate(
    model="unmask", model_args={"pretrained": sys.argv[1], "samples": 9, "dtype": "float64", "device": "cpu"}, tasks=["choices", "texts"],
    task_manager=TaskManager(include_path=sys.argv[2], include_defaults=False), bootstrap_iters=0, limit=5,
)
if found:
    samples = {name: sorted((sample["doc_id"], sample["filtered_resps"]) for sample in part) for name, part in found["samples"].items()}
    open(sys.argv[3], "w").write(json.dumps([found["results"], samples]))
"""


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tmp_path):
    toy_lm().save(tmp_path / "model")
    documents = [
        {"q": "ab" * (number % 3 + 1) + "b" * number, "choices": ["ab", "bba"], "gold": number % 2}
        for number in range(6)
    ]
    write_task(tmp_path, "choices", TASKS["local_piqa"] | {"doc_to_text": "{{q}}"}, documents)
    texts = {
        "doc_to_text": "{{q}}",
        "doc_to_target": "ab",
        "generation_kwargs": {"max_gen_toks": 8, "do_sample": True, "until": ["bb"]},
    }
    write_task(tmp_path, "texts", TASKS["local_stories"] | texts, documents)
    (tmp_path / "run.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    for name, launched in (("one", []), ("two", TWO_PROCESSES["accelerate"])):
        command = [
            sys.executable,
            *launched,
            tmp_path / "run.py",
            tmp_path / "model",
            tmp_path,
            tmp_path / f"{name}.json",
        ]
        run_all(command, timeout=300, env=environment, cwd=tmp_path)
    one, two = ((tmp_path / f"{name}.json").read_text() for name in ("one", "two"))
    assert one == two and len(json.loads(one)[1]["choices"]) == 5
    shares = [
        sorted(len(path.read_text()) for path in tmp_path.glob(f"{name}.json.asked.*"))
        for name in ("one", "two")
    ]
    assert shares == [[10 + 5], [6 + 3, 6 + 3]]  # lm-eval fills up the smaller share
    at_exit = [path.read_text() for path in tmp_path.glob("two.json.at_exit.*")]
    assert at_exit == ["False", "False"]  # processes that exit connected may abort


@pytest.mark.nightly
def test_the_command_line_has_lm_evals_own_models_too(tmp_path):
    toy_lm().save(tmp_path / "model")
    documents = [
        {"q": "ab", "choices": ["ab", "bba"], "gold": 0},
        {"q": "b", "choices": ["aba", "bb"], "gold": 0},
    ]
    write_task(tmp_path, "small", TASKS["local_piqa"] | {"doc_to_text": "{{q}}"}, documents)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    asked = [
        "--tasks",
        "small",
        "--include_path",
        tmp_path,
        "--output_path",
        tmp_path / "out",
        "--log_samples",
    ]
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "unmask",
        "--model_args",
        f"pretrained={tmp_path / 'model'},samples=9",
    ]
    run_all([*command, *asked], timeout=300, env=environment, cwd=tmp_path)
    (result,) = (tmp_path / "out").rglob("results_*.json")
    config = json.loads(result.read_text())["config"]
    assert (
        config["estimator"] == "elbo"
        and config["samples"] == 9
        and config["log_likelihoods_are_lower_bounds"] is True
    )
    names = (
        "import unmask.evaluation.harness; from lm_eval.api.registry import model_registry; "
        "print(*model_registry)"
    )
    listed = run_all(
        [sys.executable, "-c", names], timeout=100, env=environment, stdout=-1, text=True
    ).stdout.split()
    assert {"unmask", "hf", "vllm"} <= set(listed)


def test_lm_evals_default_device_is_that_of_this_machine(tmp_path, monkeypatch):
    toy_lm().save(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert HarnessLM(str(tmp_path), device="cuda:0").lm.device.type != "cuda"


def test_every_word_of_a_pair_is_scored():
    """The parts of a text that lm-eval separates are scored as in one piece."""
    lm = toy_lm(attention=CAUSAL)
    model = HarnessLM(lm)
    for first, second in itertools.pairwise(["ab", "ba", "bb"]):
        (whole, _), (start, _) = (
            measured(model, [("a", first + second)])[0],
            measured(model, [("a", first)])[0],
        )
        assert whole == pytest.approx(start + measured(model, [("a" + first, second)])[0][0], abs=1e-10)


@cache
def merging(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of pieces of words, which writes "the cat" otherwise than "the ca" and "t"."""
    model, trainer = (
        (models.WordPiece, trainers.WordPieceTrainer)
        if kind == "words"
        else (models.BPE, trainers.BpeTrainer)
    )
    tokenizer = Tokenizer(model(unk_token="<unk>"))
    tokenizer.pre_tokenizer = {
        "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "spaces": pre_tokenizers.Metaspace(),
        "words": pre_tokenizers.BertPreTokenizer(),
    }[kind]
    special = ["<unk>", "<s>", "</s>"]
    text = ["the cat sat and the rat ate the cake"] * 3
    tokenizer.train_from_iterator(
        text,
        trainer(
            vocab_size=70, special_tokens=special, initial_alphabet=sorted(" acdehknrst"), show_progress=False
        ),
    )
    ends = {"bytes": "$A", "spaces": "<s> $A", "words": "<s> $A </s>"}[kind]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=ends, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def random_model() -> torch.nn.Module:
    sizes = {"width": 8, "vocab_size": 80, "ids": ["bos_token_id", "eos_token_id"], "initializer_range": 0.7}
    return build_causal("gpt2", merging("words"), dtype=torch.float64, **sizes)[0]


@cache
def reader(kind: str, attention: tuple[str, int | None, bool] = CAUSAL) -> DiffusionLM:
    pattern, block_size, shift = attention
    return make_diffusion(
        random_model(), merging(kind), attention=pattern, block_size=block_size, logit_shift=shift
    )


def asked(pairs, task="task", document=0):
    return [Instance("loglikelihood", {}, pair, 0, (task, document, 1)) for pair in pairs]


KINDS_OF_TOKENIZERS = ("bytes", "spaces", "words")
WORDS = st.text("acdehnrst ", max_size=12)


@torch.no_grad()
def by_transformers(lm, context: str, continuation: str) -> float:
    """log p of the text's tokens from the first one that is not one of the context's, by a model that reads
    from left to right."""

    def ids(text):
        return [1] * (lm.tokenizer("")["input_ids"][:1] == [1]) + lm.tokenizer(
            text, add_special_tokens=False
        )["input_ids"]

    whole, given = ids(context + continuation), ids(context.rstrip())
    start = next(
        (n for n, (a, b) in enumerate(zip(whole, given, strict=False)) if a != b), min(len(whole), len(given))
    )
    if start == 0:
        whole, start = [1, *whole], 1
    logits_TV = random_model().eval()(torch.tensor([whole])).logits[0]
    logits_TV[:, lm.mask_token_id] = -torch.inf
    log_probs = logits_TV.log_softmax(-1)
    return sum(float(log_probs[place - 1, whole[place]]) for place in range(start, len(whole)))


@partly_slow("kind", KINDS_OF_TOKENIZERS, 1)
@examples(60)
@given(context=WORDS, continuation=WORDS)
@example(context="the ca", continuation="t sat")
@example(context="the c", continuation="at")
@example(context="the ", continuation="cat")
@example(context=" ", continuation="cat")
@example(context="the", continuation="")
@example(context="the ", continuation="")
def test_a_text_is_scored_as_its_tokens_wherever_its_context_ends(kind, context, continuation):
    lm = reader(kind)
    if not continuation or by_transformers(lm, context, continuation) == 0:
        with pytest.raises(DataError) as error:
            HarnessLM(lm).loglikelihood(asked([(context, continuation)]), disable_tqdm=True)
        assert error.value.where == "task, document 0"
    else:
        [(value, _)] = HarnessLM(lm).loglikelihood(asked([(context, continuation)]), disable_tqdm=True)
        assert value == pytest.approx(by_transformers(lm, context, continuation), abs=1e-9) and value < 0


@pytest.mark.parametrize("kind", KINDS_OF_TOKENIZERS)
def test_choices_are_conditioned_on_the_same_tokens(kind):
    """Else one that continues the context's last token would be compared with one that does not."""
    lm, pairs = reader(kind), [("the ca", "t sat"), ("the ca", " and"), ("the ca", "ke")]
    model = HarnessLM(lm)
    found = [value for value, _ in model.loglikelihood(asked(pairs), disable_tqdm=True)]
    heads = {tuple(head) for head, _ in model.encode_choices([context for context, _ in pairs], asked(pairs))}
    assert len(heads) == 1
    whole = [
        value
        for value, _ in model.loglikelihood(
            asked([("the", " " + (a + b)[4:]) for a, b in pairs]), disable_tqdm=True
        )
    ]
    assert found == pytest.approx(whole, abs=1e-9)
    alone = model.loglikelihood(asked(pairs, document=None), disable_tqdm=True)[1][0]
    assert alone == pytest.approx(by_transformers(lm, *pairs[1]), abs=1e-9) and alone > found[1]


@pytest.mark.parametrize("kind", KINDS_OF_TOKENIZERS)
@pytest.mark.parametrize("attention", [("bidirectional", None, False), ("block_causal", 3, True)], ids=str)
def test_models_that_are_noised_score_texts_whose_tokens_cross_their_context(kind, attention):
    lm = reader(kind, attention)
    [(value, greedy)] = HarnessLM(lm, estimator="exact").loglikelihood(
        asked([("the ca", "t sat")]), disable_tqdm=True
    )
    [(expected, _)] = HarnessLM(lm, estimator="exact").loglikelihood(
        asked([("the", " cat sat")]), disable_tqdm=True
    )
    assert value == pytest.approx(expected, abs=1e-9) and value < 0 and not greedy


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_new_tokens": 256, "temperature": 0.0}),
        ({"max_gen_toks": 8}, {"max_new_tokens": 8}),
        ({"max_tokens": 8}, {"max_new_tokens": 8}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
        ),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        (
            {"steps": 4, "block_size": 2, "remasking": "margin"},
            {"steps": 4, "block_size": 2, "remasking": "margin"},
        ),
    ],
)
def test_options_are_obeyed(given, expected):
    sampler, until = read_gen_kwargs(given, SamplerConfig())
    assert {name: getattr(sampler, name) for name in expected} == expected and until == []


def test_a_request_comes_before_the_defaults():
    defaults = SamplerConfig(max_new_tokens=16, temperature=0.5, steps=4, seed=3)
    sampler, _ = read_gen_kwargs({"steps": 8}, defaults)
    assert (sampler.max_new_tokens, sampler.temperature, sampler.steps, sampler.seed) == (16, 0.5, 8, 3)
    assert read_gen_kwargs({"do_sample": True, "max_gen_toks": 9}, defaults)[0].temperature == 0.5
    assert read_gen_kwargs({"do_sample": False, "max_gen_toks": 9}, defaults)[0].max_new_tokens == 9


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"num_beams": 4}, "gen_kwargs"),
        ({"temprature": 1}, "gen_kwargs"),
        ({"max_gen_toks": 8, "max_tokens": 9}, "gen_kwargs"),
        ({"do_sample": True, "temperature": 0.0}, "gen_kwargs"),
        ({"until": [3]}, "gen_kwargs"),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_other_options_are_refused_by_name(given, where):
    with raises(ConfigError, where=where):
        read_gen_kwargs(given, SamplerConfig())


def test_settings_are_of_the_model_or_of_the_sampler():
    assert split_settings({"dtype": "float64", "steps": 4}) == ({"dtype": "float64"}, {"steps": 4})
    assert split_settings({"token": "x", "trust_remote_code": True, "top_p": 1.0})[1] == {"top_p": 1.0}
    for name in ("sample", "peft"):
        with raises(ConfigError, where="model_args"):
            split_settings({name: 4})
