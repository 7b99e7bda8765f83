"""Byte channel to a worker in a container through the engine's attach stream."""

from __future__ import annotations

import contextlib
import struct
import time
from typing import Any

from rollgym.core.errors import WorkerLost
from rollgym.sandbox import docker_engine
from rollgym.sandbox.cgroup import SPARE_MB
from rollgym.sandbox.types import Limits

FRAME = struct.Struct(">BxxxI")
"""Frame header of the attach stream: stream number and length."""
STDOUT = 1
SPARE_TASKS = 4
"""Processes besides the code's: worker, session head, waiter and one that is ending."""
LEAST_TASKS = 24
"""Processes that the engine's helper needs until it becomes the worker."""
KEEP_ERRORS = 2000
OOM_WAIT_SECONDS = 0.5
"""Seconds to wait for the engine to report an OOM kill."""


def memory_bytes(limits: Limits) -> int:
    """Memory limit of a container: code, files (tmpfs) and worker."""
    return (limits.memory_mb + 2 * limits.disk_mb + SPARE_MB) << 20


def first_tasks(limits: Limits) -> int:
    """Process and thread limit of a container at start."""
    return max(LEAST_TASKS, limits.processes + SPARE_TASKS)


class Attached:
    """Channel to the worker of a container; removes the container on close."""

    def __init__(self, api: Any, container: str, limits: Limits) -> None:
        self._api, self._container = api, container
        self._given = memory_bytes(limits), first_tasks(limits)
        self._left = 0
        """Remaining bytes of the current output frame."""
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
                raise self._lost("did not answer in time") from None
            except OSError:
                raise self._lost("or the engine died") from None

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
        """Return the length of the next stdout frame; stderr before it is stored."""
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
            raise self._lost("did not answer in time") from None
        except OSError:
            size = 0
        if not size:
            raise self._lost("or the engine died")
        return size

    def _patience(self, deadline: float) -> None:
        if self._closed:
            raise WorkerLost("The container of a sandbox is closed.")
        # 0 would mean non-blocking, with a different error.
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))

    def _lost(self, why: str) -> WorkerLost:
        words = self._errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        self.close()
        return WorkerLost(f"The worker of a sandbox in a container {why}{': ' + words if words else ''}.")

    def out_of_memory(self) -> bool:
        """Whether the kernel OOM-killed since the last call."""
        filters = {"container": self._container, "event": "oom"}
        until = time.time() + OOM_WAIT_SECONDS
        with contextlib.suppress(*docker_engine.failures()):
            events = self._api.events(since=self._born, until=f"{until:.3f}", filters=filters, decode=True)
            before, self._kills = self._kills, max((event["timeNano"] for event in events), default=0)
            return self._kills > before
        return False

    def adapt(self, limits: Limits) -> None:
        """Apply the limits of the next execution if they changed."""
        size, tasks = wanted = memory_bytes(limits), limits.processes + SPARE_TASKS
        if self._closed or wanted == self._given:
            return
        new = {"Memory": size, "MemorySwap": size, "PidsLimit": tasks}
        # The package's method does not support PidsLimit.
        url = f"{self._api.base_url}/v{self._api.api_version}/containers/{self._container}/update"
        try:
            answer = self._api.post(url, json=new, timeout=self._api.timeout)
        except OSError:
            raise self._lost("cannot be given its limits: the engine is gone") from None
        if answer.status_code != 200:
            raise self._lost(f"cannot be given its limits ({' '.join(answer.text.split())[:300]})")
        self._given = wanted

    def close(self) -> None:
        """Remove the container."""
        if self._closed:
            return
        self._closed = True
        docker_engine.remove(self._api, self._container)
        # The stream is only a view of the connection, which the answer holds.
        getattr(self._stream, "_response", self._stream).close()
        self._socket.close()
        self._api.close()
