"""The tokens that end a text: read when a model is loaded, stored in its settings and in generation_config.json.

A model may have several: the tokenizer names one, generation_config.json others, and the chat template ends a turn with one of them. The
tokenizer's is the only one that fills canvases.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.errors import ModelError
from unmask.models.chat_template import turn_end

if TYPE_CHECKING:
    from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.generation_config import as_ids, name_ends


def resolve_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int] | None) -> tuple[int, ...]:
    """The end tokens of a model: the tokenizer's EOS first, the others in order. Also sets them in its generation config.

    Args:
        eos_token_ids: those besides the tokenizer's EOS; None: those of generation config, config and chat template.

    Raises:
        ModelError: one of them is the mask token, or outside the vocabulary.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    for token in as_ids(eos_token_ids):
        if not isinstance(token, int):
            raise ModelError(f"{token!r} is no token id", where="eos_token_ids", remedy="Give ids of tokens that end a text, as integers")
        if token == tokenizer.mask_token_id or not 0 <= token < rows:
            what = f"{token} is {'the mask token' if token == tokenizer.mask_token_id else f'outside the vocabulary of {rows}'}"
            raise ModelError(what, where="eos_token_ids", remedy="Give ids of tokens that end a text, or leave it out")
    ends = _in_order(tokenizer, _find(model, tokenizer) if eos_token_ids is None else as_ids(eos_token_ids))
    name_ends(model, ends)
    return ends


def set_chat_template(lm: DiffusionLM, template: str, *, ends: bool = True) -> None:
    """Set the tokenizer's chat template; unless `ends` is False, the token that ends its turns becomes an end token."""
    lm.tokenizer.chat_template = template
    if not ends:
        return
    lm.eos_token_ids = _in_order(lm.tokenizer, {*lm.eos_token_ids, *as_ids(turn_end(lm.tokenizer))})
    name_ends(lm.model, lm.eos_token_ids)


def _find(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens that the configs name, among those added to the vocabulary: a config class has a default (2 in Llama's), which is a
    word in many vocabularies."""
    configs = [model.config, model.config.get_text_config(), getattr(model, "generation_config", None)]
    named = {token for config in configs for token in as_ids(getattr(config, "eos_token_id", None)) if isinstance(token, int)}
    return named & (tokenizer.added_tokens_decoder.keys() - {tokenizer.mask_token_id}) | {*as_ids(turn_end(tokenizer))}


def _in_order(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*as_ids(tokenizer.eos_token_id), *sorted(eos_token_ids)]))
