"""Special tokens in users' texts stay text: `</s>` in a prompt ends nothing, and `<|mask|>` hides nothing.

`as_text` marks them, also in messages before a chat template renders them, and `encode` reads the marks.
Special tokens outside of marks, such as those that a chat template writes, become tokens. With the attribute
`parse_special_tokens` on a tokenizer (`unmask.load` has an argument of this name) nothing is marked.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from unmask.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ONLY_IDS: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False}
START, _, END = mark_control_tokens("x", re.compile("x"))


def parses_special_tokens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether special tokens in users' texts become tokens."""
    return bool(getattr(tokenizer, "parse_special_tokens", False))


def as_text(tokenizer: PreTrainedTokenizerBase, value: Any, keep: Collection[str | None] = ()) -> Any:
    """A string, or messages, whose special tokens are marked as text, except those in `keep`. Marking twice
    changes nothing."""
    if not value or parses_special_tokens(tokenizer):
        return value
    return mark_control_tokens(value, pattern(tokenizer, keep))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text in which `as_text` has marked what is not a special token, without BOS and EOS.
    Raises DataError if the tokenizer cannot write a special token as text, or if the text has a lone
    surrogate."""
    try:
        if START not in text and END not in text:
            return _ids(tokenizer, text)
        return list(encode_marked_chat(tokenizer, text))
    # from the tokenizers library, for a lone surrogate: Python's escape of a byte that is not UTF-8
    except TypeError as error:
        raise DataError(
            f"{text!r:.80} is not valid Unicode",
            where="text",
            remedy="Save it as UTF-8",
            reason="not valid Unicode",
        ) from error
    except ValueError as error:
        raise DataError(
            f"a special token cannot be written as text ({error})",
            where="text",
            remedy="Remove it, or write it differently",
            reason="special token in the text",
        ) from error


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids that a call of the tokenizer gives. Where the call only passes the text to its backend, that is
    called: half of the time goes into the rest."""
    if _passes_to_backend(tokenizer):
        backend = tokenizer.backend_tokenizer
        if (
            backend.truncation is backend.padding is None
            and backend.encode_special_tokens == tokenizer.split_special_tokens
        ):
            return list(backend.encode(text, add_special_tokens=False).ids)
    return list(tokenizer(text, **ONLY_IDS)["input_ids"])


@lru_cache(maxsize=8)  # asked for every text
def _passes_to_backend(tokenizer: PreTrainedTokenizerBase) -> bool:
    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    calls = ("__call__", "_encode_plus", "backend_tokenizer")
    return (
        isinstance(tokenizer, plain)
        and not hasattr(kind, "_switch_to_input_mode")
        and all(getattr(kind, name) is getattr(plain, name) for name in calls)
    )


def without_marks(text: str) -> str:
    """A text as it was before `as_text` marked it."""
    return text.replace(START, "").replace(END, "")


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The ids of users' texts, without BOS and EOS. Errors as of `encode`."""
    marked = as_text(tokenizer, list(texts))
    if not any(START in text or END in text for text in marked):
        with contextlib.suppress(TypeError):  # `encode` says why
            return list(tokenizer(marked, **ONLY_IDS)["input_ids"]) if marked else []
    return [encode(tokenizer, text) for text in marked]


def pattern(tokenizer: PreTrainedTokenizerBase, keep: Collection[str | None] = ()) -> re.Pattern[str]:
    """Matches the special tokens, except those in `keep` and the unknown token: unknown text becomes it."""
    named = frozenset(map(str, tokenizer.special_tokens_map.values()))
    return _pattern(tokenizer, len(tokenizer), named, frozenset(keep))


@lru_cache(maxsize=64)  # needed for every text
def _pattern(
    tokenizer: PreTrainedTokenizerBase, size: int, named: frozenset[str], keep: frozenset[str | None]
) -> re.Pattern[str]:
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = {name for name in added | set(tokenizer.all_special_tokens) if name.strip()} - {
        tokenizer.unk_token,
        *keep,
    }
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
