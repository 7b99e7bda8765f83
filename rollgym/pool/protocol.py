"""Wire protocol between a pool and its workers: length-prefixed msgpack, no pickle in either direction.

A frame is a length and a msgpack array of messages. Each message is encoded separately, so that one that
cannot be encoded does not affect others; a frame holds all messages that were ready.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from rollgym.core.types import EpisodeSpec, Failure
from rollgym.pool.base import Reset, Step

# Between the pool and a worker.


class Hello(msgspec.Struct, array_like=True, tag=0):
    """First message to a worker: module path, modules and limits."""

    path: list[str]
    modules: list[str]
    reset_seconds: float
    step_seconds: float
    weigh: bool
    """Whether to measure the memory growth of the process during each call."""


class Begin(msgspec.Struct, array_like=True, tag=1):
    """Start an episode in an idle environment or a new one."""

    lease: int
    spec: EpisodeSpec


class Act(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Play one action."""

    lease: int
    action: str


class End(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Return the environment; an unhealthy one is closed."""

    lease: int
    healthy: bool


class Ready(msgspec.Struct, array_like=True, tag=0):
    """Answer to `Hello`; ``error`` if a module cannot be imported."""

    error: Failure | None


class Began(msgspec.Struct, array_like=True, tag=1):
    """The answer to `Begin`."""

    lease: int
    reset: Reset
    grown_mb: float = 0.0


class Acted(msgspec.Struct, array_like=True, tag=2):
    """The answer to `Act`."""

    lease: int
    step: Step
    grown_mb: float = 0.0


class Ended(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Answer to `End`: the environment is idle or closed."""

    lease: int


class Failed(msgspec.Struct, array_like=True, tag=4):
    """Answer to `Begin` or `Act` that raised."""

    lease: int
    error: Failure
    lost: bool = False
    """Whether a dependency of the environment, such as a browser, died: not the environment's fault."""


# Between the pool and its fork server.


class Launch(msgspec.Struct, array_like=True, tag=0):
    """Start a worker with this number, on the socket and the status page passed along."""

    number: int


class Kill(msgspec.Struct, array_like=True, tag=1):
    """Kill the worker with this number."""

    number: int


class Started(msgspec.Struct, array_like=True, tag=0):
    """A worker has started."""

    number: int
    pid: int


class Gone(msgspec.Struct, array_like=True, tag=1):
    """A worker has exited, with its exit code (negative: a signal) and its last output."""

    number: int
    code: int
    output: str


Request = Hello | Begin | Act | End
Answer = Ready | Began | Acted | Ended | Failed

MAX_MESSAGE = 64 * 2**20
"""Maximum bytes of one message."""
MAX_REPORT = 1 << 16
MAX_FRAME = 2 * MAX_MESSAGE + 64
_HEAD = struct.Struct(">IBI")
_LENGTH = struct.Struct(">I")
_ARRAY32 = 0xDD
_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_requests = msgspec.msgpack.Decoder(list[Request]).decode
decode_answers = msgspec.msgpack.Decoder(list[Answer]).decode
decode_order = msgspec.msgpack.Decoder(Launch | Kill).decode
decode_report = msgspec.msgpack.Decoder(Started | Gone).decode


def frame(messages: Sequence[bytes]) -> bytes:
    """Build a frame from encoded messages."""
    body = b"".join(messages)
    return _HEAD.pack(len(body) + 5, _ARRAY32, len(messages)) + body


def take(outbox: list[bytes]) -> list[bytes]:
    """Remove as many messages from the front of ``outbox`` as one frame may hold.

    Other threads may append concurrently, so only counted messages are removed.
    """
    count = size = 0
    for message in outbox:
        count += 1
        size += len(message)
        if size > MAX_MESSAGE:
            break
    taken = outbox[:count]
    del outbox[:count]
    return taken


class Unpacker:
    """Splits a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes | memoryview]:
        """Return the frames completed by this data."""
        if not self._buffer and len(data) >= 4:
            # Usually the data is exactly one frame: no copy.
            (length,) = _LENGTH.unpack_from(data)
            if len(data) == length + 4:
                return [memoryview(data)[4:]]
        self._buffer += data
        return self._cut()

    def _cut(self) -> list[bytes | memoryview]:
        buffer = self._buffer
        frames: list[bytes | memoryview] = []
        start = 0
        while len(buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise ValueError(f"frame of {length} bytes exceeds the limit of {MAX_FRAME}")
            if len(buffer) - start - 4 < length:
                break
            frames.append(bytes(buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        del buffer[:start]
        return frames
