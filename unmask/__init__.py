"""Unmask: turn an autoregressive language model into a diffusion language model, train it, sample from it, evaluate it.

The names below are imported when they are first used, so that `import unmask` and `unmask --help` are instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unmask import generation
    from unmask.config.run import SamplerConfig
    from unmask.convert.config import ConvertConfig
    from unmask.convert.trainer import ConvertTrainer
    from unmask.errors import UnmaskError
    from unmask.evaluation.likelihood import log_likelihood
    from unmask.generation.output import Generation
    from unmask.generation.sampler import generate, infill
    from unmask.models.attention import clear_mask_cache, mask_cache_stats
    from unmask.models.diffusion_lm import DiffusionLM
    from unmask.models.load import load
    from unmask.preference.config import DPOConfig
    from unmask.preference.trainer import DPOTrainer
    from unmask.rl.config import GRPOConfig
    from unmask.rl.trainer import GRPOTrainer
    from unmask.supervised.pretrain import PretrainConfig, PretrainTrainer
    from unmask.supervised.sft import SFTConfig, SFTTrainer

_HOMES = {
    "SamplerConfig": "unmask.config.run",
    "UnmaskError": "unmask.errors",
    "log_likelihood": "unmask.evaluation.likelihood",
    "Generation": "unmask.generation.output",
    "generate": "unmask.generation.sampler",
    "infill": "unmask.generation.sampler",
    "clear_mask_cache": "unmask.models.attention",
    "mask_cache_stats": "unmask.models.attention",
    "DiffusionLM": "unmask.models.diffusion_lm",
    "load": "unmask.models.load",
    "ConvertConfig": "unmask.convert.config",
    "ConvertTrainer": "unmask.convert.trainer",
    "DPOConfig": "unmask.preference.config",
    "DPOTrainer": "unmask.preference.trainer",
    "GRPOConfig": "unmask.rl.config",
    "GRPOTrainer": "unmask.rl.trainer",
    "PretrainConfig": "unmask.supervised.pretrain",
    "PretrainTrainer": "unmask.supervised.pretrain",
    "SFTConfig": "unmask.supervised.sft",
    "SFTTrainer": "unmask.supervised.sft",
}

__all__ = [  # noqa: RUF022 (in the order of the pipeline)
    "load",
    "DiffusionLM",
    "log_likelihood",
    "generate",
    "infill",
    "Generation",
    "SamplerConfig",
    "generation",
    "PretrainTrainer",
    "PretrainConfig",
    "ConvertTrainer",
    "ConvertConfig",
    "SFTTrainer",
    "SFTConfig",
    "DPOTrainer",
    "DPOConfig",
    "GRPOTrainer",
    "GRPOConfig",
    "UnmaskError",
    "clear_mask_cache",
    "mask_cache_stats",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "generation":
        return import_module("unmask.generation")
    if name not in _HOMES:
        raise AttributeError(f"module 'unmask' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
