"""ROUGE and BLEU: the values of the libraries, and intervals that resample groups."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import sacrebleu
from rouge_score import rouge_scorer
from typer.testing import CliRunner

from tests.evaluation.test_tasks import written
from unmask.cli import app
from unmask.config.run import SamplerConfig
from unmask.data.problems import read_problems
from unmask.demo import DemoSettings, small_model
from unmask.errors import ConfigError, DataError
from unmask.evaluation import tasks
from unmask.evaluation.result_file import read_result
from unmask.evaluation.statistics import Interval
from unmask.evaluation.tasks import evaluate_task
from unmask.evaluation.text_metrics import GeneratedTexts, text_metrics
from unmask.tasks import get_task

TEXTS = ["the cat sat", "A dog barked at the old grey postman.", "rain fell all night on the roof", ""]
REFERENCES = ["the cat sat on the mat", "The dog barked at the postman all day.", "rain fell all night on the roof", "nothing at all"]
GROUPS = ["a", "b", "b", "c"]
TOKENIZER = small_model(get_task("sudoku"), DemoSettings(hidden=16, layers=1), 0).tokenizer


def overlap(metrics: list[str], texts: list[str], references: list[str], groups: list[str]) -> dict[str, Interval]:
    written = GeneratedTexts(texts=texts, prompts=texts, references=references, groups=groups, tokenizer=TOKENIZER)
    return text_metrics(metrics, written).values


def test_means_are_the_figures_of_the_libraries():
    found = overlap(["rouge", "bleu"], TEXTS, REFERENCES, GROUPS)
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"])
    for name in ("rouge1", "rouge2", "rougeL"):
        each = [scorer.score(reference, text)[name].fmeasure for text, reference in zip(TEXTS, REFERENCES, strict=True)]
        assert found[name].mean == pytest.approx(sum(each) / 4)
    assert found["bleu"].mean == pytest.approx(sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score / 100)
    assert list(found) == ["rouge1", "rouge2", "rougeL", "bleu"]
    assert all(interval.low < interval.mean < interval.high for interval in found.values())


def test_values_computed_by_hand():
    """Three of six words: precision 1, recall 1/2. Two pairs of five: 1 and 2/5. BLEU of 4-grams 1 times exp(1 - 6/5) for brevity."""
    rouge = overlap(["rouge"], ["the cat sat"], ["the cat sat on the mat"], ["a"])
    assert [interval.mean for interval in rouge.values()] == pytest.approx([2 / 3, 4 / 7, 2 / 3])
    bleu = overlap(["bleu"], ["the cat sat on the"], ["the cat sat on the mat"], ["a"])["bleu"]
    assert bleu.mean == pytest.approx(math.exp(1 - 6 / 5)) and (bleu.low, bleu.high) == (-math.inf, math.inf)


def test_bleu_is_computed_over_the_corpus_of_each_resample():
    """Two groups have three different resamples: a quarter has the first twice, a quarter the second twice."""
    halves = [slice(0, 1), slice(1, 3)]
    found = overlap(["bleu"], TEXTS[:3], REFERENCES[:3], GROUPS[:3])["bleu"]
    alone = [sacrebleu.corpus_bleu(TEXTS[half] * 2, [REFERENCES[half] * 2]).score / 100 for half in halves]
    assert (found.low, found.high) == pytest.approx((min(alone), max(alone)))


def test_identical_texts_score_one():
    found = overlap(["rouge", "bleu"], REFERENCES, REFERENCES, ["a", "b", "c", "d"])
    assert [round(interval.mean, 6) for interval in found.values()] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("metrics", "texts", "error", "message"),
    [
        (["bleau"], TEXTS, ConfigError, "metric: unknown metric 'bleau'.*bleu"),
        (["bleu"], TEXTS[:3], DataError, "3 texts, 3 prompts, 4 references and 4 groups"),
    ],
)
def test_wrong_arguments_are_refused(metrics, texts, error, message):
    with pytest.raises(error, match=message):
        overlap(metrics, texts, REFERENCES, GROUPS)
    with pytest.raises(DataError, match="0 texts"):
        overlap(["bleu"], [], [], [])


@pytest.mark.parametrize(
    ("metric", "module", "package"), [("rouge", "rouge_score.rouge_scorer", "rouge-score"), ("bleu", "sacrebleu", "sacrebleu")]
)
def test_the_error_for_a_missing_library_has_the_install_command(metric, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"metric {metric}: needs {package}, .*pip install 'unmask\[eval\]'"):
        overlap([metric], TEXTS, REFERENCES, GROUPS)


def write_rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    rows = [{"prompt": f"Text {number}:", "completion": reference} for number, reference in enumerate(REFERENCES)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_evaluation_includes_the_metrics(monkeypatch, tmp_path):
    task = get_task("text")
    rows = read_problems(task, str(write_rows(tmp_path)), None, split="test")
    lm = small_model(get_task("sudoku"), DemoSettings(hidden=16, layers=1), 0)
    texts = [f"so: <answer>{TEXTS[0]}</answer>", *TEXTS[1:]]
    monkeypatch.setattr(tasks, "generate", lambda *_: written(texts))
    result = evaluate_task(lm, task, rows, SamplerConfig(), ["rouge", "bleu"])
    expected = overlap(["rouge", "bleu"], TEXTS, REFERENCES, [row["group"] for row in rows])
    assert result.of_texts.values == expected
    figures = result.to_scores().metrics
    assert figures["bleu"] == tasks.as_metric("bleu", expected["bleu"])
    assert figures["solved"].mean == 0.25 and not evaluate_task(lm, task, rows).of_texts.values


def test_the_command_line_measures_them(tmp_path):
    tokens = get_task("sudoku")
    lm = small_model(tokens, DemoSettings(hidden=16, layers=1), 0)
    lm.save(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}2", "completion": "1 2"}) + "\n" for n in range(1, 4)))
    command = ["evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "rows.jsonl"), "--max-new-tokens", "4", "--metric", "rouge"]
    command += ["--metric", "bleu", "--output", str(tmp_path / "out.json"), "--task"]
    made = CliRunner().invoke(app, [*command, "text"])
    assert made.exit_code == 0, made.output
    assert read_result(tmp_path / "out.json").tasks[0].metrics.keys() >= {"solved", "rouge1", "rouge2", "rougeL", "bleu"}
    assert "rougeL" in made.stdout and "bleu" in made.stdout
    for other, words in (("sudoku", "sudoku has no reference texts"), (None, "a likelihood compares no texts")):
        last = [other] if other else ["text"]
        refused = [*command, *last, "--overwrite"] if other else [*command[:-1], "--likelihood", "x.txt", "--overwrite"]
        result = CliRunner().invoke(app, refused)
        assert result.exit_code == 2 and words in result.stderr
