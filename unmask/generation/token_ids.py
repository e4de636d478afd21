"""`generate` as transformers' models have it: tensors of token ids in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, GenerationError, require_known
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM

READ = {
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"),
    *("max_length", "num_return_sequences", "suppress_tokens"),
}
"""Arguments of transformers' `generate` that mean here what they mean there."""
UNCHANGED = {
    *("eos_token_id", "pad_token_id", "bos_token_id", "use_cache", "return_dict_in_generate"),
    "transformers_version",
}
"""Arguments that have no effect here: a model has its own end tokens, and caches as it can."""


def generate_ids(
    lm: DiffusionLM,
    input_ids: Tensor | None,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    **settings: Any,
) -> Tensor:
    """Complete prompts by denoising.

    Args:
        lm: any attention pattern.
        input_ids: [B, P] prompts, padded on any side if there is an `attention_mask`.
        attention_mask: [B, P]; 0 is padding.
        generation_config: as in transformers; None: the model's.
        settings: those of `SamplerConfig`, and of transformers `do_sample`, `max_length`,
            `num_return_sequences` and `suppress_tokens`. Without `do_sample` the temperature is 0. With it,
            the seed is drawn from torch's generator, unless `seed` is given.

    Returns:
        [B, P + N]: each prompt as it was given and its completion, padded on the right.

    Raises:
        GenerationError: no prompts, or prompts and settings that do not fit the model.
        ConfigError: an argument of transformers that a diffusion model has no use for.
    """
    if input_ids is None or input_ids.ndim != 2:
        raise GenerationError(
            "no prompts" if input_ids is None else f"a tensor of {input_ids.ndim} dimensions",
            where="input_ids",
            remedy="Give token ids, one row per prompt: tokenizer(texts, return_tensors='pt', padding=True)",
        )
    stock = lm.model.generation_config if generation_config is None else generation_config
    given = {} if generation_config is None else generation_config.to_dict()
    _refuse_unread({name: value for name, value in (given | settings).items() if value is not None})
    asked = {name: settings.pop(name) if name in settings else getattr(stock, name) for name in READ}
    own = {name: value for name, value in settings.items() if name not in UNCHANGED}
    if asked["do_sample"]:
        own |= {name: asked[name] for name in ("top_k", "top_p", "min_p") if asked[name] is not None}
        own["temperature"] = 1.0 if asked["temperature"] is None else asked["temperature"]
        own.setdefault("seed", int(torch.randint(2**31, ())))  # which `set_seed` of transformers decides
    if asked["max_new_tokens"] or asked["max_length"]:
        own["max_new_tokens"] = asked["max_new_tokens"] or asked["max_length"] - input_ids.shape[1]
    if asked["repetition_penalty"]:
        own["repetition_penalty"] = asked["repetition_penalty"]
    if asked["suppress_tokens"]:
        own["forbidden_tokens"] = [*asked["suppress_tokens"], *own.get("forbidden_tokens", ())]
    config = SamplerConfig(**own)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    copies = asked["num_return_sequences"] or 1
    rows = [
        row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True) for _ in range(copies)
    ]
    done = generate(lm, rows, config)
    longest = max(map(len, done.tokens))
    ends = torch.tensor([tokens + [lm.pad_token_id] * (longest - len(tokens)) for tokens in done.tokens])
    return torch.cat([input_ids.repeat_interleave(copies, 0), ends.to(input_ids)], 1)


def _refuse_unread(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that are not read."""
    known = {*READ, *UNCHANGED, *SamplerConfig.model_fields}
    for name in given:
        if name in vars(GenerationConfig()) and name not in known:
            raise ConfigError(
                "has no meaning where tokens are not written from left to right",
                where=name,
                remedy=f"Leave it out. Read are {', '.join(sorted(READ))} and SamplerConfig's settings",
            )
        require_known(name, known, "argument", where="generate")
