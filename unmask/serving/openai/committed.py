"""The text of committed tokens: what may be sent of it, and where a stop string cuts it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


def find_stop(text: str, stops: Sequence[str], since: int = 0) -> tuple[int, int] | None:
    """Where, from `since` on, the stop string begins and ends that is complete first (of several, the
    longest); None: the text has none. It is the same however the text arrives."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop, since)) >= 0]
    return min(found)[::-1] if found else None


def held_back(text: str, marks: Sequence[str]) -> int:
    """The characters at the end of a text that may be the beginning of a mark."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    """The characters at the end of a text with which a mark begins, but for the whole mark."""
    tail = text[len(text) - min(len(text), len(mark) - 1) :]
    return next(
        (len(tail) - at for at in range(len(tail)) if tail[at] == mark[0] and mark.startswith(tail[at:])), 0
    )


class CommittedText:
    """A text that grows, and is cut before the first stop string.

    Args:
        stops: the stop strings, none empty.

    Attributes:
        text: what has been released.
        stop: where the stop string begins and ends; None: there is none yet.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = stops
        self.text = ""
        self.stop: tuple[int, int] | None = None
        self._searched = 0  # characters in which no stop string is

    def grow(self, sure: str, *, done: bool) -> str:
        """What is released of the text, of which nothing changes any more what is there; `done`: nothing
        follows."""
        if self.stop is not None:
            return ""
        self.stop = find_stop(sure, self.stops, max(0, self._searched - max(map(len, self.stops), default=0)))
        self._searched = len(sure)
        if self.stop is not None:
            sure = sure[: self.stop[0]]
        elif not done:
            sure = sure[: len(sure) - held_back(sure, self.stops)]
        # what was sent stays, also where a decoder has changed its mind about it
        released = sure[len(self.text) :]
        self.text += released
        return released


def tokens_until(decode: Callable[[int], str], count: int, stops: Sequence[str]) -> int:
    """The number of the first of `count` tokens with which a stop string is complete; `decode` gives the text
    of so many tokens."""
    return bisect_left(range(count), True, key=lambda number: find_stop(decode(number), stops) is not None)
