"""Settings of a run that cannot go together: refused before data and model are read, with both of their names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from unmask.config import RunConfig
from unmask.errors import ConfigError
from unmask.models.load import DTYPES, pattern_settings, read_config
from unmask.training.convert import ConvertConfig
from unmask.training.dpo_config import DPOConfig
from unmask.training.grpo_config import OF_CAUSAL_MODELS, GRPOConfig, beside
from unmask.training.optimizers import check_rounding
from unmask.training.pretrain import PretrainConfig
from unmask.training.stage_config import StageConfig
from unmask.training.switches import Subject, check_switches, sharded_by


def check_together(config: RunConfig, args: StageConfig) -> None:
    """Refuse what the settings, and the model's config, show not to work: what its trainer would refuse once the model is there.

    Raises:
        ConfigError: `where` holds the keys of both settings, joined by " and ".
    """
    with naming_sections(args):
        for where, on, what, remedy in _pairs(config, args):
            if on:
                raise ConfigError(what, where=where, remedy=remedy)
        if isinstance(args, ConvertConfig) and config.lora:
            args.refuse_adapters(timed=args.time_embedding)
        for attention in _attention(config, args):
            quantised, split = config.model.quantization is not None, config.model.device_map is not None
            subject = Subject(attention, DTYPES[config.model.dtype], config.lora is not None, quantised, split)
            check_switches(args, subject)
            check_rounding(args, subject)
        if isinstance(args, GRPOConfig | DPOConfig):
            _check_pattern(config, args)


def _pairs(config: RunConfig, args: StageConfig) -> Iterator[tuple[str, Any, str, str]]:
    """Both settings, whether they are on together, what is wrong then, and the way out."""
    shards, lora = sharded_by(args), config.lora is not None
    model = config.model
    untrained = model.from_scratch and not isinstance(args, PretrainConfig)
    yield "model.from_scratch", untrained, "only pretrain takes a model without training", "Pre-train it first"
    what, one = "quantised weights are not spread over devices", "Leave one of the two out"
    yield "model.quantization and model.device_map", model.quantization and model.device_map, what, one
    yield "model.from_scratch and model.quantization", model.from_scratch and model.quantization, "new weights are not quantised", one
    yield "model.from_scratch and model.device_map", model.from_scratch and model.device_map, "new weights are made on one device", one
    if isinstance(args, DPOConfig):
        what, remedy = "the policy has no adapters", "Set lora, or use reference stored or frozen"
        yield "reference and lora", args.reference == "adapter" and not lora, what, remedy
    if isinstance(args, GRPOConfig):
        whole = "train without FSDP and ZeRO 3 (a40-48gb-x3-ddp holds all in each GPU)"
        what, remedy = "weights that are shared out cannot be sent to a server", f"Use rollout.backend local, or {whole}"
        yield f"rollout.backend and {shards}", args.rollouts.backend != "local" and shards and not lora, what, remedy
        what, remedy = "weights that are shared out cannot be followed", f"Leave reference_sync_steps out, or {whole}"
        moves = args.needs_reference and args.reference_sync_steps is not None
        yield f"reference_sync_steps and {shards}", moves and shards and not lora, what, remedy
        what, remedy = "there are no adapters to send", "Train with lora, or set rollout.sync to disk"
        yield "rollout.sync and lora", args.rollouts.backend == "vllm" and args.rollouts.sync == "lora" and not lora, what, remedy


def _attention(config: RunConfig, args: StageConfig) -> list[str]:
    """The patterns that are trained. The model's config is read only where that matters."""
    if isinstance(args, ConvertConfig):
        return [stage.attention or args.attention for stage in args.stages]
    matters = args.flash_attention
    return [_pattern(config)["attention"] if matters and not config.model.from_scratch else "causal"]


def _pattern(config: RunConfig) -> dict[str, Any]:
    """How the model will be read."""
    model = config.model
    published, _ = read_config(model.path, {"revision": model.revision, "trust_remote_code": model.trust_remote_code})
    return pattern_settings(published, model.attention, model.block_size, model.logit_shift)


def _check_pattern(config: RunConfig, args: GRPOConfig | DPOConfig) -> None:
    """Refuse what the model's attention has no use for: decoding blocks that lie across its own, and views of an exact likelihood."""
    pattern = _pattern(config)
    causal = pattern["attention"] == "causal"
    autoregressive = causal and pattern["logit_shift"] is not False
    if isinstance(args, DPOConfig):
        model: Any = SimpleNamespace(attention=pattern["attention"], block_size=pattern["block_size"], autoregressive=autoregressive)
        with beside("model.path"):
            args.exact(model)
        return
    grid = {"causal": 1, "block_causal": pattern["block_size"], "bidirectional": None}[pattern["attention"]]
    for key, size in {"sampler.block_size": config.sampler.block_size, "block_size": args.block_size}.items():
        if grid is not None and size not in (None, grid):
            what = f"decoding blocks of {size} in a model that attends {'token by token' if causal else f'in blocks of {grid}'}"
            remedy = f"Set {key if '.' in key else f'training.{key}'}=null" + (f" ({OF_CAUSAL_MODELS})" if causal else "")
            raise ConfigError(what, where=f"{key} and model.path", remedy=remedy)
    if autoregressive:
        with beside("model.path"):
            args.refuse_of_causal()
    elif args.rollouts.backend == "vllm":
        what = f"vllm decodes token by token, and this model is {pattern['attention']}{' without logit shift' if causal else ''}"
        raise ConfigError(what, where="rollout.backend and model.path", remedy="Use rollout.backend server or local")


@contextmanager
def naming_sections(args: StageConfig) -> Iterator[None]:
    """Errors then name the section of settings that the trainer knows without it."""
    try:
        yield
    except ConfigError as error:
        known = {field.name for field in fields(args)}
        keys = [f"training.{key}" if key.partition(".")[0] in known else key for key in (error.where or "").split(" and ")]
        raise ConfigError(error.what, where=" and ".join(keys), remedy=error.remedy) from error
