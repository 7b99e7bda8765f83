"""Python's search for reference cycles, made rarer while thousands of episodes play."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 50_000
"""By default Python looks after 700. A turn makes about a hundred objects and hardly a cycle, and the more
episodes play, the more there is to look through: the same turn costs three times as much among 4,096."""

_users = 0
_before: tuple[int, int, int] = gc.get_threshold()


@contextmanager
def rare_collections() -> Iterator[None]:
    """While anybody is inside, cycles are looked for less often; what the process had set comes back."""
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
