"""Graceful shutdown on Ctrl-C (SIGINT) and SIGTERM.

The first signal requests an orderly shutdown; the second ends the process at once. Outside the main thread no
handler is installed: there, the caller may cancel.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_blocking = 0
"""Number of blocking calls in the main thread, during which the event loop cannot react."""


class StopRequest:
    """A request to stop the process, and its signal."""

    number: int | None = None

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], object] | None = None

    @property
    def exit_code(self) -> int:
        """The conventional exit code after a signal: 130 or 143; 0 without one."""
        return 0 if self.number is None else 128 + self.number

    @contextmanager
    def handled_by(self, stop: Callable[[], object]) -> Iterator[None]:
        """Call ``stop`` in the running event loop when a signal arrives, or has arrived before."""
        self._loop, self._stop = asyncio.get_running_loop(), stop
        if self.number is not None:
            self._loop.call_soon(stop)
        try:
            yield
        finally:
            self._loop, self._stop = None, None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.number is not None:
            end_now(number)
        self.number = number
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop)
            if _blocking:
                raise KeyboardInterrupt
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)


@contextmanager
def stoppable() -> Iterator[StopRequest]:
    """Handle Ctrl-C and SIGTERM within the block, in the main thread."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, request.handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def when_asked_to_stop(stop: Callable[[], object]) -> Iterator[StopRequest]:
    """Call ``stop`` on Ctrl-C or SIGTERM, in the running event loop, instead of being cancelled."""
    with stoppable() as request, request.handled_by(stop):
        yield request


@contextmanager
def in_blocking_call() -> Iterator[None]:
    """Let a signal interrupt a blocking call in the main thread, where the event loop cannot react."""
    global _blocking
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _blocking += 1
    try:
        yield
    finally:
        _blocking -= 1


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``; ``signal 99`` for an unknown one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_now(number: int) -> None:
    """End the process at once, as the signal would have."""
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # a live panel hides the cursor
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # where the signal is blocked
