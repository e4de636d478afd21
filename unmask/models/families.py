"""Released diffusion models on stock classes: their layouts written, their tokenizers read."""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from huggingface_hub import save_torch_state_dict
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from unmask.errors import ConfigError, ModelError
from unmask.models.card import write_card
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.ends import accept_generation_config
from unmask.models.family import Family as Family
from unmask.models.layouts import FAMILIES as FAMILIES
from unmask.models.layouts import family_of as family_of
from unmask.models.stock import export_stock, save_tokenizer

STOCK_LAYOUT = "hf"
LOCAL_TOKENIZERS = {"DreamTokenizer": "qwen2"}
"""Tokenizer classes that come as code with a model, and the model type whose class in transformers does the same."""


def export(lm: DiffusionLM, path: str | pathlib.Path, layout: str) -> None:
    """Write a model in the layout of a released family, or a causal one as stock: config.json, weights, tokenizer, model card.

    Args:
        lm: the model, with its adapters merged in.
        path: the folder, made if need be.
        layout: "llada" (bidirectional Llama), "dream" (bidirectional Qwen2 with a logit shift), "sdar" (block-causal Qwen3),
            "fast_dllm_v2" (block-causal Qwen2 with a logit shift), "llada_moe" (bidirectional Qwen3-MoE), "llada2" (block-causal
            GLM-4-MoE) or "hf" (a causal model of any architecture, `export_stock`).

    Raises:
        ConfigError: an unknown layout.
        ModelError: a model that the layout cannot express; nothing is written.
    """
    if layout == STOCK_LAYOUT:
        export_stock(lm, path)
        return
    if layout not in FAMILIES:
        remedy = f"Use one of {', '.join([*FAMILIES, STOCK_LAYOUT])}"
        raise ConfigError(f"unknown layout {layout!r}", where="layout", remedy=remedy)
    family, folder = FAMILIES[layout], pathlib.Path(path)
    family.check(lm)
    if lm.mask_token_id != family.mask_token_id:
        message = f"the mask token is {lm.mask_token_id}; what runs {layout} models may assume {family.mask_token_id}: tell it"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(family.published_weights(lm.model), folder)
    accept_generation_config(lm.model.generation_config)
    lm.model.generation_config.save_pretrained(folder)
    save_tokenizer(lm.tokenizer, folder)
    for name, text in {**family.code, "config.json": json.dumps(family.write_config(lm), indent=2) + "\n"}.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_card(lm, folder)


def tokenizer_choice(where: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `AutoTokenizer.from_pretrained` that open a released tokenizer without the code that came with it."""
    named = get_tokenizer_config(where, revision=source.get("revision")).get("tokenizer_class")
    # Without a config AutoTokenizer would read config.json, find the model's own code there and ask about it.
    choice = {"tokenizer_type": LOCAL_TOKENIZERS[named]} if named in LOCAL_TOKENIZERS else {"config": PretrainedConfig()}
    return {**source, "trust_remote_code": False, **choice}


def name_mask_token(tokenizer: PreTrainedTokenizerBase, mask_token_id: int, where: str) -> None:
    """Make the token with this id the mask token: released tokenizers hold it without saying so.

    Raises:
        ModelError: the tokenizer has no such token.
    """
    token = tokenizer.convert_ids_to_tokens(mask_token_id) if mask_token_id < len(tokenizer) else None
    if token is None:
        raise ModelError(f"the tokenizer has no mask token {mask_token_id}", where=where, remedy="Use the tokenizer of the released model")
    tokenizer.add_special_tokens({"mask_token": token})
    tokenizer.init_kwargs.pop("auto_map", None)  # to code that will not be saved beside it
