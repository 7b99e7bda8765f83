"""The learner's thread, beside the event loop of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE = 5.0
"""Seconds to wait for the running call when a run ends by an error or a signal."""


class LearnerThread(Executor):
    """An executor with one daemon thread.

    A `ThreadPoolExecutor` waits for its calls, also while the process exits: an environment that blocks
    while the built-in policy is made would keep a run from ending on Ctrl-C or SIGTERM.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="rollgym-learner", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call for the thread."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Reject further calls; ``wait`` until the submitted ones are done."""
        self._end()
        if wait:
            self._thread.join()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        self._thread.join(None if kind is None else PATIENCE)

    def _end(self) -> None:
        if not self._closed:
            self._closed = True
            self._calls.put(None)

    def _work(self) -> None:
        call: Any
        while (call := self._calls.get()) is not None:
            call()
            del call  # its arguments may be large
