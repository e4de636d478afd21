"""The variance of the preference margin, by estimator and budget: `unmask dpo --measure-variance`.

Shapes: B rows (pairs), N responses, P pairs, R redraws, M views, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unmask.cli.dry_run import short_trainer
from unmask.cli.run import training_arguments
from unmask.config.run import RunConfig
from unmask.diffusion.likelihood import bound_views
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.mixing import Mixing, RandomTokens
from unmask.diffusion.schedules import Noise, get_schedule
from unmask.diffusion.views import MaskRNG, Views, joined, mixed_views, random_views
from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import evaluating
from unmask.preference.config import MAX_EXACT_BLOCK, exact_block_size
from unmask.preference.losses import margins
from unmask.preference.trainer import MEASURED_PAIRS, DPOTrainer, PreferenceBatch

BUDGETS = (1, 2, 4, 8, 16)
"""Passes for each response."""
TABLE_REDRAWS = 16
LOSSES = ("sigmoid", "ipo", "hinge")


@dataclass(frozen=True)
class Estimator:
    """An estimator of the bounds of a response under two models.

    Attributes:
        counts: whether views hide exact counts of tokens, not each token with the probability of a time.
        stratified: whether the counts of several views are spread evenly; else each is drawn by itself.
        complementary: whether they are pairs, of which one hides what the other shows.
        shared: whether both models see the same noise.
    """

    counts: bool = True
    stratified: bool = False
    complementary: bool = False
    shared: bool = True

    def draw_views(
        self, lm: DiffusionLM, ids_BT: Tensor, group_BT: Tensor, draw: MaskRNG, num_views: int
    ) -> Views:
        """Views with the noise of a model."""
        if self.stratified or self.complementary:
            pairs = self.complementary and (lm.noise == "masked" or num_views % 2 == 0)
            return bound_views(lm, ids_BT, group_BT, draw, num_views=num_views, complementary=pairs)
        each = [
            self._one(lm, ids_BT, group_BT, replace(draw, iteration=draw.iteration * num_views + number))
            for number in range(num_views)
        ]
        return joined(each)

    def _one(self, lm: DiffusionLM, ids_BT: Tensor, group_BT: Tensor, draw: MaskRNG) -> Views:
        if self.counts:
            return bound_views(lm, ids_BT, group_BT, draw, num_views=1)
        noise = Noise(get_schedule("linear"))
        if lm.noise == "masked":
            return random_views(group_BT, draw, noise)
        return mixed_views(ids_BT, group_BT, draw, noise, Mixing.of(lm), RandomTokens.of(lm))


INDEPENDENT = "independent times, independent masks"
DEFAULT = "stratified exact counts, shared masks (default)"
COMPLEMENTARY = "the same in complementary pairs (complementary: true)"
ESTIMATORS = {
    INDEPENDENT: Estimator(counts=False, shared=False),
    "independent exact counts, independent masks": Estimator(shared=False),
    "independent times, shared masks": Estimator(counts=False),
    DEFAULT: Estimator(stratified=True),
    COMPLEMENTARY: Estimator(complementary=True),
}


@torch.no_grad()
def drawn_margins(trainer: DPOTrainer, batch: Any, estimator: Estimator, views: int, redraws: int) -> Tensor:
    """The margins [R, P] of a batch's pairs for `redraws` independent draws, in nats. The trainer must hold
    its reference model."""
    assert trainer.reference is not None
    group_BT = noise_groups(trainer.lm, batch["maskable"], batch["documents"])

    def bounds(lm: DiffusionLM, draw: MaskRNG) -> Tensor:
        drawn = estimator.draw_views(trainer.lm, batch["input_ids"], group_BT, draw, views)
        with evaluating(lm), trainer.accelerator.autocast():
            log_prob_BMT = trainer.per_view.log_probs(lm, PreferenceBatch(batch, drawn))
            return trainer.sum_by_response(batch, (drawn.weight_BMT * log_prob_BMT).sum(1))

    margin_RP = []
    for redraw in range(redraws):
        draw = MaskRNG(trainer.args.seed, batch["sample_id"], redraw)
        other = draw if estimator.shared else replace(draw, iteration=redraw + redraws)
        with trainer.reference.model_in_use() as reference:
            reference_N = bounds(reference, other)
        margin_RP.append(margins(bounds(trainer.lm, draw) - reference_N))
    return torch.stack(margin_RP)


def variances(
    trainer: DPOTrainer, *, budgets: Sequence[int], redraws: int
) -> tuple[dict[str, dict[int, float]], float]:
    """The variance of the margin over redraws by estimator and budget, in nats squared, averaged over the
    training pairs; and the mean margin of the last estimator with the largest budget, in nats."""
    batches = list(trainer.in_batches(trainer.train_dataset, trainer.args.train_batch_size))
    found: dict[str, dict[int, float]] = {}
    for name, estimator in ESTIMATORS.items():
        found[name] = {}
        for views in budgets:
            margin_RP = torch.cat(
                [drawn_margins(trainer, batch, estimator, views, redraws) for batch in batches], 1
            )
            found[name][views] = margin_RP.double().var(0).mean().item()
    return found, margin_RP.mean().item()


def measure_run(config: RunConfig) -> dict[str, Any]:
    """The variances on the first pairs of a run's data, with its model as the policy and
    `training.ref_model` as the reference.

    Returns:
        pairs, redraws, the mean margin in nats, and the variance in nats squared by estimator and passes per
        response; that of exact likelihoods is 0, with the number of passes that they need.

    Raises:
        ConfigError: the loss or the reference leaves no margin to measure.
    """
    args = training_arguments("dpo", config)
    if args.loss_type not in LOSSES:
        what = f"{args.loss_type} has no pairs that are compared with a reference"
        raise ConfigError(what, where="training.loss_type", remedy=f"Measure with {', '.join(LOSSES)}")
    if args.ref_model is None:
        remedy = "Give the model that the policy was trained from"
        raise ConfigError(
            "the policy is its own reference, so every margin is 0",
            where="training.ref_model",
            remedy=remedy,
        )
    data = config.data.model_copy(update={"max_rows": config.data.max_rows or MEASURED_PAIRS})
    training = {**config.training, "reference": "frozen"}
    training.pop("stale_reference", None)
    measured = config.model_copy(update={"data": data, "training": training, "lora": None})
    with short_trainer("dpo", measured, args, 1, first_rows=None) as trainer:
        found, margin = dict[str, dict[int, float]](), None
        if not trainer.lm.autoregressive:
            found, margin = variances(trainer, budgets=BUDGETS, redraws=TABLE_REDRAWS)
        if (width := exact_block_size(trainer.lm)) <= MAX_EXACT_BLOCK:
            found["exact"] = {int(2**width) - 1: 0.0}
        return {
            "pairs": len(trainer.train_dataset),
            "redraws": TABLE_REDRAWS,
            "margin": margin,
            "variance": found,
        }


def as_table(measured: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The head and rows of a table: estimators by budgets, each with the reduction compared with independent
    draws."""
    found = measured["variance"]
    passes = sorted({views for by_views in found.values() for views in by_views})

    def cell(by_views: dict[int, float], views: int) -> str:
        if views not in by_views:
            return ""
        variance, independent = by_views[views], found.get(INDEPENDENT, {}).get(views, 0.0)
        less = f" ({independent / variance:.1f} x less)" if 0 < variance < independent else ""
        return f"{variance:.3g}{less}"

    return ["passes", *map(str, passes)], [
        [name, *(cell(by_views, views) for views in passes)] for name, by_views in found.items()
    ]
