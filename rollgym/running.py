"""Running a coroutine to its end from plain code: in a script, in a thread, or under a running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, TypeVar

from rollgym.errors import Interrupted
from rollgym.signals import StopRequest, stoppable

T = TypeVar("T")


def run_to_end(
    main: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[], object] = lambda: None
) -> tuple[T, StopRequest]:
    """Run ``main()`` and return its result, and whether a signal asked for an early end.

    In the main thread Ctrl-C and SIGTERM call ``stop`` within the loop, and a second signal ends the process.
    Where a loop runs in this thread already, as in a notebook, ``main()`` runs in another thread while the
    caller waits; an interrupt (``KeyboardInterrupt``) calls ``stop`` and is raised again afterwards.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with stoppable() as request:
            try:
                return asyncio.run(_heard(main, request, stop)), request
            except Interrupted as error:
                error.exit_code = request.exit_code or error.exit_code
                raise
    return _in_thread(main, stop), StopRequest()


async def _heard(
    main: Callable[[], Coroutine[Any, Any, T]], request: StopRequest, stop: Callable[[], object]
) -> T:
    with request.heard_by(stop):
        return await main()


def _in_thread(main: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[], object]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def noted() -> T:
        loops.append(asyncio.get_running_loop())
        return await main()

    def work() -> None:
        try:
            results.append(asyncio.run(noted()))
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
