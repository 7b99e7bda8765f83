"""What a command does when it is asked to stop by Ctrl-C (SIGINT) or SIGTERM.

The first signal asks for an end in order; the second ends the process at once, whatever it is doing. Outside
the main thread no handler is installed: there, the caller may cancel.
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

ASKED = (signal.SIGINT, signal.SIGTERM)
_blocking = 0
"""How many calls of others' code are under way in the main thread, where they keep the loop from hearing."""


class StopRequest:
    """Whether the process was asked to stop, and by which signal."""

    number: int | None = None

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], object] | None = None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended: 130 or 143; 0 where there was none."""
        return 0 if self.number is None else 128 + self.number

    @contextmanager
    def heard_by(self, stop: Callable[[], object]) -> Iterator[None]:
        """Within a running loop: call ``stop`` there when a signal comes, or came before."""
        self._loop, self._stop = asyncio.get_running_loop(), stop
        if self.number is not None:
            self._loop.call_soon(stop)
        try:
            yield
        finally:
            self._loop, self._stop = None, None

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
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
    """Hear Ctrl-C and SIGTERM for as long as the block lasts, in the main thread."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in ASKED}
    for number in ASKED:
        signal.signal(number, request.hear)
    try:
        yield request
    finally:
        for asked, handler in before.items():
            signal.signal(asked, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def when_asked_to_stop(stop: Callable[[], object]) -> Iterator[StopRequest]:
    """Call ``stop`` on Ctrl-C or SIGTERM, from within a running loop, instead of being torn down."""
    with stoppable() as request, request.heard_by(stop):
        yield request


@contextmanager
def in_blocking_call() -> Iterator[None]:
    """While others' code runs in the main thread: a signal interrupts it, since the loop cannot hear."""
    global _blocking
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _blocking += 1
    try:
        yield
    finally:
        _blocking -= 1


def end_now(number: int) -> None:
    """End this process as the signal would have, without waiting for anything."""
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # a live panel hides the cursor
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # where the signal is blocked
