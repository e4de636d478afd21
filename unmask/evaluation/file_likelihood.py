"""The likelihood of a file's documents, as the scores of a task."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from unmask.data.encoding import encode_prompt
from unmask.data.rows import Column
from unmask.data.sources import load_rows
from unmask.errors import DataError
from unmask.evaluation.likelihood import Estimator, default_estimator, log_likelihoods
from unmask.evaluation.result_file import Item, TaskScores
from unmask.evaluation.statistics import group_bootstrap
from unmask.evaluation.tasks import as_metric, item_ids, rows_fingerprint
from unmask.models.diffusion_lm import DiffusionLM
from unmask.redaction import masked_text

NATS_PER_TOKEN = "nats per token"


def read_documents(lm: DiffusionLM, path: str, rows: int) -> list[tuple[str, list[int]]]:
    """Those among the first documents of a file that have two tokens or more, with their tokens up to the context. Raises DataError if the
    file is missing or malformed, or has none."""
    texts = list(Column(load_rows(path, max_rows=rows), "text", path))
    encoded = [(text, encode_prompt(lm.tokenizer, text)[: lm.context_length]) for text in texts]
    documents = [(text, ids) for text, ids in encoded if len(ids) > 1]
    if not documents:
        raise DataError("no document has two tokens or more", where=path, remedy="Give a file with text.")
    return documents


def documents_fingerprint(documents: Sequence[tuple[str, list[int]]]) -> str:
    """A hash of the texts."""
    return rows_fingerprint([{"text": text} for text, _ in documents])


def file_likelihood(lm: DiffusionLM, path: str, rows: int, estimator: Estimator | None, samples: int, seed: int) -> TaskScores:
    """The negative log-likelihood of the tokens after the first of each of a file's first documents, up to the model's context.

    The metric is over all tokens, with an interval that resamples documents; an item's score is over the tokens of its document.

    Args:
        estimator: None: that of `default_estimator`.
        samples, seed: as of `log_likelihoods`.

    Raises:
        DataError: the file is missing or malformed, or no document has two tokens.
    """
    documents = read_documents(lm, path, rows)
    estimator = estimator or default_estimator(lm)
    found = log_likelihoods(lm, [ids[:1] for _, ids in documents], [ids[1:] for _, ids in documents], estimator, samples, seed)
    errors = found.standard_errors.tolist()
    nats_N, tokens_N = -found.values.double().numpy(), np.array([len(ids) - 1 for _, ids in documents])
    problems = [{"text": text} for text, _ in documents]
    items = [
        Item(id=name, group=name, scores={NATS_PER_TOKEN: float(nats / tokens)}, prompt=problem["text"], details=_details(tokens, error))
        for name, problem, nats, tokens, error in zip(item_ids(problems), problems, nats_N, tokens_N, errors, strict=True)
    ]
    values_N2 = np.stack([nats_N, tokens_N], axis=1)
    interval = group_bootstrap(values_N2, lambda sums_R2: sums_R2[:, 0] / sums_R2[:, 1], [item.id for item in items])
    total = int(tokens_N.sum())
    error = math.sqrt(sum(error**2 for error in errors)) / total
    metric = as_metric(NATS_PER_TOKEN, interval).model_copy(
        update={"standard_error": error if 0 < error < math.inf else None, "higher_is_better": False}
    )
    settings = {"samples": samples, "seed": seed} if estimator == "elbo" else {}
    counts = {"documents": len(items), "tokens": total, "rows_sha256": documents_fingerprint(documents)}
    protocol = {"data": masked_text(path), "estimator": estimator, **settings, **counts}
    return TaskScores(task="likelihood", protocol=protocol, metrics={NATS_PER_TOKEN: metric}, items=items)


def _details(tokens: int, error: float) -> dict[str, float]:
    """Of a document: its tokens, and the standard error of its log-likelihood in nats, where it is an estimate."""
    return {"tokens": int(tokens)} | ({"standard_error": error} if 0 < error < math.inf else {})
