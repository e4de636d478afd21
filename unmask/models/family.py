"""The format of a released model: reading and writing its config and weights.

A family maps the fields of its config.json and the names of its weights to those of a model of transformers.
Reading and writing both follow from it; no code of a released model is run or shipped.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Split,
    WeightConverter,
    WeightRenaming,
    revert_weight_conversion,
)

from unmask.config.run import AttentionName
from unmask.errors import ModelError
from unmask.models.auto_config import SETTINGS_KEY
from unmask.models.diffusion_lm import DiffusionLM

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
FIELDS_OUTSIDE_FORMATS = {
    *(
        "architectures",
        "dtype",
        "transformers_version",
        "_name_or_path",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
}
"""Fields of a stock config that a format may lack: its origin, the tokenizer's ids, and sliding windows,
which only causal models use."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A released model's format on disk."""

    name: str  # of the format
    model_type: str  # in config.json
    architecture: str  # in config.json
    aliases: tuple[str, ...] = ()  # other model types of the same config in published code
    config_class: type[PretrainedConfig]  # the config class of transformers that computes the same
    attention: AttentionName  # of the released models, as is the logit shift
    logit_shift: bool
    # of the attention, if config.json lacks it; None for a family without blocks
    block_size: int | None = None
    block_field: str = "block_size"  # its name in config.json
    mask_token_id: int  # if config.json lacks it; released code and engines assume it
    # the released model never trains the padding token's embedding (`nn.Embedding(padding_idx=...)`)
    frozen_padding: bool = False
    fields: Mapping[str, str]  # config.json name: field of the stock config
    # values of the stock config's fields that config.json lacks
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # the name in config.json of the list of layers with experts (1) or without (0); None: there is none
    sparse_layers: str | None = None
    constants: Mapping[str, Any]  # further fields of config.json; another value is another architecture
    # values that the stock class computes differently
    refused: Mapping[str, Any] = field(default_factory=dict)
    # part of a name in the file: the same in the stock model, replaced one after the other; a tuple: the file
    # holds these weights in one tensor
    weights: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    # in config.json, to Python code, which runs only with trust_remote_code
    auto_map: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)  # Python files beside config.json

    @contextlib.contextmanager
    def converting(self) -> Iterator[None]:
        """Let transformers convert weights between their published and their stock names, also where a tensor
        holds several weights. Elsewhere stock models of the class are saved under their own names."""
        conversions = [
            WeightRenaming(published, stock)
            if isinstance(stock, str)
            else WeightConverter(f"{published}.weight", [f"{part}.weight" for part in stock], [Split(dim=0)])
            for published, stock in self.weights.items()
        ]
        name = MODEL_FOR_CAUSAL_LM_MAPPING[self.config_class].__name__
        register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
        try:
            yield
        finally:
            register_checkpoint_conversion_mapping(name, [], overwrite=True)

    def published_weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The weights of a stock model by their published names, each expert separately."""
        bare = copy.copy(model)
        bare._weight_conversions = None  # those with which it was loaded
        state = model.state_dict()
        if model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        with self.converting():
            state = revert_weight_conversion(bare, state)
        # those that share a storage would be saved under one name
        return {
            name: weight if weight.nbytes == weight.untyped_storage().nbytes() else weight.clone()
            for name, weight in state.items()
        }

    def read_config(self, published: Mapping[str, Any], where: str) -> PretrainedConfig:
        """The stock config of a published one, with the settings that `unmask.load` reads.

        Raises:
            ModelError: an architecture or a setting that the stock class does not compute.
        """
        remedy = f"Unmask reads {self.architecture} models"
        architecture = (published.get("architectures") or [self.architecture])[0]
        if architecture != self.architecture:
            raise ModelError(
                f"a {self.model_type} config of another architecture, {architecture}",
                where=where,
                remedy=remedy,
            )
        for name, value in self.constants.items():
            if published.get(name) not in (None, value):
                raise ModelError(
                    f"{name} is {published[name]!r}, and only {value!r} is supported",
                    where=where,
                    remedy=remedy,
                )
        for name, value in self.refused.items():
            if published.get(name) == value:
                raise ModelError(f"{name} is {value!r}, which is not supported", where=where, remedy=remedy)
        values = dict(self.defaults) | {
            stock: published[name] for name, stock in self.fields.items() if published.get(name) is not None
        }
        if lacking := [name for name, stock in self.fields.items() if stock in SIZES and stock not in values]:
            raise ModelError(f"the config lacks {', '.join(lacking)}", where=where, remedy=remedy)
        if self.sparse_layers and (kinds := published.get(self.sparse_layers)):
            if not isinstance(kinds, list) or len(kinds) != values["num_hidden_layers"]:
                raise ModelError(
                    f"{self.sparse_layers} is {kinds!r}, and not a number for each of "
                    f"{values['num_hidden_layers']} layers",
                    where=where,
                    remedy=remedy,
                )
            values["mlp_only_layers"] = [layer for layer, sparse in enumerate(kinds) if not sparse]
        config = self.config_class(**values)
        settings = {
            "attention": self.attention,
            "block_size": self.block_size and published.get(self.block_field, self.block_size),
            "mask_token_id": published.get("mask_token_id", self.mask_token_id),
            "logit_shift": self.logit_shift,
            "padding_idx": published.get("pad_token_id") if self.frozen_padding else None,
        }
        setattr(config, SETTINGS_KEY, settings)
        return config

    def write_config(self, lm: DiffusionLM) -> dict[str, Any]:
        """The config.json of a model in this format."""
        layers = range(lm.config.num_hidden_layers)
        return {
            "architectures": [self.architecture],
            **({"auto_map": dict(self.auto_map)} if self.auto_map else {}),
            "model_type": self.model_type,
            **{name: _stock_value(lm.config, stock) for name, stock in self.fields.items()},
            **(
                {self.sparse_layers: [int(layer not in lm.config.mlp_only_layers) for layer in layers]}
                if self.sparse_layers
                else {}
            ),
            **self.constants,
            "mask_token_id": lm.mask_token_id,
            **({self.block_field: lm.block_size} if self.block_size else {}),
            "torch_dtype": str(next(lm.model.parameters()).dtype).removeprefix("torch."),
        }

    def check(self, lm: DiffusionLM) -> None:
        """Raise ModelError unless this format can express the model."""
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[self.config_class]
        if type(lm.model) is not model_class:
            raise self._refusal(
                f"a {type(lm.model).__name__}", f"Merge the adapters, and use a {model_class.__name__}"
            )
        if lm.attention != self.attention:
            raise self._refusal(f"{lm.attention} attention", f"Convert it to {self.attention} attention")
        if lm.logit_shift != self.logit_shift:
            word = "with" if self.logit_shift else "without"
            raise self._refusal(f"logit_shift={lm.logit_shift}", f"Convert it {word} a logit shift")
        if lm.causal_context:
            raise self._refusal("a causal context", "Convert with causal_context=false")
        before, after = lm.config.to_dict(), self.read_config(self.write_config(lm), self.name).to_dict()
        lost = [
            name
            for name in self.config_class().to_dict()
            if name not in FIELDS_OUTSIDE_FORMATS and before.get(name) != after[name]
        ]
        if lost:
            raise self._refusal(f"{lost[0]}={before.get(lost[0])!r}", "Save it as it is, with lm.save")
        with torch.device("meta"):
            shapes = {
                name: weight.shape
                for name, weight in model_class(self.config_class.from_dict(after)).state_dict().items()
            }
        if extra := sorted(
            {name for name, weight in lm.model.state_dict().items() if shapes.get(name) != weight.shape}
        ):
            raise self._refusal(f"the weight {extra[0]}", "Save it as it is, with lm.save")

    def _refusal(self, what: str, remedy: str) -> ModelError:
        return ModelError(f"the {self.name} format cannot express {what}", where="layout", remedy=remedy)


def _stock_value(config: PretrainedConfig, name: str) -> Any:
    """A field of a stock config; rotary settings by their names in transformers 4, which published configs
    use."""
    if name == "rope_theta":
        return config.rope_parameters["rope_theta"]
    if name == "partial_rotary_factor":
        return config.rope_parameters.get(name, 1.0)
    if name == "head_dim":
        return getattr(config, name, None) or config.hidden_size // config.num_attention_heads
    if name == "rope_scaling":
        scaling = {
            key: value
            for key, value in config.rope_parameters.items()
            if key not in ("rope_theta", "partial_rotary_factor")
        }
        return None if scaling == {"rope_type": "default"} else scaling
    return getattr(config, name)
