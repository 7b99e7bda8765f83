"""What a command does when it is asked to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def when_asked_to_stop(stop: Callable[[], object]) -> Iterator[None]:
    """Call ``stop`` on Ctrl-C or SIGTERM, from within a running loop, instead of being torn down."""
    loop = asyncio.get_running_loop()
    asked = (signal.SIGINT, signal.SIGTERM)
    for number in asked:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in asked:
            loop.remove_signal_handler(number)
