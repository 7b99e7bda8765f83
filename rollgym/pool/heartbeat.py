"""Heartbeat of a worker, with a stack trace of calls that are close to their time limit."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback

from rollgym.pool.protocol import Begin, Hello
from rollgym.pool.status_page import Running, StatusPage
from rollgym.pool.threads import EnvThread, EnvThreads

_EVERY = 0.5
_WARN_FRACTION = 0.8
"""Fraction of its time limit after which a call is reported."""


class Heartbeat(threading.Thread):
    """Thread that records heartbeats as long as the interpreter runs."""

    def __init__(self, status: StatusPage) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._status = status
        self._every = _EVERY
        self._env_threads: EnvThreads | None = None
        self._limits = (0.0, 0.0)
        self._reported: set[int] = set()

    def watch(self, env_threads: EnvThreads, hello: Hello) -> None:
        """Report slow calls of these threads from now on."""
        self._limits = hello.reset_seconds, hello.step_seconds
        self._every = min(_EVERY, *(limit / 10 for limit in self._limits))
        self._env_threads = env_threads

    def run(self) -> None:
        """Record heartbeats until the process exits."""
        while True:
            self._status.beat()
            if self._env_threads is not None:
                self._check_calls(self._env_threads)
            time.sleep(self._every)

    def _check_calls(self, env_threads: EnvThreads) -> None:
        running = self._status.running()
        self._reported &= {call.lease for call in running}
        for call in running:
            if call.seconds > _WARN_FRACTION * min(self._limits) and call.lease not in self._reported:
                for env_thread in env_threads.all():
                    if env_thread.slot == call.slot:
                        self._report_slow_call(env_thread, call)

    def _report_slow_call(self, env_thread: EnvThread, call: Running) -> None:
        if env_thread.call is None:
            return
        env_slot, request = env_thread.call
        begins = isinstance(request, Begin)
        if call.seconds < _WARN_FRACTION * self._limits[0 if begins else 1]:
            return
        self._reported.add(call.lease)
        what = "reset()" if begins else "close()" if request is None else "step()"
        frame = sys._current_frames().get(env_thread.ident)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        episode = env_slot.episode
        text = f"rollgym: {what} of episode {episode} has been running for {call.seconds:.1f} s:\n{stack}"
        with contextlib.suppress(OSError):  # an environment may have closed stderr
            os.write(2, text.encode("utf-8", "replace"))
