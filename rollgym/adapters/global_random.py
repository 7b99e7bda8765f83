"""Keep libraries that use the global random generators from disturbing each other.

Some libraries seed and read ``random`` and ``np.random``, which everything in a process shares. Inside
``with PrivateRandom(seed):`` these have a state that belongs to one episode; afterwards they are as before.
"""

from __future__ import annotations

import random
import threading
from types import TracebackType
from typing import Any

import numpy as np

_lock = threading.RLock()
"""Environments of a worker run on several threads: only one may have the global generators at a time."""


class PrivateRandom:
    """A state of the global generators for one episode; enter it around every call into the library.

    Example:
        >>> private = PrivateRandom(7)
        >>> with private:
        ...     first = random.random()
        >>> with PrivateRandom(7):
        ...     assert random.random() == first
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._python: Any = rng.getstate()
        self._numpy: Any = np.random.RandomState(rng.randrange(2**32)).get_state()
        self._outside: list[tuple[Any, Any]] = []

    def __enter__(self) -> PrivateRandom:
        _lock.acquire()
        self._outside.append((random.getstate(), np.random.get_state()))
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            python, numpy = self._outside.pop()
            random.setstate(python)
            np.random.set_state(numpy)
        finally:
            _lock.release()

    def copy(self) -> PrivateRandom:
        """Return a generator in the same state, which can be used without changing this one."""
        twin = PrivateRandom(0)
        twin._python, twin._numpy = self._python, self._numpy
        return twin
