"""How long the current call to an environment may still take.

A pool kills a worker whose step takes longer than `WorkerLimits.step_seconds`, and the episode fails. An
environment that does slow work for an action (judging a program, say) asks `seconds_left` and ends in time
with an answer.
"""

from __future__ import annotations

import threading
import time

_call = threading.local()


def start_call(seconds: float | None) -> None:
    """Note, in the thread that makes the call, when it must be over; ``None`` where there is no limit."""
    _call.until = None if seconds is None else time.monotonic() + seconds


def seconds_left() -> float | None:
    """Seconds until the call that this thread makes must be over; ``None`` where there is no limit."""
    until: float | None = getattr(_call, "until", None)
    return None if until is None else until - time.monotonic()
