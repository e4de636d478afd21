"""`generate` as transformers' models have it: tensors of token ids in and out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, GenerationError, require_known
from unmask.generation.sampler import generate
from unmask.models.chat_template import as_ids
from unmask.models.diffusion_lm import DiffusionLM

READ = {
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"),
    *("max_length", "num_return_sequences", "suppress_tokens", "return_dict_in_generate"),
}
"""Arguments of transformers' `generate` that mean here what they mean there."""
SPECIAL_TOKENS = {"eos_token_id", "pad_token_id"}
"""Likewise; but those of the model's generation config are its own ones."""
UNCHANGED = {"bos_token_id", "use_cache", "transformers_version", "_from_model_config"}
"""Arguments that change nothing: prompts are never empty, and a model caches as it can."""
ELSEWHERE = vars(GenerationConfig()).keys() | signature(GenerationMixin.generate).parameters.keys()
"""Arguments of transformers' `generate`."""


def generate_ids(
    lm: DiffusionLM,
    input_ids: Tensor | None,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    **settings: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Complete prompts by denoising.

    Args:
        lm: any attention pattern.
        input_ids: [B, P] prompts, padded on any side if there is an `attention_mask`.
        attention_mask: [B, P]; 0 is padding.
        generation_config: as in transformers; what it leaves open is the model's.
        settings: those of `SamplerConfig`, and of transformers `do_sample`, `max_length`,
            `num_return_sequences`, `suppress_tokens`, `eos_token_id`, `pad_token_id` and
            `return_dict_in_generate`. Without `do_sample` the temperature is 0. With it, the seed is drawn
            from torch's generator, unless `seed` is given.

    Returns:
        [B, P + N]: each prompt as it was given and its completion, padded on the right; or an object with
        these as `sequences`.

    Raises:
        GenerationError: no prompts, or prompts and settings that do not fit the model.
        ConfigError: an argument of transformers that a diffusion model has no use for.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        what = f"a {type(input_ids).__name__} is no tensor of token ids"
        if isinstance(input_ids, Tensor):
            what = f"a tensor of {input_ids.ndim} dimensions"
        raise GenerationError(
            "no prompts" if input_ids is None else what,
            where="input_ids",
            remedy="Give token ids, one row per prompt: tokenizer(texts, return_tensors='pt', padding=True)",
        )
    if not isinstance(generation_config, GenerationConfig | None):
        raise ConfigError(
            f"a {type(generation_config).__name__} is no GenerationConfig of transformers",
            where="generation_config",
            remedy="Give its settings as arguments",
        )
    configured = {} if generation_config is None else _as_fields(generation_config)
    if (sampler := settings.pop("sampler_config", None)) is not None:
        settings["entropy_bound"] = sampler.entropy_bound
    given = {name: value for name, value in configured.items() if value is not None} | settings
    _refuse_unread(given)
    saved = _as_fields(lm.model.generation_config)
    asked = {name: saved.get(name) for name in READ} | given
    if lm.noise == "uniform":  # every step of a canvas draws, at temperatures of its own
        if given.get("do_sample") is False:
            what = "every step of a canvas draws its tokens"
            raise ConfigError(what, where="do_sample", remedy="Leave it out, or lower t_min and t_max")
        asked |= {"do_sample": True, "temperature": given.get("temperature")}
    own = {name: value for name, value in given.items() if name in SamplerConfig.model_fields.keys() - READ}
    if "eos_token_id" in given:
        ends = [*as_ids(given["eos_token_id"])]
        if ends != [*as_ids(lm.model.generation_config.eos_token_id)]:  # as pipelines give it
            lm = copy.copy(lm)
            lm.eos_token_ids = tuple(ends)
    if asked["do_sample"]:
        own |= {name: asked[name] for name in ("top_k", "top_p", "min_p") if asked[name] is not None}
        if asked["temperature"] is not None or lm.noise != "uniform":
            own["temperature"] = 1.0 if asked["temperature"] is None else asked["temperature"]
        own.setdefault("seed", int(torch.randint(2**31, ())))  # which `set_seed` of transformers decides
    if asked["max_new_tokens"] or asked["max_length"]:
        own["max_new_tokens"] = asked["max_new_tokens"] or int(asked["max_length"] or 0) - input_ids.shape[1]
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
    pad = lm.pad_token_id if given.get("pad_token_id") is None else given["pad_token_id"]
    completions = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in done.tokens])
    texts = torch.cat([input_ids.repeat_interleave(copies, 0), completions.to(input_ids)], 1)
    return GenerateDecoderOnlyOutput(sequences=texts) if asked["return_dict_in_generate"] else texts


def _as_fields(config: GenerationConfig) -> dict[str, Any]:
    """The fields of a config of transformers; DiffusionGemma's has that of a sampler within."""
    fields = config.to_dict()
    sampler = fields.pop("sampler_config", None)
    return fields | ({"entropy_bound": sampler["entropy_bound"]} if sampler else {})


def _refuse_unread(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that are not read."""
    known = {*READ, *SPECIAL_TOKENS, *SamplerConfig.model_fields}
    for name, value in given.items():
        if name in UNCHANGED:
            continue
        if name not in ELSEWHERE - known:
            require_known(name, known, "argument", where="generate")
        elif value is not None and value is not False:
            raise ConfigError(
                "has no meaning where tokens are not written from left to right",
                where=name,
                remedy=f"Leave it out. Read are {', '.join(sorted(READ | SPECIAL_TOKENS))} and "
                "SamplerConfig's settings",
            )
