"""Adapters of PEFT around a model, and weights held in few bits."""

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
    """Whether adapters of PEFT stand around the model."""
    return hasattr(lm.model, "merge_and_unload")


def quantised(lm: DiffusionLM) -> bool:
    """Whether the weights are held in 4 or 8 bits."""
    return getattr(lm.model, "is_quantized", False)


def with_adapters(lm: DiffusionLM, peft_config: peft.PeftConfig) -> DiffusionLM:
    """The model with adapters of PEFT around it; only they are trained.

    Raises:
        ConfigError: PEFT finds no place for them, or one would stand beside the output head, which computes only the rows asked for.
    """
    from peft import prepare_model_for_kbit_training
    from peft.tuners.tuners_utils import BaseTunerLayer

    if quantised(lm):  # what is left of 16 bits becomes float32; checkpointing is switched by the trainer
        prepare_model_for_kbit_training(lm.model, use_gradient_checkpointing=False)
    try:
        with _untied(lm) if getattr(peft_config, "trainable_token_indices", None) else nullcontext():
            adapted = _wrapped(lm.model, peft_config)
    except (TypeError, ValueError) as error:
        where = "lora (peft_config), target_modules or modules_to_save"
        raise ConfigError(first_line(error).rstrip("."), where=where, remedy="Name modules of this model") from error
    if isinstance(adapted.get_output_embeddings(), BaseTunerLayer):
        remedy = "Leave it out of target_modules, or train all of it with modules_to_save"
        raise ConfigError("an adapter of the output head", where="peft_config, target_modules", remedy=remedy)
    return lm.bind(adapted)


def _wrapped(model: Any, peft_config: peft.PeftConfig) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT 0.21 asks for it
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)  # which it makes for stacked experts
        return get_peft_model(model, peft_config)


def training_mask_row(peft_config: peft.PeftConfig, lm: DiffusionLM) -> peft.PeftConfig:
    """The same adapters, beside which the embedding row of the mask token is trained whole.

    Raises:
        ConfigError: PEFT does not train rows beside adapters of this kind, or the config names the embedding table itself.
    """
    if not hasattr(peft_config, "trainable_token_indices"):
        what = f"{type(peft_config).__name__} trains no embedding row, and the mask token needs its own"
        raise ConfigError(what, where="peft_config", remedy="Use LoRA")
    table = "." + next(name for name, module in lm.model.named_modules() if module is lm.model.get_input_embeddings())
    for setting in ("target_modules", "modules_to_save"):
        named = getattr(peft_config, setting, None) or ()
        if not isinstance(named, str) and any(table.endswith(f".{name}") for name in named):
            remedy = "Leave it out: the row of the mask token is trained anyway"
            raise ConfigError("names the embedding table", where=f"lora (peft_config), {setting}", remedy=remedy)
    own = peft_config.trainable_token_indices or []
    if isinstance(own, dict):
        what, remedy = "rows of the embedding table are named by module", "Give trainable_token_indices as a list of tokens"
        raise ConfigError(what, where="peft_config, trainable_token_indices", remedy=remedy)
    return replace(peft_config, trainable_token_indices=sorted({*own, lm.mask_token_id}))


@contextmanager
def _untied(lm: DiffusionLM) -> Iterator[None]:
    """Inside, PEFT does not take the head for tied to the embedding table: rows that are trained there leave the head as it is, which
    computes only the rows asked for. Merged they are in both."""
    tied, lm.model.config.tie_word_embeddings = lm.model.config.tie_word_embeddings, False
    try:
        yield
    finally:
        lm.model.config.tie_word_embeddings = tied


def changes_nothing(lm: DiffusionLM) -> bool:
    """Whether the model with its adapters is what it is with them off, and training changes nothing else: LoRA that starts at zero."""
    if any(getattr(config, "bias", "none") != "none" for config in lm.model.peft_config.values()):
        return False
    weights = dict(lm.model.named_parameters())
    halves = [(half, half.replace(".lora_A.", ".lora_B.").replace(".lora_embedding_A.", ".lora_embedding_B.")) for half in weights]
    pairs = [(weights[one], weights[other]) for one, other in halves if one != other]
    return bool(pairs) and not any(one.any() and other.any() for one, other in pairs)


def merged(lm: DiffusionLM) -> DiffusionLM:
    """A copy of the model with its adapters merged into the weights, which are dequantised first: rounded again, they would
    lose most of what was learnt."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model = lm.frozen_copy().model
    if quantised(lm):
        config, adapters = model.active_peft_config, get_peft_model_state_dict(model, save_embedding_layers=False)
        model = _wrapped(model.unload().dequantize(), config)
        set_peft_model_state_dict(model, adapters)
    return lm.bind(model.merge_and_unload())


def without_tables(lm: DiffusionLM) -> None:
    """Have PEFT save adapters alone. It would write whole embedding tables beside them where the vocabulary is not that of the base, in
    which nothing else is new."""
    for adapters in getattr(lm.model, "peft_config", {}).values():
        adapters.base_model_name_or_path = None  # is filled in again when they are written
