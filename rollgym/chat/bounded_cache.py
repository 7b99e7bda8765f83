"""A cache of computed values that is bounded by what they cost, not only by their number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class BoundedCache(Generic[V]):
    """Keeps the values that were used last, as many as fit.

    Args:
        most: Maximum sum of the costs. A value that costs more than a quarter of it is not kept.
        cost: The cost of a value, such as its bytes.

    Example:
        >>> cache = BoundedCache[str](10_000, cost=len)
        >>> cache.get("a", lambda: "made once")
        'made once'
    """

    def __init__(self, most: int, cost: Callable[[V], int]) -> None:
        self._most, self._cost = most, cost
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()
        self.total = 0
        """Sum of the costs of all values."""

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key, made now if it is not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        cost = self._cost(value)
        with self._lock:
            if key not in self._values and cost <= self._most // 4:
                self._values[key] = value
                self.total += cost
                while self.total > self._most:
                    self.total -= self._cost(self._values.popitem(last=False)[1])
        return value
