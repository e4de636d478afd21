"""The text of token ids: the other direction of `encoding.py`.

The text of a completion is decode(prompt + completion) without decode(prompt), and that of a token the
difference of two prefixes. Decoded alone, a completion would lose its first space with tokenizers that write
a space before a text, as SentencePiece does. Special tokens have no text.

Decoders write each token by itself, with three exceptions: the first token with text loses its space, bytes
that make a character together are written as one, and WordPiece's may remove spaces before punctuation. So
the last tokens of a prompt stand for all of it (`_context`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""What tokenizers write for the first bytes of a character whose last bytes are missing."""
CONTEXT = 4
"""Tokens with text on which the text after them depends, since a character has at most 4 bytes. Byte tokens
in a row count as one: they are written as characters or, if one of these is invalid, as none."""
DECODED_AGAIN = 8
"""Tokens at least that are decoded again before their text is kept."""
CLEANED_UP = 4
"""Characters at the end of a text that the next token may change, where a tokenizer removes spaces before
punctuation."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def text_after(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[int],
    ids: Sequence[int],
    eos_token_ids: Sequence[int] = (),
) -> str:
    """The text of tokens that follow others, without the end token that closes them, special or not.

    Args:
        before: the tokens that they follow, such as a prompt's; empty: they begin the text.
    """
    return GrowingText(tokenizer, before).read(without_end(ids, eos_token_ids))


def without_end(ids: Sequence[int], eos_token_ids: Sequence[int]) -> Sequence[int]:
    """Tokens without the end token that closes them."""
    return ids[:-1] if ids and ids[-1] in eos_token_ids else ids


def token_texts(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[int],
    ids: Sequence[int],
    *,
    named: bool = False,
) -> list[str]:
    """The text of each token. Together they are `text_after`: the last of several tokens that make a
    character has it.

    Args:
        named: give special tokens, which have no text, by their names.
    """
    growing = GrowingText(tokenizer, before)
    whole = GrowingText(tokenizer, before).read(ids)
    ends = accumulate((_common(growing.read(ids[:number]), whole) for number in range(1, len(ids) + 1)), max)
    texts = [whole[start:end] for start, end in pairwise([0, *ends])]
    if named:
        texts = [text or _special_name(tokenizer, token) for text, token in zip(texts, ids, strict=True)]
    return texts


def canvas_texts(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[int],
    ids: Sequence[int],
    hidden: Sequence[bool],
) -> list[str | None]:
    """The text of each token of a canvas that follows `before`; None where it is hidden, by the mask token in
    `ids`. Hidden tokens are taken to have text."""
    texts: list[str | None] = []
    for is_hidden, run in groupby(zip(ids, hidden, strict=True), key=itemgetter(1)):
        tokens, known = [token for token, _ in run], [*before, *ids[: len(texts)]]
        if is_hidden:
            texts += [None] * len(tokens)
        elif None in texts and not has_text(tokenizer, known):
            texts += token_texts(tokenizer, tokens, tokens)  # after any text
        else:
            texts += token_texts(tokenizer, known, tokens)
    return texts


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int, *, first: bool = False) -> bytes:
    """What a token writes, whatever is around it: nothing if it is special.

    Args:
        first: whether no text precedes it.
    """
    text = _decode(tokenizer, [token])
    if UNFINISHED in text:
        return _bytes_of(str(tokenizer.convert_ids_to_tokens(token)), text)
    return (text if first else _decode(tokenizer, [token, token])[len(text) :]).encode()


def token_name(tokenizer: PreTrainedTokenizerBase, token: int, *, first: bool = False) -> str:
    """The text of a token for a list of tokens. A part of a character is written as by OpenAI's API, as
    `bytes:\\xe2\\x82`, and a special token by its name. Arguments as of `token_bytes`."""
    written = token_bytes(tokenizer, token, first=first)
    try:
        return written.decode() or _special_name(tokenizer, token)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def has_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Whether any of the tokens is not special. A space has text, though it has none at the beginning."""
    return any(_decode(tokenizer, [token, token]) for token in reversed(ids))


def num_at_start(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[int],
    ids: Sequence[int],
    hidden: Sequence[bool] = (),
) -> int:
    """How many of the tokens no text precedes: none if `before` has text, else those up to the first one that
    is hidden or has text."""
    if has_text(tokenizer, before):
        return 0
    known = [*hidden, *[False] * (len(ids) - len(hidden))]
    found = (number for number, token in enumerate(ids) if known[number] or has_text(tokenizer, [token]))
    return next(found, len(ids) - 1) + 1


class GrowingText:
    """The text of tokens that come one after the other. Only the last ones are decoded each time.

    Args:
        before: the tokens that they follow, as in `text_after`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self._before = _context(tokenizer, before)
        self._keep(self._before, 0, "")

    def _keep(self, context: list[int], number: int, text: str) -> None:
        """Decode only the tokens from a number on, after a context; `text`: that of those before."""
        self._context, self._number, self._kept = context, number, text
        # and without its last character, which may be unfinished
        self._starts = [_decode(self.tokenizer, context)]
        while len(self._starts) < CONTEXT and self._starts[-1].endswith(UNFINISHED):
            self._starts.append(_decode(self.tokenizer, context[: -len(self._starts)]))

    def read(self, ids: Sequence[int]) -> str:
        """The text of all tokens, which begin with those of the call before."""
        new = list(ids[self._number :])
        whole = _decode(self.tokenizer, [*self._context, *new])
        start = next((start for start in self._starts if whole.startswith(start)), None)
        if start is None and self._number:  # a space was removed from the text that was kept
            self._keep(self._before, 0, "")
            return self.read(ids)
        text = self._kept + whole[len(self._starts[0] if start is None else start) :]
        long, whole_characters = len(new) >= DECODED_AGAIN, not text.endswith(UNFINISHED)
        if long and whole_characters and _num_settled(self.tokenizer, new) == len(new):
            self._keep(_context(self.tokenizer, [*self._context, *new]), len(ids), text)
        return text

    def settled(self, ids: Sequence[int]) -> str:
        """The beginning of their text that no later token changes."""
        text = self.read(ids[: _num_settled(self.tokenizer, ids)]).rstrip(UNFINISHED)
        cleans_up = getattr(self.tokenizer, "clean_up_tokenization_spaces", False)
        return text[: max(0, len(text) - CLEANED_UP)] if cleans_up else text


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _special_name(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The name of a special token; "" for others."""
    return "" if has_text(tokenizer, [token]) else str(tokenizer.decode([token]))


def _common(text: str, whole: str) -> int:
    """The characters with which both begin."""
    if whole.startswith(text):
        return len(text)
    return next(number for number in range(len(text)) if whole[number : number + 1] != text[number])


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
    """The number of tokens up to the last one with text that is not a byte."""
    number = len(ids)
    while number and (_is_byte(tokenizer, ids[number - 1]) or not has_text(tokenizer, [ids[number - 1]])):
        number -= 1
    return number


def _bytes_of(name: str, text: str) -> bytes:
    """The bytes of a token that is a part of a character, by its name."""
    if byte := BYTE_TOKEN.fullmatch(name):
        return bytes([int(byte[1], 16)])
    return byte_level(name) if all(character in BYTES for character in name) else text.encode()


BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def byte_level(name: str) -> bytes:
    """The bytes of a token of GPT-2's byte-level alphabet, in which every byte is a visible character."""
    if any(character not in BYTES for character in name):
        return name.encode()
    return bytes(BYTES[character] for character in name)
