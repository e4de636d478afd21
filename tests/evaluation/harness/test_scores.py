"""The results of lm-eval as scores with intervals and standard errors."""

from __future__ import annotations

import math
import pickle

import lm_eval
import pytest
from lm_eval.tasks import manager

from tests.errors import raises
from tests.evaluation.harness.local_tasks import TASKS, write_task
from tests.tiny import toy_lm
from unmask import SamplerConfig
from unmask.errors import ConfigError, DataError
from unmask.evaluation.harness import HarnessLM, evaluate_with_harness
from unmask.evaluation.harness.answers import AnswerText, LogLikelihood
from unmask.evaluation.result_file import EvaluationResult, TaskScores, read_result

DOCUMENTS = [
    {
        "q": "ab" * (number % 3) + "b" * (number % 4),
        "choices": ["ab", "bba"],
        "gold": number % 2,
        "number": number,
    }
    for number in range(12)
]
CHOICES = TASKS["local_piqa"] | {"doc_to_text": "{{q}}"}
TEXTS = TASKS["local_stories"] | {
    "doc_to_text": "{{q}}",
    "doc_to_target": "ab",
    "generation_kwargs": {"max_gen_toks": 6, "until": ["bb"], "allowed_tokens": [4, 5]},
}
ROLLING = TASKS["local_wikitext"] | {"doc_to_target": "{{q}}ab"}


@pytest.fixture
def folder(tmp_path):
    for name, task in (("choices", CHOICES), ("texts", TEXTS), ("rolling", ROLLING)):
        write_task(tmp_path, name, task, DOCUMENTS)
    return tmp_path


def test_tasks_become_scores_with_their_items(folder):
    lm = toy_lm()
    sampler = SamplerConfig(seed=1)
    choices, texts, rolling = evaluate_with_harness(
        lm, ["choices", "texts", "rolling"], include_path=folder, samples=21, sampler=sampler
    )
    for scores in (choices, texts, rolling):
        assert TaskScores.model_validate_json(scores.model_dump_json()) == scores
        assert len(scores.items) == 12 and scores.statuses == {"ok": 12}
        assert (
            scores.protocol["harness"] == "lm-eval 0.4.13"
            and scores.protocol["samples"] == 21
            and scores.protocol["seed"] == 1
        )
        assert scores.protocol["estimator"] == "elbo" and scores.protocol["log_likelihoods_are_lower_bounds"]
    acc = choices.metrics["acc"]
    assert acc.mean == pytest.approx(sum(item.scores["acc"] for item in choices.items) / 12)
    assert acc.low < acc.mean < acc.high and acc.standard_error is not None and acc.higher_is_better
    found = choices.items[3].details["log_likelihoods"]
    assert [one["continuation"] for one in found] == [" ab", " bba"] and all(
        one["standard_error"] > 0 for one in found
    )
    assert texts.metrics["exact_match"].standard_error is None  # greedy: nothing is drawn
    assert texts.items[0].completions and texts.items[0].passes > 0 and texts.items[0].tokens == 6
    bits = rolling.metrics["bits_per_byte"]
    assert bits.low < bits.mean < bits.high and bits.standard_error > 0 and not bits.higher_is_better
    assert rolling.items[0].scores["bits_per_byte"] == pytest.approx(
        -rolling.items[0].details["log_likelihoods"][0]["log_likelihood"]
        / math.log(2)
        / len((DOCUMENTS[0]["q"] + "ab").encode())
    )


@pytest.mark.slow
def test_the_error_of_a_metric_is_that_of_repeated_evaluations(folder):
    """Over seeds: of bits per byte, and of the accuracy of choices with common masks."""
    lm = toy_lm()
    runs = [
        evaluate_with_harness(
            lm,
            ["choices", "rolling"],
            include_path=folder,
            samples=9,
            sampler=SamplerConfig(seed=seed),
            limit=6,
        )
        for seed in range(16)
    ]
    for index, name in ((0, "acc"), (1, "bits_per_byte")):
        means = [run[index].metrics[name].mean for run in runs]
        errors = [run[index].metrics[name].standard_error for run in runs]
        spread = math.sqrt(sum((mean - sum(means) / 16) ** 2 for mean in means) / 15)
        assert 0.5 * spread < math.sqrt(sum(error**2 for error in errors) / 16) < 2 * spread


def test_exact_scores_have_no_error(folder):
    choices, rolling = evaluate_with_harness(
        toy_lm("blocks of three"), ["choices", "rolling"], include_path=folder
    )
    assert choices.protocol["estimator"] == "exact" and "samples" not in choices.protocol
    assert (
        choices.metrics["acc"].standard_error is None
        and rolling.metrics["bits_per_byte"].standard_error is None
    )
    assert not rolling.protocol["log_likelihoods_are_lower_bounds"]
    assert choices.items[0].details["log_likelihoods"][0]["standard_error"] == 0


def test_too_few_samples_tell_no_error(folder):
    (scores,) = evaluate_with_harness(toy_lm(), ["choices"], include_path=folder, samples=3, limit=2)
    assert scores.metrics["acc"].standard_error is None
    assert scores.items[0].details["log_likelihoods"][0]["standard_error"] is None


@pytest.mark.parametrize(("lowest", "mean"), [(-900.0, math.exp((900 + 11) / 12)), (-math.inf, math.inf)])
def test_a_perplexity_that_no_float_holds_is_infinite(lowest, mean, folder, tmp_path, monkeypatch):
    """Of an item, or of all of them. The result is read as it was written."""
    monkeypatch.setattr(
        HarnessLM,
        "log_likelihood_of_text",
        lambda self, text, samples: LogLikelihood(lowest if text == "ab" else -1.0),
    )
    scores = evaluate_with_harness(toy_lm(), ["rolling"], include_path=folder)
    EvaluationResult(model={}, arguments={}, tasks=scores).write(tmp_path / "result.json")
    (read,) = read_result(tmp_path / "result.json").tasks
    assert read.metrics == scores[0].metrics and [item.scores for item in read.items] == [
        item.scores for item in scores[0].items
    ]
    assert read.items[0].scores["word_perplexity"] == math.inf and read.items[1].scores[
        "word_perplexity"
    ] == pytest.approx(math.e)
    assert read.metrics["word_perplexity"].mean == pytest.approx(mean)


def test_groups_of_tasks_have_scores(folder, monkeypatch):
    (folder / "both.yaml").write_text(
        "group: both\ntask: [choices, more]\naggregate_metric_list:\n  - {metric: acc, aggregation: "
        "mean, weight_by_size: true}\n"
    )
    write_task(folder, "more", CHOICES, DOCUMENTS[:4])
    *tasks, group = evaluate_with_harness(toy_lm("blocks of three"), ["both"], include_path=folder)
    means = {scores.task: scores.metrics["acc"].mean for scores in tasks}
    assert group.task == "both" and group.protocol["tasks"] == ["choices", "more"] and not group.items
    assert group.metrics["acc"].mean == pytest.approx((12 * means["choices"] + 4 * means["more"]) / 16)
    evaluate = lm_eval.simple_evaluate

    def in_another_order(**arguments):
        """Means whose last bits are those of other processes, which answered in another order."""
        found = evaluate(**arguments)
        for scores in (found["results"]["choices"], found["groups"]["both"]):
            scores["acc,none"] = math.nextafter(scores["acc,none"], 2)
        return found

    monkeypatch.setattr(lm_eval, "simple_evaluate", in_another_order)
    assert evaluate_with_harness(toy_lm("blocks of three"), ["both"], include_path=folder) == [*tasks, group]


@pytest.mark.parametrize(
    ("tasks", "asked", "error", "where"),
    [
        (["choises"], {}, ConfigError, "lm-eval"),
        (["choices"], {"few_shot": 1}, ConfigError, "lm-eval"),
        (["choices"], {"gen_kwargs": {"temperature": 1}}, ConfigError, "gen_kwargs"),
        (["choices"], {"sampler": SamplerConfig(steps=3)}, ConfigError, "steps"),
        (["texts"], {"samples": 3}, ConfigError, "samples"),
        (["texts", "choices"], {"sampler": SamplerConfig(cfg_scale=1.0)}, ConfigError, "cfg_scale"),
        (["choices"], {"samples": 3, "estimator": "exact"}, ConfigError, "samples"),
        (["texts"], {"gen_kwargs": {"num_beams": 2}}, ConfigError, "gen_kwargs"),
        (["missing"], {}, DataError, "missing"),
        (["choices"], {"include_path": "nowhere"}, DataError, "include_path nowhere"),
    ],
)
def test_bad_input_is_refused(folder, monkeypatch, tasks, asked, error, where):
    # lm-eval's own tasks take half a minute to list
    monkeypatch.setattr(manager, "__file__", str(folder / "none" / "manager.py"))
    write_task(folder, "missing", CHOICES, DOCUMENTS)
    (folder / "missing.jsonl").unlink()
    with raises(error, where=where):
        evaluate_with_harness(toy_lm(), tasks, **({"include_path": folder} | asked))


def test_answers_survive_other_processes_and_caches():
    value, text = LogLikelihood(-1.5, (0.3, 0.4)), AnswerText("ab", 3, 2, 1)
    again, words = pickle.loads(pickle.dumps((value, text)))
    assert (again, again.differences, again.standard_error) == (-1.5, (0.3, 0.4), 0.5)
    assert (words, words.tokens, words.steps, words.passes) == ("ab", 3, 2, 1)
    assert value.moved((1, -1)) == pytest.approx(-1.6)
