"""A float32 model whose weights follow from keyed numbers, so that outputs of published samplers over it can
be replayed anywhere."""

from __future__ import annotations

import hashlib
from functools import cache

import torch

from tests.tiny import build_causal
from unmask.diffusion.rng import RngStream, uniform
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
# wide, so that some predictions are sure and few nearly tie
SCALES = {"lm_head.weight": 2.4, "model.embed_tokens.weight": 2.0}


@cache
def recorded_model(attention: str, block_size: int | None, logit_shift: bool, seed: int = 0) -> DiffusionLM:
    """A Llama of two layers: weight number i of a parameter is uniform around 0, by (seed, hash of its name,
    i); norms are 1."""
    sizes = {"width": 32, "intermediate_size": 64, "heads": 4, "context": 128}
    model, tokenizer = build_causal("llama", ALPHABET, ids=["eos_token_id"], **sizes)
    for name, weight in model.named_parameters():
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
        number = uniform(
            seed, torch.tensor(key), position=torch.arange(weight.numel()), stream=RngStream.MASK
        )
        scale = SCALES.get(name, 0.9)
        weight.data = (
            torch.ones_like(weight) if weight.dim() == 1 else (scale * (number - 0.5)).view_as(weight).float()
        )
    return make_diffusion(
        model, tokenizer, attention=attention, block_size=block_size, logit_shift=logit_shift
    )
