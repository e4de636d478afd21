"""PEFT adapters on a model, and quantised weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unmask.errors import ConfigError, first_line
from unmask.models.diffusion_lm import DiffusionLM

if TYPE_CHECKING:
    import peft


def has_adapters(lm: DiffusionLM) -> bool:
    """Whether the model has PEFT adapters."""
    return hasattr(lm.model, "merge_and_unload")


def quantised(lm: DiffusionLM) -> bool:
    """Whether the weights are quantised to 4 or 8 bits."""
    return getattr(lm.model, "is_quantized", False)


def with_adapters(lm: DiffusionLM, peft_config: peft.PeftConfig) -> DiffusionLM:
    """The model with PEFT adapters; only these are trained.

    Raises:
        ConfigError: PEFT finds no module for them, or one would be on the output head, which computes selected rows only.
    """
    from peft import prepare_model_for_kbit_training

    if quantised(lm):  # 16-bit parameters become float32; the trainer sets checkpointing
        prepare_model_for_kbit_training(lm.model, use_gradient_checkpointing=False)
    return add_adapters(lm, peft_config)


def add_adapters(lm: DiffusionLM, peft_config: peft.PeftConfig) -> DiffusionLM:
    """As `with_adapters`, with quantised weights as they are: for inference."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    try:
        with _untied(lm) if getattr(peft_config, "trainable_token_indices", None) else nullcontext():
            adapted = _wrapped(lm.model, peft_config)
    except (TypeError, ValueError) as error:
        where = "lora (peft_config), target_modules or modules_to_save"
        raise ConfigError(first_line(error).rstrip("."), where=where, remedy="Name modules of this model") from error
    if isinstance(adapted.get_output_embeddings(), BaseTunerLayer):
        remedy = "Leave it out of target_modules, or train all of it with modules_to_save"
        raise ConfigError("an adapter of the output head", where="lora (peft_config), target_modules", remedy=remedy)
    return lm.bind(adapted)


def _wrapped(model: Any, peft_config: peft.PeftConfig) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT 0.21 reads it
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)  # which it writes for stacked experts
        return get_peft_model(model, peft_config)


def with_trained_mask_row(peft_config: peft.PeftConfig, lm: DiffusionLM) -> peft.PeftConfig:
    """The config of adapters, with the full embedding row of the mask token.

    Raises:
        ConfigError: PEFT cannot train rows with adapters of this kind, or the config names the embedding table.
    """
    if not hasattr(peft_config, "trainable_token_indices"):
        what = f"{type(peft_config).__name__} cannot train the embedding row of the mask token"
        raise ConfigError(what, where="lora (peft_config)", remedy="Use LoRA")
    table = "." + next(name for name, module in lm.model.named_modules() if module is lm.model.get_input_embeddings())
    for setting in ("target_modules", "modules_to_save"):
        named = getattr(peft_config, setting, None) or ()
        if not isinstance(named, str) and any(table.endswith(f".{name}") for name in named):
            remedy = "Leave it out: the row of the mask token is trained anyway"
            raise ConfigError("names the embedding table", where=f"lora (peft_config), {setting}", remedy=remedy)
    tokens = peft_config.trainable_token_indices or []
    if isinstance(tokens, dict):
        what, remedy = "rows of the embedding table are named by module", "Give trainable_token_indices as a list of tokens"
        raise ConfigError(what, where="lora (peft_config), trainable_token_indices", remedy=remedy)
    return replace(peft_config, trainable_token_indices=sorted({*tokens, lm.mask_token_id}))


@contextmanager
def _untied(lm: DiffusionLM) -> Iterator[None]:
    """Inside, PEFT treats the head as untied from the embedding table: a trained row of the table does not change the head, which computes
    selected rows only. Merging changes both."""
    tied, lm.model.config.tie_word_embeddings = lm.model.config.tie_word_embeddings, False
    try:
        yield
    finally:
        lm.model.config.tie_word_embeddings = tied


def starts_at_base(lm: DiffusionLM) -> bool:
    """Whether the base model under the adapters is still the model before training: LoRA that starts at zero, no other trained weights."""
    if any(getattr(config, "bias", "none") != "none" for config in lm.model.peft_config.values()):
        return False
    weights = dict(lm.model.named_parameters())
    names = [(name, name.replace(".lora_A.", ".lora_B.").replace(".lora_embedding_A.", ".lora_embedding_B.")) for name in weights]
    pairs = [(weights[a], weights[b]) for a, b in names if a != b]
    return bool(pairs) and not any(a.any() and b.any() for a, b in pairs)


def merged(lm: DiffusionLM) -> DiffusionLM:
    """A copy of the model with its adapters merged into the weights. Quantised weights are dequantised, since rounding would lose most of
    the update."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model = lm.frozen_copy().model
    if quantised(lm):
        config, adapters = model.active_peft_config, get_peft_model_state_dict(model, save_embedding_layers=False)
        model = _wrapped(model.unload().dequantize(), config)
        set_peft_model_state_dict(model, adapters)
    return lm.bind(model.merge_and_unload())


def without_tables(lm: DiffusionLM) -> None:
    """Make PEFT save only adapters: it would also save embedding tables when the vocabulary differs from the base model's."""
    for adapters in getattr(lm.model, "peft_config", {}).values():
        adapters.base_model_name_or_path = None  # restored when they are saved
