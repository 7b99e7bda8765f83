"""The HTTP side of the chat agent: rate limits, retries and token counts of one endpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.agents.chat.credentials import Secret
from rollgym.agents.chat.openai_protocol import (
    ChatReply,
    Tokens,
    check_status,
    read_body,
    read_reply,
    read_tokens,
)
from rollgym.agents.chat.options import ChatOptions
from rollgym.agents.chat.rate_limit import RateLimiter
from rollgym.core.errors import AgentError
from rollgym.core.files import gunzip
from rollgym.utils.http_client import HttpClient, HttpResponse, ResponseTooLarge, TransportError
from rollgym.utils.retry import RetryableError, RetryPolicy

FIRST_WAIT = 0.5
MAX_WAIT = 60.0
"""Back-off in seconds: before the first retry, and at most. A request therefore ends within
(retries + 1) timeouts and ``retries`` longest waits, besides the rate limit."""
MAX_RESPONSE_BYTES = 32 << 20
"""Size limit of one response, both compressed and decompressed."""
_DEFAULT_COMPLETION_TOKENS = 512
_CHARS_PER_TOKEN = 4


class Endpoint:
    """A chat-completions endpoint, shared by all players of an agent, within one event loop."""

    def __init__(self, base_url: str, key: Secret, options: ChatOptions) -> None:
        self.base_url = base_url
        self.requests = 0
        self.retries = 0
        self.tokens = Tokens(0, 0)
        self._key = key
        self._options = options
        rpm, tpm = options.requests_per_minute, options.tokens_per_minute
        self._request_limit = RateLimiter(rpm) if rpm else None
        self._token_limit = RateLimiter(tpm) if tpm else None
        # The caller limits how many requests run at once, so the connection pool must not.
        self.http = HttpClient(
            RetryPolicy(retries=options.retries, first_wait=FIRST_WAIT, max_wait=MAX_WAIT),
            headers={**key.headers(), "Content-Type": "application/json"},
        )

    async def complete(
        self, body: Mapping[str, Any], rng: np.random.Generator
    ) -> tuple[ChatReply, Tokens | None]:
        """Return the model's reply and the tokens of all attempts; ``rng`` adds jitter to the back-off."""
        spent: list[Tokens] = []
        try:
            reply = await self.http.retry(
                lambda: self._attempt(body, spent), rng=rng, before_retry=self._count_retry
            )
        except RetryableError as error:
            attempts = f" ({self._options.retries + 1} attempts)" if self._options.retries else ""
            raise AgentError(f"{self._key.hide(str(error))}{attempts}.") from None
        return reply, _sum(spent) if spent else None

    async def close(self) -> None:
        """Close the connections."""
        await self.http.close()

    def _count_retry(self) -> None:
        self.retries += 1

    async def _attempt(self, body: Mapping[str, Any], spent: list[Tokens]) -> ChatReply:
        estimate = await self._wait_for_rate_limits(body)
        self.requests += 1
        response = await self._post(body)
        # Everything read from here on may be recorded, so the key is removed first.
        payload = read_body(_decoded(response), self._key.hide)
        check_status(response.status, response.headers, payload)
        tokens = read_tokens(payload)
        if tokens is not None:
            spent.append(tokens)
            self.tokens = _sum([self.tokens, tokens])
            if self._token_limit:
                self._token_limit.give_back(estimate - sum(tokens))
        return read_reply(payload)

    async def _post(self, body: Mapping[str, Any]) -> HttpResponse:
        timeout = self._options.timeout
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        try:
            return await self.http.send(
                "POST",
                f"{self.base_url}/chat/completions",
                content=content,
                max_bytes=MAX_RESPONSE_BYTES,
                timeout=timeout,
            )
        except TimeoutError:
            raise RetryableError(f"The endpoint did not answer within {timeout:g} seconds") from None
        except TransportError as error:
            raise RetryableError(f"The endpoint {self.base_url} cannot be reached: {error}") from None
        except ResponseTooLarge:
            raise RetryableError(f"The endpoint answered more than {MAX_RESPONSE_BYTES:,} bytes") from None

    async def _wait_for_rate_limits(self, body: Mapping[str, Any]) -> float:
        """Wait for both limits; return the estimated number of tokens that was taken."""
        if self._request_limit:
            await self._request_limit.take()
        if not self._token_limit:
            return 0.0
        chars = sum(len(message["content"]) for message in body["messages"])
        estimate = chars / _CHARS_PER_TOKEN + (self._options.max_tokens or _DEFAULT_COMPLETION_TOKENS)
        await self._token_limit.take(estimate)
        return estimate


def _decoded(response: HttpResponse) -> str:
    """Return the text of a response, which some servers compress although that was not requested."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", ""):
        raise RetryableError(
            f"The endpoint compressed its response with {encoding[:40]!r}, which was not requested"
        )
    try:
        body = gunzip(response.body, MAX_RESPONSE_BYTES) if encoding == "gzip" else response.body
    except OSError as error:
        raise RetryableError(f"The endpoint's compressed response cannot be read: {error.strerror}") from None
    return body.decode("utf-8", "replace")


def _sum(counts: list[Tokens]) -> Tokens:
    return Tokens(sum(count.prompt for count in counts), sum(count.completion for count in counts))
