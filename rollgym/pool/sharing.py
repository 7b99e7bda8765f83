"""Things too heavy to load per environment: once per process, whichever environment asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class _Thing:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.made = False
        self.value: Any = None


_things: dict[Hashable, _Thing] = {}


def shared(key: Hashable, factory: Callable[[], T]) -> T:
    """What ``factory`` returns, made once in this process and handed to everybody who asks for ``key``.

    For data that environments only read: an index, a word list, a loaded model. Concurrent callers wait for
    the first; where the factory raises, that caller gets the error and the next one tries again.
    """
    thing = _things.setdefault(key, _Thing())
    if not thing.made:
        with thing.lock:
            if not thing.made:
                thing.value = factory()
                thing.made = True
    value: T = thing.value
    return value
