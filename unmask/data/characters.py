"""A character tokenizer, and a model of it, for small tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig

from unmask.config.run import AttentionName
from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion, random_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of the alphabet, after <pad>, <s>, </s> and <unk>; any other character is
    <unk>.

    Encoding prepends <s> unless `add_special_tokens=False`. Decoding restores the text exactly. Conversion to
    a diffusion model adds the mask token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise ConfigError(
            "the alphabet is empty",
            where="character_tokenizer",
            remedy="Give every character that the text can hold.",
        )
    vocabulary = {token: index for index, token in enumerate([*SPECIAL.values(), *dict.fromkeys(alphabet)])}
    bos, unk = SPECIAL["bos_token"], SPECIAL["unk_token"]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL)


def character_model(
    alphabet: str, *, hidden: int, layers: int, context: int, seed: int, attention: AttentionName = "causal"
) -> DiffusionLM:
    """A small Llama with random weights, whose tokens are the characters of an alphabet.

    Args:
        hidden, layers: width, a multiple of 4, and depth.
        context: tokens of a text at most.
        seed: of the weights.
    """
    tokenizer = character_tokenizer(alphabet)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=2 * hidden,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return make_diffusion(random_model(config), tokenizer, attention=attention)
