"""Settings of a run that cannot go together: refused before data and model are read, with both of their names."""

from __future__ import annotations

from typing import Any

from unmask.config import RunConfig
from unmask.errors import ConfigError
from unmask.models.load import pattern_settings, read_config
from unmask.training.stage_config import StageConfig


def check_together(config: RunConfig, args: StageConfig) -> None:
    """Refuse what the settings alone show not to work: adapters on sharded weights, and decoding blocks that lie across those of the
    model's attention.

    Raises:
        ConfigError: `where` holds the keys of both settings, joined by " and ".
    """
    given: Any = args
    for key, shards in (("fsdp", bool(given.fsdp)), ("deepspeed", _zero_stage(given) == 3)):
        if config.lora and shards:
            remedy = "Train whole weights (lora=null), use deepspeed zero1 or zero2, or leave it out: a40-48gb-x3-ddp holds all in each GPU"
            raise ConfigError("adapters cannot be merged into sharded weights", where=f"training.{key} and lora", remedy=remedy)
    blocks = {"sampler.block_size": config.sampler.block_size, "training.block_size": getattr(given, "block_size", None)}
    if not any(blocks.values()) or not hasattr(given, "num_generations"):
        return
    model = config.model
    published, _ = read_config(model.path, {"revision": model.revision, "trust_remote_code": model.trust_remote_code})
    pattern = pattern_settings(published, model.attention, model.block_size, model.logit_shift)
    grid = {"causal": 1, "block_causal": pattern["block_size"], "bidirectional": None}[pattern["attention"]]
    for key, size in blocks.items():
        if grid is not None and size not in (None, grid):
            what = f"decoding blocks of {size} in a model that attends {'token by token' if grid == 1 else f'in blocks of {grid}'}"
            remedy = f"Set {key}=null" + (", and see grpo-code-ocaml-causal for a causal model" if grid == 1 else "")
            raise ConfigError(what, where=f"{key} and model.path", remedy=remedy)


def _zero_stage(args: Any) -> int | None:
    return (args.deepspeed or {}).get("zero_optimization", {}).get("stage")
