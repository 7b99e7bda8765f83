"""One session with an MCP server, for callers that are not asynchronous.

The official client is asynchronous, and a session must be opened and closed by the same task. All sessions of
a process run in one event loop in a separate thread; a `Session` posts its requests there and waits, with a
deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from rollgym.core.errors import EnvError, WorkerLost, one_line
from rollgym.core.extras import require
from rollgym.core.messages import ToolCall, ToolSpec

__all__ = ["Session", "result_text"]

T = TypeVar("T")
Job = tuple[Callable[[Any], Awaitable[Any]], Future[Any]]
_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_CLOSE_SECONDS = 10.0


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all sessions of this process."""
    with _lock:
        me = os.getpid()  # a fork does not inherit the thread
        if me not in _loops:
            _loops.clear()
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="rollgym-mcp", daemon=True).start()
            _loops[me] = loop
        return _loops[me]


class Session:
    """An open session: tools, calls, and an end.

    Args:
        server: Arguments of the official ``mcp.Client``: the URL of a server, or the command line of one that
            speaks over stdin and stdout.
        timeout: Seconds that opening the session and each call may take.
        on_close: Called once, after the end.

    Raises:
        EnvError: The server cannot be started or reached, or does not speak MCP.
    """

    def __init__(
        self, server: str | Sequence[str], *, timeout: float, on_close: Callable[[], None] = lambda: None
    ) -> None:
        require("An MCP server", "mcp")
        self._server = server
        self._timeout = timeout
        self._on_close = on_close
        self._jobs: asyncio.Queue[Job | None] = asyncio.Queue()
        self._opened: Future[None] = Future()
        self._closed = False
        self._ended = asyncio.run_coroutine_threadsafe(self._run(), _loop())
        try:
            self._opened.result(timeout)
        except FutureTimeout:
            self.close()
            raise EnvError(f"The MCP server did not open a session within {timeout:g} s.") from None
        except BaseException as error:
            self.close()
            raise EnvError(f"No session with the MCP server: {_reason(error)}") from error

    def tools(self) -> tuple[ToolSpec, ...]:
        """Return all tools of the server."""

        async def fetch(client: Any) -> list[ToolSpec]:
            specs: list[ToolSpec] = []
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                specs += [
                    ToolSpec(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
                    for tool in page.tools
                ]
                cursor = page.next_cursor
                if cursor is None or len(specs) > 1_000:
                    return specs

        return tuple(self._ask(fetch, "list its tools"))

    def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool; returns its result as text, and whether the tool reports an error.

        Raises:
            WorkerLost: The server died or did not answer in time. The session is over.
        """
        result = self._ask(lambda client: client.call_tool(call.name, call.arguments), f"answer {call.name}")
        return result_text(result), bool(result.is_error)

    def close(self) -> None:
        """End the session, and the server if the session started it."""
        if self._closed:
            return
        self._closed = True
        _loop().call_soon_threadsafe(self._jobs.put_nowait, None)
        try:
            self._ended.result(_CLOSE_SECONDS)
        except BaseException:
            self._ended.cancel()
        self._on_close()

    def _ask(self, job: Callable[[Any], Awaitable[T]], doing: str) -> T:
        if self._closed:
            raise WorkerLost("The session with the MCP server is over.")
        future: Future[T] = Future()
        _loop().call_soon_threadsafe(self._jobs.put_nowait, (job, future))
        try:
            return future.result(self._timeout)
        except FutureTimeout:
            self._ended.cancel()
            self.close()
            raise WorkerLost(f"The MCP server did not {doing} within {self._timeout:g} s.") from None
        except Exception as error:
            if _is_answer(error):
                raise EnvError(f"The MCP server refused to {doing}: {_reason(error)}") from error
            self.close()
            raise WorkerLost(f"The MCP server ended before it could {doing}: {_reason(error)}") from error

    async def _run(self) -> None:
        """Open the session, do jobs until `close`, and fail those that are left."""
        job: Job | None = None
        try:
            async with self._client() as client:
                self._opened.set_result(None)
                while (job := await self._jobs.get()) is not None:
                    work, future = job
                    try:
                        future.set_result(await work(client))
                    except Exception as error:
                        future.set_exception(error)
                    job = None
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            waiting = [] if job is None else [job]
            with contextlib.suppress(asyncio.QueueEmpty):
                while True:
                    if (left := self._jobs.get_nowait()) is not None:
                        waiting.append(left)
            for _, future in waiting:
                if not future.done():
                    future.set_exception(ConnectionError("the session has ended"))

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        from mcp import Client, StdioServerParameters, stdio_client

        if isinstance(self._server, str):
            async with Client(self._server) as client:
                yield client
            return
        program, *arguments = self._server
        parameters = StdioServerParameters(command=program, args=arguments, cwd="/")
        # What a server writes to stderr must not end up between our own output.
        with open(os.devnull, "w") as errors:
            async with Client(stdio_client(parameters, errlog=errors)) as client:
                yield client


def _is_answer(error: Exception) -> bool:
    """Return whether an error is the server's own answer to a request, so that the session continues."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.error.code != CONNECTION_CLOSED


def result_text(result: Any) -> str:
    """Return the text of a tool's result; parts that are not text are named."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        return str(result.structured_content)
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """Return a sentence about an error, or about the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error)
