"""Tiny random models: the builders, and the named models that most tests use.

Each call of a builder gives the same weights. Phi and GPT-2 compute in float64 throughout; the norms of Llama
and Qwen round to float32.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from unmask.data.characters import SPECIAL, character_tokenizer
from unmask.models.adapters import with_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FLOAT64_ALPHABET = "abcdef"
FLOAT64_CONTEXT = 40
LLAMA_ALPHABET = "abcdefgh"
PLAIN_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
TOY_ALPHABET = "ab"
TOY_VOCABULARY = len(SPECIAL) + len(TOY_ALPHABET)
PRINTABLE = "".join(sorted(set(string.printable) - set("\x0b\x0c\r\t"))) + "é"
CHAT_CONTEXT = 2048
HERMES = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson '
    "}}}\n</tool_call>{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template that writes calls as Hermes does."""

KINDS = {
    "bidirectional": ("bidirectional", None, False),
    "bidirectional with a shift": ("bidirectional", None, True),
    "blocks of three": ("block_causal", 3, False),
    "blocks of three with a shift": ("block_causal", 3, True),
    "causal without a shift": ("causal", None, False),
}
"""Attention, block size and shift of the models that are noised. A causal model with a shift is not: it needs
no noise."""


def tokenizer_of(
    alphabet: str | PreTrainedTokenizerBase, template: str | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer of these characters, or the given one; with a chat template."""
    tokenizer = character_tokenizer(alphabet) if isinstance(alphabet, str) else alphabet
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def build_config(
    family: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    width: int = 16,
    layers: int = 2,
    heads: int = 2,
    context: int | None = 64,
    ids: Sequence[str] = SPECIAL_IDS,
    **more: Any,
) -> PreTrainedConfig:
    """The config of a family at these sizes; `ids` are the token ids that it names, and `more` its other
    settings. A `context` of None is the family's own."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    if context is not None:
        sizes["max_position_embeddings"] = context
    sizes |= {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in ids}}
    return AutoConfig.for_model(family, **sizes | more)


def build_causal(
    family: str,
    alphabet: str | PreTrainedTokenizerBase,
    *,
    template: str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    **sizes: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal model of transformers and its tokenizer without a mask token; `sizes` go to `build_config`."""
    tokenizer = tokenizer_of(alphabet, template)
    config = build_config(family, tokenizer, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # by its class: `from_config` would let DeepSpeed divide the weights
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or before)
        if dtype is not None:
            config.dtype = dtype
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        torch.set_default_dtype(before)
        return model, tokenizer


def build_lm(
    family: str,
    alphabet: str | PreTrainedTokenizerBase,
    attention: str = "bidirectional",
    block_size: int | None = None,
    *,
    logit_shift: bool | None = None,
    **sizes: Any,
) -> DiffusionLM:
    """The model of `build_causal` under a pattern."""
    return make_diffusion(
        *build_causal(family, alphabet, **sizes),
        attention=attention,
        block_size=block_size,
        logit_shift=logit_shift,
    )


def add_to_logits(lm: DiffusionLM, added: dict[int, float], *, trained: bool = False) -> DiffusionLM:
    """The model, whose head adds this to the logits of these tokens."""
    head = lm.model.get_output_embeddings()
    bias_V = torch.zeros(head.weight.shape[0], dtype=head.weight.dtype)
    for token, bias in added.items():
        bias_V[token] = bias
    head.bias = nn.Parameter(bias_V, requires_grad=trained)
    return lm


# --- in float64, with the EOS as frequent as a test needs: for sampling ---


def float64_causal(family: str = "phi", layers: int = 2) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Phi or GPT-2, which have rotary and learned positions; its predictions depend on the position."""
    more = {"intermediate_size": 24, "num_key_value_heads": 1} if family == "phi" else {}
    model, tokenizer = build_causal(
        family,
        FLOAT64_ALPHABET,
        layers=layers,
        context=FLOAT64_CONTEXT,
        dtype=torch.float64,
        initializer_range=0.3,
        **more,
    )
    return model.eval(), tokenizer


@cache
def float64_lm(
    family: str = "phi",
    attention: str = "causal",
    block_size: int | None = None,
    logit_shift: bool | None = None,
    *,
    eos_bias: float = 0.0,
    mask_bias: float = 0.0,
    layers: int = 2,
    causal_context: bool = False,
    time_embedding: bool = False,
    quality_head: bool = False,
) -> DiffusionLM:
    """`float64_causal` under a pattern; the biases are added to the logits of EOS and of the mask token."""
    pattern = {
        "attention": attention,
        "block_size": block_size,
        "logit_shift": logit_shift,
        "causal_context": causal_context,
    }
    lm = make_diffusion(
        *float64_causal(family, layers), time_embedding=time_embedding, quality_head=quality_head, **pattern
    )
    add_to_logits(lm, {lm.eos_token_id: eos_bias, lm.mask_token_id: mask_bias}, trained=True)
    # its weights start at zero
    for weight in lm.model.unmask_time.out.parameters() if time_embedding else ():
        weight.data += 0.5 * torch.randn(
            weight.shape, generator=torch.Generator().manual_seed(5), dtype=weight.dtype
        )
    if lm.quality_head is not None:
        weight_D = lm.quality_head.weight.data
        weight_D += torch.randn(
            weight_D.shape, generator=torch.Generator().manual_seed(6), dtype=weight_D.dtype
        )
    return lm


def adapted(lm: DiffusionLM, seed: int = 0, **settings: Any) -> DiffusionLM:
    """A copy of a Phi with LoRA adapters whose weights are not zero."""
    config = LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings}
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        trained = with_adapters(lm.frozen_copy(), config)
        for name, weight in trained.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.5)
    return trained


def save_adapters(adapted: DiffusionLM, path: Path, **options: Any) -> Path:
    """Save the adapters of a model as PEFT does."""
    adapted.model.save_pretrained(path, save_embedding_layers=False, **options)
    return path


# --- Llama, for training ---


def llama_causal(
    dtype: torch.dtype = torch.float32, **config: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Llama of two layers whose chat template adds nothing to the contents; `config` goes to its config."""
    sizes = {"num_key_value_heads": 2, "intermediate_size": 48}
    model, tokenizer = build_causal(
        "llama", LLAMA_ALPHABET, template=PLAIN_TEMPLATE, width=32, **sizes | config
    )
    return model.to(dtype), tokenizer


def llama_lm(
    attention: str = "bidirectional",
    block_size: int | None = None,
    *,
    logit_shift: bool | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> DiffusionLM:
    """`llama_causal` under a pattern."""
    return make_diffusion(
        *llama_causal(dtype, **config), attention=attention, block_size=block_size, logit_shift=logit_shift
    )


def quantizable_llama_lm() -> DiffusionLM:
    """Weights large enough to be quantized: bitsandbytes keeps an optimizer's state of fewer than 4096
    numbers in 32 bits."""
    return llama_lm(hidden_size=64, intermediate_size=64)


# --- so small that all sequences, masks and orders can be listed ---


def toy_lm(
    kind: str = "bidirectional",
    *,
    attention: tuple[str, int | None, bool] | None = None,
    seed: int = 0,
    **more: bool,
) -> DiffusionLM:
    """A GPT-2 of two letters of one of KINDS, or of any attention, block size and shift; its predictions
    depend strongly on what they see.

    `more` goes to `make_diffusion`.
    """
    pattern, block_size, shift = attention or KINDS[kind]
    model, tokenizer = build_causal(
        "gpt2", TOY_ALPHABET, width=8, context=32, dtype=torch.float64, seed=seed, initializer_range=0.7
    )
    return make_diffusion(
        model, tokenizer, attention=pattern, block_size=block_size, logit_shift=shift, **more
    )


# --- for serving ---


def chat_lm(
    attention: str = "bidirectional", block_size: int | None = None, *, eos_bias: float = 0.0
) -> DiffusionLM:
    """A GPT-2 of printable characters with a chat template and a long context."""
    lm = build_lm(
        "gpt2",
        PRINTABLE,
        attention,
        block_size,
        template=HERMES,
        layers=1,
        context=CHAT_CONTEXT,
        dtype=torch.float64,
        initializer_range=0.3,
    )
    return add_to_logits(lm, {lm.eos_token_id: eos_bias})


@cache
def cached_chat_lm(
    attention: str = "bidirectional", block_size: int | None = None, *, eos_bias: float = 0.0
) -> DiffusionLM:
    """The same, kept for what tests compute themselves. A model computes in one thread at a time, so no
    scheduler gets one of these."""
    return chat_lm(attention, block_size, eos_bias=eos_bias)


def lm_of_tokenizer(
    tokenizer: PreTrainedTokenizerBase, attention: str = "block_causal", block_size: int | None = 4
) -> DiffusionLM:
    """A GPT-2 with this tokenizer."""
    sizes = {"layers": 1, "context": 256, "ids": ["eos_token_id"], "initializer_range": 0.3}
    return build_lm("gpt2", tokenizer, attention, block_size, dtype=torch.float64, seed=1, **sizes)


def byte_lm() -> DiffusionLM:
    """A block-causal GPT-2 whose tokens are pieces of words, and bytes of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end of the story, é ü 猫"] * 9, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False
    )
    return lm_of_tokenizer(wrapped)
