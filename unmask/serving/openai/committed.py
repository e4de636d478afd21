"""The text of committed tokens: what may be sent of it, and where a stop string cuts it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What tokenizers write for the first bytes of a character whose last bytes are missing."""
CLEANED = 4
"""Characters at the end of a text that the next token may change, where a tokenizer removes spaces before punctuation."""


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the stop string begins and ends that is complete first (of several, the longest); None: the text has none. It is the same
    however the text arrives."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found)[::-1] if found else None


def held_back(text: str, marks: Sequence[str]) -> int:
    """The characters at the end of a text that may be the beginning of a mark."""
    longest = max(map(len, marks), default=0) - 1
    return next((size for size in range(min(longest, len(text)), 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)


class CommittedText:
    """A text that grows, and is cut before the first stop string.

    Args:
        stops: the stop strings, none empty.
        cleans_up: whether the tokenizer removes spaces before punctuation, which the next token may be.

    Attributes:
        text: what has been released.
        stop: where the stop string begins and ends; None: there is none yet.
    """

    def __init__(self, stops: Sequence[str], *, cleans_up: bool = False):
        self.stops, self.cleans_up = stops, cleans_up
        self.text = ""
        self.stop: tuple[int, int] | None = None

    def grow(self, whole: str, *, done: bool) -> str:
        """What is released of the text, of which `whole` is there now; `done`: nothing follows."""
        if self.stop is not None:
            return ""
        self.stop = find_stop(whole, self.stops)
        if self.stop is not None:
            sure = whole[: self.stop[0]]
        elif done:
            sure = whole
        else:
            sure = whole.rstrip(UNFINISHED)
            sure = sure[: max(0, len(sure) - CLEANED)] if self.cleans_up else sure
            sure = sure[: len(sure) - held_back(sure, self.stops)]
        released = sure[len(self.text) :] if sure.startswith(self.text) else ""
        self.text += released
        return released


def tokens_until(decode: Callable[[int], str], count: int, stops: Sequence[str]) -> int:
    """The number of the first of `count` tokens with which a stop string is complete; `decode` gives the text of so many tokens."""
    return bisect_left(range(count), True, key=lambda number: find_stop(decode(number), stops) is not None)
