"""Export models in the formats of released families, or as stock causal models for transformers and servers
without Unmask."""

from __future__ import annotations

import contextlib
import copy
import json
import pathlib
import warnings
from collections.abc import Iterator

from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.artifacts import read_file, share
from unmask.errors import ConfigError, ModelError, UnmaskWarning
from unmask.models.adapters import has_adapters, merged
from unmask.models.auto_config import SETTINGS_KEY
from unmask.models.chat_template import accept_generation_config
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.hooks.quality_head import NAME as QUALITY_HEAD
from unmask.models.model_card import HISTORY_KEY, write_card
from unmask.models.released_families import FAMILIES

STOCK_FORMAT = "hf"


def export(lm: DiffusionLM, path: str | pathlib.Path, layout: str) -> None:
    """Write a model in the format of a released family, or a causal model as transformers saves it:
    config.json, weights, tokenizer, card.

    Args:
        lm: the model; adapters are merged.
        path: the folder; it is created.
        layout: the format: "llada" (bidirectional Llama), "dream" (bidirectional Qwen2 with a logit shift),
            "sdar" (block-causal Qwen3), "fast_dllm_v2" (block-causal Qwen2 with a logit shift), "llada_moe"
            (bidirectional Qwen3-MoE), "llada2" (block-causal GLM-4-MoE) or "hf" (a causal model of any
            architecture, as transformers saves it).

    Raises:
        ConfigError: an unknown format.
        ModelError: a model that the format cannot express; nothing is written.
    """
    folder = pathlib.Path(path)
    if layout not in (STOCK_FORMAT, *FAMILIES):
        raise ConfigError(
            f"unknown layout {layout!r}",
            where="layout",
            remedy=f"Use one of {', '.join([*FAMILIES, STOCK_FORMAT])}",
        )
    if lm.expand_token_id is not None:
        raise ModelError(
            "engines would write its expand and delete tokens",
            where="layout",
            remedy="Export the model that it was before that training, or serve it with `unmask serve`",
        )
    with _without_quality_head(merged(lm) if has_adapters(lm) else lm) as bare:
        _export_stock(bare, folder) if layout == STOCK_FORMAT else _export_released(bare, folder, layout)
        save_tokenizer(bare.tokenizer, folder)
        write_card(bare, folder)


@contextlib.contextmanager
def _without_quality_head(lm: DiffusionLM) -> Iterator[DiffusionLM]:
    """The same model; inside, it lacks its quality head, which no engine reads."""
    head = lm.model._modules.pop(QUALITY_HEAD, None)
    try:
        yield lm.bind(lm.model)
    finally:
        if head is not None:
            setattr(lm.model, QUALITY_HEAD, head)


def _export_released(lm: DiffusionLM, folder: pathlib.Path, layout: str) -> None:
    family = FAMILIES[layout]
    family.check(lm)
    if lm.mask_token_id != family.mask_token_id:
        message = (
            f"the mask token is {lm.mask_token_id}, but engines may assume {family.mask_token_id} for "
            f"{layout} models: set it there"
        )
        warnings.warn(message, UnmaskWarning, stacklevel=3)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(family.published_weights(lm.model), folder)
    share(folder)
    accept_generation_config(lm.model.generation_config)
    lm.model.generation_config.save_pretrained(folder)
    for name, text in {
        **family.code,
        "config.json": json.dumps(family.write_config(lm), indent=2) + "\n",
    }.items():
        (folder / name).write_text(text, encoding="utf-8")


def _export_stock(lm: DiffusionLM, folder: pathlib.Path) -> None:
    """Without Unmask's keys in config.json. The mask token stays in the vocabulary, for rollouts from a vLLM
    server; generation_config.json suppresses it."""
    _check_stock(lm)
    config = lm.model.config
    removed = {name: vars(config).pop(name) for name in (SETTINGS_KEY, HISTORY_KEY) if name in vars(config)}
    accept_generation_config(lm.model.generation_config)
    try:
        lm.model.save_pretrained(folder)
        share(folder)
    finally:
        vars(config).update(removed)
    generation = copy.deepcopy(lm.model.generation_config)
    generation.suppress_tokens = sorted({*(generation.suppress_tokens or ()), lm.mask_token_id})
    generation._from_model_config = False  # else transformers may rebuild it, without these tokens
    accept_generation_config(generation)
    generation.save_pretrained(folder)
    _name_rotary_base(folder / "config.json")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: pathlib.Path) -> None:
    """Write a tokenizer with a config that transformers 4, which engines still use, reads too."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(read_file(file))
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_stock(lm: DiffusionLM) -> None:
    if not lm.autoregressive or lm.causal_context or lm.has_time_embedding:
        shift = "" if lm.logit_shift else " without logit shift"
        raise ModelError(
            f"a stock model is causal, and this one is {lm.attention}{shift}",
            where="layout",
            remedy="Use the --layout of a released family, or serve it with `unmask serve`",
        )
    kind = type(lm.model)
    if not isinstance(lm.model, PreTrainedModel) or not kind.__module__.startswith("transformers."):
        raise ModelError(
            f"{kind.__name__} is not a class of transformers",
            where="layout",
            remedy="Use an architecture that comes with transformers",
        )
    if getattr(lm.model, "is_quantized", False):
        raise ModelError(
            "its weights are quantized", where="layout", remedy="Load it without model.quantization"
        )


def _name_rotary_base(file: pathlib.Path) -> None:
    """Add the rotary embedding's base by its name in transformers 4, which would use the default
    otherwise."""
    settings = json.loads(read_file(file))
    rotary = settings.get("rope_parameters") or {}
    if "rope_theta" in rotary and "rope_theta" not in settings:
        settings["rope_theta"] = rotary["rope_theta"]
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
