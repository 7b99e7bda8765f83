"""Where the web site listens, and what listens."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette

from rollgym.errors import UsageError


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; a clear error where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise UsageError(
            f"The shop cannot be opened at {host}, port {port}: {error.strerror or error}. Choose another "
            "port (0 takes a free one) or an address of this machine."
        ) from error


def web_server(app: Starlette) -> uvicorn.Server:
    """A server for the site, which says nothing of itself."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,  # who runs us decides where errors are told
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
    )
