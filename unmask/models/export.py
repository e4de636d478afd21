"""Write models in the formats of released families."""

from __future__ import annotations

import json
import pathlib
import warnings

from huggingface_hub import save_torch_state_dict

from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.families import FAMILIES
from unmask.models.generation_config import accept_generation_config
from unmask.models.model_card import write_card
from unmask.models.stock import STOCK_LAYOUT, export_stock, save_tokenizer


def export(lm: DiffusionLM, path: str | pathlib.Path, layout: str) -> None:
    """Write a model in the layout of a released family, or a causal one as stock: config.json, weights, tokenizer, model card.

    Args:
        lm: the model, with adapters merged.
        path: the folder; it is created.
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
