"""Frames between the host and the worker inside: a small JSON header and a body of raw bytes.

This file runs on both sides. Inside, there is only the standard library, perhaps of an older Python.

Bodies (code, input, files, output) are never turned into Python strings by the worker: it keeps them in
buffers that it wipes, so that nothing of one execution is left in the memory that the next one inherits.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

LENGTHS = struct.Struct(">II")
MAX_HEADER = 1 << 20
MAX_BODY = 64 << 20
HELLO = b"boot"
"""First bytes of the boot code; the host may then move its processes before anything else runs."""


class FrameError(Exception):
    """Malformed frame."""


def prefix(header: dict[str, Any], body: int) -> bytes:
    """Encode the start of a frame whose body has ``body`` bytes."""
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER or body > MAX_BODY:
        raise FrameError(f"a frame of {len(text):,} + {body:,} bytes is too large")
    return LENGTHS.pack(len(text), body) + text


def receive(fill: Callable[[memoryview], None]) -> tuple[dict[str, Any], bytearray]:
    """Read the next frame; ``fill`` fills a buffer from the stream or raises."""
    lengths = bytearray(LENGTHS.size)
    fill(memoryview(lengths))
    size, rest = LENGTHS.unpack(lengths)
    if size > MAX_HEADER or rest > MAX_BODY:
        raise FrameError(f"a frame of {size:,} + {rest:,} bytes was announced")
    text, body = bytearray(size), bytearray(rest)
    fill(memoryview(text))
    fill(memoryview(body))
    try:
        header = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FrameError("the header is not a JSON object")
    return header, body
