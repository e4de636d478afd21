"""The likelihood of a file is that of its documents, says how well it is known, and is shared among
processes."""

from __future__ import annotations

import json
import string
import threading

import pytest

from tests.errors import raises
from unmask.data.characters import character_model
from unmask.data.pairs import RowLimits, pair_rows
from unmask.data.report import DataReport
from unmask.errors import DataError
from unmask.evaluation import file_likelihood
from unmask.evaluation.file_likelihood import LIKELIHOOD, NATS_PER_TOKEN, Documents
from unmask.evaluation.item_log import ItemLog
from unmask.evaluation.likelihood import log_likelihood
from unmask.generation.prompt_log_probs import prompt_log_probs
from unmask.models.load import make_diffusion
from unmask.tasks import get_task

TEXTS = ["1234", "43", "2", "1234", "4321=12"]


def causal_model():
    return character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0)


CAUSAL = causal_model()
BIDIRECTIONAL = make_diffusion(CAUSAL.model, CAUSAL.tokenizer, attention="bidirectional", logit_shift=False)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    return str(tmp_path / "text.txt")


def measured(lm, path, rows=200, estimator=None, log=None, samples=8):
    samples = None if lm.autoregressive else samples
    return Documents.read(lm, path, rows, estimator, samples, 5).measure(lm, log)


@pytest.mark.parametrize(("lm", "estimator"), [(CAUSAL, "exact"), (BIDIRECTIONAL, "elbo")])
def test_the_metric_is_over_all_tokens_and_an_item_over_its_own(lm, estimator, path):
    scores = measured(lm, path)
    metric, texts = scores.metrics[NATS_PER_TOKEN], [item.prompt for item in scores.items]
    assert texts == TEXTS
    bos = [lm.tokenizer.bos_token_id]
    nats = -log_likelihood(lm, [bos] * len(texts), texts, estimator, 8, 5).double()
    tokens = list(map(len, texts))
    assert [item.scores[NATS_PER_TOKEN] for item in scores.items] == [
        float(n) / count for n, count in zip(nats, tokens, strict=True)
    ]
    assert (
        metric.mean == pytest.approx(float(nats.sum()) / sum(tokens))
        and metric.low < metric.mean < metric.high
    )
    assert len({item.id for item in scores.items}) == len(texts) and scores.protocol["tokens"] == sum(tokens)
    assert (metric.standard_error is None) == (estimator == "exact")


def test_too_few_samples_tell_no_error(path):
    scores = measured(BIDIRECTIONAL, path, samples=2)
    assert scores.metrics[NATS_PER_TOKEN].standard_error is None
    # the bound of one token is exact
    assert [item.details["standard_error"] for item in scores.items] == [None, None, 0, None, None]


def test_equal_documents_have_equal_estimates(path):
    one, _, _, repeated, _ = measured(BIDIRECTIONAL, path).items
    assert (
        one.scores == repeated.scores
        and one.details == repeated.details
        and one.details["standard_error"] > 0
    )


def test_fewer_documents_have_the_same_scores(path):
    every, first = (measured(BIDIRECTIONAL, path, rows=rows) for rows in (200, 2))
    assert every.items[:2] == first.items and every.protocol["rows_sha256"] != first.protocol["rows_sha256"]


def test_documents_in_another_order_have_the_same_bits(path, tmp_path):
    (tmp_path / "turned.txt").write_text("\n\n".join(TEXTS[::-1]))
    straight, turned = measured(BIDIRECTIONAL, path), measured(BIDIRECTIONAL, str(tmp_path / "turned.txt"))
    assert sorted(straight.items, key=lambda item: item.id) == sorted(turned.items, key=lambda item: item.id)


def test_finished_documents_are_not_measured_again(path, tmp_path, monkeypatch):
    calls, compute = [], file_likelihood.log_likelihoods

    def counted(lm, *arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(lm, *arguments)

    monkeypatch.setattr(file_likelihood, "log_likelihoods", counted)
    with pytest.raises(KeyboardInterrupt):
        measured(BIDIRECTIONAL, path, log=ItemLog(tmp_path / "out.json", {}))
    log = ItemLog(tmp_path / "out.json", {})
    assert len(log.finished(LIKELIHOOD)) == 2
    resumed = measured(BIDIRECTIONAL, path, log=log)
    assert len(calls) == 3 + 3
    monkeypatch.undo()
    assert resumed == measured(BIDIRECTIONAL, path)


def test_processes_share_documents(path, tmp_path, monkeypatch):
    """Each document is measured once, and all processes have the scores of one."""
    models = [causal_model() for _rank in range(2)]  # threads may not share one
    calls, barrier, compute = [], threading.Barrier(2), file_likelihood.log_likelihoods
    monkeypatch.setattr(
        file_likelihood, "log_likelihoods", lambda *arguments: calls.append(arguments) or compute(*arguments)
    )
    found = {}

    def process(rank):
        log = ItemLog(tmp_path / "out.json", {}, rank=rank, processes=2, wait=lambda: barrier.wait(60))
        found[rank] = measured(models[rank], path, log=log)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == len(TEXTS)
    assert found[0] == found[1] == measured(CAUSAL, path)


def test_a_file_without_text_is_one_error(tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    with raises(DataError, where=str(tmp_path / "empty.txt")):
        measured(CAUSAL, str(tmp_path / "empty.txt"))


def chat_model():
    lm = character_model(string.ascii_lowercase + ":\n", hidden=16, layers=1, context=128, seed=0)
    lm.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token "
        "}}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return lm


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "a"},
]
ANSWER = [{"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "one", "completion": "two"},
        {"prompt": CHAT, "completion": ANSWER},
        {"messages": CHAT + ANSWER},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    ],
    ids=["pair", "pair of messages", "messages", "sharegpt"],
)
def test_of_rows_for_fine_tuning_the_answers_are_measured(row, tmp_path):
    """The tokens that `unmask sft` learns, but for those that fill a block, given all before them."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    lm = chat_model()
    [trained] = pair_rows(
        lm.tokenizer, [row], RowLimits(128), DataReport("rows"), ends=lm.eos_token_ids, learn="all"
    )
    by_token = prompt_log_probs(lm, trained["input_ids"], 0, lambda part: part()).log_probs
    expected = [value for value, maskable in zip(by_token, trained["maskable"], strict=True) if maskable]
    scores = measured(lm, str(tmp_path / "rows.jsonl"))
    assert scores.items[0].details["tokens"] == scores.protocol["tokens"] == len(expected) > 1
    assert scores.items[0].details["log_likelihood"] == pytest.approx(sum(expected), rel=1e-5)


def test_the_column_with_the_texts_is_named(path, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"content": text, "text": "4"}) + "\n" for text in TEXTS)
    )
    named = Documents.read(CAUSAL, str(tmp_path / "rows.jsonl"), 200, None, None, 5, "content").measure(
        CAUSAL
    )
    assert named.items == measured(CAUSAL, path).items
    with raises(DataError, where=f"{tmp_path}/rows.jsonl, row 0") as error:
        Documents.read(CAUSAL, str(tmp_path / "rows.jsonl"), 200, None, None, 5, "texts")
    assert error.value.where.endswith("rows.jsonl, row 0")


def test_a_bad_row_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": ""}\n'
    )
    with pytest.raises(DataError) as error:
        measured(chat_model(), str(tmp_path / "rows.jsonl"))
    assert error.value.where.endswith("rows.jsonl, row 1, completion")
