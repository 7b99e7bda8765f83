"""A service as a reward: the episode is posted as JSON, the answer is the score."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import httpx
import msgspec

from rollgym.errors import RewardError, UsageError
from rollgym.records import encode_episode
from rollgym.rewards.address import Headers, check_url, is_loopback
from rollgym.rewards.scoring import Score, read_score
from rollgym.seeding import derive_rng
from rollgym.types import Episode

MAX_ANSWER = 1 << 20
"""Bytes of an answer."""
FIRST_WAIT = 0.25
LONGEST_WAIT = 10.0
"""Seconds before a second attempt, doubled for each further one, and the longest wait of all."""
_SHOWN = 200
"""Characters of a refusal that an error repeats."""


class _Trouble(Exception):
    """An attempt failed in a way that another may not."""


class HttpScorer:
    """Posts each episode to ``url`` and reads ``{"reward": x, "success": …, "parts": …, "note": …}``.

    An attempt that cannot connect, or is answered with a 5xx, is made again; any other refusal is final. A
    redirect is one: it could carry the episode and the headers to another host.

    Args:
        url: Where to; ``https``, or this machine.
        timeout: Seconds for one score, all attempts and the waits between them included.
        header_env: Environment variables whose values are sent as headers, by the header's name. The
            variables are named, never their values: what is configured is also recorded.
        retries: Attempts after the first.
        concurrency: Episodes at once; others wait, which does not count as taking long.
        allow_plain_http: Send episodes and headers unencrypted over a network.
        name: What the reward is called in records.
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
            raise UsageError(f"Needed: retries >= 0 and concurrency >= 1, not {retries} and {concurrency}.")
        self.url = check_url(url, allow_plain_http)
        self.name = name
        self.timeout = timeout
        self.retries = retries
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._headers = Headers(header_env or {})
        self._places = asyncio.Semaphore(concurrency)
        # A proxy is for the network: this machine is reached without one.
        self._client = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
            verify=_certificates(),
            timeout=None,
            follow_redirects=False,
            trust_env=not is_loopback(self.url),
            limits=httpx.Limits(max_connections=concurrency),
        )

    async def score(self, episode: Episode) -> Score:
        """Ask the service; a `RewardError` where it gives no score in time."""
        body = encode_episode(episode)
        async with self._places:
            try:
                async with asyncio.timeout(self.timeout):
                    return await self._attempts(body, episode.spec.episode_id)
            except TimeoutError:
                raise RewardError(f"{self.url} gave no score within {self.timeout:g} s") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _attempts(self, body: bytes, episode_id: str) -> Score:
        rng = derive_rng("reward retry", self.url, episode_id)
        for attempt in range(self.retries + 1):
            try:
                answer = await self._post(body)
            except _Trouble as trouble:
                if attempt == self.retries:
                    raise RewardError(f"{trouble} ({attempt + 1} attempts)") from None
                wait = min(FIRST_WAIT * 2.0 ** min(attempt, 20), LONGEST_WAIT)
                await self.sleep(float(wait * rng.uniform(0.5, 1.0)))
            else:
                return read_score(answer, strict=False)
        raise AssertionError("the last attempt raises")

    async def _post(self, body: bytes) -> dict[str, Any]:
        headers = self._headers.values()
        try:
            async with self._client.stream("POST", self.url, content=body, headers=headers) as response:
                text = await _read(response)
        except httpx.RequestError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise _Trouble(self._headers.hide(f"{self.url} cannot be reached: {reason}")) from None
        # Whatever is read from here on may be recorded, so the secrets leave it first.
        said = self._headers.hide(text.decode("utf-8", "replace"))
        if 200 <= response.status_code < 300:
            return self._parsed(said)
        refusal = f"{self.url} answered {response.status_code}: {_short(said)}"
        raise _Trouble(refusal) if response.status_code >= 500 else RewardError(refusal)

    def _parsed(self, said: str) -> dict[str, Any]:
        try:
            answer = msgspec.json.decode(said)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise RewardError(f"{self.url} answered no JSON: {_short(said)}") from None
        if not isinstance(answer, dict):
            raise RewardError(f"{self.url} answered no object with a reward: {_short(said)}")
        return answer


def _short(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]


async def _read(response: httpx.Response) -> bytes:
    """The answer as it came (no compression was asked for), within bounds."""
    text = bytearray()
    async for piece in response.aiter_raw():
        text += piece
        if len(text) > MAX_ANSWER:
            raise RewardError(f"the answer is longer than {MAX_ANSWER} bytes")
    return bytes(text)


@cache
def _certificates() -> Any:
    """The trusted certificates, read once a process."""
    return httpx.create_ssl_context()
