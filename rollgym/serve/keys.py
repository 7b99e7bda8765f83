"""API keys that name a session, for clients that can only set a base URL and a key.

``session/NAME`` is the key of session NAME. Where the server has a key itself, that of a session is signed
with it: ``session/NAME/SIGNATURE``, so that a client can neither act for other sessions nor open one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from rollgym.serve.requests import ApiError, check_name

PREFIX = "session/"


def session_key(name: str, server_key: str | None) -> str:
    """Return the API key of a session."""
    if not server_key:
        return f"{PREFIX}{name}"
    return f"{PREFIX}{name}/{hmac.new(server_key.encode(), name.encode(), hashlib.sha256).hexdigest()[:32]}"


def check_key(headers: Mapping[str, str], server_key: str | None) -> str | None:
    """Return the session that the key of a request names; ``None`` for any other valid key.

    Raises:
        ApiError: The key is missing or wrong.
    """
    given = _given(headers)
    for key in given:
        if key.startswith(PREFIX):
            name = check_name(key.removeprefix(PREFIX).partition("/")[0])
            if not server_key or _same(key, session_key(name, server_key)):
                return name
    if server_key and not any(_same(key, server_key) for key in given):
        raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
    return None


def _given(headers: Mapping[str, str]) -> list[str]:
    """Return the keys of a request: as OpenAI's clients send them, and as Anthropic's do."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    keys = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
    return [key.strip() for key in keys if key.strip()]


def _same(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode("utf-8", "replace"), second.encode("utf-8", "replace"))
