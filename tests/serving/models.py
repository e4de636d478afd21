"""Random models of printable characters and of pieces of words, with a chat template."""

from __future__ import annotations

import string
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from unmask.data.characters import character_tokenizer
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

CHARACTERS = "".join(sorted(set(string.printable) - set("\x0b\x0c\r\t"))) + "é"
CONTEXT = 2048
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


def make_model(
    attention: str = "bidirectional", block_size: int | None = None, *, eos_bias: float = 0.0
) -> DiffusionLM:
    """A random model of printable characters with a chat template: the same weights for the same pattern."""
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.chat_template = HERMES
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=CONTEXT,
        initializer_range=0.3,
        **ids,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    lm = make_diffusion(network, tokenizer, attention=attention, block_size=block_size)
    head = lm.model.get_output_embeddings()
    bias_V = torch.zeros(head.weight.shape[0], dtype=head.weight.dtype)
    bias_V[lm.eos_token_id] = eos_bias
    head.bias = nn.Parameter(bias_V, requires_grad=False)
    return lm


@cache
def model(
    attention: str = "bidirectional", block_size: int | None = None, *, eos_bias: float = 0.0
) -> DiffusionLM:
    """The same, kept for what tests compute themselves. A model computes in one thread at a time, so no
    scheduler gets one of these."""
    return make_model(attention, block_size, eos_bias=eos_bias)


def make_byte_model() -> DiffusionLM:
    """A random block-causal model whose tokens are pieces of words, and bytes of characters."""
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
    return make_random(wrapped)


def make_random(
    tokenizer: PreTrainedTokenizerBase, attention: str = "block_causal", block_size: int | None = 4
) -> DiffusionLM:
    """A random model with a tokenizer."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.3}
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=256, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return make_diffusion(network, tokenizer, attention=attention, block_size=block_size)
