"""The metrics of `--metric`: what each needs, and an evaluation with all of them."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from tests.errors import raises
from tests.tiny import toy_lm
from unmask.cli import app
from unmask.data.characters import character_model
from unmask.errors import ConfigError
from unmask.evaluation import diversity
from unmask.evaluation.result_file import read_result
from unmask.evaluation.text_metrics import METRICS, GeneratedTexts, bleu, check_metrics, rouge, text_metrics
from unmask.tasks import get_task

TEXTS, PROMPTS, GROUPS = ["abab", "<answer>bb</answer>", "aaaa"], ["a", "b", "a"], ["1", "2", "2"]


def test_every_metric_is_that_of_its_function():
    judge = toy_lm(attention=("causal", None, True))
    of = GeneratedTexts(
        texts=TEXTS,
        prompts=PROMPTS,
        references=["abab", "bb", "b"],
        groups=GROUPS,
        tokenizer=judge.tokenizer,
        judge=judge,
    )
    found = text_metrics(list(METRICS), of)
    answers = ["abab", "bb", "aaaa"]
    perplexity = diversity.generative_perplexity(judge, PROMPTS, TEXTS, GROUPS)
    assert found.values == {
        **rouge(answers, of.references, GROUPS),
        **bleu(answers, of.references, GROUPS),
        "entropy": diversity.token_entropy(judge.tokenizer, TEXTS, GROUPS),
        **diversity.distinct(TEXTS),
        "self-bleu": diversity.self_bleu(TEXTS),
        "perplexity": perplexity.value,
    }
    assert found.judged == {"texts": 3, "tokens": perplexity.tokens}


@pytest.mark.parametrize(
    ("metrics", "reference", "judge", "where"),
    [
        (["entropi"], True, False, "metric"),
        (["bleu"], False, False, "metric bleu"),
        (["perplexity"], False, False, "metric perplexity"),
        (["entropy"], False, True, "judge"),
    ],
)
def test_what_a_metric_lacks_is_said(metrics, reference, judge, where):
    with raises(ConfigError, where=where):
        check_metrics(metrics, get_task("text" if reference else "sudoku"), has_judge=judge)


@pytest.mark.parametrize(
    ("metric", "library"), [("rouge", "rouge_score"), ("bleu", "sacrebleu"), ("self-bleu", "sacrebleu")]
)
def test_a_missing_library_is_named(metric, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with raises(ConfigError, where=f"metric {metric}"):
        check_metrics([metric], get_task("text"), has_judge=False)


def test_the_command_line_measures_every_metric(tmp_path):
    character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0).save(
        tmp_path / "model"
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}2", "completion": "1 2"}) + "\n" for n in range(1, 4))
    )
    command = [
        "evaluate",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--task",
        "text",
        "--max-new-tokens",
        "4",
    ]
    command += ["--output", str(tmp_path / "out.json")]
    for name in METRICS:
        command += ["--metric", name]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "--judge" in refused.stderr
    made = CliRunner().invoke(app, [*command, "--judge", str(tmp_path / "model")])
    assert made.exit_code == 0, made.output
    scores = read_result(tmp_path / "out.json").tasks[0]
    for name in ("solved", "rouge1", "rougeL", "bleu", "entropy", "distinct-3", "self-bleu", "perplexity"):
        assert name in scores.metrics and name in made.stdout
    assert scores.protocol["judged"]["tokens"] > 0 and scores.protocol["judge"]["path"] == str(
        tmp_path / "model"
    )
    assert scores.metrics["perplexity"].mean > 1 and not scores.metrics["perplexity"].higher_is_better
