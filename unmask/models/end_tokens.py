"""The tokens that end a text: the tokenizer names one, which also fills canvases; configs and the chat
template may name others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from unmask.errors import ModelError
from unmask.models.chat_template import turn_end


def resolve_end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int] | None
) -> tuple[int, ...]:
    """The end tokens of a model: the tokenizer's EOS first, the others in order. Also sets them in its
    generation config.

    `eos_token_ids` are those besides the tokenizer's EOS; None: those of generation config, config and chat
    template. Raises ModelError if one of them is the mask token or outside the vocabulary.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    for token in as_ids(eos_token_ids):
        if not isinstance(token, int):
            raise ModelError(
                f"{token!r} is not a token id",
                where="eos_token_ids",
                remedy="Give ids of end tokens, as integers",
            )
        if token == tokenizer.mask_token_id or not 0 <= token < rows:
            is_mask = token == tokenizer.mask_token_id
            what = "the mask token" if is_mask else f"outside the vocabulary of {rows}"
            raise ModelError(
                f"{token} is {what}",
                where="eos_token_ids",
                remedy="Give ids of tokens that end a text, or leave it out",
            )
    ends = eos_first(
        tokenizer, _declared_end_tokens(model, tokenizer) if eos_token_ids is None else as_ids(eos_token_ids)
    )
    set_end_tokens(model, ends)
    return ends


def _declared_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens that the chat template and the configs name. Those of configs count only among the
    tokens added to the vocabulary: the default of a config class (2 in Llama's) is a word in many
    vocabularies."""
    configs = [model.config, model.config.get_text_config(), getattr(model, "generation_config", None)]
    named = {
        token
        for config in configs
        for token in as_ids(getattr(config, "eos_token_id", None))
        if isinstance(token, int)
    }
    return named & (tokenizer.added_tokens_decoder.keys() - {tokenizer.mask_token_id}) | {
        *as_ids(turn_end(tokenizer))
    }


def eos_first(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """The end tokens with the tokenizer's EOS, which comes first."""
    return tuple(dict.fromkeys([*as_ids(tokenizer.eos_token_id), *sorted(eos_token_ids)]))


def as_ids(value: int | Collection[int] | None) -> Collection[int]:
    """The ids of an `eos_token_id`, which may be one, several or None."""
    return [] if value is None else value if isinstance(value, Collection) else [value]


def set_end_tokens(model: Any, ends: Sequence[int]) -> None:
    """Set the end tokens of generation_config.json, at which transformers, vLLM and other engines stop."""
    generation = getattr(model, "generation_config", None)
    if generation is not None and ends and {*as_ids(generation.eos_token_id)} != {*ends}:
        generation.eos_token_id = list(ends) if len(ends) > 1 else ends[0]
        generation._from_model_config = False  # else transformers may rebuild it from the config


def accept_generation_config(generation: GenerationConfig | None) -> None:
    """Let transformers save a generation config unchanged. Many published ones have a temperature without
    `do_sample`. It refuses to save these after a change, such as of the end tokens here or of special tokens
    in its trainer."""
    if generation is not None:
        generation._original_object_hash = hash(generation)
