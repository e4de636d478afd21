"""The generation config saved with a model: its end tokens, and values that transformers refuses to save."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from transformers import GenerationConfig


def accept_generation_config(generation: GenerationConfig | None) -> None:
    """Let transformers save a generation config unchanged. Many published ones have a temperature without `do_sample`. It refuses to save
    these after a change, such as of the end tokens here or of special tokens in its trainer."""
    if generation is not None:
        generation._original_object_hash = hash(generation)


def set_end_tokens(model: Any, ends: Sequence[int]) -> None:
    """Set the end tokens of generation_config.json, at which transformers, vLLM and other engines stop."""
    generation = getattr(model, "generation_config", None)
    if generation is not None and ends and {*as_ids(generation.eos_token_id)} != {*ends}:
        generation.eos_token_id = list(ends) if len(ends) > 1 else ends[0]
        generation._from_model_config = False  # else transformers may rebuild it from the config


def as_ids(value: int | Collection[int] | None) -> Collection[int]:
    """An `eos_token_id` may be one, several or none."""
    return [] if value is None else value if isinstance(value, Collection) else [value]
