"""Tiny models with random weights, in the configurations on which the attention function is tested."""

from __future__ import annotations

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from unmask.data.characters import SPECIAL, character_tokenizer
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

ALPHABET = "abcdefghijkl"
VOCABULARY = len(SPECIAL) + len(ALPHABET)
WINDOW = 3
LAYERS = 2

# Weights large enough that each token that a row attends to visibly changes its output.
SHARED = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES = SHARED | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
ONE_WINDOW = {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"]}
WINDOWS = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": WINDOW}

CONFIGURATIONS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(n_embd=16, n_layer=LAYERS, n_head=4, n_positions=64, **SHARED),
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen2_windows": Qwen2Config(**GROUPED, **WINDOWS),
    "qwen3": Qwen3Config(**HEADS),
    "qwen3_windows": Qwen3Config(**HEADS, **WINDOWS),
    "phi": PhiConfig(**GROUPED),
    "phi3": Phi3Config(**GROUPED),
    "mistral": MistralConfig(**HEADS, sliding_window=WINDOW),
    "gemma": GemmaConfig(**HEADS),
    "gemma2": Gemma2Config(
        **HEADS,
        **ONE_WINDOW,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": Gemma3TextConfig(**HEADS, **ONE_WINDOW, query_pre_attn_scalar=8),
    "smollm3": SmolLM3Config(**GROUPED, no_rope_layers=[1, 0]),
    "olmo2": Olmo2Config(**GROUPED),
    "gpt_neox": GPTNeoXConfig(**SIZES),
}
NAMES = list(CONFIGURATIONS)

WINDOWS_OF_LAYERS: dict[str, list[int | None]] = {
    "qwen2_windows": [WINDOW, WINDOW],
    "qwen3_windows": [WINDOW, WINDOW],
    "mistral": [WINDOW, WINDOW],
    "gemma2": [None, WINDOW],
    "gemma3": [None, WINDOW],
}
"""The sliding window of every layer, of those that have one."""


def tiny_model(name: str, attention: str = "eager", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A stock model in eval mode, with the same weights at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(CONFIGURATIONS[name]), attn_implementation=attention, dtype=dtype
        )
    return model.eval()


def tiny_lm(
    name: str,
    attention: str = "causal",
    block_size: int | None = None,
    *,
    shift: bool | None = None,
    dtype: torch.dtype = torch.float64,
    **more: bool,
) -> DiffusionLM:
    """The same model as a DiffusionLM; its mask token is added after a full vocabulary. `more` goes to
    `make_diffusion`."""
    pattern = {"attention": attention, "block_size": block_size, "logit_shift": shift}
    return make_diffusion(tiny_model(name, dtype=dtype), character_tokenizer(ALPHABET), **pattern, **more)


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids without special tokens."""
    return torch.randint(
        len(SPECIAL), VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )
