"""The HTTP client that agents, rewards and engines share, against a real server on this machine."""

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from local_http import LocalServer

from rollgym.utils.http_client import ConnectError, HttpClient, HttpResponse, ResponseTooLarge
from rollgym.utils.retry import RetryableError, RetryPolicy

POLICY = RetryPolicy(retries=3, first_wait=1.0, max_wait=3.0)


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            redirect = self.path == "/redirect"
            self.send_response(302 if redirect else 200)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"x" * 100)

        def log_message(self, *args: Any) -> None:
            return

    server = LocalServer(Handler)
    yield server.url
    server.close()


def get(client: HttpClient, url: str, **options: Any) -> HttpResponse:
    async def main() -> HttpResponse:
        try:
            return await client.send("GET", url, **{"max_bytes": 100, "timeout": 20.0, **options})
        finally:
            await client.close()

    return asyncio.run(main())


def test_one_client_serves_several_event_loops(url: str) -> None:
    client = HttpClient(POLICY)
    assert [get(client, url).body for _ in range(2)] == [b"x" * 100] * 2


def test_redirects_are_not_followed(url: str) -> None:
    assert get(HttpClient(POLICY), f"{url}/redirect").status == 302


def test_a_response_is_bounded(url: str) -> None:
    with pytest.raises(ResponseTooLarge):
        get(HttpClient(POLICY), url, max_bytes=99)


def test_a_refused_connection_is_a_connect_error(url: str) -> None:
    with pytest.raises(ConnectError, match="."):
        get(HttpClient(POLICY), "http://127.0.0.1:1/")


def run(policy: RetryPolicy, errors: list[Exception], **options: Any) -> tuple[list[float], Any]:
    waits: list[float] = []
    queue = list(errors)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def attempt() -> str:
        if queue:
            raise queue.pop(0)
        return "done"

    try:
        return waits, asyncio.run(policy.run(attempt, sleep=sleep, **options))
    except Exception as error:
        return waits, error


def test_waits_double_up_to_a_bound_and_a_server_may_set_them() -> None:
    assert run(POLICY, [RetryableError("busy")] * 3) == ([1.0, 2.0, 3.0], "done")
    assert run(POLICY, [RetryableError("busy", 0.5), RetryableError("busy", 99.0)]) == ([0.5, 3.0], "done")


def test_the_last_error_is_raised_as_it_is() -> None:
    last = RetryableError("fourth")
    waits, error = run(POLICY, [*[RetryableError("busy")] * 3, last])
    assert error is last
    assert len(waits) == 3


def test_other_errors_are_not_retried() -> None:
    error = ValueError("wrong")
    assert run(POLICY, [error]) == ([], error)
    assert run(POLICY, [error], on=(KeyError, ValueError)) == ([1.0], "done")
