"""Less frequent garbage collection while thousands of episodes run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 50_000
"""Allocations between two collections; Python's default is 700. A turn allocates about a hundred objects and
hardly any cycle, and each collection scans all running episodes: with 4,096 of them, a turn costs three times
as much."""

_users = 0
_before: tuple[int, int, int] = gc.get_threshold()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Raise the collection threshold inside the block; the last block to end restores the old one."""
    global _users, _before
    if _users == 0:
        _before = gc.get_threshold()
        if 0 < _before[0] < NEW_OBJECTS:
            gc.set_threshold(NEW_OBJECTS, *_before[1:])
    _users += 1
    try:
        yield
    finally:
        _users -= 1
        if _users == 0:
            gc.set_threshold(*_before)
