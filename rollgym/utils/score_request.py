"""A POST to a service that scores episodes: which failures are tried again, and which are final."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from rollgym.core.errors import RewardError
from rollgym.utils.http_client import HttpClient, ResponseTooLarge, TransportError, short
from rollgym.utils.retry import RetryableError

SERVER_ERRORS = range(500, 600)


async def request_score(
    client: HttpClient,
    url: str,
    body: bytes,
    *,
    max_bytes: int,
    hide: Callable[[str], str],
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    retried: Container[int] = SERVER_ERRORS,
) -> str:
    """Make one attempt, and return the response's text, from which ``hide`` has removed secrets.

    Args:
        client: Sends the request; its `HttpClient.retry` may call this function again.
        url: The service.
        body: What is posted.
        max_bytes: Size limit of the response.
        hide: Replaces secrets in a text: what a service answers may be recorded.
        headers: Sent besides those of the client.
        timeout: Seconds for this attempt; ``None`` for no limit.
        retried: Error statuses after which another attempt may succeed.

    Raises:
        RetryableError: The service was not reached, did not answer in time, or has a status to retry.
        RewardError: Any other failure.
    """
    try:
        response = await client.send(
            "POST", url, content=body, headers=headers, max_bytes=max_bytes, timeout=timeout
        )
    except TimeoutError:
        raise RetryableError(f"{url} did not answer within {timeout:g} s") from None
    except TransportError as error:
        raise RetryableError(hide(f"{url} cannot be reached: {error}")) from None
    except ResponseTooLarge:
        raise RewardError(f"the response is longer than {max_bytes} bytes") from None
    text = hide(response.body.decode("utf-8", "replace"))
    if 200 <= response.status < 300:
        return text
    message = f"{url} answered {response.status}: {short(text)}"
    raise RetryableError(message) if response.status in retried else RewardError(message)
