"""Standard output of a command with ``--json``: one JSON value and nothing else.

Environments, agents and plugins may print, from Python, from C or from worker processes. While `only_json`
lasts, all of that goes to standard error; `print_json` alone writes to standard output.
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
"""The stream and a copy of the descriptor of standard output, while they are kept for JSON."""


@contextmanager
def only_json() -> Iterator[None]:
    """Send what anything prints to standard error, except for `print_json`."""
    global _real
    stream = sys.stdout
    stream.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # a process without one of the two
        with redirect_stdout(sys.stderr):
            _real = (stream, -1)
            try:
                yield
            finally:
                _real = None
        return
    _real = (stream, kept)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _real = None
        _flush_c()  # what C code printed and its library still holds must not follow the JSON
        with suppress(BrokenPipeError, ValueError):
            sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Print a value as JSON to the real standard output."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if _real is None:
        print(text)
        return
    stream, kept = _real
    if kept < 0:
        print(text, file=stream, flush=True)
        return
    _flush_c()
    os.dup2(kept, 1)
    try:
        print(text, file=stream, flush=True)
    finally:
        os.dup2(2, 1)


def _flush_c() -> None:
    with suppress(Exception):
        ctypes.CDLL(None).fflush(None)
