"""Small versions of released models: configs, random weights and tokenizers in the published format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Glm4MoeConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY, HIDDEN, INNER, LAYERS = 264, 16, 24, 2
END, MASK = 257, 258
WIDTHS = {"llada": 4, "dream": 4, "sdar": 8, "fast_dllm_v2": 4, "llada_moe": 4, "llada2": 8}  # of a head
GROUPS = {name: 4 if name == "llada" else 2 for name in WIDTHS}  # heads of keys and values, of 4
EXPERTS, EXPERT = 8, 12  # how many and how wide
SHARED = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": END,
    "attention_dropout": 0.0,
    "use_cache": False,
}
QWEN = SHARED | {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": END,
    "max_window_layers": LAYERS,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "torch_dtype": "float32",
}
MIXTURE = {
    **{name: value for name, value in QWEN.items() if "window" not in name and name != "intermediate_size"},
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "pad_token_id": END,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": SHARED
    | {
        "architectures": ["LLaDAModelLM"],
        "auto_map": {
            "AutoConfig": "configuration_llada.LLaDAConfig",
            "AutoModel": "modeling_llada.LLaDAModelLM",
        },
        "model_type": "llada",
        "d_model": HIDDEN,
        "n_layers": LAYERS,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": INNER,
        "mlp_ratio": 4,
        "max_sequence_length": 64,
        "vocab_size": VOCABULARY,
        "embedding_size": VOCABULARY,
        "weight_tying": False,
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "include_bias": False,
        "include_qkv_bias": False,
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "multi_query_attention": None,
        "mask_token_id": MASK,
        "pad_token_id": END,
        "rope": True,
        "scale_logits": False,
    },
    "dream": QWEN
    | {
        "architectures": ["DreamModel"],
        "auto_map": {
            "AutoConfig": "configuration_dream.DreamConfig",
            "AutoModel": "modeling_dream.DreamModel",
        },
        "model_type": "Dream",
        "pad_token_id": END,
        "use_mrope": False,
    },
    "sdar": QWEN
    | {
        "architectures": ["SDARForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_sdar.SDARConfig",
            "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
        },
        "model_type": "sdar",
        "block_size": 4,
        "head_dim": 8,
        "attention_bias": False,
        "fuse_cross_entropy": True,
    },
    "fast_dllm_v2": QWEN
    | {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
            "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
        },
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": 8,
        "conplemenrary_mask": True,
        "layer_types": ["full_attention"] * LAYERS,
        "pad_token_id": END,
    },
    "llada_moe": MIXTURE
    | {
        "architectures": ["LLaDAMoEModelLM"],
        "auto_map": {
            "AutoConfig": "configuration_lladamoe.LLaDAConfig",
            "AutoModel": "modeling_lladamoe.LLaDAMoEModelLM",
        },
        "model_type": "llada",
        "attention_bias": False,
        "clip_qkv": None,
        "dense_intermediate_size": INNER,
        "expert_intermediate_size": EXPERT,
        "moe_layer_freq": [0, 1],
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "partial_rotary_factor": 1,
        "qk_layernorm": True,
        "routed_scaling_factor": 1,
        "router_aux_loss_coef": 0.01,
        "router_num_group": None,
        "router_topk_group": None,
        "shared_expert_intermediate_size": None,
    },
    "llada2": MIXTURE
    | {
        "architectures": ["LLaDA2MoeModelLM"],
        "auto_map": {
            "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
            "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
        },
        "model_type": "llada2_moe",
        "embedding_dropout": 0.0,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "intermediate_size": INNER,
        "moe_intermediate_size": EXPERT,
        "moe_router_enable_expert_bias": True,
        "n_group": 4,
        "norm_head": False,
        "norm_softmax": False,
        "norm_topk_prob": True,
        "num_shared_experts": 1,
        "output_dropout": 0.0,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 4,
        "routed_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "topk_group": 2,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
        "using_split_qkv_in_self_attention": False,
    },
}
FROZEN = ("dream", "fast_dllm_v2", "llada_moe", "llada2")
"""Families whose released modeling code never trains the embedding at padding."""
SPARSE = {"moe_intermediate_size": EXPERT, "num_experts_per_tok": 2}
GROUPED = {
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llada": (LlamaConfig, {}),
    "dream": (Qwen2Config, {}),
    "sdar": (Qwen3Config, {"head_dim": 8}),
    "fast_dllm_v2": (Qwen2Config, {}),
    "llada_moe": (Qwen3MoeConfig, SPARSE | {"num_experts": EXPERTS, "mlp_only_layers": [0]}),
    "llada2": (
        Glm4MoeConfig,
        SPARSE | GROUPED | {"n_routed_experts": EXPERTS, "head_dim": 8, "use_qk_norm": True},
    ),
}
"""Stock configs, by what is peculiar to each."""
MIXTURES = ("llada_moe", "llada2")
NOT_KEPT = {
    *(
        "auto_map",
        "mlp_ratio",
        "fuse_cross_entropy",
        "conplemenrary_mask",
        "layer_types",
        "router_num_group",
        "router_topk_group",
    ),
    *("embedding_dropout", "output_dropout", "rotary_dim", "using_split_qkv_in_self_attention"),
}
"""What released configs also hold: where their code is, and what it does not read (or reads in training
alone)."""
EXPECTED = {
    **{
        "llada": ("bidirectional", None, False),
        "dream": ("bidirectional", None, True),
        "sdar": ("block_causal", 4, False),
    },
    **{
        "fast_dllm_v2": ("block_causal", 8, True),
        "llada_moe": ("bidirectional", None, False),
        "llada2": ("block_causal", 32, False),
    },
}


def published_weights(name: str) -> dict[str, Tensor]:
    """Random weights under their published names."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)

    keys, queries = WIDTHS[name] * GROUPS[name], WIDTHS[name] * 4

    def mlp(prefix: str, width: int) -> dict[str, Tensor]:
        up = {f"{prefix}.{part}_proj.weight": weight(width, HIDDEN) for part in ("gate", "up")}
        return up | {f"{prefix}.down_proj.weight": weight(HIDDEN, width)}

    if name == "llada":
        weights = {
            f"model.transformer.{part}.weight": weight(VOCABULARY, HIDDEN) for part in ("wte", "ff_out")
        }
        weights["model.transformer.ln_f.weight"] = weight(HIDDEN)
        for layer in range(LAYERS):
            block = f"model.transformer.blocks.{layer}"
            weights |= {f"{block}.{part}.weight": weight(HIDDEN) for part in ("attn_norm", "ff_norm")}
            weights |= {
                f"{block}.{part}.weight": weight(HIDDEN, HIDDEN)
                for part in ("q_proj", "k_proj", "v_proj", "attn_out")
            }
            weights |= {f"{block}.{part}.weight": weight(INNER, HIDDEN) for part in ("ff_proj", "up_proj")}
            weights[f"{block}.ff_out.weight"] = weight(HIDDEN, INNER)
        return weights
    table = "word_embeddings" if name == "llada2" else "embed_tokens"
    weights = {
        f"model.{table}.weight": weight(VOCABULARY, HIDDEN),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    weights["model.norm.weight"] = weight(HIDDEN)
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        weights |= {
            f"{block}.{part}.weight": weight(HIDDEN)
            for part in ("input_layernorm", "post_attention_layernorm")
        }
        if name == "llada2":
            weights[f"{block}.attention.query_key_value.weight"] = weight(queries + 2 * keys, HIDDEN)
            weights[f"{block}.attention.dense.weight"] = weight(HIDDEN, queries)
            weights |= {
                f"{block}.attention.{part}_layernorm.weight": weight(WIDTHS[name])
                for part in ("query", "key")
            }
        else:
            weights |= {f"{block}.self_attn.{part}_proj.weight": weight(keys, HIDDEN) for part in "kv"}
            weights[f"{block}.self_attn.q_proj.weight"] = weight(queries, HIDDEN)
            weights[f"{block}.self_attn.o_proj.weight"] = weight(HIDDEN, queries)
        if name in ("dream", "fast_dllm_v2"):
            weights |= {
                f"{block}.self_attn.{part}_proj.bias": weight(width)
                for part, width in (("q", queries), ("k", keys), ("v", keys))
            }
        elif name != "llada2":
            weights |= {f"{block}.self_attn.{part}_norm.weight": weight(WIDTHS[name]) for part in "qk"}
        if name in MIXTURES and layer > 0:
            weights[f"{block}.mlp.gate.weight"] = weight(EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                weights |= mlp(f"{block}.mlp.experts.{expert}", EXPERT)
        else:
            weights |= mlp(f"{block}.mlp", INNER)
        if name == "llada2" and layer > 0:
            weights[f"{block}.mlp.gate.expert_bias"] = weight(EXPERTS) - 1
            weights |= mlp(f"{block}.mlp.shared_experts", EXPERT)
    return weights


def write_tokenizer(name: str, folder: Path) -> None:
    """LLaDA comes with a tokenizer.json that names no mask token, Dream with vocabulary, merges and code,
    SDAR with all of it."""
    pieces = {piece: number for number, piece in enumerate(sorted(ByteLevel.alphabet()))} | {"ab": 256}
    tokens = {END: "<|endoftext|>", MASK: "<|mdm_mask|>" if name == "llada" else "<|mask|>"}
    (folder / "vocab.json").write_text(json.dumps(pieces))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    added = {
        str(number): {"content": text, "special": True, "normalized": False}
        for number, text in tokens.items()
    }
    config: dict[str, Any] = {
        "added_tokens_decoder": added,
        "eos_token": tokens[END],
        "pad_token": tokens[END],
        "bos_token": None,
    }
    kind = "DreamTokenizer" if name == "dream" else "Qwen2Tokenizer"
    if name != "llada":
        config |= {
            "mask_token": tokens[MASK],
            "auto_map": {"AutoTokenizer": [f"tokenization_{name}.{kind}", None]},
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": kind}))
    if name == "llada":
        AutoTokenizer.from_pretrained(folder, config=PretrainedConfig()).save_pretrained(folder)
        for file in ("vocab.json", "merges.txt"):
            (folder / file).unlink()
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"})
        )


def write_published(
    name: str, folder: Path, weights: dict[str, Tensor] | None = None, **changes: Any
) -> Path:
    """Write a folder as the family publishes it."""
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in (CONFIGS[name] | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights or published_weights(name), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(name, folder)
    return folder


def by_hand(name: str) -> Any:
    """The stock model, to which the same tensors were assigned one by one."""
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": INNER,
    }
    more = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    kind, extra = KINDS[name]
    model: Any = AutoModelForCausalLM.from_config(
        kind(**sizes, **more, **extra, num_key_value_heads=GROUPS[name], tie_word_embeddings=False)
    )
    weights = published_weights(name)
    if name != "llada":
        model.load_state_dict(as_stock(weights))
        return model.eval()
    model.model.embed_tokens.weight.data = weights["model.transformer.wte.weight"]
    model.model.norm.weight.data = weights["model.transformer.ln_f.weight"]
    model.lm_head.weight.data = weights["model.transformer.ff_out.weight"]
    for number, layer in enumerate(model.model.layers):
        places = {
            **{"attn_norm": layer.input_layernorm, "ff_norm": layer.post_attention_layernorm},
            **{
                "q_proj": layer.self_attn.q_proj,
                "k_proj": layer.self_attn.k_proj,
                "v_proj": layer.self_attn.v_proj,
            },
            **{"attn_out": layer.self_attn.o_proj, "ff_out": layer.mlp.down_proj},
            # LLaDA: ff_out(silu(ff_proj x) * up_proj x)
            **{"ff_proj": layer.mlp.gate_proj, "up_proj": layer.mlp.up_proj},
        }
        for part, module in places.items():
            module.weight.data = weights[f"model.transformer.blocks.{number}.{part}.weight"]
    return model.eval()


def as_stock(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names of a stock model: separate queries, keys and values, all experts of a layer in
    two tensors."""
    state = dict(weights)
    for name in weights:
        if name.endswith("query_key_value.weight"):
            heads = state.pop(name).split(WIDTHS["llada2"])
            for part, rows in {"q": heads[:4], "k": heads[4:6], "v": heads[6:]}.items():
                state[name.replace("attention.query_key_value", f"self_attn.{part}_proj")] = torch.cat(rows)
        elif name.endswith("experts.0.gate_proj.weight"):
            layer = name.removesuffix(".0.gate_proj.weight")
            stacked = {
                part: torch.stack(
                    [state.pop(f"{layer}.{expert}.{part}_proj.weight") for expert in range(EXPERTS)]
                )
                for part in ("gate", "up", "down")
            }
            state |= {
                f"{layer}.gate_up_proj": torch.cat([stacked["gate"], stacked["up"]], 1),
                f"{layer}.down_proj": stacked["down"],
            }
    renamed = {
        **{
            "word_embeddings": "embed_tokens",
            "attention.dense": "self_attn.o_proj",
            "gate.expert_bias": "gate.e_score_correction_bias",
        },
        **{"attention.query_layernorm": "self_attn.q_norm", "attention.key_layernorm": "self_attn.k_norm"},
    }
    for published, stock in renamed.items():
        state = {name.replace(published, stock): weight for name, weight in state.items()}
    return state
