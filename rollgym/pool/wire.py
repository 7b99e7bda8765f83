"""What goes between a pool and its workers: length-prefixed msgpack, no pickle in either direction.

A frame is a length and a msgpack array of messages. Each message is encoded by whoever says it, so that one
that cannot be encoded spoils nobody else's; a frame holds all that were ready at the time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from rollgym.pool import Reset, Step
from rollgym.types import EpisodeSpec, Failure

# Between the pool and a worker.


class Hello(msgspec.Struct, array_like=True, tag=0):
    """The first message to a worker: how to find what the environments are made of."""

    path: list[str]
    modules: list[str]
    reset_seconds: float
    step_seconds: float
    weigh: bool
    """Whether to tell by how much the process grew during each call."""


class Begin(msgspec.Struct, array_like=True, tag=1):
    """Start an episode, in an environment that is made where there is none idle."""

    lease: int
    spec: EpisodeSpec


class Act(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Play one action."""

    lease: int
    action: str


class End(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Give the environment back; one that is not healthy is thrown away."""

    lease: int
    healthy: bool


class Ready(msgspec.Struct, array_like=True, tag=0):
    """The answer to `Hello`; the error where a module cannot be imported."""

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
    """The answer to `End`: the environment is free, or gone."""

    lease: int


class Failed(msgspec.Struct, array_like=True, tag=4):
    """The answer to `Begin` or `Act` where something was raised."""

    lease: int
    error: Failure
    lost: bool = False
    """Whether it was not the environment's fault: something that it needs, such as a browser, died."""


# Between the pool and its keeper.


class Launch(msgspec.Struct, array_like=True, tag=0):
    """Start a worker with this number, on the socket and the board that come along."""

    number: int


class Kill(msgspec.Struct, array_like=True, tag=1):
    """Kill the worker with this number."""

    number: int


class Started(msgspec.Struct, array_like=True, tag=0):
    """A worker is there."""

    number: int
    pid: int


class Gone(msgspec.Struct, array_like=True, tag=1):
    """A worker is no more; its exit code (negative: a signal) and the last it printed."""

    number: int
    code: int
    output: str


Request = Hello | Begin | Act | End
Answer = Ready | Began | Acted | Ended | Failed

MAX_MESSAGE = 64 * 2**20
"""Of one message, in bytes."""
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
    """One frame out of messages that are encoded already."""
    body = b"".join(messages)
    return _HEAD.pack(len(body) + 5, _ARRAY32, len(messages)) + body


def take(outbox: list[bytes]) -> list[bytes]:
    """Remove as many messages from the front of ``outbox`` as one frame may hold.

    Others may append meanwhile, so nothing is taken that was not seen.
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
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes | memoryview]:
        """The frames that are complete with this piece of data."""
        if not self._buffer and len(data) >= 4:
            # Nearly always a piece is exactly one frame: no copy then.
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
                raise ValueError(f"a frame of {length} bytes is longer than {MAX_FRAME} allow")
            if len(buffer) - start - 4 < length:
                break
            frames.append(bytes(buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        del buffer[:start]
        return frames
