"""A worker process: hosts environments and answers requests, one after another, until its pool goes away.

Started as ``python -m rollgym.pool.worker FD`` with one end of a socket pair.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

import msgspec

from rollgym.errors import RollgymError
from rollgym.failures import failure_of
from rollgym.pool import Reset, Step
from rollgym.pool.host import EnvHost
from rollgym.pool.wire import Answer, Hello, Request, Unpacker, encode_result, pack

_requests = msgspec.msgpack.Decoder(Request)
_PR_SET_PDEATHSIG = 1


def serve(connection: socket.socket) -> None:
    """Answer requests until the pool closes the connection."""
    unpacker = Unpacker()
    host: EnvHost | None = None
    while data := connection.recv(1 << 16):
        replies = bytearray()
        for message in unpacker.feed(data):
            if host is None:
                host, answer = _start(msgspec.msgpack.decode(message, type=Hello))
            else:
                answer = _answer(host, _requests.decode(message))
            replies += pack(answer)
        if replies:
            connection.sendall(replies)
    if host is not None:
        host.close()


def _start(hello: Hello) -> tuple[EnvHost, Answer]:
    sys.path[:] = hello.path
    try:
        return EnvHost(hello.modules), Answer(0)
    except RollgymError as error:
        return EnvHost(), Answer(0, failure_of(error))


def _answer(host: EnvHost, request: Request) -> Answer:
    try:
        return Answer(request.number, None, encode_result(_perform(host, request)))
    except Exception as error:
        # The boundary of the process: whatever went wrong is an answer, and the next request is served.
        return Answer(request.number, failure_of(error))


def _perform(host: EnvHost, request: Request) -> Reset | Step | None:
    if request.op == "step":
        return host.step(request.lease, request.action)
    if request.op == "reset":
        return host.reset(request.lease)
    if request.op == "open":
        assert request.spec is not None
        host.open(request.lease, request.spec)
    else:
        host.release(request.lease, request.healthy)
    return None


def _die_with_parent() -> None:
    """Linux: be killed when the pool's process dies, even in the middle of a long step."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run a worker on the socket whose descriptor is the first argument."""
    _die_with_parent()
    # Ctrl-C reaches the whole terminal; the pool decides when its workers stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever an environment prints must not mix with a command's own output.
    os.dup2(2, 1)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except ConnectionError:
            return


if __name__ == "__main__":
    main()
