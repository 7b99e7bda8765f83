"""Worker side of a session: its head process, pipes and validation of its reports."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any

from rollgym.sandbox import worker_child, worker_limits
from rollgym.sandbox.worker_watch import Watch, pipe

BACK_SECONDS = 5.0
"""Seconds for a head to report a killed turn."""
READY_SECONDS = 30.0
"""Seconds for the first head to apply its confinement."""


class Session:
    """Session head and pipes to it."""

    def __init__(self, config: dict[str, Any], folder: str) -> None:
        self._turn = 0
        self._back = False
        """Whether the head reported the death of this turn's process."""
        self.out, out = pipe()
        self.err, err = pipe()
        orders, self._orders = os.pipe()
        self._status, status = pipe()
        os.set_blocking(self._orders, False)
        self.head = os.fork()
        if not self.head:
            worker_child.session(config, folder, out, err, orders, status)
        for descriptor in (out, err, orders, status):
            os.close(descriptor)
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if not poll.poll(READY_SECONDS * 1000) or "ready" not in self._said():
            self.close()
            raise OSError("the confinement of a session failed")

    def turn(self, code: bytearray, watch: Watch) -> tuple[str, int | None, str]:
        """Run code; return how it ended, its exit code and the state of the session."""
        self._turn += 1
        self._back = False
        order = json.dumps({"turn": self._turn, "code": len(code), "limits": watch.limits}).encode()
        whole = bytearray(len(order).to_bytes(4, "big") + order) + code
        worker_limits.send(self.head, signal.SIGCONT)
        try:
            ended, exit_code, head = self._until_said(whole, watch)
        finally:
            whole[:] = bytes(len(whole))
        pids = worker_limits.family()
        if ended == "exit" and head in pids:
            # Usage since the last check counts too, and must not grow meanwhile.
            worker_limits.send(head, signal.SIGSTOP)
            if broken := watch.broken(pids, (head,)):
                ended, exit_code, head = broken, None, self.head
        if ended not in ("exit", "lost") and head is not None and not self._gone_back():
            head = None
        if head is None or head not in pids or not worker_limits.alive(head):
            return ("lost" if ended == "exit" else ended), None, "lost"
        state = "rolled_back" if head == self.head else "committed"
        self.head = head
        return ended, exit_code, state

    def _until_said(self, order: bytearray, watch: Watch) -> tuple[str, int | None, int | None]:
        """Return how the turn ended, its exit code and the new head process."""
        rest = memoryview(order)
        try:
            handle = os.pidfd_open(self.head)
        except OSError:
            return "lost", None, None
        try:
            while True:
                try:
                    rest = rest[os.write(self._orders, rest) :] if rest else rest
                except BlockingIOError:
                    pass
                except OSError:
                    return "lost", None, None
                broken, ready = watch.wait(self._status, handle)
                if broken:
                    # A partially read order would be mistaken for the next one.
                    return broken, None, None if rest else self.head
                said = self._said() if self._status in ready else {}
                if "pid" in said and "code" in said:
                    return "exit", said["code"] & 255, said["pid"]
                if "died" in said:
                    by_limit = said["died"] == -signal.SIGXCPU
                    self._back = True
                    return ("cpu_limit" if by_limit else "lost"), None, self.head
                if handle in ready:
                    return "lost", None, None
        finally:
            os.close(handle)

    def _gone_back(self) -> bool:
        """End a turn that broke a limit; return whether the head reported it.

        On a busy machine the turn may not have started yet: it must not start later.
        """
        poll, until = select.poll(), time.monotonic() + BACK_SECONDS
        poll.register(self._status, select.POLLIN)
        while not self._back and worker_limits.alive(self.head) and time.monotonic() < until:
            worker_limits.sweep((self.head,))
            self._back = bool(poll.poll(20)) and "died" in self._said()
        return self._back

    def _said(self) -> dict[str, int]:
        """Read the status of this turn: integers or nothing. Untrusted code may write to this pipe."""
        try:
            words = json.loads(os.read(self._status, 4096).splitlines()[-1])
            if words["turn"] == self._turn and all(type(value) is int for value in words.values()):
                return dict(words)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        return {}

    def close(self) -> None:
        """Close the pipes."""
        for descriptor in (self.out, self.err, self._orders, self._status):
            os.close(descriptor)
