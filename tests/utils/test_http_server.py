"""The web server that all servers share."""

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollgym.serve.relay import Relay
from rollgym.utils.http_server import listening, web_server


def test_a_server_that_stops_closes_a_connection_with_a_stream_in_progress() -> None:
    asyncio.run(_stop_during_a_stream())


async def _stop_during_a_stream() -> None:
    done = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not done.is_set():
            await send({"type": "http.response.body", "body": b"more", "more_body": True})
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    listener = listening("127.0.0.1", 0)
    server = web_server(endless, grace=1, signals=False)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    server.should_exit = True
    await serving
    still_open = len(server.server_state.connections)
    done.set()
    writer.close()
    await asyncio.sleep(0.2)
    assert still_open == 0


async def _close_a_relay(listener: socket.socket) -> Callable[[], Awaitable[None]]:
    with listening("127.0.0.1", 0) as unused:
        address = unused.getsockname()
    return (await Relay.start(listener, *address)).close


async def _stop_a_web_server(listener: socket.socket) -> Callable[[], Awaitable[None]]:
    async def unused(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("no request was sent")

    server = web_server(unused, signals=False)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listener])
    return lambda: server.shutdown([listener])


@pytest.mark.parametrize("start", [_close_a_relay, _stop_a_web_server])
@pytest.mark.parametrize("rounds", range(6))
def test_a_connection_accepted_while_a_server_closes_is_closed(start: Any, rounds: int) -> None:
    """``rounds`` of the event loop lie between the connection and the close; asyncio drops it at two."""

    async def main() -> bytes:
        listener = listening("127.0.0.1", 0)
        close = await start(listener)
        with socket.create_connection(listener.getsockname(), timeout=10) as client:
            for _ in range(rounds):
                await asyncio.sleep(0)
            await close()
            with contextlib.suppress(ConnectionResetError):
                return client.recv(1)
        return b""

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(main()) == b""
        gc.collect()
