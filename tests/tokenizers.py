"""Tokenizers of every kind that models have, trained on a few sentences."""

from __future__ import annotations

import json
import string
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXT = [
    string.ascii_letters + string.digits + " .,:;!?'()[]{}=+-*/_",
    "Once upon a time, there was a girl who liked the sun. The girl was then and there.",
    "def f(x): return x + 1 the end of the story, and then the other one     ",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<mask>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = (
    "bytes",
    "bytes-with-space",
    "llama",
    "mistral",
    "metaspace",
    "unspaced",
    "wordpiece",
    "wordpiece-cleaned",
)
"""As GPT-2's, RoBERTa's, Llama 2's (legacy) and stories260K's, Mistral's (not legacy), with the decoder of
that name, SentencePiece's without a space before a text, and BERT's."""
EXACT = ("bytes", "llama", "mistral", "unspaced")
"""Those that restore every text that they encode."""


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of the `KINDS`, which writes BOS before a text."""
    wordpiece = kind.startswith("wordpiece")
    made = (
        _wordpiece()
        if wordpiece
        else _byte_level(kind == "bytes-with-space")
        if "bytes" in kind
        else _sentencepiece(kind)
    )
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, clean_up_tokenization_spaces=kind == "wordpiece-cleaned", **names
    )


def _byte_level(space: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=space), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([*TEXT, "é猫猫🙂"] * 2, trainer)
    return made


def _sentencepiece(kind: str) -> Tokenizer:
    """With byte fallback; unlike those that are trained, its bytes are no special tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TEXT * 2, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocabulary = [*SPECIAL, *BYTES, *sorted(model["vocab"], key=model["vocab"].get), "▁▁", "▁▁▁▁"]
    merges = [*map(tuple, model["merges"]), ("▁", "▁"), ("▁▁", "▁▁")]
    ids = {name: number for number, name in enumerate(dict.fromkeys(vocabulary))}
    made = Tokenizer(
        models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=kind != "metaspace")
    )
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(pieces[:3] if kind == "unspaced" else pieces)
    if kind == "llama":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "metaspace":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="never" if kind == "unspaced" else "first", split=False
        )
    return made


def _wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        TEXT * 2, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    )
    return made
