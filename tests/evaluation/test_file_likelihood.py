"""The likelihood of a file is that of its documents, and says how well it is known."""

from __future__ import annotations

import pytest

from unmask.demo import DemoSettings, small_model
from unmask.evaluation.file_likelihood import NATS_PER_TOKEN, file_likelihood
from unmask.evaluation.likelihood import log_likelihood
from unmask.models.load import make_diffusion
from unmask.tasks import get_task

TEXTS = ["1234", "43", "2", "1234", "4321=12"]
CAUSAL = small_model(get_task("sudoku"), DemoSettings(hidden=16, layers=1), 0)
BIDIRECTIONAL = make_diffusion(CAUSAL.model, CAUSAL.tokenizer, attention="bidirectional", logit_shift=False)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    return str(tmp_path / "text.txt")


@pytest.mark.parametrize(("lm", "estimator"), [(CAUSAL, "exact"), (BIDIRECTIONAL, "elbo")])
def test_the_metric_is_over_all_tokens_and_an_item_over_its_own(lm, estimator, path):
    scores = file_likelihood(lm, path, 200, None, 8, 5)
    metric, texts = scores.metrics[NATS_PER_TOKEN], [item.prompt for item in scores.items]
    assert texts == TEXTS
    bos = [lm.tokenizer.bos_token_id]
    nats = -log_likelihood(lm, [bos] * len(texts), texts, estimator, 8, 5).double()
    tokens = list(map(len, texts))
    assert [item.scores[NATS_PER_TOKEN] for item in scores.items] == [float(n) / count for n, count in zip(nats, tokens, strict=True)]
    assert metric.mean == pytest.approx(float(nats.sum()) / sum(tokens)) and metric.low < metric.mean < metric.high
    assert len({item.id for item in scores.items}) == len(texts) and scores.protocol["tokens"] == sum(tokens)
    assert (metric.standard_error is None) == (estimator == "exact")


def test_equal_documents_have_equal_estimates(path):
    one, _, _, repeated, _ = file_likelihood(BIDIRECTIONAL, path, 200, "elbo", 8, 5).items
    assert one.scores == repeated.scores and one.details == repeated.details and one.details["standard_error"] > 0


def test_fewer_documents_have_the_same_scores(path):
    every, first = (file_likelihood(BIDIRECTIONAL, path, rows, "elbo", 8, 5) for rows in (200, 2))
    assert every.items[:2] == first.items and every.protocol["rows_sha256"] != first.protocol["rows_sha256"]
