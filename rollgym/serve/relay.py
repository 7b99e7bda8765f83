"""Passes connections on a listening socket to an address: how a program in a sandbox reaches the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from rollgym.utils.http_server import loop_rounds, stop_accepting

__all__ = ["Relay"]

MAX_CONNECTIONS = 64
"""Connections of one program at once; further ones are closed."""
CHUNK = 65_536
FLUSH_SECONDS = 10.0
"""Seconds for a program to read the rest of a response after its connection was closed."""


class Relay:
    """Forwards every connection on a socket until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._closed = False

    @classmethod
    async def start(cls, listener: socket.socket, host: str, port: int) -> Relay:
        """Accept connections on ``listener`` and forward them."""
        relay = cls(host, port)
        relay._server = await asyncio.start_server(relay._accept, sock=listener)
        return relay

    async def close(self) -> None:
        """Close the socket and all connections."""
        self._closed = True
        if self._server is not None:
            await stop_accepting([self._server])
            self._server.close()
        connections = dict(self._connections)
        for task, writer in connections.items():
            task.cancel()
            writer.transport.abort()  # here too: a task that has not begun closes nothing
        await asyncio.gather(*connections, return_exceptions=True)
        await loop_rounds()  # in which aborted connections are closed

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed or len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._forward(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            connecting = asyncio.ensure_future(asyncio.open_connection(self._host, self._port))
            try:
                there_reader, there_writer = await asyncio.shield(connecting)
            except asyncio.CancelledError:
                # A cancelled `open_connection` may leave a connection that has just been made.
                _, there_writer = await connecting
                there_writer.transport.abort()
                raise
            writers.append(there_writer)
            await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))
            writer.close()
            async with asyncio.timeout(FLUSH_SECONDS):
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # one side has closed the connection, or does not read
        finally:
            for end in writers:
                end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError, NotImplementedError):
        writer.write_eof()
