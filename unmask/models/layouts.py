"""The layouts that released models are published in.

Sources: the configs and modelling code published with LLaDA (Nie et al. 2025), Dream (Ye et al. 2025) and SDAR (Cheng et
al. 2025), and the engines that serve SDAR (SGLang, LMDeploy).
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from unmask.models.family import SIZES, Family

QWEN_FIELDS = {
    name: name
    for name in (
        *SIZES,
        *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_theta"),
        *("rope_scaling", "tie_word_embeddings", "attention_dropout", "max_window_layers", "use_cache", "bos_token_id", "eos_token_id"),
    )
}
NO_WINDOWS: dict[str, Any] = {"use_sliding_window": False, "sliding_window": None}

SDAR_CONFIG_CODE = '''"""Lets AutoConfig read config.json (with trust_remote_code=True), as serving engines do."""

from transformers import PretrainedConfig


class SDARConfig(PretrainedConfig):
    model_type = "sdar"
'''

LLADA = Family(
    name="llada",
    model_type="llada",
    architecture="LLaDAModelLM",
    stock=LlamaConfig,
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
        "embedding_size": "vocab_size",  # the rows of the table, which may be more than the tokens
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
        "model.transformer.blocks.*.attn_norm": "model.layers.*.input_layernorm",
        "model.transformer.blocks.*.q_proj": "model.layers.*.self_attn.q_proj",
        "model.transformer.blocks.*.k_proj": "model.layers.*.self_attn.k_proj",
        "model.transformer.blocks.*.v_proj": "model.layers.*.self_attn.v_proj",
        "model.transformer.blocks.*.attn_out": "model.layers.*.self_attn.o_proj",
        "model.transformer.blocks.*.ff_norm": "model.layers.*.post_attention_layernorm",
        "model.transformer.blocks.*.ff_proj": "model.layers.*.mlp.gate_proj",  # the activation is on this one
        "model.transformer.blocks.*.up_proj": "model.layers.*.mlp.up_proj",
        "model.transformer.blocks.*.ff_out": "model.layers.*.mlp.down_proj",
    },
)
DREAM = Family(
    name="dream",
    model_type="Dream",
    architecture="DreamModel",
    stock=Qwen2Config,
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
    stock=Qwen3Config,
    attention="block_causal",
    logit_shift=False,
    block_size=4,
    mask_token_id=151669,
    fields=QWEN_FIELDS | {"head_dim": "head_dim", "attention_bias": "attention_bias"},
    constants=NO_WINDOWS,
    auto_map={"AutoConfig": "configuration_sdar.SDARConfig"},
    code={"configuration_sdar.py": SDAR_CONFIG_CODE},
)
FAMILIES = {family.name: family for family in (LLADA, DREAM, SDAR)}
