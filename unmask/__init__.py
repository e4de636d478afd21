"""Unmask: turn an autoregressive language model into a diffusion language model, train it, sample from it,
evaluate it.

Public names are imported on first use, so that `import unmask` and `unmask --help` are instant. The imports
for type checkers list them, and say where each is.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unmask import generation as generation
    from unmask import losses as losses
    from unmask.config.sampler import SamplerConfig as SamplerConfig
    from unmask.convert.config import ConvertConfig as ConvertConfig
    from unmask.convert.trainer import ConvertTrainer as ConvertTrainer
    from unmask.errors import UnmaskError as UnmaskError
    from unmask.evaluation.likelihood import log_likelihood as log_likelihood
    from unmask.generation.fill_in_the_middle import fim_prompt as fim_prompt
    from unmask.generation.output import Generation as Generation
    from unmask.generation.sampler import generate as generate
    from unmask.generation.sampler import infill as infill
    from unmask.models.attention import clear_mask_cache as clear_mask_cache
    from unmask.models.attention import mask_cache_stats as mask_cache_stats
    from unmask.models.diffusion_lm import DiffusionLM as DiffusionLM
    from unmask.models.load import load as load
    from unmask.preference.config import DPOConfig as DPOConfig
    from unmask.preference.trainer import DPOTrainer as DPOTrainer
    from unmask.rl.config import GRPOConfig as GRPOConfig
    from unmask.rl.trainer import GRPOTrainer as GRPOTrainer
    from unmask.supervised.pretrain import PretrainConfig as PretrainConfig
    from unmask.supervised.pretrain import PretrainTrainer as PretrainTrainer
    from unmask.supervised.sft import SFTConfig as SFTConfig
    from unmask.supervised.sft import SFTTrainer as SFTTrainer

PUBLIC_NAMES = {
    name: module
    for module, name in re.findall(
        r"^    from (unmask[\w.]*) import (\w+) as \2$", Path(__file__).read_text(encoding="utf-8"), re.M
    )
}
"""Each with its module, read from the imports above."""
__all__ = [*PUBLIC_NAMES, "__version__"]


NOISY = ("bitsandbytes.backends.cpu.ops", "torch.utils._pytree", "torchao", "torchao.kernel.intmm")
"""Loggers through which libraries warn when they are imported: of kernels that this machine lacks, and of
their own deprecated calls."""
if not os.environ.get("UNMASK_DEBUG"):
    for _logger in map(logging.getLogger, NOISY):
        if _logger.level == logging.NOTSET:
            _logger.setLevel(logging.ERROR)


AUTO_CLASSES = {
    "transformers.models.auto.configuration_auto": "unmask.models.auto_config",
    "transformers.models.auto.modeling_auto": "unmask.auto_classes",
}
"""Modules of transformers, and those that register diffusion models with their Auto classes."""


class _AutoClasses(MetaPathFinder):
    """Registers diffusion models as soon as a program imports these modules, not before."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in AUTO_CLASSES or name in self.found:
            return None
        self.found.add(name)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                import_module(AUTO_CLASSES[name])

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec

    def __init__(self) -> None:
        self.found = set[str]()


for _module in AUTO_CLASSES.keys() & sys.modules.keys():
    import_module(AUTO_CLASSES[_module])
sys.meta_path.insert(0, _AutoClasses())


def _meant(name: str) -> str:
    """What to use in place of a name that only another library has, after a colon."""
    trainers = [public for public in PUBLIC_NAMES if public.endswith("Trainer")]
    remedy = import_module("unmask.names").remedy_of_class(name, trainers)
    return f": {remedy}" if remedy else ""


class _NamesElsewhere(MetaPathFinder):
    """Says what is meant by `from unmask import KTOTrainer`: the message of an AttributeError would be lost,
    as Python then looks for a module of this name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        package, _, last = name.rpartition(".")
        if package == "unmask" and (meant := _meant(last)):
            raise ImportError(f"cannot import name {last!r} from 'unmask'{meant}", name=package)


sys.meta_path.append(_NamesElsewhere())


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in PUBLIC_NAMES:
            raise AttributeError(f"module 'unmask' has no attribute {name!r}{_meant(name)}")
        module = PUBLIC_NAMES[name]
        try:
            whole = module == "unmask"
            return import_module(f"unmask.{name}") if whole else getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            errors = import_module("unmask.errors")
            raise errors.missing_library(error, where=f"unmask.{name}") or error from error

    def __dir__() -> list[str]:
        return __all__
