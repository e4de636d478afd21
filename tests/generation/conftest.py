"""Tiny random models in float64: their predictions differ from place to place, and EOS comes up as often as a test needs.

Phi and GPT-2 have rotary and learned positions, and compute in float64 throughout (the norm of Llama rounds to float32).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PhiConfig, PreTrainedModel, PreTrainedTokenizerBase

from unmask.data.characters import character_tokenizer
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

ALPHABET = "abcdef"
CONTEXT = 40
PATTERNS = [("causal", None), ("block_causal", 1), ("block_causal", 3), ("block_causal", 4), ("bidirectional", None)]


def stock(family: str = "phi") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal model of transformers as it comes: always the same weights."""
    tokenizer = character_tokenizer(ALPHABET)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {"vocab_size": len(tokenizer), "initializer_range": 0.3, **ids}
    if family == "phi":
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = PhiConfig(hidden_size=16, intermediate_size=24, max_position_embeddings=CONTEXT, **layers, **shape)
    else:
        config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=CONTEXT, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval(), tokenizer


@cache
def tiny(
    family: str = "phi",
    attention: str = "causal",
    block_size: int | None = None,
    logit_shift: bool | None = None,
    *,
    eos_bias: float = 0.0,
    mask_bias: float = 0.0,
) -> DiffusionLM:
    """The stock model under a pattern; the biases are added to the logits of EOS and of the mask token."""
    lm = make_diffusion(*stock(family), attention=attention, block_size=block_size, logit_shift=logit_shift)
    head = lm.model.get_output_embeddings()
    bias_V = torch.zeros(head.weight.shape[0], dtype=head.weight.dtype)
    bias_V[lm.eos_token_id], bias_V[lm.mask_token_id] = eos_bias, mask_bias
    head.bias = nn.Parameter(bias_V)
    return lm
