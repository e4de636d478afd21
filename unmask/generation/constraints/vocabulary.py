"""The bytes of every token, as decoding a completion writes them.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from unmask.data.decoding import BYTE_TOKEN, byte_level
from unmask.errors import GenerationError
from unmask.models.diffusion_lm import DiffusionLM

KNOWN = "ByteLevel, Fuse, Metaspace, and Replace with ByteFallback"


@dataclass(frozen=True)
class Vocabulary:
    """What the tokens of a model write.

    Attributes:
        bytes_V: of each token; None: it matches no text (special tokens, the mask token, ids without a
            token).
        end_token_ids: tokens that end a text.
        fill_token_ids: end tokens and padding.
        never_token_ids: tokens that are never produced: the mask token.
        strips_space: whether decoding removes a space at the start of a text.
    """

    bytes_V: tuple[bytes | None, ...]
    end_token_ids: tuple[int, ...] = ()
    fill_token_ids: tuple[int, ...] = ()
    never_token_ids: tuple[int, ...] = ()
    strips_space: bool = False

    @cached_property
    def digest(self) -> bytes:
        """A hash of the content."""
        content = repr(
            (self.bytes_V, self.end_token_ids, self.fill_token_ids, self.never_token_ids, self.strips_space)
        )
        return blake2b(content.encode(), digest_size=16).digest()


_read: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple, Vocabulary]] = WeakKeyDictionary()


def read_vocabulary(lm: DiffusionLM) -> Vocabulary:
    """The vocabulary of a model's tokenizer.

    Raises:
        GenerationError: what its tokens write cannot be found one by one.
    """
    tokenizer = lm.tokenizer
    key = (
        len(tokenizer),
        lm.vocab_size,
        lm.mask_token_id,
        tuple(lm.eos_token_ids),
        tokenizer.pad_token_id,
    )
    known = _read.setdefault(tokenizer, {})
    if key not in known:
        write, strips_space = _decoder(tokenizer)
        ends = set(lm.eos_token_ids)
        pad = {tokenizer.pad_token_id} - {None, lm.mask_token_id}
        special = {*tokenizer.all_special_ids, lm.mask_token_id, *ends, *pad}
        added = tokenizer.added_tokens_decoder
        special |= {number for number, token in added.items() if token.special}
        names = tokenizer.convert_ids_to_tokens(list(range(min(len(tokenizer), lm.vocab_size))))
        bytes_V: list[bytes | None] = [None] * lm.vocab_size
        for number, name in enumerate(names):
            if name is not None and number not in special:
                bytes_V[number] = (added[number].content.encode() if number in added else write(name)) or None
        never = (lm.mask_token_id,) if lm.mask_token_id < lm.vocab_size else ()
        known[key] = Vocabulary(
            tuple(bytes_V), tuple(sorted(ends)), tuple(sorted(ends | pad)), never, strips_space
        )
    return known[key]


def _decoder(tokenizer: PreTrainedTokenizerBase) -> tuple[Callable[[str], bytes], bool]:
    """A function from a token's name to its bytes, and whether a space at the start of a text is removed."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
    steps = _flat(decoder) if decoder else []
    kinds = [step["type"] for step in steps]
    remedy = f"Known are fast tokenizers with the decoders {KNOWN}"
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        what = "removes spaces before punctuation, so that texts differ from their tokens"
        raise GenerationError(what, where="tokenizer", remedy="Set its clean_up_tokenization_spaces to False")
    if kinds == ["ByteLevel"]:
        return byte_level, False
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        return lambda name: name.replace(mark, " ").encode(), steps[0].get(
            "prepend_scheme", "always"
        ) != "never"
    plain = {"content": " ", "start": 1, "stop": 0}  # removes one space
    fused = "Fuse" in kinds and "Strip" not in kinds[: kinds.index("Fuse")]
    if not fused or not all(
        step["type"] in ("ByteFallback", "Fuse")
        or (step["type"] == "Strip" and plain.items() <= step.items())
        or (step["type"] == "Replace" and "String" in step["pattern"])
        for step in steps
    ):
        what = f"writes tokens by {' + '.join(kinds) or 'joining them'}"
        raise GenerationError(what, where="tokenizer", remedy=remedy)
    pairs = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]

    def write(name: str) -> bytes:
        if "ByteFallback" in kinds and (byte := BYTE_TOKEN.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        for old, new in pairs:
            name = name.replace(old, new)
        return name.encode()

    return write, "Strip" in kinds


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return (
        [step for one in decoder["decoders"] for step in _flat(one)]
        if decoder["type"] == "Sequence"
        else [decoder]
    )
