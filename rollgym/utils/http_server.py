"""Common parts of all web servers: listening, cross-site protection, and limits on connections.

Every server drops connections that do not send a whole request in time or do not read the response, and
bounds how many are open, so that a client that stalls, vanishes or opens many connections cannot hold memory
or file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollgym.core.errors import UsageError

if TYPE_CHECKING:
    import uvicorn


REQUEST_SECONDS = 30.0
"""Seconds within which a whole request, body included, must arrive."""
MAX_MESSAGE_BYTES = 4_000_000
"""Bytes of one WebSocket message."""
MAX_CONNECTIONS = 1000
"""Open connections per server, or half of the process's file descriptors if that is less."""


def cross_site(headers: Mapping[str, str]) -> bool:
    """Return whether a browser sends this request for a page of another site.

    Such a page can send a POST with an empty or plain-text body to any address without a preflight.
    """
    if headers.get("sec-fetch-site", "") in ("cross-site", "same-site"):
        return True
    origin, host = headers.get("origin"), headers.get("host", "")
    return origin is not None and origin not in (f"http://{host}", f"https://{host}")


def listening(host: str, port: int, *, backlog: int = 128) -> socket.socket:
    """Return a listening socket; raise a `UsageError` where the address is unavailable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {host}, port {port}: {error.strerror or error}. Choose another port (0 for a "
            "free one) or an address of this machine."
        ) from error


async def stop_accepting(servers: Iterable[asyncio.Server]) -> None:
    """Stop accepting connections and hand over those already accepted; call it before `asyncio.Server.close`.

    asyncio accepts a connection in one round of the event loop and hands it over in the next. Of a server
    closed in between, the connection is dropped without being closed.
    """
    loop = asyncio.get_running_loop()
    for server in servers:
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
    await loop_rounds()


async def loop_rounds(count: int = 4) -> None:
    """Let the event loop run callbacks that are scheduled now, and those that they schedule in turn."""
    for _ in range(count):
        await asyncio.sleep(0)


def web_server(
    app: Any,
    *,
    grace: int = 1,
    signals: bool = True,
    request_seconds: float = REQUEST_SECONDS,
    max_connections: int = MAX_CONNECTIONS,
    websockets: bool = False,
) -> uvicorn.Server:
    """Make a server for an ASGI app.

    Args:
        app: The application.
        grace: Seconds for responses in progress when the server stops.
        signals: Whether it handles Ctrl-C itself, or leaves signals to the program around it.
        request_seconds: Seconds for a whole request to arrive, and for which a client may read nothing of a
            response; after that its connection is closed.
        max_connections: Open connections; further ones are closed at once.
        websockets: Whether the app has WebSocket routes; requires the package websockets.
    """
    import uvicorn

    class Closing(uvicorn.Server):
        """A server that leaves no connection open when it stops, such as one with a stream in progress."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await stop_accepting(self.servers)
            await super().shutdown(sockets)
            for connection in list(self.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await loop_rounds()

    class Quiet(Closing):
        """A server that does not handle signals."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    kind = Closing if signals else Quiet
    return kind(
        uvicorn.Config(
            app,
            http=_bounded_protocol(request_seconds, _affordable(max_connections)),
            log_config=None,  # the program around it configures logging
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="websockets-sansio" if websockets else "none",
            ws_max_size=MAX_MESSAGE_BYTES,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=grace,
        )
    )


def _affordable(max_connections: int) -> int:
    """Return the limit on connections, at most half of the process's file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max_connections if soft == resource.RLIM_INFINITY else max(1, min(max_connections, soft // 2))


@functools.cache
def _bounded_protocol(request_seconds: float, max_connections: int) -> Any:
    """An HTTP/1.1 protocol with a deadline for each request and a bound on connections.

    uvicorn has a timeout between requests only: not before the first byte, nor within headers or body.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class BoundedProtocol(H11Protocol):
        """Closes a connection that does not send a whole request, or read the response, in time."""

        _upgraded = False
        _deadline: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
                return
            connection = transport.get_extra_info("socket")
            if connection is not None:  # the kernel detects a vanished peer
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                # asyncio sets it only where the socket names its protocol: without it, a response of two
                # writes waits 40 ms for the client's delayed acknowledgement.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # The kernel gives up on a peer that takes no data; a close would wait for it.
                milliseconds = max(1, int(request_seconds * 1000))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            self._expect_request()

        def data_received(self, data: bytes) -> None:
            self._expect_request()
            super().data_received(data)
            if self._upgraded or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._request_arrived()

        def handle_websocket_upgrade(self, event: h11.Request) -> None:
            # The connection leaves HTTP: its messages have no deadline.
            super().handle_websocket_upgrade(event)
            self._upgraded = True

        def connection_lost(self, exc: Exception | None) -> None:
            self._request_arrived()
            self._writing_resumed()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            # The write buffer is full: the client reads more slowly than the response is written.
            super().pause_writing()
            self._stalled = self.loop.call_later(request_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self._writing_resumed()
            super().resume_writing()

        def _expect_request(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(request_seconds, self._too_late)

        def _request_arrived(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _writing_resumed(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

        def _too_late(self) -> None:
            self._deadline = None
            self.transport.abort()

    return BoundedProtocol
