"""Preference optimisation of diffusion models: DPO on variance-reduced ELBO estimates (VRPO, Zhu et al. 2025, LLaDA 1.5).

Shapes: B = 2P rows (P chosen, then their P rejected), V views, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unmask.data.pairs import preference_rows
from unmask.data.report import Rows
from unmask.data.rows import Collator
from unmask.diffusion.views import Draw, Views, all_masked_views, exact_count_views
from unmask.models.diffusion_lm import DiffusionLM, disable_dropout, evaluating, fingerprint
from unmask.objectives.preference import dpo
from unmask.training.pairs import PairConfig, room
from unmask.training.stage_config import steps_per_epoch
from unmask.training.trainer import Batch
from unmask.training.viewwise import Piece, ViewwiseTrainer

REFERENCE_FILE = "reference_scores.safetensors"


@dataclass(kw_only=True)
class DPOConfig(PairConfig):
    """Settings of `DPOTrainer`."""

    learning_rate: float = field(default=5e-6, metadata={"help": "The peak learning rate of AdamW."})
    beta: float = field(default=0.2, metadata={"help": "How strongly the policy is held to the reference."})
    samples: int = field(default=8, metadata={"help": "Views of each response: that many times, with one mask each."})


class PairCollator(Collator):
    """Batches of chosen rows followed by their rejected ones."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        batch = super().__call__([row["chosen"] for row in rows] + [row["rejected"] for row in rows])
        return batch | {"pair": torch.tensor([row["pair"] for row in rows])}


class DPOTrainer(ViewwiseTrainer):
    """Trains on `prompt`, `chosen`, `rejected` (standard or conversational; the prompt may be implicit).

    Policy and reference are scored on the same masks of the same response. The reference is the model as given: it is
    scored once, before the first step, for every epoch's masks, and stored in the output directory; training then holds
    one model. Dropout is off. One view is gone through at a time.
    """

    def __init__(self, model: DiffusionLM | str | Path, args: DPOConfig, *datasets: Any, **rest: Any):
        super().__init__(model, args, *datasets, data_collator=rest.pop("data_collator", PairCollator(0)), **rest)
        disable_dropout(self.lm.model)
        epochs = args.max_steps / steps_per_epoch(args, self.train_dataset) if args.max_steps > 0 else args.num_train_epochs
        self.reference = {"train": self._reference_scores(self.train_dataset, math.ceil(epochs), "train")}
        if self.eval_dataset is not None:
            self.reference["eval"] = self._reference_scores(self.eval_dataset, 1, "eval")

    @classmethod
    def make_rows(cls, lm: DiffusionLM, args: DPOConfig, dataset: Sequence[Mapping[str, Any]], where: str) -> Rows[dict[str, Any]]:
        return preference_rows(lm.tokenizer, dataset, room(lm, args), args.data_report(where))

    def plan(self, batch: Batch, draw: Draw) -> Views:
        if self.lm.autoregressive:
            return all_masked_views(batch["maskable"])
        return exact_count_views(self.groups(batch), draw, views=self.args.samples)

    def views_of(self, batch: Any) -> Views:
        """Those of the epoch; made once, and kept in the batch."""
        if "views" not in batch:
            batch["views"] = self.plan(batch, self.draw(batch))
        return batch["views"]

    def loss_on(self, batch: Batch, log_prob_BVT: Tensor, piece: Piece | None = None) -> Tensor:
        chosen_P, rejected_P = self._bounds(batch, log_prob_BVT).chunk(2)
        stored = self.reference["train" if self.model.training else "eval"][self.draw(batch).iteration].to(chosen_P.device)[batch["pair"]]
        loss = dpo(chosen_P, rejected_P, stored[:, 0], stored[:, 1], beta=self.args.beta)
        pairs = len(loss.loss_P)
        self.record("margin", loss.margin_P.mean(), pairs)
        self.record("accuracy", (loss.margin_P > 0).float().mean(), pairs)
        self.record("chosen", chosen_P.detach().mean(), pairs)
        self.record("rejected", rejected_P.detach().mean(), pairs)
        return loss.loss_P.sum()

    def count_items(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch["pair"]), device=batch["pair"].device)

    def _bounds(self, batch: Batch, log_prob_BVT: Tensor) -> Tensor:
        """The estimated log-likelihood bound of every response [B]."""
        return (self.views_of(batch).weight_BVT * log_prob_BVT).sum((1, 2))

    @torch.no_grad()
    def _reference_scores(self, pairs: Sequence[Mapping[str, Any]], epochs: int, split: str) -> Tensor:
        """The reference's bounds [epochs, pairs, 2], from disk if they were stored for these rows, masks and weights."""
        identity = json.dumps([self.lm.settings, self.args.samples, self.args.seed, epochs, fingerprint(self.lm.model), list(pairs)])
        key = hashlib.sha256(identity.encode()).hexdigest()
        path = Path(self.args.output_dir) / f"{split}_{REFERENCE_FILE}"
        if path.exists():
            stored = load_file(path)
            if key in stored:
                return stored[key]
        scores = torch.zeros(epochs, len(pairs), 2)
        size = self.args.train_batch_size
        with evaluating(self.lm), self.accelerator.autocast():
            for start in range(0, len(pairs), size):
                batch = self._prepare_inputs(self.data_collator(pairs[start : start + size]))
                for epoch in range(epochs):
                    planned = batch | {"views": self.plan(batch, Draw(self.args.seed, batch["sample_id"], epoch))}
                    bounds = self._bounds(planned, self.score_views(self.lm, planned))
                    scores[epoch, start : start + size] = bounds.view(2, -1).T.cpu()
        if self.args.should_save:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".unfinished")
            save_file({key: scores}, unfinished)
            unfinished.replace(path)
        return scores
