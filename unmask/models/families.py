"""Released diffusion models on stock classes: their configs, weight names and tokenizers, read and written.

A family is a table: what its config.json calls the fields of a stock config, what else that config says, and what its
weights are called. Reading and writing both follow from it; no code of a released model is run or shipped.

Sources: the configs and modelling code published with LLaDA (Nie et al. 2025), Dream (Ye et al. 2025) and SDAR (Cheng et
al. 2025), and the engines that serve SDAR (SGLang, LMDeploy).
"""

from __future__ import annotations

import json
import pathlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from unmask.errors import ConfigError, ModelError
from unmask.models.attention import Pattern
from unmask.models.card import write_card
from unmask.models.diffusion_lm import SETTINGS_KEY, DiffusionLM
from unmask.models.stock import export_stock, save_tokenizer

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
QWEN_FIELDS = {
    name: name
    for name in (
        *SIZES,
        *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_theta"),
        *("rope_scaling", "tie_word_embeddings", "attention_dropout", "max_window_layers", "use_cache", "bos_token_id", "eos_token_id"),
    )
}
NO_WINDOWS: dict[str, Any] = {"use_sliding_window": False, "sliding_window": None}
OUTSIDE_LAYOUTS = {
    *("architectures", "dtype", "transformers_version", "_name_or_path", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
}
"""Fields of a stock config that a layout need not hold: how it was made, what the tokenizer knows, and sliding windows, which
only causal attention keeps."""

SDAR_CONFIG_CODE = '''"""Lets AutoConfig read config.json (with trust_remote_code=True), as serving engines do."""

from transformers import PretrainedConfig


class SDARConfig(PretrainedConfig):
    model_type = "sdar"
'''


@dataclass(frozen=True, kw_only=True)
class Family:
    """A released model's layout on disk, and how such a model is read.

    Attributes:
        name: of the layout.
        model_type, architecture: what config.json says of itself.
        stock: the config class of transformers that computes the same.
        attention, logit_shift: as the released models were trained.
        block_size: of the attention, where config.json does not say it; None for a family without blocks.
        mask_token_id: where config.json does not say it; released code and engines assume it.
        fields: names in config.json, with the names in the stock config.
        constants: what config.json says beyond them. Another value is another architecture.
        weights: names in the files, with the names in the stock model; `*` is a layer's number. Unset: the same names.
        frozen_padding: whether the released model never trains the padding token's embedding (`nn.Embedding(padding_idx=...)`).
        code: Python files that stand beside config.json, and its `auto_map` to them.
    """

    name: str
    model_type: str
    architecture: str
    stock: type[PretrainedConfig]
    attention: Pattern
    logit_shift: bool
    block_size: int | None = None
    mask_token_id: int
    frozen_padding: bool = False
    fields: Mapping[str, str]
    constants: Mapping[str, Any]
    weights: Mapping[str, str] = field(default_factory=dict)
    auto_map: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def key_mapping(self) -> dict[str, str]:
        """Patterns of published weight names and what replaces them, as `from_pretrained` takes them."""
        return {_pattern(published): _replacement(stock) for published, stock in self.weights.items()}

    def published_name(self, stock: str) -> str:
        """The published name of a weight of the stock model."""
        for published, ours in self.weights.items():
            if re.match(_pattern(ours), stock):
                return re.sub(_pattern(ours), _replacement(published), stock)
        return stock

    def read_config(self, published: Mapping[str, Any], where: str) -> PretrainedConfig:
        """The stock config that a published one stands for, with the settings that `unmask.load` reads.

        Raises:
            ModelError: an architecture or a setting that the stock class does not compute.
        """
        remedy = f"Unmask reads {self.architecture} models"
        architecture = (published.get("architectures") or [self.architecture])[0]
        if architecture != self.architecture:
            raise ModelError(f"a {self.model_type} config of another architecture, {architecture}", where=where, remedy=remedy)
        for name, value in self.constants.items():
            if published.get(name, value) != value:
                raise ModelError(f"{name} is {published[name]!r}, and only {value!r} is supported", where=where, remedy=remedy)
        values = {stock: published[name] for name, stock in self.fields.items() if published.get(name) is not None}
        lacking = [name for name, stock in self.fields.items() if stock in SIZES and stock not in values]
        if lacking:
            raise ModelError(f"the config lacks {', '.join(lacking)}", where=where, remedy=remedy)
        config = self.stock(**values)
        settings = {
            "attention": self.attention,
            "block_size": self.block_size and published.get("block_size", self.block_size),
            "mask_token_id": published.get("mask_token_id", self.mask_token_id),
            "logit_shift": self.logit_shift,
            "padding_idx": published.get("pad_token_id") if self.frozen_padding else None,
        }
        setattr(config, SETTINGS_KEY, settings)
        return config

    def write_config(self, lm: DiffusionLM) -> dict[str, Any]:
        """The config.json of a model in this layout."""
        return {
            "architectures": [self.architecture],
            **({"auto_map": dict(self.auto_map)} if self.auto_map else {}),
            "model_type": self.model_type,
            **{name: _stock_value(lm.config, stock) for name, stock in self.fields.items()},
            **self.constants,
            "mask_token_id": lm.mask_token_id,
            **({"block_size": lm.block_size} if self.block_size else {}),
            "torch_dtype": str(next(lm.model.parameters()).dtype).removeprefix("torch."),
        }

    def check(self, lm: DiffusionLM) -> None:
        """Raise ModelError unless this layout says all that there is to say about the model."""
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[self.stock]
        if type(lm.model) is not model_class:
            raise self._refusal(f"a {type(lm.model).__name__}", f"It holds {model_class.__name__} models, with adapters merged in")
        if lm.attention != self.attention:
            raise self._refusal(f"{lm.attention} attention", f"It holds {self.attention} models: convert to that")
        if lm.logit_shift != self.logit_shift:
            word = "with" if self.logit_shift else "without"
            raise self._refusal(f"logit_shift={lm.logit_shift}", f"It holds models {word} a logit shift: convert to that")
        if lm.causal_context:
            raise self._refusal("a causal context", "Convert with causal_context=false")
        back = self.read_config(self.write_config(lm), self.name).to_dict()
        ours = lm.config.to_dict()
        lost = [name for name in self.stock().to_dict() if name not in OUTSIDE_LAYOUTS and ours.get(name) != back[name]]
        if lost:
            raise self._refusal(f"{lost[0]}={ours.get(lost[0])!r}", "Save it as it is, with lm.save")
        with torch.device("meta"):
            shapes = {name: weight.shape for name, weight in model_class(self.stock.from_dict(back)).state_dict().items()}
        extra = sorted({name for name, weight in lm.model.state_dict().items() if shapes.get(name) != weight.shape})
        if extra:
            raise self._refusal(f"the weight {extra[0]}", "Save it as it is, with lm.save")

    def _refusal(self, what: str, remedy: str) -> ModelError:
        return ModelError(f"the {self.name} layout cannot express {what}", where="layout", remedy=remedy)


LLADA = Family(
    name="llada",
    model_type="llada",
    architecture="LLaDAModelLM",
    stock=LlamaConfig,
    attention="bidirectional",
    logit_shift=False,
    mask_token_id=126336,
    fields={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "mlp_hidden_size": "intermediate_size",
        "max_sequence_length": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "embedding_size": "vocab_size",  # the rows of the table, which may be more than the tokens
        "rms_norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "weight_tying": "tie_word_embeddings",
        "attention_dropout": "attention_dropout",
        "init_std": "initializer_range",
        "use_cache": "use_cache",
        "eos_token_id": "eos_token_id",
        "pad_token_id": "pad_token_id",
    },
    constants={
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "multi_query_attention": None,
        "rope": True,
        "scale_logits": False,
    },
    weights={
        "model.transformer.wte": "model.embed_tokens",
        "model.transformer.ln_f": "model.norm",
        "model.transformer.ff_out": "lm_head",
        "model.transformer.blocks.*.attn_norm": "model.layers.*.input_layernorm",
        "model.transformer.blocks.*.q_proj": "model.layers.*.self_attn.q_proj",
        "model.transformer.blocks.*.k_proj": "model.layers.*.self_attn.k_proj",
        "model.transformer.blocks.*.v_proj": "model.layers.*.self_attn.v_proj",
        "model.transformer.blocks.*.attn_out": "model.layers.*.self_attn.o_proj",
        "model.transformer.blocks.*.ff_norm": "model.layers.*.post_attention_layernorm",
        "model.transformer.blocks.*.ff_proj": "model.layers.*.mlp.gate_proj",  # the activation is on this one
        "model.transformer.blocks.*.up_proj": "model.layers.*.mlp.up_proj",
        "model.transformer.blocks.*.ff_out": "model.layers.*.mlp.down_proj",
    },
)
DREAM = Family(
    name="dream",
    model_type="Dream",
    architecture="DreamModel",
    stock=Qwen2Config,
    attention="bidirectional",
    logit_shift=True,
    mask_token_id=151666,
    frozen_padding=True,
    fields=QWEN_FIELDS | {"pad_token_id": "pad_token_id"},
    constants=NO_WINDOWS | {"use_mrope": False},
)
SDAR = Family(
    name="sdar",
    model_type="sdar",
    architecture="SDARForCausalLM",
    stock=Qwen3Config,
    attention="block_causal",
    logit_shift=False,
    block_size=4,
    mask_token_id=151669,
    fields=QWEN_FIELDS | {"head_dim": "head_dim", "attention_bias": "attention_bias"},
    constants=NO_WINDOWS,
    auto_map={"AutoConfig": "configuration_sdar.SDARConfig"},
    code={"configuration_sdar.py": SDAR_CONFIG_CODE},
)
FAMILIES = {family.name: family for family in (LLADA, DREAM, SDAR)}
STOCK_LAYOUT = "hf"
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES.values()}
LOCAL_TOKENIZERS = {"DreamTokenizer": "qwen2"}
"""Tokenizer classes that come as code with a model, and the model type whose class in transformers does the same."""


def export(lm: DiffusionLM, path: str | pathlib.Path, layout: str) -> None:
    """Write a model in the layout of a released family, or a causal one as stock: config.json, weights, tokenizer, model card.

    Args:
        lm: the model, with its adapters merged in.
        path: the folder, made if need be.
        layout: "llada" (bidirectional Llama), "dream" (bidirectional Qwen2 with a logit shift), "sdar" (block-causal Qwen3) or "hf"
            (a causal model of any architecture, `export_stock`).

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
    state = lm.model.state_dict()
    if lm.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_torch_state_dict({family.published_name(name): weight for name, weight in state.items()}, folder)
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


def _pattern(name: str) -> str:
    return "^" + re.escape(name).replace(r"\*", r"(\d+)") + r"\."


def _replacement(name: str) -> str:
    return name.replace("*", r"\1") + "."


def _stock_value(config: PretrainedConfig, name: str) -> Any:
    """A field of a stock config; rotary settings by the names they had in transformers 4, which published configs use."""
    if name == "rope_theta":
        return config.rope_parameters["rope_theta"]
    if name == "rope_scaling":
        scaling = {key: value for key, value in config.rope_parameters.items() if key != "rope_theta"}
        return None if scaling == {"rope_type": "default"} else scaling
    return getattr(config, name)
