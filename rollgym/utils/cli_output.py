"""Standard output of commands with ``--json``: one JSON value and nothing else.

Environments, agents and plugins may print, from Python, from C or from worker processes. Inside `only_json`
all of that goes to stderr, and only `print_json` writes to stdout.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO, Any

_real: tuple[IO[str], int] | None = None
"""The stream and a copy of the file descriptor of stdout, while they are reserved for JSON."""


@contextmanager
def only_json() -> Iterator[None]:
    """Redirect all output to stderr, except that of `print_json`."""
    global _real
    stream = sys.stdout
    stream.flush()
    try:
        copy = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # stdout or stderr is closed
        copy = -1
    _real = (stream, copy)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _real = None
        if copy >= 0:
            _flush_c()  # output buffered by the C library must not follow the JSON
            with suppress(BrokenPipeError, ValueError):
                sys.stderr.flush()
            os.dup2(copy, 1)
            os.close(copy)


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Print a value as JSON to the real stdout."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if _real is None:
        print(text)
        return
    stream, copy = _real
    if copy < 0:
        print(text, file=stream, flush=True)
        return
    _flush_c()
    os.dup2(copy, 1)
    try:
        print(text, file=stream, flush=True)
    finally:
        os.dup2(2, 1)


def _flush_c() -> None:
    with suppress(Exception):
        ctypes.CDLL(None).fflush(None)
