"""The config.json of diffusion models: a model type of their own.

The config.json of a model that is not a causal one has the model type `unmask`. No library reads it without
Unmask, so none takes the weights for a causal model's. The type of the stock model that computes it is among
Unmask's settings; all other fields are the stock config's.

`import unmask` registers the type with transformers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from unmask.artifacts import read_file, write_atomic

MODEL_TYPE = "unmask"
ARCHITECTURE = "UnmaskForMaskedDiffusion"
SETTINGS_KEY = "unmask"
"""Where a config has the settings of Unmask."""
READ_AS = "unmask_pattern"
"""Where a model in memory has the pattern of the DiffusionLM that reads it."""
STOCK = ("model_type", "auto_map")
"""Fields of the stock config that stand among the settings."""


class UnmaskConfig(PreTrainedConfig):
    """The config of a diffusion model as it is on disk."""

    model_type = MODEL_TYPE


def publish_config(folder: str | Path) -> None:
    """Give the config.json of a saved model the type of a diffusion model. Adapters have none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return
    config = json.loads(read_file(path))
    if config["model_type"] == MODEL_TYPE:
        return
    kept = {name: config.pop(name) for name in STOCK if name in config}
    config |= {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE]}
    config[SETTINGS_KEY] |= {"stock": kept}
    write_atomic(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def publish_when_saved(model: Any, settings: Mapping[str, Any] | None) -> None:
    """Let `save_pretrained` of a stock model write and upload the type of a diffusion model with these
    settings, also once adapters are merged into it; None: let it write the stock model again."""
    if settings is None:
        for name in ("save_pretrained", "_upload_modified_files"):
            vars(model).pop(name, None)
        return
    model.unmask_settings, model.save_pretrained = dict(settings), partial(_save_published, model)
    model._upload_modified_files = partial(_upload_published, model)


def _save_published(
    model: Any, save_directory: str | Path, is_main_process: bool = True, *arguments: Any, **options: Any
) -> None:
    setattr(model.config, SETTINGS_KEY, model.unmask_settings)
    type(model).save_pretrained(model, save_directory, is_main_process, *arguments, **options)
    if is_main_process:
        publish_config(save_directory)


def _upload_published(model: Any, folder: str | Path, *arguments: Any, **options: Any) -> Any:
    publish_config(folder)
    return type(model)._upload_modified_files(model, folder, *arguments, **options)


def stock_config(published: Mapping[str, Any], where: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The stock config of a diffusion model's config.json. Raises ValueError if it names no stock model."""
    settings = dict(published.get(SETTINGS_KEY) or {})
    kept = settings.pop("stock", None)
    if not isinstance(kept, dict) or kept.get("model_type") in (None, MODEL_TYPE):
        raise ValueError(f"its {SETTINGS_KEY!r} names no stock model")
    config = copy.deepcopy(dict(published)) | kept | {SETTINGS_KEY: settings}
    if trust_remote_code and "AutoConfig" in kept.get("auto_map", ()):
        made = get_class_from_dynamic_module(kept["auto_map"]["AutoConfig"], where)
    else:
        made = CONFIG_MAPPING[kept["model_type"]]
    return made.from_dict(config, name_or_path=where)


AutoConfig.register(MODEL_TYPE, UnmaskConfig)
