"""A web service as a reward: posts the episode as JSON and reads the score from the response."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rollgym.core.errors import RewardError, UsageError
from rollgym.core.seeding import derive_rng
from rollgym.core.serialization import encode_episode
from rollgym.core.types import Episode
from rollgym.rewards.scoring import Score, check_timeout, read_score
from rollgym.utils.credentials import check_service_url, hide_secrets, read_secret
from rollgym.utils.http_client import HttpClient, short
from rollgym.utils.retry import RetryableError, RetryPolicy
from rollgym.utils.score_request import request_score
from rollgym.utils.urls import is_loopback

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_RESERVED = {"accept-encoding", "connection", "content-length", "content-type", "host", "transfer-encoding"}
MAX_RESPONSE_BYTES = 1 << 20
FIRST_WAIT = 0.25
MAX_WAIT = 10.0
"""Back-off in seconds: before the first retry, and at most."""


class Headers:
    """Headers with values from environment variables, which are not shown in a repr or a file."""

    __slots__ = ("_values",)

    def __init__(self, variables: Mapping[str, str]) -> None:
        for header in variables:
            if not _HEADER.fullmatch(header) or header.lower() in _RESERVED:
                raise UsageError(f"header_env cannot set the header {header!r}.")
        self._values = {
            header: read_secret(
                variable, f"header_env[{header!r}]", f"value of the header {header!r}", spaces=True
            )
            for header, variable in variables.items()
        }

    def __repr__(self) -> str:
        return f"Headers({', '.join(self._values)})"

    def __reduce__(self) -> str:
        raise TypeError("secrets must not be copied or written to a file")

    def values(self) -> dict[str, str]:
        """Return the headers to send."""
        return dict(self._values)

    def hide(self, text: str) -> str:
        """Return the text with every secret replaced, also without a scheme before it (``Bearer``)."""
        secrets = {part for value in self._values.values() for part in (value, value.rpartition(" ")[2])}
        return hide_secrets(text, secrets, "[secret]")


def check_url(url: object, allow_plain_http: bool) -> str:
    """Return the URL if it is allowed; otherwise raise a `UsageError`, which does not repeat it."""
    expected = "A reward's url must be an address such as https://rewards.example/score"
    url = check_service_url(url, expected, "header_env")
    if urlsplit(url).scheme == "http" and not allow_plain_http and not is_loopback(url):
        raise UsageError(
            f"{expected}: plain http would send episodes and headers unencrypted over the network. "
            "Use https, or set allow_plain_http=True on a trusted network."
        )
    return url


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
        if retries < 0 or concurrency < 1:
            raise UsageError(
                f"An http reward needs retries >= 0 and concurrency >= 1, not {retries} and {concurrency}."
            )
        self.url = check_url(url, allow_plain_http)
        self.name = name
        self.timeout = check_timeout(timeout)
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
        text = await request_score(
            self.http,
            self.url,
            body,
            headers=self._headers.values(),
            hide=self._headers.hide,
            max_bytes=MAX_RESPONSE_BYTES,
        )
        try:
            answer = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise RewardError(f"{self.url} did not answer with JSON: {short(text)}") from None
        if not isinstance(answer, dict):
            raise RewardError(f"{self.url} did not answer with a JSON object: {short(text)}")
        return answer
