"""`WeightChain`: a full update and the deltas after it, as references to what the ranks stored.

An engine that has the version before fetches the last delta alone. One that was restarted, joined or missed
a version fetches the full update and all deltas. Buckets are published as the ranks store them, so that
engines fetch one while the ranks prepare the next.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from rollgym.engines.weight_sync.receiver import WeightReceiver
from rollgym.engines.weight_sync.wire import Part, Sent


class Handle(Protocol):
    """Reference to what one rank sends of one bucket."""

    shared: bool
    """Whether what `read` returns stays valid and unchanged for as long as it is used."""

    def read(self) -> Part:
        """Fetch it."""


class KeptPart:
    """A part in this process's memory, which its owner may overwrite."""

    shared = False

    def __init__(self, part: Part) -> None:
        self._part = part

    def read(self) -> Part:
        """Return it."""
        return self._part


class Link:
    """One update. Thread-safe: one thread publishes its buckets, others wait for them.

    Args:
        base: The stamp of the update that it is a delta to; ``None``: a full update.
    """

    def __init__(self, base: str | None = None) -> None:
        self.stamp = uuid.uuid4().hex
        self.base = base
        self.buckets: list[tuple[Handle, ...]] = []
        self.sent = Sent()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def publish(self, handles: Sequence[Handle], sent: Sent) -> None:
        """Add a bucket: what each rank sends of it."""
        with self._lock:
            self.buckets.append(tuple(handles))
            self.sent = self.sent.plus(sent)
        self._notify()

    def end(self, error: BaseException | None = None) -> None:
        """Publish no more buckets: all are there, or the ranks failed."""
        self._error = error
        self._done.set()
        self._notify()

    def wait(self) -> None:
        """Wait for all buckets; raises the error of the ranks."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    async def follow(self) -> AsyncIterator[tuple[Handle, ...]]:
        """Yield the buckets as they are published; raises the error of the ranks."""
        number = 0
        while True:
            future: asyncio.Future[None] | None = None
            with self._lock:
                done, there = self._done.is_set(), len(self.buckets)
                if number >= there and not done:
                    loop = asyncio.get_running_loop()
                    future = loop.create_future()
                    self._waiting.append((loop, future))
            if future is not None:
                await future
            elif number < there:
                yield self.buckets[number]
                number += 1
            else:
                self.wait()
                return

    def _notify(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future)

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        return {"stamp": self.stamp, "base": self.base, "buckets": self.buckets, "sent": self.sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["base"])  # type: ignore[misc]
        self.__dict__.update(state)
        self._done.set()


class WeightChain(Mapping[str, Any]):
    """Weights as a full update and deltas; as a mapping, the tensors by name, fetched on first access.

    Args:
        links: The full update, then the deltas in order.
        delta: Whether deltas follow, so that receivers keep a copy of the weights.
    """

    def __init__(self, links: Sequence[Link], *, delta: bool = False) -> None:
        self.links = tuple(links)
        self.delta = delta
        self._tensors: Mapping[str, Any] | None = None

    @property
    def last(self) -> Link:
        """The update that is sent."""
        return self.links[-1]

    @property
    def sent(self) -> Sent:
        """Counts of the last update."""
        self.last.wait()
        return self.last.sent

    def fetch(self) -> Mapping[str, Any]:
        """Fetch all tensors to this process."""
        if self._tensors is None:
            self.last.wait()
            self._tensors = WeightReceiver().complete(self)
        return self._tensors

    def __getitem__(self, name: str) -> Any:
        return self.fetch()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fetch())

    def __len__(self) -> int:
        return len(self.fetch())

    def __reduce__(self) -> tuple[Any, ...]:
        return _chain, (self.links, self.delta)


def _chain(links: Sequence[Link], delta: bool) -> WeightChain:
    return WeightChain(links, delta=delta)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
