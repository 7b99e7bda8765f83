"""Deadline of the current call to an environment.

A pool kills a worker whose step takes longer than `WorkerLimits.step_seconds`, and the episode fails. An
environment that does slow work for an action (running a program, say) reads `seconds_left` and returns in
time.
"""

from __future__ import annotations

import threading
import time

_call = threading.local()


def start_call(seconds: float | None) -> None:
    """Set the deadline of the call that this thread makes; ``None`` for no limit."""
    _call.until = None if seconds is None else time.monotonic() + seconds


def seconds_left() -> float | None:
    """Seconds until the deadline of the call that this thread makes; ``None`` for no limit."""
    until: float | None = getattr(_call, "until", None)
    return None if until is None else until - time.monotonic()
