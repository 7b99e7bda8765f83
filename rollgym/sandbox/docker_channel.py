"""Bytes to a worker in a container and back, through the engine's attach stream."""

from __future__ import annotations

import contextlib
import struct
import time
from typing import Any

from rollgym.errors import WorkerLost
from rollgym.sandbox import docker_engine
from rollgym.sandbox.cgroup import SPARE_MB
from rollgym.sandbox.types import Limits

FRAME = struct.Struct(">BxxxI")
"""Before each piece of output the engine says of which stream it is, and how long."""
STDOUT = 1
SPARE_TASKS = 4
"""For the worker, the head of a session, the one that waits, and one that is just ending."""
LEAST_TASKS = 24
"""What the engine's own helper needs in a container until it has become the worker."""
KEEP_ERRORS = 2000
OOM_WAIT_SECONDS = 0.5
"""How late the engine may tell that the kernel killed for memory."""


def memory_bytes(limits: Limits) -> int:
    """What a container may hold: the code's memory, its files (which are memory), and the worker."""
    return (limits.memory_mb + 2 * limits.disk_mb + SPARE_MB) << 20


def first_tasks(limits: Limits) -> int:
    """How many processes and threads a container may have when it starts."""
    return max(LEAST_TASKS, limits.processes + SPARE_TASKS)


class Attached:
    """A channel to the worker in one container, which it removes in the end."""

    def __init__(self, api: Any, container: str, limits: Limits) -> None:
        self._api, self._container = api, container
        self._given = memory_bytes(limits), first_tasks(limits)
        self._left = 0
        """What is still to come of the piece of output that is being read."""
        self._errors = b""
        self._closed = False
        self._kills = 0
        self._born = int(time.time())
        # Before the start, or what the worker says first could be lost in the buffer of the HTTP library.
        self._stream = api.attach_socket(container, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        self._socket = getattr(self._stream, "_sock", self._stream)

    def start(self) -> None:
        """Start the container."""
        self._api.start(self._container)

    def write(self, data: bytes | memoryview, deadline: float) -> None:
        """Send all of it before the deadline."""
        rest = memoryview(data)
        while rest:
            self._patience(deadline)
            try:
                rest = rest[self._socket.send(rest) :]
            except TimeoutError:
                raise self._lost("said nothing in time") from None
            except OSError:
                raise self._lost("died, or the engine did") from None

    def read_into(self, view: memoryview, deadline: float) -> None:
        """Fill a buffer from the worker's output before the deadline."""
        while view:
            if not self._left:
                self._left = self._next_piece(deadline)
                continue
            size = self._receive(view[: self._left], deadline)
            self._left -= size
            view = view[size:]

    def _next_piece(self, deadline: float) -> int:
        """The length of the next piece of standard output; errors that come before it are kept."""
        header = bytearray(FRAME.size)
        self._fill(memoryview(header), deadline)
        stream, size = FRAME.unpack(header)
        if stream == STDOUT:
            return int(size)
        while size:
            piece = bytearray(min(size, 1 << 16))
            self._fill(memoryview(piece), deadline)
            self._errors = (self._errors + piece)[-KEEP_ERRORS:]
            size -= len(piece)
        return 0

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view:
            view = view[self._receive(view, deadline) :]

    def _receive(self, view: memoryview, deadline: float) -> int:
        self._patience(deadline)
        try:
            size = int(self._socket.recv_into(view))
        except TimeoutError:
            raise self._lost("said nothing in time") from None
        except OSError:
            size = 0
        if not size:
            raise self._lost("died, or the engine did")
        return size

    def _patience(self, deadline: float) -> None:
        if self._closed:
            raise WorkerLost("The container of a sandbox is closed.")
        # 0 would mean not to wait at all, with another error.
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))

    def _lost(self, why: str) -> WorkerLost:
        words = self._errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        self.close()
        return WorkerLost(f"The worker of a sandbox in a container {why}{': ' + words if words else ''}.")

    def out_of_memory(self) -> bool:
        """Whether the kernel killed for memory since the last question."""
        filters = {"container": self._container, "event": "oom"}
        until = time.time() + OOM_WAIT_SECONDS
        with contextlib.suppress(*docker_engine.failures()):
            events = self._api.events(since=self._born, until=f"{until:.3f}", filters=filters, decode=True)
            before, self._kills = self._kills, max((event["timeNano"] for event in events), default=0)
            return self._kills > before
        return False

    def adapt(self, limits: Limits) -> None:
        """Fit the container to the limits of the next execution; the engine is asked only for a change."""
        size, tasks = wanted = memory_bytes(limits), limits.processes + SPARE_TASKS
        if self._closed or wanted == self._given:
            return
        new = {"Memory": size, "MemorySwap": size, "PidsLimit": tasks}
        # The package's own method knows no PidsLimit.
        url = f"{self._api.base_url}/v{self._api.api_version}/containers/{self._container}/update"
        try:
            answer = self._api.post(url, json=new, timeout=self._api.timeout)
        except OSError:
            raise self._lost("cannot be given its limits: the engine is gone") from None
        if answer.status_code != 200:
            raise self._lost(f"cannot be given its limits ({' '.join(answer.text.split())[:300]})")
        self._given = wanted

    def close(self) -> None:
        """Remove the container and all in it."""
        if self._closed:
            return
        self._closed = True
        docker_engine.remove(self._api, self._container)
        # The stream is only a view of the connection, which the answer holds.
        getattr(self._stream, "_response", self._stream).close()
        self._socket.close()
        self._api.close()
