"""Loads tokenizers of released diffusion models with stock classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from unmask.errors import ModelError

LOCAL_TOKENIZERS = {"DreamTokenizer": "qwen2"}
"""Tokenizer classes of remote code, and the model types whose classes in transformers are equivalent."""


def tokenizer_choice(where: str, hub_options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `AutoTokenizer.from_pretrained` that load a released tokenizer without remote code."""
    named = get_tokenizer_config(where, revision=hub_options.get("revision")).get("tokenizer_class")
    # Without a config AutoTokenizer would read config.json, and ask about the remote code that it names.
    choice = (
        {"tokenizer_type": LOCAL_TOKENIZERS[named]}
        if named in LOCAL_TOKENIZERS
        else {"config": PretrainedConfig()}
    )
    return {**hub_options, "trust_remote_code": False, **choice}


def name_mask_token(tokenizer: PreTrainedTokenizerBase, mask_token_id: int, where: str) -> None:
    """Make the token with this id the mask token, which released tokenizers do not declare. Raises ModelError
    if there is no such token."""
    token = tokenizer.convert_ids_to_tokens(mask_token_id) if mask_token_id < len(tokenizer) else None
    if token is None:
        raise ModelError(
            f"the tokenizer has no mask token {mask_token_id}",
            where=where,
            remedy="Use the tokenizer of the released model",
        )
    tokenizer.add_special_tokens({"mask_token": token})
    tokenizer.init_kwargs.pop("auto_map", None)  # which refers to code that is not saved with it
