"""ROUGE and BLEU: the values of the libraries, and intervals that resample groups."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import sacrebleu
from rouge_score import rouge_scorer

from tests.evaluation.test_tasks import written
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_model
from unmask.data.sources import read_problems
from unmask.evaluation import tasks
from unmask.evaluation.statistics import Interval, group_interval
from unmask.evaluation.tasks import evaluate_task
from unmask.evaluation.text_metrics import GeneratedTexts, text_metrics
from unmask.tasks import get_task

TEXTS = ["the cat sat", "A dog barked at the old grey postman.", "rain fell all night on the roof", ""]
REFERENCES = [
    "the cat sat on the mat",
    "The dog barked at the postman all day.",
    "rain fell all night on the roof",
    "nothing at all",
]
GROUPS = ["a", "b", "b", "c"]
TOKENIZER = character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0).tokenizer


def overlap(
    metrics: list[str], texts: list[str], references: list[str], groups: list[str]
) -> dict[str, Interval]:
    written = GeneratedTexts(
        texts=texts, prompts=texts, references=references, groups=groups, tokenizer=TOKENIZER
    )
    return text_metrics(metrics, written).values


def test_means_are_the_figures_of_the_libraries():
    found = overlap(["rouge", "bleu"], TEXTS, REFERENCES, GROUPS)
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"])
    for name in ("rouge1", "rouge2", "rougeL"):
        each = [
            scorer.score(reference, text)[name].fmeasure
            for text, reference in zip(TEXTS, REFERENCES, strict=True)
        ]
        assert found[name].mean == pytest.approx(sum(each) / 4)
    assert found["bleu"].mean == pytest.approx(sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score / 100)
    assert list(found) == ["rouge1", "rouge2", "rougeL", "bleu"]
    assert all(interval.low < interval.mean < interval.high for interval in found.values())


def test_values_computed_by_hand():
    """Three of six words: precision 1, recall 1/2. Two pairs of five: 1 and 2/5. BLEU of 4-grams 1 times
    exp(1 - 6/5) for brevity."""
    rouge = overlap(["rouge"], ["the cat sat"], ["the cat sat on the mat"], ["a"])
    assert [interval.mean for interval in rouge.values()] == pytest.approx([2 / 3, 4 / 7, 2 / 3])
    bleu = overlap(["bleu"], ["the cat sat on the"], ["the cat sat on the mat"], ["a"])["bleu"]
    assert bleu.mean == pytest.approx(math.exp(1 - 6 / 5)) and (bleu.low, bleu.high) == (-math.inf, math.inf)


def test_the_interval_of_bleu_is_that_of_corpora_without_a_group():
    texts, references, groups = TEXTS[:3] * 2, REFERENCES[:3] * 2, list("aabbcd")
    found = overlap(["bleu"], texts, references, groups)["bleu"]
    values_N1 = np.eye(6)

    def corpus_bleu(kept_R6):
        kept = [[text for text, keep in zip(texts, row, strict=True) if keep] for row in kept_R6]
        right = [[text for text, keep in zip(references, row, strict=True) if keep] for row in kept_R6]
        return np.array(
            [
                sacrebleu.corpus_bleu(*pair).score / 100
                for pair in zip(kept, [[each] for each in right], strict=True)
            ]
        )

    expected = group_interval(values_N1, corpus_bleu, groups)
    assert (found.mean, found.low, found.high) == pytest.approx(
        (expected.mean, max(expected.low, 0), min(expected.high, 1))
    )


def test_identical_texts_score_one():
    found = overlap(["rouge", "bleu"], REFERENCES, REFERENCES, ["a", "b", "c", "d"])
    assert [round(interval.mean, 6) for interval in found.values()] == [1, 1, 1, 1]


def test_an_evaluation_includes_the_metrics(monkeypatch, tmp_path):
    task, path = get_task("text"), tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"Text {n}:", "completion": text}) + "\n"
            for n, text in enumerate(REFERENCES)
        )
    )
    rows = read_problems(task, str(path), None, split="test")
    lm = character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0)
    texts = [f"so: <answer>{TEXTS[0]}</answer>", *TEXTS[1:]]
    monkeypatch.setattr(tasks, "generate", lambda *_: written(texts))
    result = evaluate_task(lm, task, rows, SamplerConfig(), ["rouge", "bleu"])
    expected = overlap(["rouge", "bleu"], TEXTS, REFERENCES, [row["group"] for row in rows])
    assert result.of_texts.values == expected
    figures = result.to_scores().metrics
    assert figures["bleu"] == tasks.as_metric("bleu", expected["bleu"])
    assert figures["solved"].mean == 0.25 and not evaluate_task(lm, task, rows).of_texts.values
