"""The protocols of authors on tasks of lm-eval: examples, sampler, number of masks, what the result says."""

from __future__ import annotations

from unittest import mock

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from tests.errors import raises
from tests.evaluation.harness.local_tasks import CHOICES, write_task
from tests.tiny import toy_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError
from unmask.evaluation.harness import HarnessLM, evaluate_with_harness
from unmask.evaluation.protocols import read_protocol

QUESTIONS = [{"query": "ab" * number, "choices": ["a", "bb"], "gold": number % 2} for number in range(8)]
TEXTS = {
    "output_type": "generate_until",
    "doc_to_text": "{{query}}",
    "doc_to_target": "ab",
    "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"max_gen_toks": 99, "temperature": 0.7, "until": ["c"]},
}
SHORT = SamplerConfig(max_new_tokens=6, steps=6, block_size=6, allowed_tokens=[4, 5])


@pytest.fixture
def folder(tmp_path):
    write_task(tmp_path, "winogrande", CHOICES, QUESTIONS)
    write_task(tmp_path, "piqa", CHOICES, QUESTIONS)
    write_task(tmp_path, "gsm8k", TEXTS, QUESTIONS)
    return tmp_path


def test_a_task_is_evaluated_as_by_its_authors(folder):
    shots = {"num_fewshot": 0}  # a row of the toy is short
    measured, made = (
        evaluate_with_harness(
            toy_lm(), [task], include_path=folder, protocol="llada-base", sampler=sampler, limit=3, **shots
        )[0]
        for task, sampler in (("winogrande", None), ("gsm8k", SHORT))
    )
    assert measured.protocol["authors"]["likelihood_samples"] == 128
    authors = made.protocol["authors"]
    assert (authors["name"], authors["task"], authors["shots"], made.protocol["shots"]) == (
        "llada-base",
        "gsm8k",
        5,
        0,
    )
    assert authors["replaced"]["max_new_tokens"] == {"protocol": 1024, "used": 6}
    # end tokens end nothing, and neither 99 tokens nor T = 0.7 count
    assert [item.tokens for item in made.items] == [6, 6, 6]
    again = evaluate_with_harness(
        toy_lm(), ["gsm8k"], include_path=folder, protocol="llada-base", sampler=SHORT, limit=3, **shots
    )[0]
    assert [item.completions for item in again.items] == [item.completions for item in made.items]


def test_the_authors_number_of_examples_is_set(folder, monkeypatch):
    seen = {}

    def simple_evaluate(*, tasks, task_manager, **options):
        seen.update(
            options,
            shots={
                name: task.get_config("num_fewshot")
                for name, task in task_manager.load(tasks)["tasks"].items()
            },
        )

    monkeypatch.setattr("lm_eval.simple_evaluate", simple_evaluate)
    evaluate_with_harness(
        toy_lm(), ["winogrande", "gsm8k"], include_path=folder, protocol="llada-base", sampler=SHORT
    )
    assert seen["shots"] == {"winogrande": 5, "gsm8k": 5} and not seen["apply_chat_template"]
    evaluate_with_harness(toy_lm(), ["gsm8k"], include_path=folder, protocol="llada-instruct", sampler=SHORT)
    assert seen["shots"] == {"gsm8k": 4} and seen["apply_chat_template"] and seen["fewshot_as_multiturn"]


def test_texts_are_kept_by_protocol(folder):
    """Tasks with one prompt and different rules about end tokens: lm-eval's file has an answer of each."""
    write_task(folder, "hellaswag", TEXTS, QUESTIONS)

    def run(*tasks, **options):
        model = HarnessLM(toy_lm(), protocol="llada-instruct", max_new_tokens=6, steps=6, block_size=6)
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        found = lm_eval.simple_evaluate(
            model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, num_fewshot=0, **options
        )
        return [[sample["resps"] for sample in found["samples"][task]] for task in tasks]

    alone, kept = [*run("gsm8k"), *run("hellaswag")], {"use_cache": str(folder / "answers")}
    assert alone[0] != alone[1]
    assert [*run("gsm8k", **kept), *run("hellaswag", **kept)] == alone
    with mock.patch(
        "unmask.evaluation.harness.model.generate", side_effect=AssertionError("was asked again")
    ):
        assert run("gsm8k", "hellaswag", **kept) == alone


def test_samples_that_are_given_win():
    assert HarnessLM(toy_lm(), protocol="llada-base").samples_of("mmlu_anatomy") == 1
    assert HarnessLM(toy_lm(), protocol="llada-base", samples=7).samples_of("mmlu_anatomy") == 7
    assert HarnessLM(toy_lm()).samples_of("mmlu_anatomy") == 128


@pytest.mark.parametrize(
    ("protocol", "task", "where"),
    [
        ("llada-bse", "gsm8k", "protocol"),
        ("d1", "winogrande", "protocol d1"),
        ("llada-base", "piqa", "protocol llada-base"),
        ("dream-base", "gsm8k", "protocol dream-base"),
    ],
)
def test_what_does_not_fit_is_refused(folder, protocol, task, where):
    with raises(ConfigError, where=where):
        evaluate_with_harness(
            toy_lm(), [task], include_path=folder, protocol=protocol, limit=2, num_fewshot=0
        )


def test_a_prompt_has_bos_once_and_the_beginning_of_the_answer():
    lm = toy_lm()
    assert (
        read_protocol("dream-base", "mbpp").prompt("a", lm)
        == read_protocol("dream-base", "mbpp").prompt("<s>a", lm)
        == "<s>a"
    )
    assert read_protocol("d1", "gsm8k").prompt("a", lm) == "a<reasoning>"
