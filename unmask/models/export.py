"""Export models in the formats of released families, or as stock causal models for transformers and servers
without Unmask."""

from __future__ import annotations

import contextlib
import copy
import json
import pathlib
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from unmask.artifacts import read_file, share
from unmask.errors import ConfigError, ModelError, UnmaskWarning
from unmask.models.adapters import has_adapters, merged
from unmask.models.auto_config import SETTINGS_KEY
from unmask.models.chat_template import accept_generation_config
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.hooks.quality_head import NAME as QUALITY_HEAD
from unmask.models.model_card import HISTORY_KEY, write_card
from unmask.models.model_files import has_towers, read_config, reading, refuse_missing, refuse_pickled
from unmask.models.model_paths import fetched
from unmask.models.released_families import FAMILIES

STOCK_FORMAT = "hf"


def export(
    lm: DiffusionLM, path: str | pathlib.Path, layout: str, base: str | pathlib.Path | None = None
) -> None:
    """Write a model in the format of a released family, or a causal model as transformers saves it:
    config.json, weights, tokenizer, card.

    Args:
        lm: the model; adapters are merged.
        path: the folder; it is created.
        layout: the format: "llada" (bidirectional Llama), "dream" (bidirectional Qwen2 with a logit shift),
            "sdar" (block-causal Qwen3), "fast_dllm_v2" (block-causal Qwen2 with a logit shift), "llada_moe"
            (bidirectional Qwen3-MoE), "llada2" (block-causal GLM-4-MoE) or "hf" (a causal model of any
            architecture, as transformers saves it).
        base: with "hf" the model whose language model this was, a folder or a name on the hub: its other
            towers and its processor are written too. Of a model that is no longer causal the folder then has
            the type `unmask`, which only the whole model's own class and Unmask read.

    Raises:
        ConfigError: an unknown format, or a base with another than "hf".
        ModelError: a model that the format cannot express, or a base with another language model or no
            towers; nothing is written.
    """
    folder = pathlib.Path(path)
    if layout not in (STOCK_FORMAT, *FAMILIES):
        raise ConfigError(
            f"unknown layout {layout!r}",
            where="layout",
            remedy=f"Use one of {', '.join([*FAMILIES, STOCK_FORMAT])}",
        )
    if lm.noise == "uniform" and not (layout == STOCK_FORMAT and (lm.canvas or base is not None)):
        kind = "stock causal" if layout == STOCK_FORMAT else layout
        what = f"no {kind} model denoises random tokens, and this model's noise is {lm.noise}"
        own = "Keep the folder as Unmask wrote it, or serve it with `unmask serve`"
        raise ModelError(what, where="layout", remedy=f"Use layout {STOCK_FORMAT}" if lm.canvas else own)
    if base is not None and layout != STOCK_FORMAT:
        raise ConfigError(
            f"{layout} models have no other towers", where="base", remedy=f"Use layout {STOCK_FORMAT}"
        )
    if lm.expand_token_id is not None:
        raise ModelError(
            "engines would write its expand and delete tokens",
            where="layout",
            remedy="Export the model that it was before that training, or serve it with `unmask serve`",
        )
    with _without_quality_head(merged(lm) if has_adapters(lm) else lm) as bare:
        if layout == STOCK_FORMAT:
            _export_stock(bare, folder, base)
        else:
            _export_released(bare, folder, layout)
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


def _export_stock(lm: DiffusionLM, folder: pathlib.Path, base: str | pathlib.Path | None) -> None:
    """Without Unmask's keys in config.json, unless the model is not causal. The mask token stays in the
    vocabulary, for rollouts from a vLLM server; generation_config.json suppresses it."""
    _check_stock(lm, whole=base is not None)
    source, config = None if base is None else pathlib.Path(fetched(base)), vars(lm.model.config)
    removed = {name: config.pop(name) for name in (SETTINGS_KEY, HISTORY_KEY) if name in config}
    try:
        model = lm.model if source is None else _whole_model(lm, str(source))
        if not lm.stock:
            vars(model.config).update(removed | {SETTINGS_KEY: lm.settings})
        accept_generation_config(model.generation_config)
        model.save_pretrained(folder)
        share(folder)
    finally:
        config.update(removed)
    generation = copy.deepcopy(lm.model.generation_config)
    if not lm.canvas:
        generation.suppress_tokens = sorted({*(generation.suppress_tokens or ()), lm.mask_token_id})
    generation._from_model_config = False  # else transformers may rebuild it, without these tokens
    accept_generation_config(generation)
    generation.save_pretrained(folder)
    _complete_config(folder / "config.json", torch.promote_types(model.dtype, lm.model.dtype))
    lm.publish_config(folder)
    lm.write_processor(folder)
    for file in source.glob("*processor*.json") if source else ():
        shutil.copyfile(file, folder / file.name)


def _whole_model(lm: DiffusionLM, base: str) -> PreTrainedModel:
    """The model in the folder `base`, with this language model in place of its own."""
    config, family = read_config(base, whole=True)
    kind: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if family or kind is None or not has_towers(config):
        raise ModelError("has no towers besides a language model", where=base, remedy="Leave --base out")
    text, _ = read_config(base)
    with torch.device("meta"):
        there = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]._from_config(text)
    if difference := _difference(lm.model, there):
        raise ModelError(
            f"its language model is another one: {difference}",
            where=base,
            remedy="Name the model that this one was trained from",
        )
    refuse_pickled(base, None)
    remedy = "Give a model with safetensors weights"
    with reading("cannot load the weights", base, remedy):
        whole, info = kind.from_pretrained(
            base, config=config, dtype="auto", use_safetensors=True, output_loading_info=True
        )
    refuse_missing(info, base, remedy)
    language = whole.get_decoder()  # Llama 4's has the head, too
    name = next(name for name, module in whole.named_modules() if module is language)
    whole.set_submodule(name, lm.model if isinstance(language, type(lm.model)) else lm.model.get_decoder())
    whole.set_output_embeddings(lm.model.get_output_embeddings())
    whole.config.text_config = copy.deepcopy(lm.model.config)
    whole.config.text_config.name_or_path = ""
    return whole


def _difference(model: PreTrainedModel, other: PreTrainedModel) -> str | None:
    """How the weights of language models differ besides the number of tokens; None: they do not."""
    if type(model) is not type(other):
        return f"{type(other).__name__} in place of {type(model).__name__}"
    ours, theirs = (
        {
            name: list(weight.shape)[any(weight is table.weight for table in tables) :]
            for name, weight in each.named_parameters()
        }
        for each in (model, other)
        for tables in [(each.get_input_embeddings(), each.get_output_embeddings())]
    )
    names = (name for name in ours | theirs if ours.get(name) != theirs.get(name))
    return next((f"{name} is {theirs.get(name)} in place of {ours.get(name)}" for name in names), None)


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


def _check_stock(lm: DiffusionLM, *, whole: bool) -> None:
    if lm.has_time_embedding or not (whole or lm.stock):
        shift = "" if lm.logit_shift else " without logit shift"
        raise ModelError(
            f"a stock model is causal, and this one is {lm.attention}{shift}",
            where="layout",
            remedy="Use the --layout of a released family, or serve it with `unmask serve`",
        )
    kind = type(lm.model)
    known = lm.canvas or kind.__module__.startswith("transformers.")
    if not isinstance(lm.model, PreTrainedModel) or not known:
        raise ModelError(
            f"{kind.__name__} is not a class of transformers",
            where="layout",
            remedy="Use an architecture that comes with transformers",
        )
    if getattr(lm.model, "is_quantized", False):
        raise ModelError(
            "its weights are quantized", where="layout", remedy="Load it without model.quantization"
        )


def _complete_config(file: pathlib.Path, dtype: torch.dtype) -> None:
    """Name the type in which no tower is rounded, and the rotary embedding's base by its name in
    transformers 4, which would use the default otherwise."""
    settings = json.loads(read_file(file))
    settings["dtype"] = str(dtype).removeprefix("torch.")
    rotary = settings.get("rope_parameters") or {}
    if "rope_theta" in rotary:
        settings.setdefault("rope_theta", rotary["rope_theta"])
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
