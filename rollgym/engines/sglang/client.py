"""HTTP to one SGLang server or router: bounded, retried where that is safe, each failure a typed sentence."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from rollgym.errors import AgentError, EngineLost, UsageError

MAX_ANSWER = 8 << 20
"""Bytes of an answer to anything but a request to generate."""
FIRST_WAIT = 0.1
LONGEST_WAIT = 5.0
"""Seconds before a second attempt, doubled for each further one."""
_SHOWN = 200
_AGAIN = frozenset({429, 502, 503, 504})
T = TypeVar("T")


class Unreached(EngineLost):
    """The server cannot be reached: nothing of the call has got there."""


class Refused(AgentError):
    """The server answered, and the answer is no."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Calls to one address, from whichever event loop is running.

    Args:
        url: Of the server or router.
        timeout: Seconds for one call.
        retries: Further attempts where nothing of a call got there.
        api_key: Sent as a bearer token with every call.
    """

    def __init__(
        self, url: str, *, timeout: float = 600.0, retries: int = 4, api_key: str | None = None
    ) -> None:
        if not timeout > 0 or retries < 0:
            raise UsageError(f"Needed: timeout > 0 and retries >= 0, not {timeout} and {retries}.")
        self.url = check_url(url)
        self.timeout = timeout
        self.retries = retries
        self.headers = auth_headers(api_key)
        self._clients: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, httpx.AsyncClient] | None = None

    async def get(self, path: str) -> Any:
        """What is answered, as JSON; ``None`` where it is none."""
        return _loose(await self._control("GET", path, None, self.timeout))

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float | None = None) -> Any:
        """Send a control call once (again only where nothing of it got there)."""
        answer = _loose(await self._control("POST", path, body, timeout or self.timeout))
        if isinstance(answer, dict) and answer.get("success") is False:
            raise Refused(f"{self.url}{path} failed: {short(answer.get('message'))}")
        return answer

    async def generate(self, body: Mapping[str, Any], limit: int, headers: Mapping[str, str]) -> bytes:
        """Send a request for tokens; the answer is at most ``limit`` bytes."""
        return await self._send(self._pair()[0], "POST", "/generate", body, limit, self.timeout, headers)

    def ask(self, path: str) -> Any:
        """What a GET answers, waiting for it in this thread."""
        until = time.monotonic() + self.timeout
        try:
            with (
                httpx.Client(timeout=min(30.0, self.timeout), **transport(self.url)) as client,
                client.stream(
                    "GET", self.url + path, headers={"Accept-Encoding": "identity", **self.headers}
                ) as response,
            ):
                answer = bytearray()
                for piece in response.iter_raw():
                    answer += piece
                    if len(answer) > MAX_ANSWER or time.monotonic() > until:
                        raise AgentError(f"{self.url}{path} answers without an end.")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreached(self._unreachable(error)) from None
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise Refused(self._refusal(path, response.status_code, bytes(answer)), response.status_code)
        return _loose(bytes(answer))

    async def close(self) -> None:
        """Close the connections."""
        held, self._clients = self._clients, None
        if held is not None and held[0] is asyncio.get_running_loop():
            await held[1].aclose()
            await held[2].aclose()

    async def _control(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> bytes:
        return await self._send(self._pair()[1], method, path, body, MAX_ANSWER, timeout, {})

    def _pair(self) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
        """For requests, and for control calls: those reuse no connection, which could be closing."""
        loop = asyncio.get_running_loop()
        if self._clients is None or self._clients[0] is not loop:

            def client(kept: int | None) -> httpx.AsyncClient:
                return httpx.AsyncClient(
                    headers={"Accept-Encoding": "identity", **self.headers},
                    timeout=None,
                    follow_redirects=False,
                    **transport(self.url),
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept),
                )

            self._clients = (loop, client(None), client(0))
        return self._clients[1], self._clients[2]

    async def _send(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        limit: int,
        timeout: float,
        headers: Mapping[str, str],
    ) -> bytes:
        content = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **headers}
        for attempt in range(self.retries + 1):
            try:
                async with asyncio.timeout(timeout):
                    status, answer = await self._once(client, method, path, content, limit, sent)
            except TimeoutError:
                raise EngineLost(f"{self.url}{path} gave no answer within {timeout:g} s.") from None
            except Unreached:
                if attempt == self.retries:
                    raise
            else:
                if status == 200:
                    return answer
                if status not in _AGAIN:
                    raise Refused(self._refusal(path, status, answer), status)
                if attempt == self.retries:
                    raise EngineLost(self._refusal(path, status, answer))
            await asyncio.sleep(min(FIRST_WAIT * 2.0**attempt, LONGEST_WAIT))
        raise AssertionError("the last attempt returns or raises")

    async def _once(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        content: bytes | None,
        limit: int,
        headers: Mapping[str, str],
    ) -> tuple[int, bytes]:
        try:
            async with client.stream(method, self.url + path, content=content, headers=headers) as response:
                answer = bytearray()
                async for piece in response.aiter_raw():
                    answer += piece
                    if len(answer) > limit:
                        raise AgentError(f"{self.url}{path} answered more than {limit} bytes.")
                return response.status_code, bytes(answer)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreached(self._unreachable(error)) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineLost(f"{self.url} broke off in {path}: {_reason(error)}.") from None

    def _unreachable(self, error: Exception) -> str:
        return f"No SGLang server can be reached at {self.url}: {_reason(error)}."

    def _refusal(self, path: str, status: int, answer: bytes) -> str:
        found: Any = _loose(answer)
        if isinstance(found, dict):
            inner = found.get("error", found)
            found = inner.get("message", inner) if isinstance(inner, dict) else inner
        said = short(found if found is not None else answer.decode("utf-8", "replace"))
        return f"{self.url}{path} answered {status}: {said or 'nothing'}."


def auth_headers(api_key: str | None) -> dict[str, str]:
    """How a client shows its key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def parse(answer: bytes, kind: type[T], where: str) -> T:
    """An answer as what it should be, or a sentence on why it is not."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as error:
        said = short(answer.decode("utf-8", "replace"))
        raise AgentError(f"{where} answered nonsense ({short(error)}): {said}") from None


def check_url(url: str) -> str:
    """An address without a trailing slash, or a sentence on what is wrong with it."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise UsageError(f"{url!r} is no address of a server: write it as http://HOST:PORT.")
    return url.rstrip("/")


def short(text: object) -> str:
    """The beginning of a text, on one line."""
    return " ".join(str(text).split())[:_SHOWN]


def _loose(answer: bytes) -> Any:
    try:
        return msgspec.json.decode(answer)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        return None


def transport(url: str) -> dict[str, Any]:
    """How an address is reached: this machine without a proxy, and plain HTTP without certificates."""
    parts = urlsplit(url)
    local = parts.hostname in ("127.0.0.1", "localhost", "::1")
    return {"trust_env": not local, "verify": _certificates() if parts.scheme == "https" else False}


@cache
def _certificates() -> Any:
    """The trusted certificates, read once a process."""
    return httpx.create_ssl_context()


def _reason(error: Exception) -> str:
    return short(error).rstrip(".") or type(error).__name__
