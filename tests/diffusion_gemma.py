"""A tiny DiffusionGemma with random weights, and `generate` of transformers with Unmask's random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaGenerationConfig,
    PreTrainedModel,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationMixin,
    EntropyBoundSamplerConfig,
)

from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.diffusion.rng import RngStream, uniform
from unmask.generation.canvas import CanvasSettings, random_tokens
from unmask.generation.policies import draw
from unmask.generation.requests import Request
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,!?0"
CANVAS = 8
GAIN = 0.3
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
TEXT: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 12,
    "num_global_key_value_heads": 1,
    "layer_types": LAYERS,
    "sliding_window": 6,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
    "max_position_embeddings": 256,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 64,
}


@torch.no_grad()
def published_model(
    alphabet: str = ALPHABET, *, canvas: int = CANVAS, gain: float = GAIN, **text: Any
) -> PreTrainedModel:
    """The model of transformers, whose encoder and decoder differ in the scale of their layers. `gain`: of
    self-conditioning; with much of it, rounding grows from step to step until it changes tokens."""
    tokenizer = character_tokenizer(alphabet)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    settings = TEXT | {"vocab_size": len(tokenizer)} | ids | text
    config = DiffusionGemmaConfig(text_config=settings, vision_config=VISION, canvas_length=canvas)
    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    for name, weight in model.named_parameters():
        weight.normal_(*((0, weight.shape[-1] ** -0.5) if weight.dim() > 1 else (1, 0.2)))
        if "self_conditioning" in name and weight.dim() > 1:
            weight *= gain
    for name, scale in model.named_buffers():
        if "layer_scalar" in name:
            scale.uniform_(0.6, 1.1)
    return model


def save_published(folder: Path, alphabet: str = ALPHABET, **settings: Any) -> PreTrainedModel:
    """Write such a model with its tokenizer."""
    model = published_model(alphabet, **settings)
    model.save_pretrained(folder)
    character_tokenizer(alphabet).save_pretrained(folder)
    return model


@contextmanager
def exact() -> Iterator[None]:
    """Compute in float64 where transformers computes in float32, for models that were loaded before: rounding
    would grow from step to step, and differ between machines."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def exact_models(folder: Path, **settings: Any) -> tuple[DiffusionLM, PreTrainedModel]:
    """Such a model in float64 as Unmask and as transformers read it."""
    save_published(folder, **settings)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")
    return load(folder, dtype="float64"), model


def loaded(folder: Path, **settings: Any) -> DiffusionLM:
    """Such a model as Unmask reads it."""
    save_published(folder, **settings)
    return load(folder)


def generated(
    model: PreTrainedModel,
    lm: DiffusionLM,
    requests: Sequence[Request],
    config: SamplerConfig,
    generation: DiffusionGemmaGenerationConfig | None = None,
) -> list[list[int]]:
    """The completions of `generate` of transformers, with left padding, and keyed random numbers in place of
    its own. All sequences must take as many steps, or there be one. `generation`: its settings; None: those
    of `config`."""
    settings, canvas = CanvasSettings.of(lm, config), model.config.canvas_length
    starts = [request.start for request in requests]
    key_B1 = torch.tensor([[request.key] for request in requests])
    passes = number = 0
    ids_BT, mask_BT = torch.zeros(2, len(requests), max(starts), dtype=torch.long)
    for row, request in enumerate(requests):
        ids_BT[row, max(starts) - request.start :] = torch.tensor(request.prompt)
        mask_BT[row, max(starts) - request.start :] = 1

    def where(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        position_BT = torch.tensor(starts)[:, None] + (number - 1) * canvas + torch.arange(canvas)
        key_BT = key_B1.expand_as(position_BT)
        return key_BT, torch.full_like(key_BT, step), position_BT

    def randint(**_: Any) -> torch.Tensor:
        return random_tokens(lm, config.seed, *where(passes))

    def multinomial(share_NV: torch.Tensor, **_: Any) -> torch.Tensor:
        nonlocal passes
        key_BT, step_BT, position_BT = where(passes)
        passes += 1
        how: dict[str, Any] = {"step": step_BT, "position": position_BT, "stream": RngStream.TOKEN}
        return draw(share_NV, uniform(config.seed, key_BT, **how).flatten())[:, None]

    prepare = DiffusionGemmaGenerationMixin._prepare_denoiser_inputs

    def next_canvas(*arguments: Any, **named: Any) -> tuple:
        nonlocal number
        number += 1
        return prepare(*arguments, **named)

    generation = generation or DiffusionGemmaGenerationConfig(
        max_new_tokens=config.max_new_tokens,
        max_denoising_steps=settings.max_denoising_steps,
        t_min=settings.t_min,
        t_max=settings.t_max,
        stability_threshold=settings.stability_threshold,
        confidence_threshold=settings.confidence_threshold,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=settings.entropy_bound),
    )
    generation.eos_token_id = lm.eos_token_id if config.stop_at_eos else None
    generation.pad_token_id = model.config.text_config.pad_token_id
    with (
        mock.patch("torch.randint", randint),
        mock.patch("torch.multinomial", multinomial),
        mock.patch.object(DiffusionGemmaGenerationMixin, "_prepare_denoiser_inputs", next_canvas),
    ):
        if not config.stop_at_eos:  # it would be that of the model
            model.generation_config.eos_token_id = None
        found = model.generate(input_ids=ids_BT, attention_mask=mask_BT, generation_config=generation)
    sequences = getattr(found, "sequences", found)
    return sequences[:, max(starts) :].tolist()
