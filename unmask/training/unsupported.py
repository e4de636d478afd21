"""The refusals of a trainer: settings that would not act on its model, or not correctly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.hardware_checks import TrainedModel, check_hardware_settings
from unmask.training.optimizers import check_rounding


def refuse_unsupported(lm: DiffusionLM, args: Any, *, adapters: bool, trainer_arguments: Mapping[str, Any]) -> None:
    """Refuse everything that cannot work with this model, before a step is made.

    Args:
        lm: the model to train.
        args: the trainer's config.
        adapters: whether adapters are trained, including those that are still to be added.
        trainer_arguments: arguments of transformers.Trainer.

    Raises:
        ConfigError: a setting that the model does not support, or a function that would read the logits of whole rows.
    """
    for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
        if trainer_arguments.get(name) is not None:
            what = "is never called: a row has no logits of its own, because they depend on which tokens are hidden"
            raise ConfigError(what, where=name, remedy="Leave it out; a subclass may override measure and micro_loss")
    subject = TrainedModel.of(lm, adapters=adapters)
    check_hardware_settings(args, subject)
    check_rounding(args, subject)
