"""Compressed inputs are unpacked up to a bound, however small they are packed."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from local_http import LocalServer

from rollgym.core.agent import AgentSetup, Briefing, make_agent
from rollgym.core.errors import AgentError, UsageError
from rollgym.core.files import gunzip
from rollgym.core.types import EpisodeSpec
from rollgym.envs.code import loaders


def test_gzip_is_read_whole_up_to_the_bound_and_refused_beyond_it() -> None:
    text = b"0123456789" * 1_000
    assert gunzip(gzip.compress(text), len(text)) == text
    assert gunzip(gzip.compress(text) + gzip.compress(b"more"), len(text) + 4) == text + b"more"
    for packed, most, said in (
        (gzip.compress(text), len(text) - 1, "more than"),
        (gzip.compress(text) + gzip.compress(text), len(text) + 1, "more than"),
        (gzip.compress(text)[:-9], len(text), "cut off"),
        (b"nonsense", 100, "not gzip"),
    ):
        with pytest.raises(OSError, match=said):
            gunzip(packed, most)


def test_a_small_file_of_problems_does_not_become_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "MOST_BYTES", 1_000_000)
    path = tmp_path / "problems.json.gz"
    path.write_bytes(gzip.compress(b" " * 50_000_000))
    with pytest.raises(UsageError, match="holds more than 1,000,000 bytes"):
        list(loaders.read_records(str(path)))
    path.write_bytes(b"[" * 900_000)
    with pytest.raises(UsageError, match="is not JSON"):
        list(loaders.read_records(str(path)))


def completion(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()


@pytest.mark.parametrize(
    ("encoding", "body", "said"),
    [
        ("gzip", gzip.compress(b" " * 100_000_000), "holds more than"),
        ("identity", b" " * 40_000_000, "answered more than"),
        ("gzip", b"nonsense", "not gzip"),
        ("br", b"nonsense", "compressed its response with 'br'"),
        ("gzip", gzip.compress(completion("<answer>Up</answer>")), None),
        ("identity", completion("<answer>Up</answer>"), None),
    ],
    ids=["bomb", "flood", "nonsense", "other", "packed", "plain"],
)
def test_an_endpoint_cannot_fill_the_memory_of_the_agent(
    encoding: str, body: bytes, said: str | None
) -> None:
    asked: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.headers.get("Accept-Encoding"))
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Encoding", encoding)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    async def play(url: str) -> Any:
        agent = make_agent("chat", AgentSetup(env_id="test/Env-v0"), model="m", base_url=url, retries=0)
        try:
            spec = EpisodeSpec(episode_id="e", env_id="test/Env-v0")
            return await agent.player(Briefing(spec=spec, instructions="")).act("observation", {})
        finally:
            await agent.close()

    server = LocalServer(Handler)
    try:
        told: Callable[[], Any] = lambda: asyncio.run(play(f"{server.url}/v1"))  # noqa: E731
        if said is None:
            assert told().action == "Up"
        else:
            with pytest.raises(AgentError, match=said):
                told()
    finally:
        server.close()
    assert asked == ["identity"]
