"""The formats in which released models are published: tables of the names of their settings and weights,
which `family.py` applies.

Sources: the configs and modeling code published with LLaDA (Nie et al. 2025), Dream (Ye et al. 2025), SDAR
(Cheng et al. 2025), Fast-dLLM v2 (Wu et al. 2025), LLaDA-MoE (Zhu et al. 2025) and LLaDA2 (Bie et al. 2025),
and the engines that serve SDAR (SGLang, LMDeploy).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Glm4MoeConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from unmask.models.family import SIZES, Family


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


SHARED = (
    *(
        "num_key_value_heads",
        "hidden_act",
        "max_position_embeddings",
        "initializer_range",
        "rms_norm_eps",
        "rope_theta",
    ),
    *(
        "rope_scaling",
        "tie_word_embeddings",
        "attention_dropout",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
    ),
)
QWEN_FIELDS = _same(*SIZES, *SHARED, "max_window_layers")
NO_WINDOWS: dict[str, Any] = {"use_sliding_window": False, "sliding_window": None}

SDAR_CONFIG_CODE = '''"""Lets AutoConfig read config.json (trust_remote_code=True), as serving engines do."""

from transformers import PretrainedConfig


class SDARConfig(PretrainedConfig):
    model_type = "sdar"
'''


LLADA = Family(
    name="llada",
    model_type="llada",
    architecture="LLaDAModelLM",
    config_class=LlamaConfig,
    attention="bidirectional",
    logit_shift=False,
    mask_token_id=126336,
    fields={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "mlp_hidden_size": "intermediate_size",
        "max_sequence_length": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "embedding_size": "vocab_size",  # rows of the table, possibly more than tokens
        "rms_norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "weight_tying": "tie_word_embeddings",
        "attention_dropout": "attention_dropout",
        "init_std": "initializer_range",
        "use_cache": "use_cache",
        "eos_token_id": "eos_token_id",
        "pad_token_id": "pad_token_id",
    },
    constants={
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "multi_query_attention": None,
        "rope": True,
        "scale_logits": False,
    },
    weights={
        "model.transformer.wte": "model.embed_tokens",
        "model.transformer.ln_f": "model.norm",
        "model.transformer.ff_out": "lm_head",
        "model.transformer.blocks": "model.layers",
        "attn_norm": "input_layernorm",
        **{f"{part}_proj": f"self_attn.{part}_proj" for part in "qkv"},
        "attn_out": "self_attn.o_proj",
        "ff_norm": "post_attention_layernorm",
        "ff_proj": "mlp.gate_proj",  # the activation is on this one
        "up_proj": "mlp.up_proj",
        "ff_out": "mlp.down_proj",
    },
)
DREAM = Family(
    name="dream",
    model_type="Dream",
    architecture="DreamModel",
    config_class=Qwen2Config,
    attention="bidirectional",
    logit_shift=True,
    mask_token_id=151666,
    frozen_padding=True,
    fields=QWEN_FIELDS | {"pad_token_id": "pad_token_id"},
    constants=NO_WINDOWS | {"use_mrope": False},
)
SDAR = Family(
    name="sdar",
    model_type="sdar",
    architecture="SDARForCausalLM",
    config_class=Qwen3Config,
    attention="block_causal",
    logit_shift=False,
    block_size=4,
    mask_token_id=151669,
    fields=QWEN_FIELDS | {"head_dim": "head_dim", "attention_bias": "attention_bias"},
    constants=NO_WINDOWS,
    auto_map={"AutoConfig": "configuration_sdar.SDARConfig"},
    code={"configuration_sdar.py": SDAR_CONFIG_CODE},
)
FAST_DLLM_V2 = Family(
    name="fast_dllm_v2",
    model_type="Fast_dLLM_Qwen",
    architecture="Fast_dLLM_QwenForCausalLM",
    config_class=Qwen2Config,
    attention="block_causal",
    logit_shift=True,
    block_size=32,
    block_field="bd_size",
    mask_token_id=151665,
    frozen_padding=True,
    fields=QWEN_FIELDS | {"pad_token_id": "pad_token_id"},
    constants=NO_WINDOWS,
    auto_map={
        "AutoConfig": "Efficient-Large-Model/Fast_dLLM_v2_7B--configuration.Fast_dLLM_QwenConfig",
        "AutoModelForCausalLM": "Efficient-Large-Model/Fast_dLLM_v2_7B--modeling.Fast_dLLM_QwenForCausalLM",
    },
)
LLADA_MOE = Family(
    name="llada_moe",
    model_type="llada",
    aliases=("lladamoe",),
    architecture="LLaDAMoEModelLM",
    config_class=Qwen3MoeConfig,
    attention="bidirectional",
    logit_shift=False,
    mask_token_id=156895,
    frozen_padding=True,
    fields=_same(
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "attention_bias",
        "pad_token_id",
        *SHARED,
    )
    | _same("num_experts", "num_experts_per_tok", "router_aux_loss_coef", "output_router_logits")
    | {"dense_intermediate_size": "intermediate_size", "expert_intermediate_size": "moe_intermediate_size"},
    defaults={"norm_topk_prob": False},
    sparse_layers="moe_layer_freq",
    constants={
        "clip_qkv": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "partial_rotary_factor": 1,
        "qk_layernorm": True,
        "routed_scaling_factor": 1,
        "shared_expert_intermediate_size": None,
    },
    auto_map={
        "AutoConfig": "inclusionAI/LLaDA-MoE-7B-A1B-Instruct--configuration_lladamoe.LLaDAConfig",
        "AutoModel": "inclusionAI/LLaDA-MoE-7B-A1B-Instruct--modeling_lladamoe.LLaDAMoEModelLM",
    },
)
LLADA2 = Family(
    name="llada2",
    model_type="llada2_moe",
    aliases=("llada21_moe",),
    architecture="LLaDA2MoeModelLM",
    config_class=Glm4MoeConfig,
    attention="block_causal",
    logit_shift=False,
    block_size=32,
    mask_token_id=156895,
    frozen_padding=True,
    fields=_same(
        *SIZES,
        *SHARED,
        "pad_token_id",
        "head_dim",
        "partial_rotary_factor",
        "first_k_dense_replace",
        "moe_intermediate_size",
    )
    | _same("num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor", "output_router_logits")
    | {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    defaults={
        "use_qk_norm": True,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
    }
    | {"n_shared_experts": 0},
    constants={
        "moe_router_enable_expert_bias": True,
        "norm_head": False,
        "norm_softmax": False,
        "norm_topk_prob": True,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
    },
    refused={"num_experts_per_tok": 1},  # whose weight the published code does not normalize
    weights={
        "model.word_embeddings": "model.embed_tokens",
        "attention.query_key_value": tuple(f"self_attn.{part}_proj" for part in "qkv"),
        "attention.query_layernorm": "self_attn.q_norm",
        "attention.key_layernorm": "self_attn.k_norm",
        "attention.dense": "self_attn.o_proj",
        "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
    },
    auto_map={
        "AutoConfig": "inclusionAI/LLaDA2.0-mini--configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModelForCausalLM": "inclusionAI/LLaDA2.0-mini--modeling_llada2_moe.LLaDA2MoeModelLM",
    },
)
FAMILIES = {family.name: family for family in (LLADA, DREAM, SDAR, FAST_DLLM_V2, LLADA_MOE, LLADA2)}


def family_of(published: Mapping[str, Any]) -> Family | None:
    """The family of a config.json, by its architecture where families share a model type; None: it is of
    none."""
    model_type, architectures = published.get("model_type"), published.get("architectures") or ()
    candidates = [
        family for family in FAMILIES.values() if model_type in (family.model_type, *family.aliases)
    ]
    return next(
        (family for family in candidates if family.architecture in architectures),
        candidates[0] if candidates else None,
    )
