"""A web service as a reward: posts the episode as JSON and reads the score from the response."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from rollgym.core.errors import RewardError, UsageError
from rollgym.core.seeding import derive_rng
from rollgym.core.serialization import encode_episode
from rollgym.core.types import Episode
from rollgym.rewards.auth import Headers, check_url
from rollgym.rewards.scoring import Score, read_score
from rollgym.utils.http_client import (
    HttpClient,
    ResponseTooLarge,
    TransportError,
    short,
)
from rollgym.utils.retry import RetryableError, RetryPolicy
from rollgym.utils.urls import is_loopback

MAX_RESPONSE_BYTES = 1 << 20
FIRST_WAIT = 0.25
MAX_WAIT = 10.0
"""Back-off in seconds: before the first retry, and at most."""


class HttpScorer:
    """Posts each episode to ``url`` and reads ``{"reward": x, "success": …, "parts": …, "note": …}``.

    A failed connection and a 5xx status are retried; every other error status is final, redirects included.

    Args:
        url: The service: ``https``, or ``http`` on this machine.
        timeout: Seconds for one score, including all attempts and the waits between them.
        header_env: Environment variables whose values are sent as headers, by header name. The config holds
            the names of the variables, never their values, because it is recorded.
        retries: Attempts after the first.
        concurrency: Episodes that are scored at once; time spent waiting does not count towards ``timeout``.
        allow_plain_http: Send episodes and headers unencrypted over a network.
        name: Name of the reward in records.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        header_env: Mapping[str, str] | None = None,
        retries: int = 3,
        concurrency: int = 16,
        allow_plain_http: bool = False,
        name: str = "http",
    ) -> None:
        if not 0 < timeout < math.inf:
            raise UsageError(f"The timeout of a reward must be positive and finite, not {timeout}.")
        if retries < 0 or concurrency < 1:
            raise UsageError(
                f"An http reward needs retries >= 0 and concurrency >= 1, not {retries} and {concurrency}."
            )
        self.url = check_url(url, allow_plain_http)
        self.name = name
        self.timeout = timeout
        self._headers = Headers(header_env or {})
        self._slots = asyncio.Semaphore(concurrency)
        self.http = HttpClient(
            RetryPolicy(retries=retries, first_wait=FIRST_WAIT, max_wait=MAX_WAIT),
            headers={"Content-Type": "application/json"},
            trust_env=not is_loopback(self.url),
            max_connections=concurrency,
        )

    async def score(self, episode: Episode) -> Score:
        """Return the service's score.

        Raises:
            RewardError: The service gave no valid score within ``timeout`` seconds.
        """
        body = encode_episode(episode)
        rng = derive_rng("reward retry", self.url, episode.spec.episode_id)
        async with self._slots:
            try:
                async with asyncio.timeout(self.timeout):
                    response = await self.http.retry(lambda: self._post(body), rng=rng)
            except TimeoutError:
                raise RewardError(f"{self.url} gave no score within {self.timeout:g} s") from None
            except RetryableError as error:
                raise RewardError(f"{error} ({self.http.policy.retries + 1} attempts)") from None
        return read_score(response, strict=False)

    async def close(self) -> None:
        """Close the connections."""
        await self.http.close()

    async def _post(self, body: bytes) -> dict[str, Any]:
        try:
            response = await self.http.send(
                "POST", self.url, content=body, headers=self._headers.values(), max_bytes=MAX_RESPONSE_BYTES
            )
        except TransportError as error:
            raise RetryableError(self._headers.hide(f"{self.url} cannot be reached: {error}")) from None
        except ResponseTooLarge:
            raise RewardError(f"the response is longer than {MAX_RESPONSE_BYTES} bytes") from None
        # Everything read from here on may be recorded, so the secrets are removed first.
        text = self._headers.hide(response.body.decode("utf-8", "replace"))
        if 200 <= response.status < 300:
            return self._parse(text)
        message = f"{self.url} answered {response.status}: {short(text)}"
        raise RetryableError(message) if response.status >= 500 else RewardError(message)

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            answer = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise RewardError(f"{self.url} did not answer with JSON: {short(text)}") from None
        if not isinstance(answer, dict):
            raise RewardError(f"{self.url} did not answer with a JSON object: {short(text)}")
        return answer
