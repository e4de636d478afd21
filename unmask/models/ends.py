"""The tokens that end a text: the tokenizer names one, which also fills canvases; configs and the chat template may name others."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.errors import ModelError
from unmask.models.chat_template import turn_end
from unmask.models.generation_config import as_ids, set_end_tokens

if TYPE_CHECKING:
    from unmask.models.diffusion_lm import DiffusionLM


def resolve_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int] | None) -> tuple[int, ...]:
    """The end tokens of a model: the tokenizer's EOS first, the others in order. Also sets them in its generation config.

    `eos_token_ids` are those besides the tokenizer's EOS; None: those of generation config, config and chat template. Raises ModelError if
    one of them is the mask token or outside the vocabulary.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    for token in as_ids(eos_token_ids):
        if not isinstance(token, int):
            raise ModelError(f"{token!r} is not a token id", where="eos_token_ids", remedy="Give ids of end tokens, as integers")
        if token == tokenizer.mask_token_id or not 0 <= token < rows:
            what = f"{token} is {'the mask token' if token == tokenizer.mask_token_id else f'outside the vocabulary of {rows}'}"
            raise ModelError(what, where="eos_token_ids", remedy="Give ids of tokens that end a text, or leave it out")
    ends = _eos_first(tokenizer, _declared_ends(model, tokenizer) if eos_token_ids is None else as_ids(eos_token_ids))
    set_end_tokens(model, ends)
    return ends


def set_chat_template(lm: DiffusionLM, template: str, *, ends: bool = True) -> None:
    """Set the tokenizer's chat template; unless `ends` is False, the token that ends its turns becomes an end token."""
    lm.tokenizer.chat_template = template
    if not ends:
        return
    lm.eos_token_ids = _eos_first(lm.tokenizer, {*lm.eos_token_ids, *as_ids(turn_end(lm.tokenizer))})
    set_end_tokens(lm.model, lm.eos_token_ids)


def _declared_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens that the chat template and the configs name. Those of configs count only among the tokens added to the vocabulary:
    the default of a config class (2 in Llama's) is a word in many vocabularies."""
    configs = [model.config, model.config.get_text_config(), getattr(model, "generation_config", None)]
    named = {token for config in configs for token in as_ids(getattr(config, "eos_token_id", None)) if isinstance(token, int)}
    return named & (tokenizer.added_tokens_decoder.keys() - {tokenizer.mask_token_id}) | {*as_ids(turn_end(tokenizer))}


def _eos_first(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*as_ids(tokenizer.eos_token_id), *sorted(eos_token_ids)]))
