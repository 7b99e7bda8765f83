"""Retries with exponential back-off, for any async call. Separate from `http_client`, which imports httpx."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class RetryableError(Exception):
    """An attempt failed in a way that may pass.

    Args:
        message: One sentence without a period.
        retry_after: Seconds to wait before the next attempt, where the server asked for a certain time.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Number of retries and their back-off."""

    retries: int
    """Attempts after the first."""
    first_wait: float
    """Seconds before the second attempt, doubled for each further one."""
    max_wait: float
    """Longest wait in seconds, also where the server asks for more."""

    def backoff(self, retry: int, rng: np.random.Generator | None) -> float:
        """Return the seconds before a retry (counted from 0), times a factor in [0.5, 1) given an ``rng``."""
        wait = min(self.first_wait * 2.0 ** min(retry, 20), self.max_wait)
        return wait if rng is None else float(wait * rng.uniform(0.5, 1.0))

    async def run(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        sleep: Callable[[float], Awaitable[None]],
        on: type[Exception] | tuple[type[Exception], ...] = RetryableError,
        rng: np.random.Generator | None = None,
        before_retry: Callable[[], None] = lambda: None,
    ) -> T:
        """Return the result of the first attempt that does not raise ``on``; raise the last error otherwise.

        ``before_retry`` is called before each wait.
        """

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome is not None else None
            if isinstance(error, RetryableError) and error.retry_after is not None:
                return min(error.retry_after, self.max_wait)
            return self.backoff(state.attempt_number - 1, rng)

        async def call() -> T:  # tenacity does not await what a lambda returns
            return await attempt()

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(on),
            stop=stop_after_attempt(self.retries + 1),
            wait=wait,
            sleep=sleep,
            before_sleep=lambda _: before_retry(),
            reraise=True,
        )
        return await retrying(call)
