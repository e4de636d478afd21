"""A byte-level BPE tokenizer, trained on the texts of a new model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from unmask.data.characters import SPECIAL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NAMES = {name: token for name, token in SPECIAL.items() if name != "unk_token"}  # bytes write every text
READ = 200_000_000
"""Characters that a tokenizer is trained on at most: more would change few of its tokens."""


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `size` tokens: <pad>, <s>, </s>, the 256 bytes, and the most frequent sequences
    of bytes.

    The same texts give the same tokenizer. Encoding prepends <s> unless `add_special_tokens=False`. Decoding
    restores the text exactly. Conversion to a diffusion model adds the mask token.

    Args:
        texts: read to a limit (`READ`).
        size: one of `TOKENIZER_SIZES` (config/run.py); the settings refuse others.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*NAMES.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(texts), trainer)
    bos = NAMES["bos_token"]
    start = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), start])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **NAMES)


def _beginning(texts: Iterable[str]) -> Iterator[str]:
    """The texts, until `READ` characters are read."""
    left = READ
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
