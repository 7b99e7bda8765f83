"""Running a coroutine from synchronous code, also where an event loop is already running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, TypeVar

from rollgym.core.errors import Interrupted
from rollgym.utils.signals import StopRequest, stoppable

T = TypeVar("T")


def run_to_end(
    main: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[], object] = lambda: None
) -> tuple[T, StopRequest]:
    """Run ``main()``; return its result, and whether a signal asked to stop early.

    In the main thread Ctrl-C and SIGTERM call ``stop`` within the loop, and a second signal ends the process.
    Where this thread already runs a loop, as in a notebook, ``main()`` runs in another thread while the
    caller waits; a ``KeyboardInterrupt`` calls ``stop`` and is raised again afterwards.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with stoppable() as request:

            async def with_signals() -> T:
                with request.handled_by(stop):
                    return await main()

            try:
                return asyncio.run(with_signals()), request
            except Interrupted as error:
                error.exit_code = request.exit_code or error.exit_code
                raise
    return _in_thread(main, stop), StopRequest()


def _in_thread(main: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[], object]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def started() -> T:
        loops.append(asyncio.get_running_loop())
        return await main()

    def work() -> None:
        try:
            results.append(asyncio.run(started()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(work,), name="rollgym-run", daemon=True)
    thread.start()
    interrupted: KeyboardInterrupt | None = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:
            if interrupted is not None or not loops:
                raise
            interrupted = error
            loops[0].call_soon_threadsafe(stop)
    if interrupted is not None:
        raise interrupted
    if errors:
        raise errors[0]
    return results[0]
