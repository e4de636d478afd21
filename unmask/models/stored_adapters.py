"""Adapters that were stored in a folder: on a base of their own, to train them further, or LoRA on a model in
memory whose weights they share with it and with one another."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from unmask.artifacts import read_file
from unmask.errors import ConfigError, ModelError
from unmask.models.adapters import add_adapters, checked_adapters
from unmask.models.auto_config import SETTINGS_KEY
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_files import reading, refuse_irregular, refuse_pickled

if TYPE_CHECKING:
    import peft

READ = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
}
READ |= {
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "eva_config",
}
READ |= {
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
}
READ |= {"modules_to_save", "trainable_token_indices", "ensure_weight_tying"}
"""Settings of LoRA with which the weights under the adapters stay as they are. Others change them, or read
more than the adapters."""
COMPARED = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "trainable_token_indices")
"""Settings with which the same weights compute something else."""
UNCHANGING = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""Starts of LoRA that leave the weights under the adapters as they are."""
DETERMINED = (*UNCHANGING, "pissa", "olora")
"""Starts of LoRA that leave these weights as they are, or change them alike every time."""
REMEDY = (
    "Give a folder with LoRA adapters for this model, which save_pretrained of PEFT or a run with lora "
    "wrote (a checkpoint)"
)


def stored_adapters(lm: DiffusionLM, folder: str) -> DiffusionLM:
    """A base model with the adapters of a folder, which can be trained further.

    Raises:
        ModelError: the folder holds no adapters for this model in safetensors, or adapters of a kind that is
            not trained here (docs/models.md).
    """
    from peft import LoraConfig, PeftConfig
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    remedy = "Give a folder with adapters for this model, which save_pretrained of PEFT wrote"
    refuse_pickled(folder)
    with reading("cannot read the adapters", folder, remedy):
        refuse_irregular(Path(folder))
        config = PeftConfig.from_pretrained(folder)
        if isinstance(config, LoraConfig) and (config.megatron_config is not None):
            raise ValueError("they name code of Megatron")
        if getattr(config, "init_lora_weights", True) not in DETERMINED:
            raise ValueError(f"the weights under them depend on init_lora_weights {config.init_lora_weights}")
        weights = load_file(Path(folder) / SAFETENSORS_WEIGHTS_NAME)
    config.base_model_name_or_path, config.inference_mode = None, False  # PEFT names that of the model
    try:
        with reading("the adapters do not fit the model", folder, remedy):
            adapted = checked_adapters(add_adapters(lm, config), config)
    except ConfigError as error:
        raise ModelError(error.what, where=folder, remedy=error.remedy) from error
    _check_shapes(adapted, weights, folder, tables=True)
    with reading("cannot load the adapters", folder, remedy):
        put_adapters(adapted, weights)
    adapted.model.eval()
    return adapted


def load_adapters(lm: DiffusionLM, path: str | Path) -> DiffusionLM:
    """A model with the adapters of a folder, unmerged, and the weights of `lm` in the same memory. `lm`
    computes as before, and may get any number of such models beside it; its weights are no longer trained.

    Raises:
        ModelError: the folder holds no LoRA adapters for this model in safetensors, or their settings would
            change the model's own weights.
    """
    where = str(path)
    if getattr(lm.model, "is_loaded_in_8bit", False):
        raise ModelError(
            "several models cannot share weights in 8 bits",
            where="quantization",
            remedy="Load it with quantization 4bit, or without",
        )
    config, weights = _read(lm, where)
    try:
        with reading("the adapters do not fit the model", where, REMEDY):
            adapted = add_adapters(lm.bind(_sharing(lm.model)), config)
    except ConfigError as error:  # of modules that the model does not have
        raise ModelError(error.what, where=where, remedy=REMEDY) from error
    _check_shapes(adapted, weights, where)
    with reading("cannot load the adapters", where, REMEDY):
        put_adapters(adapted, weights)
    adapted.model.eval()
    return adapted


def read_adapters(lm: DiffusionLM, path: str | Path) -> dict[str, torch.Tensor]:
    """The weights of a folder for the adapters of a model from `load_adapters`, off the memory of its files.
    ModelError as there, and for adapters with other settings."""
    where = str(path)
    config, weights = _read(lm, where)
    present = lm.model.active_peft_config
    if other := [name for name in COMPARED if getattr(config, name) != getattr(present, name)]:
        raise ModelError(
            f"their {', '.join(other)} differs from that of the present adapters", where=where, remedy=REMEDY
        )
    _check_shapes(lm, weights, where)
    return weights


def put_adapters(lm: DiffusionLM, weights: Mapping[str, torch.Tensor]) -> None:
    """Put weights that `read_adapters` has read into the adapters of a model."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(lm.model, dict(weights))


def _read(lm: DiffusionLM, where: str) -> tuple[peft.LoraConfig, dict[str, torch.Tensor]]:
    """The settings and the weights of adapters that may belong to this model."""
    from peft import LoraConfig, PeftConfig
    from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

    folder = Path(where)
    if not (folder / CONFIG_NAME).is_file():
        raise ModelError(
            f"holds no adapters: there is no {CONFIG_NAME}" if folder.is_dir() else "no such folder",
            where=where,
            remedy=REMEDY,
        )
    refuse_pickled(where)
    with reading("cannot read the adapters", where, REMEDY):
        refuse_irregular(folder)
        config = PeftConfig.from_pretrained(where)
        if not isinstance(config, LoraConfig):
            raise ValueError(
                f"they are of the kind {getattr(config.peft_type, 'value', config.peft_type)}, not LORA"
            )
        if foreign := _foreign_settings(config, LoraConfig()):
            raise ValueError(
                f"LoRA with {', '.join(foreign)} does not leave the model's own weights as they are"
            )
        _check_pattern(lm, folder)
        # copied, else a file that is written now would be what is loaded
        weights = {
            name: weight.clone() for name, weight in load_file(folder / SAFETENSORS_WEIGHTS_NAME).items()
        }
    config.base_model_name_or_path = None  # as it was where they were trained
    config.inference_mode = True
    return config, weights


def _foreign_settings(config: peft.LoraConfig, default: peft.LoraConfig) -> list[str]:
    foreign = [
        name for name, value in vars(default).items() if name not in READ and getattr(config, name) != value
    ]
    starts = config.init_lora_weights
    return foreign if starts in UNCHANGING else [*foreign, f"init_lora_weights {starts}"]


def _check_pattern(lm: DiffusionLM, folder: Path) -> None:
    """Raise ValueError for adapters that were trained with another attention pattern; those that other tools
    wrote do not say."""
    if not (folder / "config.json").is_file():
        return
    trained = json.loads(read_file(folder / "config.json")).get(SETTINGS_KEY) or {}
    if differ := [
        f"{name} {trained[name]}, not {value}"
        for name, value in lm.pattern.items()
        if trained.get(name, value) != value
    ]:
        raise ValueError(f"they were trained with {', '.join(differ)}")


def _sharing(model: Any) -> Any:
    """A copy of a model's modules, with the same weights and buffers in memory."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def _check_shapes(
    lm: DiffusionLM, weights: dict[str, torch.Tensor], where: str, *, tables: bool = False
) -> None:
    """Raise ModelError for weights of adapters that are not exactly those that the model has: PEFT would
    leave out what it does not find, and write to the weights below the adapters what is not of adapters.
    `tables`: whether there may be whole embedding tables, which PEFT saves with adapters on one."""
    from peft import get_peft_model_state_dict

    there = {name: tuple(weight.shape) for name, weight in weights.items()}
    here = {
        name: tuple(weight.shape)
        for name, weight in get_peft_model_state_dict(lm.model, save_embedding_layers=False).items()
    }
    if tables:
        own = {name: tuple(weight.shape) for name, weight in lm.model.state_dict().items()}
        here |= {name: own[name] for name in there.keys() & own.keys()}
    if unlike := sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name)):
        shapes = f"is {there.get(unlike[0], 'absent')}, and has to be {here.get(unlike[0], 'absent')}"
        raise ModelError(
            f"the adapters are of another model: {unlike[0]} {shapes}", where=where, remedy=REMEDY
        )
