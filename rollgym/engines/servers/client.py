"""HTTP calls to one inference server or router: bounded, retried where that is safe, with typed errors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from rollgym.core.errors import AgentError, EngineLost, UsageError
from rollgym.utils.http_client import (
    ConnectError,
    HttpClient,
    ResponseTooLarge,
    TransportError,
    certificates,
    error_text,
    short,
)
from rollgym.utils.retry import RetryPolicy
from rollgym.utils.urls import is_http_url, is_loopback

MAX_RESPONSE_BYTES = 8 << 20
"""Size limit of every response but generated replies."""
FIRST_WAIT = 0.1
MAX_WAIT = 5.0
"""Back-off in seconds: before the first retry, and at most."""
_RETRIED_STATUS = frozenset({429, 502, 503, 504})
T = TypeVar("T")


class Unreached(EngineLost):
    """The server cannot be reached, so it has received nothing of the call."""


class Busy(EngineLost):
    """The server or router answered that it cannot serve the call now."""


class Refused(AgentError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Calls to one server, from any event loop.

    Args:
        url: Address of the server or router.
        name: The server's software, for messages.
        timeout: Seconds for one call.
        retries: Attempts after the first, made only where the server has processed nothing of the call.
        api_key: Sent as a bearer token with every call.
    """

    def __init__(
        self, url: str, *, name: str, timeout: float = 600.0, retries: int = 4, api_key: str | None = None
    ) -> None:
        if not timeout > 0 or retries < 0:
            raise UsageError(f"timeout must be above 0 and retries at least 0, not {timeout} and {retries}.")
        self.url = check_url(url)
        self.name = name
        self.timeout = timeout
        self.headers = auth_headers(api_key)

        def client(max_keepalive: int | None) -> HttpClient:
            return HttpClient(
                RetryPolicy(retries=retries, first_wait=FIRST_WAIT, max_wait=MAX_WAIT),
                headers={"Content-Type": "application/json", **self.headers},
                trust_env=not is_loopback(self.url),
                max_keepalive=max_keepalive,
            )

        self._requests = client(None)
        # Control calls reuse no connection: the server could be closing an idle one at that moment.
        self._control = client(0)

    async def get(self, path: str) -> Any:
        """Return the response as JSON; ``None`` where it is not JSON."""
        return _json_or_none(
            await self._send(self._control, "GET", path, None, MAX_RESPONSE_BYTES, self.timeout)
        )

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float | None = None) -> Any:
        """Send a control call and return the response as JSON."""
        answer = _json_or_none(
            await self._send(self._control, "POST", path, body, MAX_RESPONSE_BYTES, timeout or self.timeout)
        )
        if isinstance(answer, dict) and answer.get("success") is False:
            raise Refused(f"{self.url}{path} failed: {short(answer.get('message'))}")
        return answer

    async def generate(
        self, path: str, body: Mapping[str, Any], limit: int, headers: Mapping[str, str]
    ) -> bytes:
        """Send a generation request; the response has at most ``limit`` bytes."""
        return await self._send(self._requests, "POST", path, body, limit, self.timeout, headers)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a GET, or a POST with a body, and block until it is answered; ``None`` for status 404."""
        deadline = time.monotonic() + self.timeout
        try:
            with (
                httpx.Client(timeout=min(30.0, self.timeout), **transport(self.url)) as client,
                client.stream(
                    "GET" if body is None else "POST",
                    self.url + path,
                    json=body,
                    headers={"Accept-Encoding": "identity", **self.headers},
                ) as response,
            ):
                answer = bytearray()
                for chunk in response.iter_raw():
                    answer += chunk
                    if len(answer) > MAX_RESPONSE_BYTES or time.monotonic() > deadline:
                        raise AgentError(f"The response of {self.url}{path} does not end.")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreached(self._unreachable(short(error_text(error)))) from None
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise Refused(self._refusal(path, response.status_code, bytes(answer)), response.status_code)
        return _json_or_none(bytes(answer))

    async def close(self) -> None:
        """Close the connections."""
        await self._requests.close()
        await self._control.close()

    async def _send(
        self,
        http: HttpClient,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        limit: int,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        content = None if body is None else json.dumps(body).encode()

        async def attempt() -> bytes:
            try:
                response = await http.send(
                    method,
                    self.url + path,
                    content=content,
                    headers=headers,
                    max_bytes=limit,
                    timeout=timeout,
                )
            except TimeoutError:
                raise EngineLost(f"{self.url}{path} did not answer within {timeout:g} s.") from None
            except ResponseTooLarge:
                raise AgentError(f"{self.url}{path} answered more than {limit} bytes.") from None
            except ConnectError as error:
                raise Unreached(self._unreachable(short(error))) from None
            except TransportError as error:
                raise EngineLost(
                    f"The connection to {self.url} broke off during {path}: {short(error)}."
                ) from None
            if response.status == 200:
                return response.body
            message = self._refusal(path, response.status, response.body)
            raise Busy(message) if response.status in _RETRIED_STATUS else Refused(message, response.status)

        return await http.retry(attempt, on=(Unreached, Busy))

    def _unreachable(self, reason: str) -> str:
        return f"No {self.name} server can be reached at {self.url}: {reason}."

    def _refusal(self, path: str, status: int, body: bytes) -> str:
        detail: Any = _json_or_none(body)
        if isinstance(detail, dict):
            inner = detail.get("error", detail)
            detail = inner.get("message", inner) if isinstance(inner, dict) else inner
        text = short(detail if detail is not None else body.decode("utf-8", "replace"))
        return f"{self.url}{path} answered {status}: {text or 'nothing'}."


def auth_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers that carry the API key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def parse(body: bytes, kind: type[T], where: str) -> T:
    """Decode a response into ``kind``; raise an `AgentError` where it does not match."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as error:
        text = short(body.decode("utf-8", "replace"))
        raise AgentError(f"{where} sent an invalid response ({short(error)}): {text}") from None


def check_url(url: str) -> str:
    """Return the URL without a trailing slash; raise a `UsageError` where it is not a server's."""
    if not is_http_url(url) or urlsplit(url).query or urlsplit(url).fragment:
        raise UsageError(f"{url!r} is not the address of a server: write it as http://HOST:PORT.")
    return url.rstrip("/")


def transport(url: str) -> dict[str, Any]:
    """Return the options of a synchronous `httpx.Client`: loopback without a proxy, HTTP without TLS."""
    tls = urlsplit(url).scheme == "https"
    return {"trust_env": not is_loopback(url), "verify": certificates() if tls else False}


def _json_or_none(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        return None
