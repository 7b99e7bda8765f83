"""Any environment as an MCP server: its tools are MCP tools, its observations are their results.

Every client plays its own episodes. Over stdin and stdout there is one client; over HTTP a client is named
by the path, ``/NAME/mcp``, since the protocol has no sessions since 2026-07-28. Rewards are not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollgym.core.errors import EnvError, UsageError
from rollgym.core.extras import require
from rollgym.core.messages import ToolCall, ToolSpec
from rollgym.core.types import Episode, EpisodeSpec, Outcome
from rollgym.core.version import __version__
from rollgym.serve.env_player import ACT, EnvPlayer, ServedEnv
from rollgym.utils.urls import is_loopback_host

__all__ = ["EnvMCPServer"]

T = TypeVar("T")

START = ToolSpec(
    name="start_episode",
    description="Start a new episode. Returns the instructions and the first observation. Call this first.",
    parameters={"type": "object", "properties": {}, "additionalProperties": False},
)
_OVER = "The episode is over. Call start_episode for the next one."
_PATH = re.compile(r"(?:/([A-Za-z0-9._-]{1,64}))?/mcp/?")


@dataclass(slots=True)
class _Seat:
    """One client: its environment once that is made, and whose turn it is."""

    player: EnvPlayer | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvMCPServer:
    """Offers an environment to MCP clients, and records what they play.

    Args:
        served: The environment.
        record: Takes every finished episode, with its rewards; called by one thread at a time.
        max_players: Clients at once.
        idle_seconds: A client without a request for so long loses its episode, which is recorded as
            ``time_limit``.

    Example:
        >>> server = EnvMCPServer(ServedEnv(env_id="rollgym/Sokoban-v0"))
        >>> await server.run_stdio()
    """

    def __init__(
        self,
        served: ServedEnv,
        record: Callable[[Episode], None] = lambda episode: None,
        *,
        max_players: int = 64,
        idle_seconds: float = 600.0,
    ) -> None:
        require("An environment as an MCP server", "mcp")
        self._served, self._to_record, self._recording = served, record, threading.Lock()
        self._max_players, self._idle_seconds = max_players, idle_seconds
        self._specs: Iterator[EpisodeSpec] = served.specs()
        self._players: dict[str, _Seat] = {}
        self._tasks: set[asyncio.Task[tuple[str, bool]]] = set()
        self._closed = False
        # A thread for each client: environments that are slow must not hold up those of other clients.
        self._threads = ThreadPoolExecutor(max_players, "rollgym-mcp-client")
        # Fails early for a wrong id or argument; also the source of tools and instructions.
        example = EnvPlayer(served, iter(()), record)
        self.instructions, self.tools = example.instructions, (START, *example.tools)
        example.close()

    async def run_stdio(self) -> None:
        """Serve one client over stdin and stdout until it closes them."""
        import anyio
        from mcp import stdio_server

        server = self._server(lambda context: "stdio")
        try:
            # Copies of the descriptors: sys.stdout may be a wrapper for a terminal.
            with open(os.dup(0), encoding="utf-8") as lines, open(os.dup(1), "w", encoding="utf-8") as out:
                async with stdio_server(anyio.wrap_file(lines), anyio.wrap_file(out)) as streams:
                    await server.run(*streams, server.create_initialization_options())
        finally:
            await self.close()

    @contextlib.asynccontextmanager
    async def http_app(self, *, host: str = "127.0.0.1", api_key: str | None = None) -> AsyncIterator[Any]:
        """Yield an ASGI app that serves ``/mcp`` and ``/NAME/mcp``; closes all environments at the end.

        Args:
            host: The address that the app is served at; web pages of other sites are refused on loopback.
            api_key: The bearer token that clients must send.
        """
        inner = self._server(_name_of).streamable_http_app(
            json_response=True, stateless_http=True, transport_security=_web_pages_refused(host)
        )

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and api_key is not None and not _authorized(scope, api_key):
                await _refuse(send)
                return
            if scope["type"] == "http" and (match := _PATH.fullmatch(scope["path"])):
                scope = {
                    **scope,
                    "path": "/mcp",
                    "raw_path": b"/mcp",
                    "rollgym.player": match[1] or "default",
                }
            await inner(scope, receive, send)

        try:
            async with inner.router.lifespan_context(inner):
                yield app
        finally:
            await self.close()

    async def close(self) -> None:
        """Record running episodes as cancelled, and close all environments."""
        self._closed = True
        seats, self._players = list(self._players.values()), {}
        for seat in seats:
            async with seat.lock:
                if seat.player is not None:
                    await self._in_thread(seat.player.close)
        self._threads.shutdown(wait=False)

    @contextlib.asynccontextmanager
    async def _player(self, name: str) -> AsyncIterator[EnvPlayer]:
        """Yield a client's player, alone."""
        await self._drop_idle()
        while True:
            seat = self._seat(name)
            async with seat.lock:
                if self._players.get(name) is not seat:
                    continue  # dropped while this request waited
                if seat.player is None:
                    try:
                        seat.player = await self._in_thread(
                            EnvPlayer, self._served, self._specs, self._record
                        )
                    except BaseException:
                        self._players.pop(name, None)
                        raise
                seat.player.touch()
                yield seat.player
                return

    def _seat(self, name: str) -> _Seat:
        if self._closed:
            raise UsageError("The server is closed.")
        if name not in self._players and len(self._players) >= self._max_players:
            raise UsageError(
                f"{self._max_players} clients play already: end one, or wait until one is idle for "
                f"{self._idle_seconds:g} s."
            )
        return self._players.setdefault(name, _Seat())

    async def _drop_idle(self) -> None:
        for name, seat in list(self._players.items()):
            player = seat.player
            if player is None or player.idle_seconds <= self._idle_seconds or seat.lock.locked():
                continue
            if self._players.get(name) is seat:
                del self._players[name]
                await self._in_thread(player.close, Outcome.TIME_LIMIT)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _record(self, episode: Episode) -> None:
        with self._recording:
            self._to_record(episode)

    async def _play(self, name: str, call: ToolCall) -> tuple[str, bool]:
        """Return a call's result, and whether it is an error.

        A call continues after its client has left, so that it does not overlap with the next one.
        """
        task = asyncio.create_task(self._play_alone(name, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _play_alone(self, name: str, call: ToolCall) -> tuple[str, bool]:
        try:
            async with self._player(name) as player:
                if call.name == START.name:
                    observation = await self._in_thread(player.start)
                    return f"{self.instructions}\n\n{observation}".strip(), False
                if not player.playing:
                    return _OVER if player.episodes else f"Call {START.name} first.", True
                action = str(call.arguments.get("action", "")) if self._is_text else call.to_json()
                observation, over = await self._in_thread(player.act, action)
                return (f"{observation}\n\n{_OVER}" if over else observation), False
        except (UsageError, EnvError) as error:
            return str(error), True

    @property
    def _is_text(self) -> bool:
        return ACT in self.tools

    def _server(self, name_of: Callable[[Any], str]) -> Any:
        from mcp import types
        from mcp.server.lowlevel import Server

        async def list_tools(context: Any, params: Any) -> Any:
            tools = [
                types.Tool(name=spec.name, description=spec.description, input_schema=spec.parameters)
                for spec in self.tools
            ]
            return types.ListToolsResult(tools=tools)

        async def call_tool(context: Any, params: Any) -> Any:
            call = ToolCall(name=params.name, arguments=dict(params.arguments or {}))
            if call.name not in {spec.name for spec in self.tools}:
                names = ", ".join(spec.name for spec in self.tools)
                text, failed = f"Unknown tool {call.name}: the tools are {names}.", True
            else:
                text, failed = await self._play(name_of(context), call)
            return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)

        return Server(
            f"rollgym: {self._served.env_id}",
            version=__version__,
            instructions=f"Call {START.name} first.\n\n{self.instructions}",
            on_list_tools=list_tools,
            on_call_tool=call_tool,
        )


def _web_pages_refused(host: str) -> Any:
    """Return settings that keep web pages of other sites, and DNS rebinding, from a server on loopback."""
    from mcp.server.transport_security import TransportSecuritySettings

    if not is_loopback_host(host):
        return TransportSecuritySettings(enable_dns_rebinding_protection=False)
    own = f"[{host}]" if ":" in host else host
    hosts = [f"{name}:*" for name in dict.fromkeys((own, "127.0.0.1", "localhost", "[::1]"))]
    return TransportSecuritySettings(
        allowed_hosts=hosts, allowed_origins=[f"http://{name}" for name in hosts]
    )


def _authorized(scope: Any, api_key: str) -> bool:
    sent = dict(scope["headers"]).get(b"authorization", b"")
    return hmac.compare_digest(sent, b"Bearer " + api_key.encode())


async def _refuse(send: Any) -> None:
    headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b"A bearer token is required."})


def _name_of(context: Any) -> str:
    request = context.request
    name = None if request is None else request.scope.get("rollgym.player")
    return str(name or "default")
