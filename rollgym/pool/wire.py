"""What goes between a pool and its workers: length-prefixed msgpack, no pickle in either direction."""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

from rollgym.pool import Reset, Step
from rollgym.types import EpisodeSpec, Failure

Op = Literal["open", "reset", "step", "release", "hello"]


class Request(msgspec.Struct, array_like=True):
    """One call to a worker."""

    number: int
    op: Op
    lease: int = 0
    action: str = ""
    healthy: bool = True
    spec: EpisodeSpec | None = None


class Hello(msgspec.Struct, array_like=True):
    """The first message to a worker: how to find what the environments are made of."""

    path: list[str]
    modules: list[str]


class Answer(msgspec.Struct, array_like=True):
    """A worker's answer to the request with the same number."""

    number: int
    error: Failure | None = None
    result: msgspec.Raw = msgspec.Raw(b"\xc0")


_LENGTH = struct.Struct(">I")
MAX_MESSAGE = 256 * 2**20
_encoder = msgspec.msgpack.Encoder()


def pack(message: Any) -> bytes:
    """A message with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def encode_result(result: Reset | Step | None) -> msgspec.Raw:
    """What an operation returned, ready to travel inside an `Answer`."""
    return msgspec.Raw(_encoder.encode(result))


class Unpacker:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with this piece of data."""
        buffer = self._buffer
        buffer += data
        messages: list[bytes] = []
        start = 0
        while len(buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_MESSAGE:
                raise ValueError(f"a message of {length} bytes is longer than {MAX_MESSAGE} allow")
            if len(buffer) - start - 4 < length:
                break
            messages.append(bytes(buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        del buffer[:start]
        return messages
