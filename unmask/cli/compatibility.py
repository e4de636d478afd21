"""Refuse combinations of settings before data and model are read, naming both settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial

from unmask.cli.inputs import read_pattern
from unmask.config.run import RunConfig
from unmask.errors import ConfigError
from unmask.models.load import DTYPES
from unmask.training.config import TrainingConfig
from unmask.training.hardware_checks import TrainedModel, check_hardware_settings


def check_together(config: RunConfig, args: TrainingConfig, *, planned: bool = False) -> None:
    """Refuse, before the model is loaded, the combinations that the trainer would refuse after loading it.
    `planned`: other processes will make the run.

    Raises:
        ConfigError: `where` holds the keys of both settings, joined by " and ".
    """

    with naming_sections(args):
        for conflict in args.conflicts(config):
            conflict.refuse()
        model, patterns = config.model, args.patterns()
        if not patterns and args.flash_attention and not model.from_scratch:
            patterns = [read_pattern(model)["attention"]]
        adapters, quantized, split = (
            part is not None for part in (config.lora, model.quantization, model.device_map)
        )
        for attention in patterns or ["causal"]:
            subject = TrainedModel(attention, DTYPES[model.dtype], adapters, quantized, split)
            check_hardware_settings(args, subject, planned=planned)
        args.check_model(partial(read_pattern, config.model), config)


@contextmanager
def naming_sections(args: TrainingConfig) -> Iterator[None]:
    """Errors name settings with their section, which the trainer does not know."""
    try:
        yield
    except ConfigError as error:
        known = {field.name for field in fields(args)}
        keys = [
            f"training.{key}" if key.partition(".")[0] in known else key
            for key in (error.where or "").split(" and ")
        ]
        raise error.moved(" and ".join(keys)) from error
