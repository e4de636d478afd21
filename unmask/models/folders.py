"""The config and the tokenizer of a model folder or hub repository, whose files may be anybody's: whatever a library raises on them is a
ModelError. `weight_files.py` is about its weights."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import ADAPTER_CONFIG_NAME

from unmask.errors import ModelError
from unmask.models.diffusion_lm import SETTINGS_KEY
from unmask.models.family import Family
from unmask.models.released_families import family_of
from unmask.models.released_tokenizers import name_mask_token, tokenizer_choice
from unmask.models.weight_files import reading

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
MAX_LAYERS = 10_000
"""Layers of a model at most: a config with more would take hours to build."""


def read_config(where: str, hub_options: Mapping[str, Any]) -> tuple[PretrainedConfig, Family | None]:
    """The stock config of a folder or hub id, and the family of its published format; `hub_options`: `revision` and `trust_remote_code`."""
    folder = pathlib.Path(where)
    if not folder.exists() and where.startswith(("/", ".", "~")):
        raise ModelError("no such folder", where=where, remedy="Check the path")
    if (folder / ADAPTER_CONFIG_NAME).is_file() or [path.name for path in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]:
        remedy = "Load the model that save_model wrote (adapters merged), or resume the run from this checkpoint"
        raise ModelError("is a checkpoint of adapters, not a model", where=where, remedy=remedy)
    with reading("cannot load a model config", where, "Give a model folder or a hub id"):
        published, _ = PretrainedConfig.get_config_dict(where, **hub_options)
        if not isinstance(published, dict):
            raise ValueError("config.json is not a JSON object")
        family = family_of(published)
        config = AutoConfig.from_pretrained(where, **hub_options) if family is None else family.read_config(published, where)
        layers = getattr(config.get_text_config(), "num_hidden_layers", None) or 0
        if layers > MAX_LAYERS:
            raise ValueError(f"num_hidden_layers is {layers}, but at most {MAX_LAYERS:,} are read")
        settings = getattr(config, SETTINGS_KEY, None)
        if not isinstance(settings, dict | None):
            raise ValueError(f"{SETTINGS_KEY!r} is not an object")
    return config, family


def read_tokenizer(
    where: str, hub_options: Mapping[str, Any] = NO_CODE, config: PretrainedConfig | None = None, family: Family | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. `hub_options` is that of `read_config`; `config` and `family` are what it returned."""
    remedy = "Save the tokenizer beside the model (tokenizer.save_pretrained)"
    with reading("no usable tokenizer", where, remedy):
        tokenizer = AutoTokenizer.from_pretrained(where, **(tokenizer_choice(where, hub_options) if family else hub_options))
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise ValueError("its vocabulary is empty")
        if family:
            name_mask_token(tokenizer, getattr(config, SETTINGS_KEY)["mask_token_id"], where)
    return tokenizer
