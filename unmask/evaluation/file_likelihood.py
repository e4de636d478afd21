"""The likelihood of a file's documents, as the scores of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from unmask.console import Phase
from unmask.data.encoding import encode_pair, encode_prompt, encode_turns, template_options
from unmask.data.formats import SUPERVISED, Reader
from unmask.data.rows import Column
from unmask.data.sources import load_examples
from unmask.errors import DataError, prepending_place
from unmask.evaluation.item_log import ItemLog, finished_items
from unmask.evaluation.likelihood import LikelihoodEstimator, chosen_estimator, log_likelihoods
from unmask.evaluation.result_file import Item, TaskScores
from unmask.evaluation.statistics import group_interval, ratio
from unmask.evaluation.tasks import as_metric, item_ids, rows_fingerprint
from unmask.models.diffusion_lm import DiffusionLM
from unmask.redaction import masked_text

NATS_PER_TOKEN = "nats per token"
LIKELIHOOD = "likelihood"
"""The name of the task in a result file."""


DocumentPart = tuple[list[int], list[int]]
"""The tokens that are given, and those that follow, whose likelihood is measured."""


@dataclass(frozen=True)
class Documents:
    """Documents whose likelihood is measured: of a text the tokens after the first, of a conversation or a
    pair the answers, as they are trained on by `unmask sft`; up to the model's context."""

    by_id: Mapping[str, tuple[Any, list[DocumentPart]]]
    """The text or the prompt of each, and its parts, which have a token or more to measure."""
    estimator: LikelihoodEstimator
    samples: int
    seed: int
    protocol: dict[str, Any]
    """What the scores depend on beside the model."""

    @classmethod
    def read(
        cls,
        lm: DiffusionLM,
        path: str,
        rows: int,
        estimator: LikelihoodEstimator | None,
        samples: int | None,
        seed: int,
        text_column: str | None = None,
        split: str = "train",
    ) -> Documents:
        """The first documents of a file or a dataset.

        Args:
            estimator: None: that of `default_estimator`.
            samples, seed: as of `log_likelihoods`; None: 32.
            text_column: the column with the text; None: `text`, or rows in any other format that `unmask sft`
                reads.
            split: of a dataset.

        Raises:
            ConfigError: as `chosen_estimator`.
            DataError: the file is missing or malformed, or no document has two tokens.
        """
        estimator = chosen_estimator(lm, estimator, samples)
        samples = 32 if samples is None else samples
        column = text_column or "text"
        loaded: Any = list(load_examples(path, split=split, text_column=column, max_rows=rows))
        reader, found = Reader(SUPERVISED), []
        columns = set(loaded[0] if len(loaded) else ())
        if (
            text_column
            or "text" in columns
            or not any(columns.issuperset(known.columns) for known in SUPERVISED)
        ):
            loaded = [{"text": text} for text in Column(loaded, column, path, "--text-column")]
        for index, row in enumerate(loaded):
            with prepending_place(f"{path}, row {index}"):
                problem = row if "text" in row else reader.read(row)
                parts = [(given, ids[: _room(lm, given)]) for given, ids in likelihood_parts(lm, problem)]
                found.append((problem, [part for part in parts if part[1]]))
        documents = [(problem, parts) for problem, parts in found if parts]
        if not documents:
            raise DataError("no document has two tokens or more", where=path, remedy="Give a file with text.")
        settings = {"samples": samples, "seed": seed} if estimator == "elbo" else {}
        problems = [problem for problem, _ in documents]
        counts = {
            "documents": len(documents),
            "tokens": sum(len(ids) for _, parts in documents for _, ids in parts),
        }
        protocol = {
            "data": masked_text(path),
            "estimator": estimator,
            **settings,
            **counts,
            "rows_sha256": rows_fingerprint(problems),
        }
        shown = [
            (problem.get("text") or problem.get("prompt") or problem["messages"], parts)
            for problem, parts in documents
        ]
        names = item_ids(
            [{"text": problem["text"]} if "text" in problem else {"row": problem} for problem in problems]
        )
        return cls(dict(zip(names, shown, strict=True)), estimator, samples, seed, protocol)

    def measure(
        self, lm: DiffusionLM, log: ItemLog | None = None, progress: Phase | None = None
    ) -> TaskScores:
        """The negative log-likelihood per token, over the tokens of all documents, with an interval over
        documents. The score of an item is over the tokens of its document.

        Args:
            log: keeps documents as they finish, and shares them among processes.
            progress: a phase of a progress display to update.
        """

        def measure(names: Sequence[str]) -> list[Item]:
            return [self._item(lm, name) for name in names]

        items = finished_items(log, LIKELIHOOD, list(self.by_id), measure, 1, progress)
        values_N2 = np.array(
            [(-float(item.details["log_likelihood"]), item.details["tokens"]) for item in items]
        )
        interval = group_interval(values_N2, ratio, [item.id for item in items])
        more = {"standard_error": self._standard_error(items), "higher_is_better": False}
        metric = as_metric(NATS_PER_TOKEN, interval).model_copy(update=more)
        return TaskScores(
            task=LIKELIHOOD, protocol=self.protocol, metrics={NATS_PER_TOKEN: metric}, items=items
        )

    def _item(self, lm: DiffusionLM, name: str) -> Item:
        prompt, parts = self.by_id[name]
        given, ids = ([part[side] for part in parts] for side in (0, 1))
        found = log_likelihoods(lm, given, ids, self.estimator, self.samples, self.seed)
        value, tokens = math.fsum(found.values.tolist()), sum(map(len, ids))
        error = math.sqrt(math.fsum(found.standard_errors.double().square().tolist()))
        details: dict[str, float | None] = {"tokens": tokens, "log_likelihood": value}
        if self.estimator == "elbo":
            details["standard_error"] = error if math.isfinite(error) else None
        return Item(
            id=name, group=name, scores={NATS_PER_TOKEN: -value / tokens}, prompt=prompt, details=details
        )

    def _standard_error(self, items: Sequence[Item]) -> float | None:
        """The metric's standard error over the random masks; None where it is exact or not known."""
        errors = [item.details.get("standard_error", 0.0) for item in items]
        if None in errors or not any(errors):
            return None
        return math.sqrt(math.fsum(error**2 for error in errors)) / int(self.protocol["tokens"])


def likelihood_parts(lm: DiffusionLM, row: Mapping[str, Any]) -> list[DocumentPart]:
    """What is measured of a row in TRL's columns: of a conversation each answer, given what is before it."""
    if "text" in row:
        ids = encode_prompt(lm.tokenizer, row["text"])
        return [(ids[:1], ids[1:])]
    options = template_options(lm.tokenizer, row)
    if "messages" not in row:
        return [encode_pair(lm.tokenizer, row["prompt"], row["completion"], lm.eos_token_ids, options)]
    before, answer, trained = encode_turns(lm.tokenizer, row["messages"], "all", lm.eos_token_ids, options)
    ids, turns, start = [*before, *answer], list[DocumentPart](), 0
    for is_trained, run in groupby([*trained, *[True] * len(answer)]):
        stop = start + len(list(run))
        turns += [(ids[:start], ids[start:stop])] if is_trained else []
        start = stop
    return turns


def _room(lm: DiffusionLM, given: list[int]) -> int | None:
    """The tokens that the model's context has room for after these."""
    return None if lm.context_length is None else max(lm.context_length - len(given), 0)
