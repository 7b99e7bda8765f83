"""The HTTP side of the chat agent: one request at a time made to succeed, or to fail with a sentence."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import httpx
import numpy as np

from rollgym.agents.chat_options import ChatOptions
from rollgym.agents.credentials import Secret
from rollgym.agents.ratelimit import Bucket
from rollgym.agents.wire import (
    ChatReply,
    Tokens,
    Trouble,
    check_status,
    read_body,
    read_reply,
    read_tokens,
)
from rollgym.errors import AgentError
from rollgym.files import gunzip

FIRST_WAIT = 0.5
LONGEST_WAIT = 60.0
"""Seconds before a second attempt, doubled for each further one, and the longest wait of all. A request
therefore ends within (retries + 1) timeouts and ``retries`` longest waits, besides the rate limit."""

_USUAL_COMPLETION = 512
MAX_ANSWER = 32 << 20
"""Bytes of one answer, compressed or not."""
_CHARS_PER_TOKEN = 4


class Endpoint:
    """A chat-completions endpoint, shared by all players of an agent, within one event loop."""

    def __init__(self, base_url: str, key: Secret, options: ChatOptions) -> None:
        self.base_url = base_url
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self.requests = 0
        self.retries = 0
        self.tokens = Tokens(0, 0)
        self._key = key
        self._options = options
        rpm, tpm = options.requests_per_minute, options.tokens_per_minute
        self._request_bucket = Bucket(rpm) if rpm else None
        self._token_bucket = Bucket(tpm) if tpm else None
        # How many requests go on at once is the caller's choice, so the pool must not add one; and a
        # redirect must not carry the key to another host.
        self._client = httpx.AsyncClient(
            headers={**key.headers(), "Accept-Encoding": "identity"},
            verify=_certificates(),
            timeout=None,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def complete(
        self, body: Mapping[str, Any], rng: np.random.Generator
    ) -> tuple[ChatReply, Tokens | None]:
        """The model's reply, and the tokens of every attempt it took; ``rng`` spreads the waits."""
        spent: list[Tokens] = []
        attempt = 0
        while True:
            try:
                reply = await self._attempt(body, spent)
            except Trouble as trouble:
                if attempt >= self._options.retries:
                    tries = f" ({attempt + 1} attempts)" if attempt else ""
                    raise AgentError(f"{self._key.hide(str(trouble))}{tries}.") from None
                wait = trouble.after
            else:
                return reply, _total(spent) if spent else None
            self.retries += 1
            await self.sleep(min(_backoff(attempt, rng) if wait is None else wait, LONGEST_WAIT))
            attempt += 1

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _attempt(self, body: Mapping[str, Any], spent: list[Tokens]) -> ChatReply:
        guess = await self._wait_for_turn(body)
        self.requests += 1
        status, headers, text = await self._post(body)
        # Whatever is read from here on may be recorded, so the key leaves it first.
        answer = read_body(text, self._key.hide)
        check_status(status, headers, answer)
        tokens = read_tokens(answer)
        if tokens is not None:
            spent.append(tokens)
            self.tokens = _total([self.tokens, tokens])
            if self._token_bucket:
                self._token_bucket.give_back(guess - sum(tokens))
        return read_reply(answer)

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, httpx.Headers, str]:
        """Status, headers and text of the answer, whose size is bounded, unpacked or not."""
        limit = self._options.timeout
        url = f"{self.base_url}/chat/completions"
        try:
            async with asyncio.timeout(limit), self._client.stream("POST", url, json=body) as response:
                return response.status_code, response.headers, await _read(response)
        except TimeoutError:
            raise Trouble(f"The endpoint did not answer within {limit:g} seconds") from None
        except httpx.RequestError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Trouble(f"The endpoint {self.base_url} cannot be reached: {reason}") from None

    async def _wait_for_turn(self, body: Mapping[str, Any]) -> float:
        if self._request_bucket:
            await self._request_bucket.take()
        if not self._token_bucket:
            return 0.0
        chars = sum(len(message["content"]) for message in body["messages"])
        guess = chars / _CHARS_PER_TOKEN + (self._options.max_tokens or _USUAL_COMPLETION)
        await self._token_bucket.take(guess)
        return guess


async def _read(response: httpx.Response) -> str:
    """The text of an answer. Not compressed, as was asked for, or by gzip all the same."""
    found = bytearray()
    async for piece in response.aiter_raw():
        found += piece
        if len(found) > MAX_ANSWER:
            raise Trouble(f"The endpoint answered more than {MAX_ANSWER:,} bytes")
    packed = response.headers.get("content-encoding", "identity").strip().lower()
    if packed not in ("identity", "gzip", ""):
        raise Trouble(f"The endpoint compressed its answer with {packed[:40]!r}, which was not asked for")
    try:
        data = gunzip(bytes(found), MAX_ANSWER) if packed == "gzip" else bytes(found)
    except OSError as error:
        raise Trouble(f"The endpoint's compressed answer cannot be read: {error.strerror}") from None
    return data.decode("utf-8", "replace")


@cache
def _certificates() -> ssl.SSLContext:
    """The trusted certificates, read once a process."""
    return httpx.create_ssl_context()


def _total(parts: list[Tokens]) -> Tokens:
    return Tokens(sum(part.prompt for part in parts), sum(part.completion for part in parts))


def _backoff(attempt: int, rng: np.random.Generator) -> float:
    return float(min(FIRST_WAIT * 2.0 ** min(attempt, 20), LONGEST_WAIT) * rng.uniform(0.5, 1.0))
