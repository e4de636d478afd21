"""Export a causal model as a stock one, for transformers and servers without Unmask."""

from __future__ import annotations

import copy
import json
import pathlib

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.errors import ModelError
from unmask.models.diffusion_lm import SETTINGS_KEY, DiffusionLM
from unmask.models.generation_config import accept_generation_config
from unmask.models.model_card import HISTORY_KEY, write_card


def export_stock(lm: DiffusionLM, path: str | pathlib.Path) -> None:
    """Write a causal model as transformers saves its architecture: config.json without Unmask's keys, weights, tokenizer, card.

    The mask token stays in the vocabulary, for rollouts from a vLLM server; generation_config.json suppresses it.

    Raises:
        ModelError: the model is not causal, or is not of a class of transformers; nothing is written.
    """
    _check(lm)
    folder = pathlib.Path(path)
    config, own = lm.model.config, {}
    for name in (SETTINGS_KEY, HISTORY_KEY):
        if hasattr(config, name):
            own[name] = getattr(config, name)
            delattr(config, name)
    accept_generation_config(lm.model.generation_config)
    try:
        lm.model.save_pretrained(folder)
    finally:
        for name, value in own.items():
            setattr(config, name, value)
    generation = copy.deepcopy(lm.model.generation_config)
    generation.suppress_tokens = sorted({*(generation.suppress_tokens or ()), lm.mask_token_id})
    generation._from_model_config = False  # else transformers may make it again, without these tokens
    accept_generation_config(generation)
    generation.save_pretrained(folder)
    _name_rotary_base(folder / "config.json")
    save_tokenizer(lm.tokenizer, folder)
    write_card(lm, folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: pathlib.Path) -> None:
    """The config as transformers 4 reads it too, which engines still use."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check(lm: DiffusionLM) -> None:
    if not lm.autoregressive or lm.causal_context or lm.has_time_embedding:
        shift = "" if lm.logit_shift else " without logit shift"
        remedy = "Use the --layout of a released family, or serve it with `unmask serve`"
        raise ModelError(f"a stock model is causal, and this one is {lm.attention}{shift}", where="layout", remedy=remedy)
    kind = type(lm.model)
    if not isinstance(lm.model, PreTrainedModel) or not kind.__module__.startswith("transformers."):
        remedy = "Merge its adapters before, or use an architecture that comes with transformers"
        raise ModelError(f"{kind.__name__} is not a class of transformers", where="layout", remedy=remedy)
    if getattr(lm.model, "is_quantized", False):
        raise ModelError("its weights are quantised", where="layout", remedy="Load it without model.quantization")


def _name_rotary_base(file: pathlib.Path) -> None:
    """Add the rotary embedding's base by its name in transformers 4, which would use the default otherwise."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    rotary = settings.get("rope_parameters") or {}
    if "rope_theta" in rotary and "rope_theta" not in settings:
        settings["rope_theta"] = rotary["rope_theta"]
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


STOCK_LAYOUT = "hf"
