"""A character tokenizer, for small tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unmask.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of the alphabet, after <pad>, <s>, </s> and <unk>; any other character is <unk>.

    Encoding prepends <s> unless `add_special_tokens=False`. Decoding restores the text exactly. Conversion to a diffusion model adds the
    mask token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise ConfigError("the alphabet is empty", where="character_tokenizer", remedy="Give every character that the text can hold.")
    vocabulary = {token: index for index, token in enumerate([*SPECIAL.values(), *dict.fromkeys(alphabet)])}
    bos, unk = SPECIAL["bos_token"], SPECIAL["unk_token"]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL)
