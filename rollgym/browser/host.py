"""The browser of this process: one, for all environments of the process.

It is driven in one thread with a separate event loop, for environments of any thread. The browser is
started by the first episode, and closed when no environment has used it for a moment, or when Python ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast

from rollgym.browser.find import FIX
from rollgym.browser.tab import SECONDS, Tab
from rollgym.core.errors import RunError, WorkerLost, one_line

if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright

T = TypeVar("T")
TabT = TypeVar("TabT", bound=Tab)

LINGER = 1.0
"""Seconds that an unused browser stays open."""
MAX_TABS = 1000
"""Episodes after which a browser is replaced, since its memory grows."""
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]


class BrowserLost(WorkerLost):
    """The browser crashed, was killed or does not answer; not the episode's fault."""


def _error_text(error: BaseException) -> str:
    """Return Playwright's message without its logs, plus Chromium's own errors."""
    text = str(error)
    browser_log = " ".join(re.findall(r"^\[pid=\d+\]\[err\] (.*)", text, re.MULTILINE))[-300:]
    message = " ".join(re.split(r"\n(?:Browser logs|Call log):", text)[0].split())[:300]
    return f"{message or one_line(error)}{f' ({browser_log})' if browser_log else ''}"


class Engine:
    """A running browser and the program that drives it."""

    def __init__(self, driver: Playwright, browser: Browser) -> None:
        self._driver = driver
        self.browser = browser
        self.users = 0
        self.tabs = 0
        """Number of contexts opened in it."""
        self.old = False
        """Takes no new episodes, and is closed when the last one has ended."""

    @classmethod
    async def start(cls, program: str | None) -> Engine:
        """Start a browser; raise `RunError` with the reason if it does not start."""
        from playwright.async_api import Error, async_playwright

        driver = await async_playwright().start()
        try:
            browser = await driver.chromium.launch(
                executable_path=program,
                args=FLAGS,
                chromium_sandbox=os.geteuid() != 0,  # Chromium has none for root
                timeout=SECONDS * 1000,
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
            )
        except Error as error:
            await driver.stop()
            name = program or "Playwright's own"
            raise RunError(f"Chromium ({name}) does not start: {_error_text(error)}. {FIX}") from error
        return cls(driver, browser)

    @property
    def alive(self) -> bool:
        """Whether new episodes can be played in it."""
        return not self.old and self.tabs < MAX_TABS and self.browser.is_connected()

    async def close(self) -> None:
        """Close the browser and its driver, ignoring errors."""
        for stop in (self.browser.close, self._driver.stop):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(stop(), 5)


class Service(Protocol):
    """A part of an environment that runs in the host's loop, such as a web server with its pages."""

    @classmethod
    async def start(cls) -> Self:
        """Make and start it."""

    async def close(self) -> None:
        """Stop it."""


ServiceT = TypeVar("ServiceT", bound=Service)


class Host:
    """The thread, its loop, the browsers (one per program) and services (one per class)."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._engines: dict[str | None, Engine] = {}
        self._all: set[Engine] = set()
        self._starting = asyncio.Lock()
        self._services: dict[type[Service], Service] = {}
        self._opening = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rollgym browser", daemon=True)
        self._thread.start()

    def service(self, kind: type[ServiceT]) -> ServiceT:
        """Return the service of a class, started if necessary; it is closed with the host."""
        with self._opening:
            if kind not in self._services:
                self._services[kind] = self.call(kind.start(), SECONDS)
            return cast(ServiceT, self._services[kind])

    def call(self, work: Coroutine[Any, Any, T], seconds: float = 4 * SECONDS) -> T:
        """Run a coroutine in the loop and wait for it, from any other thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()
            raise

    def post(self, work: Coroutine[Any, Any, T]) -> Future[T] | None:
        """Schedule a coroutine in the loop; None after the host was closed."""
        if self._closed:
            work.close()
            return None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def enter(self, program: str | None) -> Engine:
        """Return the browser, started if necessary; `leave` must follow."""
        async with self._starting:
            engine = self._engines.get(program)
            if engine is None or not engine.alive:
                if engine is not None:
                    await self._retire(engine)
                engine = self._engines[program] = await Engine.start(program)
                self._all.add(engine)
            engine.users += 1
            return engine

    async def leave(self, engine: Engine, tab: Tab | None) -> None:
        """Close a tab and release the browser."""
        if tab is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(tab.close(), 5)
        engine.users -= 1
        if not engine.alive:
            await self._retire(engine)
        elif engine.users == 0:
            self._loop.call_later(LINGER, self._close_unused, engine)

    async def _retire(self, engine: Engine) -> None:
        engine.old = True
        if engine in self._all and (engine.users == 0 or not engine.browser.is_connected()):
            self._all.discard(engine)
            await engine.close()

    def _close_unused(self, engine: Engine) -> None:
        if engine.users == 0:
            self._closing = self._loop.create_task(self._retire(engine))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def close(self) -> None:
        """End everything."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Exception):
                self.call(self._close(), 15)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    async def _close(self) -> None:
        for engine in list(self._all):
            engine.users = 0
            await self._retire(engine)
        for service in self._services.values():
            await service.close()


_host: Host | None = None
_making = threading.Lock()


def host() -> Host:
    """Return the host of this process."""
    global _host
    with _making:
        if _host is None:
            _host = Host()
            atexit.register(_host.close)
        return _host


def _forget() -> None:
    """In a forked child: the thread and the browser are the parent's."""
    global _host, _making
    if _host is not None:
        atexit.unregister(_host.close)
    _host, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


class Seat(Generic[TabT]):
    """An environment's tab in the browser, reopened for each episode. Any thread may call it."""

    def __init__(self, program: str | None) -> None:
        self._program = program
        self._host: Host | None = None
        self._engine: Engine | None = None
        self.tab: TabT | None = None

    def open(self, make: Callable[[Browser], Awaitable[TabT]]) -> TabT:
        """Open a tab and close the previous one; ``make`` runs in the browser's loop."""
        current_host = host()
        if current_host is not self._host:  # the first episode, or the first in a forked process
            self._host, self._engine, self.tab = current_host, None, None
        if self._engine is not None and not self._engine.alive:
            self.close(broken=True)

        async def work() -> TabT:
            before, self.tab = self.tab, None
            if before is not None:
                await before.close()
            if self._engine is None:
                self._engine = await current_host.enter(self._program)
            self._engine.tabs += 1
            self.tab = await make(self._engine.browser)
            return self.tab

        return self.call(work)

    def require_tab(self) -> TabT:
        """Return the open tab; raise `BrowserLost` if there is none."""
        if self.tab is None:
            raise BrowserLost("the browser was lost: the environment is closed, or its browser crashed")
        return self.tab

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in the browser; raise `BrowserLost` if the browser fails."""
        from playwright.async_api import Error

        assert self._host is not None

        async def bounded() -> T:
            async with asyncio.timeout(3 * SECONDS):
                return await work()

        try:
            return self._host.call(bounded())
        except (Error, TimeoutError, ConnectionError) as error:
            self.close(broken=True)
            raise BrowserLost(f"the browser was lost: {_error_text(error)}") from error

    def close(self, broken: bool = False) -> None:
        """Release the slot. A broken browser is not waited for and takes no more episodes."""
        leaving = self._leaving(broken)
        if leaving is not None and not broken:
            with contextlib.suppress(Exception):
                leaving.result(SECONDS)

    def abandon(self) -> None:
        """Release the slot without waiting, from any thread."""
        self._leaving(broken=False)

    def _leaving(self, broken: bool) -> Future[None] | None:
        current_host, tab, engine = self._host, self.tab, self._engine
        self.tab = self._engine = None
        if current_host is None or current_host is not _host or engine is None:
            return None
        engine.old = engine.old or broken
        return current_host.post(current_host.leave(engine, tab))
