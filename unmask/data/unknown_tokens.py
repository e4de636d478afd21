"""Counts the tokens that stand for text that a tokenizer does not know (`<unk>`). A model that is trained on
them learns nothing else. Also warns of texts that spell special tokens, which stay text."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unmask.data.special_tokens import parses_special_tokens, pattern
from unmask.errors import DataError, UnmaskWarning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXAMPLES = 8
"""Unknown words or characters that an error or a report names."""
SEARCHED, SEARCHED_LENGTH = 64, 2000
"""Texts in which they, and special tokens, are looked for, and the characters of each."""


class UnknownTokens:
    """Counts the unknown tokens of a dataset.

    Args:
        limit: the fraction of the tokens that may be unknown.
        lazily: whether to check after each batch of texts, as a stream has no end.
    """

    def __init__(self, limit: float = 1.0, *, lazily: bool = False):
        self.limit, self.lazily = limit, lazily
        self.tokens = self.unknown = self.searched = 0
        self.found: Counter[str] = Counter()  # unknown words or characters, in the texts that were searched
        self.first = self.spelling = 0  # of the first texts, and those of them that spell special tokens
        self.spelled: Counter[str] = Counter()  # special tokens in the first texts

    def count(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], texts: Any) -> None:
        """Count the tokens of a text, of messages, or of several of these."""
        unknown = ids.count(_unknown_id(tokenizer))
        self.tokens += len(ids)
        self.unknown += unknown
        if unknown and self.searched < SEARCHED:
            self.searched += 1
            for text in _strings(texts):
                self.found.update(_unknown_parts(tokenizer, text[:SEARCHED_LENGTH]))
        if self.first < SEARCHED and not parses_special_tokens(tokenizer):
            found = (token for text in _strings(texts) for token in _special_tokens(tokenizer, text))
            spelled = [*dict.fromkeys(found)]  # in their order
            self.first += 1
            self.spelling += bool(spelled)
            self.spelled.update(spelled)

    def identity(self) -> None:
        """What rows depend on: nothing of this."""

    def state(self) -> dict[str, Any]:
        """The counts, of JSON types."""
        return {
            "tokens": self.tokens,
            "unknown": self.unknown,
            "found": self.found.most_common(),
            "first": self.first,
            "spelling": self.spelling,
            "spelled": self.spelled.most_common(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the counts of rows that are stored."""
        self.tokens, self.unknown = state["tokens"], state["unknown"]
        self.first, self.spelling = state["first"], state["spelling"]
        self.found, self.spelled = (Counter(dict(state[name])) for name in ("found", "spelled"))

    @property
    def fraction(self) -> float:
        """The fraction of the tokens that are unknown."""
        return self.unknown / max(self.tokens, 1)

    @property
    def examples(self) -> list[str]:
        """The most frequent unknown words or characters."""
        return [part for part, _ in self.found.most_common(EXAMPLES)]

    def check(self, where: str) -> None:
        """Raise DataError if more tokens of the dataset `where` are unknown than `limit` allows. Warns, once,
        if most of its first texts spell special tokens, as those do that a chat template has rendered."""
        if where and 2 * self.spelling > self.first:
            names = ", ".join(token for token, _ in self.spelled.most_common(EXAMPLES))
            what = f"{where}: the special tokens that the texts spell ({names}) stay text"
            remedy = "If a chat template has rendered them, set parse_special_tokens (docs/data.md)"
            warnings.warn(f"{what}. {remedy}.", UnmaskWarning, stacklevel=2)
            self.spelling = 0
        if self.fraction <= self.limit:
            return
        others = " and others" if len(self.found) > EXAMPLES else ""
        lacks = f". It lacks {', '.join(map(repr, self.examples))}{others}" if self.found else ""
        what = f"{self.fraction:.1%} of the tokens are unknown to the tokenizer{lacks}"
        enough = math.ceil(self.fraction * 100) / 100
        raise DataError(
            what,
            where=where,
            remedy="Use a model whose tokenizer knows the text, make a tokenizer for a new one (unmask "
            "pretrain model.from_scratch=true "
            f"--tokenizer train:8000), or allow it with training.max_unknown={enough:g}",
        )


def _unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of unknown text; None for a tokenizer that knows every text. Byte-level ones may name their end
    token."""
    unknown: int | None = tokenizer.unk_token_id
    return None if unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id) else unknown


def _unknown_parts(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[str]:
    """The parts of a text that are unknown; none from a slow tokenizer, which does not say where its tokens
    are."""
    if not tokenizer.is_fast:
        return
    encoded, unknown = (
        tokenizer(text, add_special_tokens=False, return_offsets_mapping=True),
        _unknown_id(tokenizer),
    )
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if token == unknown:
            yield text[start:end]


def _special_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[str]:
    """The special tokens that a text spells before its end, where Unmask reads an end token."""
    start, end = text[:SEARCHED_LENGTH], len(text.rstrip())
    return (found.group() for found in pattern(tokenizer).finditer(start) if found.end() < end)


def _strings(value: Any) -> Iterator[str]:
    """The strings in a text, messages, or columns of these, without roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([inside for name, inside in value.items() if name != "role"])
    elif isinstance(value, Sequence):
        for inside in value:
            yield from _strings(inside)
