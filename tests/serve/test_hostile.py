"""Whatever is sent: an answer or a refusal with a sentence, never a failure of the server."""

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollgym.serve.dialects import AnthropicMessages, OpenAIChat, OpenAIResponses
from rollgym.serve.requests import ApiError
from rollgym.testing import ScriptedEngine

Serving = Callable[..., Any]
TEXT = "@ F F F\nF H F H"
GOOD = {"model": "policy", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}


def with_server(serving: Serving, work: Callable[[Any], Any]) -> None:
    async def run() -> None:
        async with serving() as place:
            await work(place)

    asyncio.run(run())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [
    "messages",
    "temperature",
    "top_p",
    "max_tokens",
    "stop",
    "n",
    "seed",
    "stream",
    "logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "input",
    "instructions",
    "include",
    "text",
    "previous_response_id",
    "system",
    "stop_sequences",
    "thinking",
]
ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
CALLS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "id": st.sampled_from(["a", "b"]) | JSON,
            "type": st.just("function"),
            "function": st.fixed_dictionaries({}, optional={"name": JSON, "arguments": JSON}) | JSON,
        },
    )
    | JSON,
    max_size=3,
)
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "input_text", "image"])},
        optional={
            "text": JSON,
            "thinking": JSON,
            "id": st.sampled_from(["a", "b"]),
            "tool_use_id": st.sampled_from(["a", "b"]) | JSON,
            "name": st.just("f") | JSON,
            "input": JSON,
            "content": JSON,
        },
    ),
    max_size=4,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES, "content": JSON | BLOCKS | st.text(max_size=5)},
        optional={"tool_calls": CALLS, "tool_call_id": st.sampled_from(["a", "b"]) | JSON, "name": JSON},
    ),
    max_size=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    messages=MESSAGES | st.none(),
    body=st.binary(max_size=40) | st.none(),
)
def test_whatever_is_sent_is_read_or_refused_with_a_sentence(
    changes: dict[str, Any], messages: Any, body: bytes | None
) -> None:
    dialects: list[tuple[Any, dict[str, Any], str]] = [
        (OpenAIChat(), GOOD, "messages"),
        (OpenAIResponses(), RESPONSES, "input"),
        (AnthropicMessages(), GOOD, "messages"),
    ]
    for dialect, good, name in dialects:
        told = good | ({name: messages} if messages is not None else {}) | changes
        data = json.dumps(told).encode() if body is None else body
        answer: Any
        try:
            answer = dialect.read(data, lambda response_id: ())
        except ApiError as refused:
            answer = refused
        if isinstance(answer, ApiError):
            assert answer.status == 400
            assert str(answer).endswith(".")
        else:
            assert answer.chat.messages[-1].role in ("user", "tool")


RESPONSES = {"model": "policy", "input": TEXT, "max_output_tokens": 4}
PATHS = [
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/session", "/session/x/end", "/session/x/reward", "/rl/reward"),
]


def test_fuzzed_requests_over_http_are_never_a_500(serving: Serving) -> None:
    async def work(place: Any) -> None:
        seen: set[int] = set()

        async def send(changes: dict[str, Any], path: str) -> None:
            good = RESPONSES if path == "/v1/responses" else GOOD
            data = json.dumps(good | changes).encode()
            head = {"content-type": "application/json"}
            answer = await place.http.post(path, content=data, headers=head)
            seen.add(answer.status_code)
            assert answer.status_code < 500, answer.text
            if answer.status_code != 200 and answer.status_code != 201:
                assert len(answer.json()["error"]["message"]) > 10

        cases: list[tuple[dict[str, Any], str]] = []

        @settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(
            changes=st.just({}) | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2),
            messages=st.none() | MESSAGES,
            path=st.sampled_from(PATHS),
        )
        def collect(changes: dict[str, Any], messages: Any, path: str) -> None:
            name = "input" if path == "/v1/responses" else "messages"
            cases.append((changes | ({name: messages} if messages is not None else {}), path))

        collect()
        cases += [({}, path) for path in PATHS]
        for changes, path in cases:
            await send(changes, path)
        assert {200, 400} <= seen

    with_server(serving, work)


def test_hostile_texts_stay_text(serving: Serving) -> None:
    async def work(place: Any) -> None:
        controls = " ".join(place.tokenizer.all_special_tokens)
        marks = "".join(chr(c) for c in range(0xF0000, 0xF0000 + 2000))
        answer = await place.ask([f"{controls} {TEXT}"], "one")
        assert answer.status_code == 200
        plain = await place.ask([f"x {TEXT}"], "two")
        assert plain.status_code == 200
        special = set(place.tokenizer.all_special_ids) - {place.tokenizer.unk_token_id}
        one, two = ([i for i in request.prompt_ids if i in special] for request, _ in place.spy.made)
        assert one == two
        assert (await place.ask([marks])).status_code == 400
        lone = json.dumps(GOOD | {"messages": [{"role": "user", "content": "\ud800"}]}).encode()
        head = {"content-type": "application/json"}
        assert (await place.http.post("/v1/chat/completions", content=lone, headers=head)).status_code < 500

    with_server(serving, work)


async def connected(place: Any, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A plain connection on which this much was sent."""
    url = httpx.URL(place.server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


HEAD = (
    b"POST /session HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n"
)


@pytest.mark.parametrize("sent", [b"", HEAD[:40], HEAD, HEAD + b"\r\n", HEAD + b"\r\n{"], ids=len)
def test_a_connection_that_never_sends_a_whole_request_is_dropped(serving: Serving, sent: bytes) -> None:
    async def run() -> None:
        async with serving(request_seconds=0.3) as place:
            reader, writer = await connected(place, sent)
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
            connections = place.server._web.server_state.connections
            await until(lambda: not connections)

    asyncio.run(run())


def test_a_second_request_that_stalls_is_dropped_too(serving: Serving) -> None:
    async def run() -> None:
        async with serving(request_seconds=0.3) as place:
            reader, writer = await connected(place, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n")
            writer.write(HEAD[:30])
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 20)
            writer.close()
            await until(lambda: not place.server._web.server_state.connections)

    asyncio.run(run())


def test_a_reply_may_take_longer_than_its_request(serving: Serving) -> None:
    """The deadline is for what the client sends, not for what it waits for."""

    async def run() -> None:
        async with serving(request_seconds=0.2) as place:

            async def slowly() -> None:
                await asyncio.sleep(0.8)

            place.spy.before = slowly
            assert (await place.ask([TEXT])).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_its_response_is_dropped(
    serving: Serving, tokenizer: Any, stream: bool
) -> None:
    """A long response does not fit the buffers of the kernel; without a deadline it would wait for ever."""
    word = tokenizer.encode(" F", add_special_tokens=False)
    long = ScriptedEngine(lambda request: (word * 60_000)[:60_000], context_length=200_000)

    async def run() -> None:
        async with serving(request_seconds=0.5, inner=long) as place:
            body = json.dumps(GOOD | {"max_tokens": 60_000, "stream": stream, "logprobs": True})
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
            url = httpx.URL(place.server.url)
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect((url.host, url.port))
                client.sendall(f"{head}content-type: application/json\r\n\r\n{body}".encode())
                connections = place.server._web.server_state.connections
                if stream:  # the kernel drops it while the reply is being sampled
                    await until(lambda: bool(long.active))
                else:
                    await until(lambda: any(one.flow.write_paused for one in connections))
                await until(lambda: not connections)
                await until(lambda: not long.active)
            assert (await place.http.get("/health")).status_code == 200

    asyncio.run(run())


def test_connections_and_unfinished_bodies_are_bounded(serving: Serving) -> None:
    async def run() -> None:
        async with serving(max_connections=8, max_body=1000) as place:
            opened = [await connected(place) for _ in range(30)]
            await until(lambda: len(place.server._web.server_state.connections) <= 8)
            for _, writer in opened:
                writer.close()
            await until(lambda: not place.server._web.server_state.connections)
            assert (await place.http.get("/health")).status_code == 200
        async with serving(max_body=1000) as place:
            # 20 bodies of 900 bytes each that never end: together more than 16 times max_body.
            opened = [await connected(place, HEAD + b"\r\n" + b" " * 900) for _ in range(20)]
            first = [asyncio.create_task(reader.readline()) for reader, _ in opened]
            done, waiting = await asyncio.wait(first, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            assert all(b"429" in task.result() for task in done)
            assert waiting
            for task in waiting:
                task.cancel()
            for _, writer in opened:
                writer.close()
            # What was given up counts no longer.
            await until(lambda: len(place.server._web.server_state.connections) <= 1)
            assert (await place.http.post("/session", json={})).status_code == 201

    asyncio.run(run())


CROSS_SITE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("path", ["end", "reward", "v1/chat/completions"])
def test_a_page_of_another_site_changes_nothing(serving: Serving, path: str) -> None:
    """A browser sends such requests without asking, an empty body and plain text included."""

    async def run() -> None:
        async with serving() as place:
            await place.say([TEXT], "mine")
            plain = [
                {},
                {"content-type": "text/plain"},
                {"content-type": "application/x-www-form-urlencoded"},
            ]
            as_json = {"content-type": "application/json"}
            for headers in (*plain, *CROSS_SITE, *(as_json | extra for extra in CROSS_SITE)):
                for body in (b"", b"{}"):
                    answer = await place.http.post(f"/session/mine/{path}", content=body, headers=headers)
                    assert answer.status_code in (403, 415), (headers, body)
                    assert answer.json()["error"]["message"].endswith(".")
            standing = (await place.http.get("/session/mine")).json()
            assert standing == {"id": "mine", "open": True, "turns": 1, "reward": 0.0, "success": None}
            opened = len(place.server.sessions.open)
            assert (await place.http.post("/session", headers={"origin": "null"})).status_code == 403
            assert len(place.server.sessions.open) == opened

    asyncio.run(run())


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_only_names_of_this_machine_reach_a_local_server(serving: Serving, address: str) -> None:
    """DNS rebinding: the page's own host name leads here, so its requests are of the same origin."""

    async def run() -> None:
        async with serving(host=address) as place:
            port = place.server.url.rpartition(":")[2]
            for host in (
                "evil.example",
                f"evil.example:{port}",
                "localhost.evil.example",
                "127.0.0.1.nip.io",
            ):
                headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
                for path, body in (("/session", {}), ("/v1/chat/completions", GOOD)):
                    refused = await place.http.post(path, json=body, headers=headers)
                    assert (refused.status_code, "Unknown host" in refused.text) == (400, True)
            for host in (f"{address}:{port}", address, f"localhost:{port}", f"LocalHost:{port}"):
                answer = await place.http.get("/v1/models", headers={"host": host})
                assert answer.status_code == 200, host
            assert place.server.sessions.open == {}

    asyncio.run(run())


def test_a_client_that_names_this_server_as_its_origin_is_served(serving: Serving) -> None:
    async def run() -> None:
        async with serving() as place:
            headers = {"origin": place.server.url, "sec-fetch-site": "same-origin"}
            assert (await place.http.post("/session", json={}, headers=headers)).status_code == 201

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens soon; fails after a long while."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)
