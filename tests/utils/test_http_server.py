"""The web server that all servers share."""

import asyncio
import contextlib
from typing import Any

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
