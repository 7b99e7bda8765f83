"""The retrying HTTP client of chat agents, reward services and engines.

Every request has a deadline and a bound on the size of its response, follows no redirect (one could carry
secrets to another host), and asks for an uncompressed body. The caller chooses which failures are retried: it
raises `RetryableError`, or another type that it names, from an attempt.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import httpx
import numpy as np

from rollgym.utils.retry import RetryableError, RetryPolicy

T = TypeVar("T")
MESSAGE_CHARS = 200
"""Characters of a response or an error that a message repeats."""


class TransportError(Exception):
    """The connection failed or broke off; the message is the reason without a period."""


class ConnectError(TransportError):
    """No connection could be made, so the server has received nothing."""


class ResponseTooLarge(Exception):
    """The response is larger than the caller accepts."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response with any status, its body read to the end."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """An async HTTP client that can be used from several event loops, one after another.

    Args:
        policy: When and how often `retry` repeats an attempt.
        headers: Sent with every request.
        trust_env: Whether the proxies of the environment are used.
        max_connections: Connections at once; ``None`` for no limit.
        max_keepalive: Idle connections that are kept open; ``None`` for no limit.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        headers: Mapping[str, str] | None = None,
        trust_env: bool = True,
        max_connections: int | None = None,
        max_keepalive: int | None = None,
    ) -> None:
        self.policy = policy
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        # httpx.Headers masks Authorization in its repr.
        self._headers = httpx.Headers({"Accept-Encoding": "identity", **(headers or {})})
        self._trust_env = trust_env
        self._limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_keepalive)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def send(
        self,
        method: str,
        url: str,
        *,
        max_bytes: int,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> HttpResponse:
        """Send one request and read its response.

        Raises:
            TimeoutError: The response was not complete within ``timeout`` seconds.
            ConnectError: No connection could be made.
            TransportError: The connection broke off.
            ResponseTooLarge: The body is longer than ``max_bytes``.
        """
        try:
            async with (
                asyncio.timeout(timeout),
                self._open().stream(method, url, content=content, headers=headers) as response,
            ):
                body = bytearray()
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > max_bytes:
                        raise ResponseTooLarge
                return HttpResponse(response.status_code, response.headers, bytes(body))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ConnectError(error_text(error)) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TransportError(error_text(error)) from None

    async def retry(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        on: type[Exception] | tuple[type[Exception], ...] = RetryableError,
        rng: np.random.Generator | None = None,
        before_retry: Callable[[], None] = lambda: None,
    ) -> T:
        """Call `RetryPolicy.run` with this client's policy."""
        return await self.policy.run(attempt, sleep=self.sleep, on=on, rng=rng, before_retry=before_retry)

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    def _open(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            self._client = httpx.AsyncClient(
                headers=self._headers,
                verify=certificates(),
                timeout=None,
                follow_redirects=False,
                trust_env=self._trust_env,
                limits=self._limits,
            )
        return self._client


@cache
def certificates() -> ssl.SSLContext:
    """Return the trusted certificates, read once per process."""
    return httpx.create_ssl_context()


def short(text: object) -> str:
    """Return the beginning of a text on one line, for an error message."""
    return " ".join(str(text).split())[:MESSAGE_CHARS]


def error_text(error: Exception) -> str:
    """Return the reason of an error on one line, or its type where it has no message.

    It is not shortened: a caller may have to remove secrets from it first, which must be whole.
    """
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
