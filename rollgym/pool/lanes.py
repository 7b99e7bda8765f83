"""Threads of a worker: one makes all calls to one environment, so that a slow one delays nobody else."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal, NoReturn

from rollgym.errors import RollgymError
from rollgym.pool.board import SLOTS, Board
from rollgym.pool.host import Hosted
from rollgym.pool.wire import Act, Begin
from rollgym.registry import find_spec, load_object
from rollgym.types import EpisodeSpec

Thread = Literal["own", "any", "main"]
"""Which thread calls an environment: one of its own (and always that one), any, or the main one.

A class says so by its attribute ``pool_thread``; ``own`` where it says nothing. ``any`` is for environments
whose calls are far below a millisecond and do not care for threads: they are called without a change of
thread. ``main`` is for those that set signal handlers, and makes them wait for one another.
"""

SLOW = 0.002
"""Seconds beyond which a call should not have been made in the service thread."""


def thread_for(spec: EpisodeSpec) -> Thread:
    """What the environment's class says of threads, before one is made."""
    try:
        maker: Any = find_spec(spec.env_id).entry_point
        if isinstance(maker, str):
            maker = load_object(maker, "environment")
    except RollgymError:
        return "own"  # making it will fail too, and say why
    said: Thread = getattr(maker, "pool_thread", "own")
    return said


def die() -> NoReturn:
    """End a worker that is of no use any more; better dead, and known to be, than silent."""
    try:
        traceback.print_exc()
    finally:
        os._exit(70)


class Lane:
    """A queue of jobs for one thread. Its slot is its place on the worker's board."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.ident = 0
        self.call: tuple[Seat, Begin | Act | None] | None = None
        """The last call made here, which the board says whether it still runs; closing has no request."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.post = self._jobs.put
        """Add a job; ``None`` ends the lane."""

    def run(self) -> None:
        """Do jobs in the calling thread until the lane is ended."""
        self.ident = threading.get_ident()
        get = self._jobs.get
        try:
            while (job := get()) is not None:
                job()
        except BaseException:
            die()  # environments' errors are answers, so this one is our own


class Lanes:
    """The lanes of a worker: one for the service thread, one for the main thread, others as needed."""

    def __init__(self, board: Board) -> None:
        self.service = Lane(0)
        self.main = Lane(1)
        self._board = board
        board.use(1)
        self._free = list(range(SLOTS - 2, 1, -1))
        self._running: dict[Lane, threading.Thread] = {}

    def new(self) -> Lane:
        """A lane with a thread of its own."""
        # Beyond four thousand the last slot is shared, and blame is less exact.
        lane = Lane(self._free.pop() if self._free else SLOTS - 1)
        self._board.use(lane.slot)
        # Daemons: a worker that stops waits for nobody who hangs.
        thread = threading.Thread(target=lane.run, name=f"lane {lane.slot}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads
            return self.main
        self._running[lane] = thread
        return lane

    def end(self, lane: Lane) -> None:
        """End a lane after the job it does now, its last."""
        if self._running.pop(lane, None) is not None:
            lane.post(None)
            if lane.slot != SLOTS - 1:
                self._free.append(lane.slot)

    def end_all(self) -> None:
        """End every lane, the main one last and only when the others have."""
        running = list(self._running.items())
        for lane, _ in running:
            lane.post(None)
        for _, thread in running:
            thread.join()
        self.main.post(None)

    def all(self) -> list[Lane]:
        """The lanes there are."""
        return [self.service, self.main, *list(self._running)]


class Trust:
    """Whether calls of one sort may be made in the service thread, where everybody waits for them.

    The first that proves slow is the last for a while; each further one makes the while longer, and quick
    ones make it shorter again, so that a hiccup of the machine is forgiven.
    """

    __slots__ = ("_next", "_slow", "_wait")

    def __init__(self, slow: float = SLOW) -> None:
        self._slow = slow
        self._wait = 0
        self._next = 8

    def given(self) -> bool:
        """Ask once per call."""
        if self._wait:
            self._wait -= 1
            return False
        return True

    def took(self, seconds: float) -> None:
        """Tell how long a trusted call took."""
        if seconds > self._slow:
            self._wait = self._next
            self._next = min(2 * self._next, 4096)
        elif self._next > 8:
            self._next -= 1


class Seat:
    """An environment, or the place for one, and the lane its calls are made in."""

    __slots__ = ("busy", "episode", "hosted", "kind", "lane", "thread", "trust")

    def __init__(self, kind: bytes, thread: Thread | None) -> None:
        self.kind = kind
        self.episode = ""
        self.thread = thread
        """Unknown until the first environment of the kind was looked at."""
        self.lane: Lane | None = None
        self.hosted: Hosted | None = None
        self.busy = False
        """A call is in the lane: whatever comes next waits behind it there."""
        self.trust: dict[type[Begin | Act], Trust] = {Begin: Trust(), Act: Trust()}
