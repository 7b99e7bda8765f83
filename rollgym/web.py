"""What all web servers here have in common: where they listen, and that they say nothing of themselves."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollgym.errors import UsageError

if TYPE_CHECKING:
    import uvicorn


def listening(host: str, port: int, *, backlog: int = 128) -> socket.socket:
    """A socket that listens there. `UsageError` where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise UsageError(
            f"Nothing can listen at {host}, port {port}: {error.strerror or error}. Choose another port (0 "
            "takes a free one) or an address of this machine."
        ) from error


def web_server(app: Any, *, grace: int = 1, signals: bool = True) -> uvicorn.Server:
    """A server for an ASGI app.

    Args:
        app: What answers.
        grace: Seconds for answers under way when it is told to stop.
        signals: Whether it listens for Ctrl-C itself, or leaves signals to the program it is a part of.
    """
    import uvicorn

    class Quiet(uvicorn.Server):
        """A server that leaves signals alone."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    kind = uvicorn.Server if signals else Quiet
    return kind(
        uvicorn.Config(
            app,
            log_config=None,  # who runs us decides where errors are told
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=grace,
        )
    )
