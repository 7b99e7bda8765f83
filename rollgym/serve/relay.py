"""Passes connections on a listening socket to an address: how a program in a sandbox reaches the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import socket

__all__ = ["Relay"]

MAX_CONNECTIONS = 64
"""Connections of one program at once; further ones are closed."""
CHUNK = 65_536


class Relay:
    """Forwards every connection on a socket until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, listener: socket.socket, host: str, port: int) -> Relay:
        """Accept connections on ``listener`` and forward them."""
        relay = cls(host, port)
        relay._server = await asyncio.start_server(relay._accept, sock=listener)
        return relay

    async def close(self) -> None:
        """Close the socket and all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
            try:
                await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))
            finally:
                there_writer.close()
        except (OSError, asyncio.CancelledError):
            pass  # a connection that breaks, or the end of the program
        finally:
            self._connections.discard(task)
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError, NotImplementedError):
        writer.write_eof()
