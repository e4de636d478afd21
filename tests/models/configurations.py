"""Tiny models with random weights, in the configurations on which the attention function is tested."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    BailingHybridConfig,
    BambaConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    Olmo2Config,
    OlmoHybridConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
    Zamba2Config,
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

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2}
MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
THREE = HEADS | {"num_hidden_layers": 3}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
HYBRIDS: dict[str, PreTrainedConfig] = {
    "qwen3_5_text": Qwen3_5TextConfig(**THREE, **DELTA_NET, **MIXED),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(**THREE, **DELTA_NET, **MIXED, **EXPERTS, num_experts=4),
    "qwen3_next": Qwen3NextConfig(**THREE, **DELTA_NET, **MIXED, **EXPERTS, num_experts=4),
    "olmo_hybrid": OlmoHybridConfig(**GROUPED | {"num_hidden_layers": 3}, **DELTA_NET, **MIXED),
    "nemotron_h": NemotronHConfig(
        **HEADS,
        layers_block_type=["mamba", "attention", "mamba", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        n_routed_experts=4,
        moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=8,
    ),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **GROUPED | {"num_hidden_layers": 3},
        **MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        shared_intermediate_size=16,
    ),
    "bamba": BambaConfig(**GROUPED | {"num_hidden_layers": 3}, **MAMBA, attn_layer_indices=[1]),
    "falcon_h1": FalconH1Config(
        **HEADS,
        **MAMBA,
        mamba_d_ssm=32,
        time_step_limit=(1.3, 1.32),
        ssm_multipliers=[1.0, 0.9, 0.8, 0.7, -0.5],
    ),
    "zamba2": Zamba2Config(
        **SHARED,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        n_mamba_heads=4,
        mamba_d_state=8,
        mamba_ngroups=1,
        num_mem_blocks=1,
        intermediate_size=24,
        adapter_rank=4,
    ),
    "lfm2": Lfm2Config(
        **GROUPED | {"num_hidden_layers": 3},
        layer_types=["conv", "full_attention", "conv"],
        block_ff_dim=24,
        block_auto_adjust_ff_dim=False,
    ),
    "kimi_linear": KimiLinearConfig(**THREE | LATENT, **MIXED),
    "bailing_hybrid": BailingHybridConfig(**THREE | LATENT, **MIXED),
}
"""One of each type with recurrent layers."""

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
            copy.deepcopy((CONFIGURATIONS | HYBRIDS)[name]), attn_implementation=attention, dtype=dtype
        )
    for weight in model.parameters():  # some are of float32 in any model
        weight.data = weight.data.to(dtype)
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


class InFloat64(TorchFunctionMode):
    """transformers computes norms and recurrences in float32, also of a float64 model: here in float64, so
    that what differs by more than rounding is seen."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids without special tokens."""
    return torch.randint(
        len(SPECIAL), VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )
