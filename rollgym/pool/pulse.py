"""A worker's sign of life, and a word on calls that are about to be killed for taking too long."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback

from rollgym.pool.board import Board, Running
from rollgym.pool.lanes import Lane, Lanes
from rollgym.pool.wire import Begin, Hello

_EVERY = 0.5
_NEARLY = 0.8
"""The part of its time after which a call is spoken about."""


class Pulse(threading.Thread):
    """Beats as long as the interpreter runs, whatever the environments do."""

    def __init__(self, board: Board) -> None:
        super().__init__(name="pulse", daemon=True)
        self._board = board
        self._every = _EVERY
        self._lanes: Lanes | None = None
        self._limits = (0.0, 0.0)
        self._told: set[int] = set()

    def watch(self, lanes: Lanes, hello: Hello) -> None:
        """Look after the calls in these lanes from now on."""
        self._limits = hello.reset_seconds, hello.step_seconds
        self._every = min(_EVERY, *(limit / 10 for limit in self._limits))
        self._lanes = lanes

    def run(self) -> None:
        """Beat, for ever."""
        while True:
            self._board.beat()
            if self._lanes is not None:
                self._look(self._lanes)
            time.sleep(self._every)

    def _look(self, lanes: Lanes) -> None:
        running = self._board.running()
        self._told &= {call.lease for call in running}
        for call in running:
            if call.seconds > _NEARLY * min(self._limits) and call.lease not in self._told:
                for lane in lanes.all():
                    if lane.slot == call.slot:
                        self._tell(lane, call)

    def _tell(self, lane: Lane, call: Running) -> None:
        if lane.call is None:
            return
        seat, request = lane.call
        begins = isinstance(request, Begin)
        if call.seconds < _NEARLY * self._limits[0 if begins else 1]:
            return
        self._told.add(call.lease)
        what = "reset()" if begins else "close()" if request is None else "step()"
        frame = sys._current_frames().get(lane.ident)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        text = (
            f"rollgym: {what} of episode {seat.episode} has been running for {call.seconds:.1f} s:\n{stack}"
        )
        with contextlib.suppress(OSError):  # an environment may have closed it
            os.write(2, text.encode("utf-8", "replace"))
