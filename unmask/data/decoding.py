"""The text of token ids: the other direction of `encoding.py`.

The text of a completion is decode(prompt + completion) without decode(prompt), and that of a token the difference of two prefixes. Decoded
alone, a completion would lose its first space with tokenizers that write a space before a text, as SentencePiece does. Special tokens have
no text.

A decoder writes each token by itself but for three things: the first token with text loses its space, bytes that together make a
character are written as one, and WordPiece's may remove spaces before punctuation. So the last tokens of a prompt stand for all of it
(`_context`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""What tokenizers write for the first bytes of a character whose last bytes are missing."""
CONTEXT = 4
"""Tokens with text on which the text after them depends, as a character has at most 4 bytes; and all of a run of byte tokens, which is
written as characters or, if one of them is invalid, as none."""
DECODED_AGAIN = 8
"""Tokens at least that are decoded before those that are new become known."""
CLEANED_UP = 4
"""Characters at the end of a text that the next token may change, where a tokenizer removes spaces before punctuation."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def text_after(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int], eos_token_ids: Sequence[int] = ()
) -> str:
    """The text of tokens that follow others (a prompt; none: they begin the text), without special tokens, and without the end token that
    closes them, whether it is special or not."""
    return GrowingText(tokenizer, before).read(without_end(ids, eos_token_ids))


def without_end(ids: Sequence[int], eos_token_ids: Sequence[int]) -> Sequence[int]:
    """Tokens without the end token that closes them."""
    return ids[:-1] if ids and ids[-1] in eos_token_ids else ids


def token_texts(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int]) -> list[str]:
    """The text of each token, which together are that of all. A character of several tokens is the text of the last of them, and the others
    have none."""
    growing = GrowingText(tokenizer, before)
    grown = [growing.read(ids[:number]) for number in range(1, len(ids) + 1)]
    ends = list(accumulate((_common(text, grown[-1]) for text in grown), max))
    return [grown[-1][start:end] for start, end in pairwise([0, *ends])]


def _common(text: str, whole: str) -> int:
    """The characters with which both begin."""
    if whole.startswith(text):
        return len(text)
    return next(number for number in range(len(text)) if whole[number : number + 1] != text[number])


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int, *, first: bool = False) -> bytes:
    """What a token writes: nothing if it is special.

    Args:
        first: whether no text precedes it; else it is within a text, whatever precedes it there.
    """
    once = _decode(tokenizer, [token])
    text = once if first or UNFINISHED in once else _decode(tokenizer, [token, token])[len(once) :]
    return _bytes_of(str(tokenizer.convert_ids_to_tokens(token)), text) if UNFINISHED in text else text.encode()


def token_name(tokenizer: PreTrainedTokenizerBase, token: int, *, first: bool = False) -> str:
    """The text of a token, for lists of tokens: as OpenAI's API writes a part of a character (`bytes:\\xe2\\x82`), and the name of a special
    token. Arguments as of `token_bytes`."""
    if not has_text(tokenizer, [token]):
        return str(tokenizer.decode([token]))
    written = token_bytes(tokenizer, token, first=first)
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def has_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Whether any of the tokens is not special. (A lone space may be removed from the beginning of a text, but not a second one.)"""
    return any(_decode(tokenizer, [token, token]) for token in reversed(ids))


class GrowingText:
    """The text of tokens that come one after the other. Only the last ones are decoded each time, after some before them.

    Args:
        before: the tokens that they follow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self._before = _context(tokenizer, before)
        self._look_from(self._before, 0, "")

    def _look_from(self, context: list[int], number: int, known: str) -> None:
        """Decode the tokens from a number on, which follow others; `known`: the text of those before."""
        self._context, self._number, self._known = context, number, known
        self._starts = [_decode(self.tokenizer, context)]  # without its last character, too, which the next tokens may finish
        while len(self._starts) < CONTEXT and self._starts[-1].endswith(UNFINISHED):
            self._starts.append(_decode(self.tokenizer, context[: -len(self._starts)]))

    def read(self, ids: Sequence[int]) -> str:
        """The text of all tokens, which begin with those of the call before."""
        new = list(ids[self._number :])
        whole = _decode(self.tokenizer, [*self._context, *new])
        start = next((start for start in self._starts if whole.startswith(start)), None)
        if start is None and self._number:  # what was known is written otherwise: spaces before punctuation are removed from it
            self._look_from(self._before, 0, "")
            return self.read(ids)
        text = self._known + whole[len(self._starts[0] if start is None else start) :]
        if len(new) >= DECODED_AGAIN and _num_settled(self.tokenizer, new) == len(new) and not text.endswith(UNFINISHED):
            self._look_from(_context(self.tokenizer, [*self._context, *new]), len(ids), text)
        return text

    def settled(self, ids: Sequence[int]) -> str:
        """What of their text no later token changes."""
        text = self.read(ids[: _num_settled(self.tokenizer, ids)]).rstrip(UNFINISHED)
        cleans_up = getattr(self.tokenizer, "clean_up_tokenization_spaces", False)
        return text[: max(0, len(text) - CLEANED_UP)] if cleans_up else text


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _context(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """The last tokens with text, on which the text after them depends."""
    found: list[int] = []
    for token in reversed(ids):
        if has_text(tokenizer, [token]):
            found.append(token)
            if len(found) >= CONTEXT and not _is_byte(tokenizer, token):
                break
    return found[::-1]


def _is_byte(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether a token is a byte of a tokenizer with byte fallback."""
    return BYTE_TOKEN.fullmatch(str(tokenizer.convert_ids_to_tokens(token))) is not None


def _num_settled(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
    """The number of tokens up to the last one that is not a byte."""
    number = len(ids)
    while number and (_is_byte(tokenizer, ids[number - 1]) or not has_text(tokenizer, ids[number - 1 : number])):
        number -= 1
    return number


def _bytes_of(name: str, text: str) -> bytes:
    """The bytes of a token that is a part of a character, by its name."""
    if byte := BYTE_TOKEN.fullmatch(name):
        return bytes([int(byte[1], 16)])
    return byte_level(name) if all(character in BYTES for character in name) else text.encode()


def byte_level(name: str) -> bytes:
    """The bytes of a token of GPT-2's byte-level alphabet, in which every byte is a visible character."""
    if any(character not in BYTES for character in name):
        return name.encode()
    return bytes(BYTES[character] for character in name)


def _alphabet() -> dict[str, int]:
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTES = _alphabet()
