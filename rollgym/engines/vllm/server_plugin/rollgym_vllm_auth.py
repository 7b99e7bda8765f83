"""ASGI middleware of a vLLM server: every route but /health needs the server's key.

vLLM's own ``--api-key`` protects the OpenAI routes only; the routes for reinforcement learning, among them
``/collective_rpc`` and weight updates, would stay open to every user of the machine.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

KEY_FILE = "ROLLGYM_SERVER_KEY_FILE"
"""Environment variable that names the file with the key."""


class RequireKey:
    """Answers 401 to requests without the key."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        key = Path(os.environ[KEY_FILE]).read_text(encoding="utf-8").strip()
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Callable[..., Awaitable[Any]], send: Send) -> None:
        """Pass a request on if it has the key."""
        allowed = scope["type"] not in ("http", "websocket") or scope.get("path") == "/health"
        if not allowed:
            given = dict(scope.get("headers") or ()).get(b"authorization", b"")
            allowed = hmac.compare_digest(given, self.expected)
        if allowed:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
