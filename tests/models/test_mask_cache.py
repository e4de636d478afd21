"""A cache keeps the most recently used values, within its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unmask.models.mask_cache import MaskCache


@given(st.lists(st.integers(1, 8), max_size=40), st.integers(1, 4), st.integers(1, 16))
def test_the_most_recently_used_are_kept_within_the_bounds(keys, most, most_cells):
    """A value's size is its key."""
    cache: MaskCache[str] = MaskCache(most, most_cells)
    recent: list[int] = []
    for key in keys:
        asked = cache.hits + cache.misses
        made: list[int] = []
        assert (
            cache.get(key, lambda key=key, made=made: made.append(key) or f"value {key}", key)
            == f"value {key}"
        )
        assert bool(made) == (key not in recent) and cache.hits + cache.misses == asked + 1
        recent = [*(other for other in recent if other != key), key]
        while len(recent) > 1 and (len(recent) > most or sum(recent) > most_cells):
            recent.pop(0)
        assert len(cache) == len(recent) and cache.cells == sum(recent)
        assert len(cache) <= most and (cache.cells <= most_cells or len(cache) == 1)


def test_nothing_is_left_of_a_cleared_cache():
    cache: MaskCache[int] = MaskCache(4, 4)
    for _ in range(2):
        cache.get("a", lambda: 1, 1)
    assert (cache.hits, cache.misses, len(cache)) == (1, 1, 1)
    cache.clear()
    assert (cache.hits, cache.misses, len(cache), cache.cells) == (0, 0, 0, 0)
