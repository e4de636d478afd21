"""The likelihood of a file's documents, as the scores of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unmask.console import Phase, tracked
from unmask.data.encoding import encode_prompt
from unmask.data.rows import Column
from unmask.data.sources import load_rows
from unmask.errors import DataError
from unmask.evaluation.item_log import ItemLog
from unmask.evaluation.likelihood import Estimator, default_estimator, log_likelihoods
from unmask.evaluation.result_file import Item, TaskScores
from unmask.evaluation.statistics import group_interval, ratio
from unmask.evaluation.tasks import as_metric, item_ids, rows_fingerprint
from unmask.models.diffusion_lm import DiffusionLM
from unmask.redaction import masked_text

NATS_PER_TOKEN = "nats per token"
LIKELIHOOD = "likelihood"
"""The name of the task in a result file."""


@dataclass(frozen=True)
class Documents:
    """Documents whose likelihood is measured: the tokens after the first of each, up to the model's context."""

    by_id: Mapping[str, tuple[str, list[int]]]
    """The text of each, and its tokens: two or more."""
    estimator: Estimator
    samples: int
    seed: int
    protocol: dict[str, Any]
    """What the scores depend on beside the model."""

    @classmethod
    def read(cls, lm: DiffusionLM, path: str, rows: int, estimator: Estimator | None, samples: int, seed: int) -> Documents:
        """The first documents of a file.

        Args:
            estimator: None: that of `default_estimator`.
            samples, seed: as of `log_likelihoods`.

        Raises:
            DataError: the file is missing or malformed, or no document has two tokens.
        """
        texts = list(Column(load_rows(path, max_rows=rows), "text", path))
        encoded = [(text, encode_prompt(lm.tokenizer, text)[: lm.context_length]) for text in texts]
        documents = [(text, ids) for text, ids in encoded if len(ids) > 1]
        if not documents:
            raise DataError("no document has two tokens or more", where=path, remedy="Give a file with text.")
        estimator = estimator or default_estimator(lm)
        settings = {"samples": samples, "seed": seed} if estimator == "elbo" else {}
        problems = [{"text": text} for text, _ in documents]
        counts = {"documents": len(documents), "tokens": sum(len(ids) - 1 for _, ids in documents)}
        protocol = {"data": masked_text(path), "estimator": estimator, **settings, **counts, "rows_sha256": rows_fingerprint(problems)}
        return cls(dict(zip(item_ids(problems), documents, strict=True)), estimator, samples, seed, protocol)

    def measure(self, lm: DiffusionLM, log: ItemLog | None = None, progress: Phase | None = None) -> TaskScores:
        """The negative log-likelihood per token, over the tokens of all documents, with an interval over documents. The score of
        an item is over the tokens of its document.

        Args:
            log: keeps documents as they finish, and shares them among processes.
            progress: a phase of a progress display to update.
        """
        found = {} if log is None else log.finished(LIKELIHOOD)
        asked = [name for name in self.by_id if name not in found]
        own = range(len(asked)) if log is None else log.share(range(len(asked)))
        for number in tracked(own, len(own), progress):
            item = self._item(lm, asked[number])
            found[item.id] = item
            if log is not None:
                log.add(LIKELIHOOD, [item])
        if log is not None:
            found = log.gather(LIKELIHOOD)
        items = [found[name] for name in self.by_id]
        values_N2 = np.array([(-float(item.details["log_likelihood"]), item.details["tokens"]) for item in items])
        interval = group_interval(values_N2, ratio, [item.id for item in items])
        more = {"standard_error": self._standard_error(items), "higher_is_better": False}
        metric = as_metric(NATS_PER_TOKEN, interval).model_copy(update=more)
        return TaskScores(task=LIKELIHOOD, protocol=self.protocol, metrics={NATS_PER_TOKEN: metric}, items=items)

    def _item(self, lm: DiffusionLM, name: str) -> Item:
        text, ids = self.by_id[name]
        found = log_likelihoods(lm, [ids[:1]], [ids[1:]], self.estimator, self.samples, self.seed)
        value, error, tokens = float(found.values[0]), float(found.standard_errors[0]), len(ids) - 1
        details: dict[str, float | None] = {"tokens": tokens, "log_likelihood": value}
        if self.estimator == "elbo":
            details["standard_error"] = error if math.isfinite(error) else None
        return Item(id=name, group=name, scores={NATS_PER_TOKEN: -value / tokens}, prompt=text, details=details)

    def _standard_error(self, items: Sequence[Item]) -> float | None:
        """Of the metric, over the random masks; None where it is exact or not known."""
        errors = [item.details.get("standard_error", 0.0) for item in items]
        if None in errors or not any(errors):
            return None
        return math.sqrt(math.fsum(error**2 for error in errors)) / int(self.protocol["tokens"])
