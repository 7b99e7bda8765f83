"""An OpenAI-compatible endpoint on loopback that answers what a test tells it to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from local_http import LocalServer

from rollgym.core.agent import Agent, AgentAction, AgentSetup, Briefing, make_agent
from rollgym.core.types import EpisodeSpec

SETUP = AgentSetup(env_id="test/Env-v0")


def completion(text: Any = "<answer>Up</answer>", usage: Any = None, **message: Any) -> dict[str, Any]:
    """The body of a normal answer."""
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
    return {"choices": [choice]} | ({"usage": usage} if usage is not None else {})


class FakeEndpoint:
    """Gives its answers in order, then normal ones. An answer is a body, or (status, headers, body)."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.delay = 0.0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                fake.bodies.append(json.loads(body))
                fake.headers.append({name.lower(): value for name, value in self.headers.items()})
                fake.paths.append(self.path)
                time.sleep(fake.delay)
                self.send(fake.answers.pop(0) if fake.answers else completion())

            def send(self, answer: Any) -> None:
                answer = answer(fake.headers[-1]) if callable(answer) else answer
                status, headers, body = answer if isinstance(answer, tuple) else (200, {}, answer)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        served = LocalServer(Handler)
        self.url, self.close = f"{served.url}/v1", served.close

    def agent(self, **options: Any) -> Any:
        """A chat agent of this endpoint that does not wait between attempts, but notes the waits."""
        agent: Any = make_agent("chat", SETUP, **{"model": "m", "base_url": self.url, **options})
        agent.waits = []

        async def note(seconds: float) -> None:
            agent.waits.append(seconds)

        agent.endpoint.http.sleep = note
        return agent


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeEndpoint()
    yield fake
    fake.close()


@pytest.fixture
def answer() -> Callable[..., dict[str, Any]]:
    return completion


@pytest.fixture
def play() -> Callable[..., list[AgentAction]]:
    """Plays one episode: the moves that an agent makes on the observations."""

    def run(
        agent: Agent, *observations: str, info: dict[str, Any] | None = None, **spec: Any
    ) -> list[AgentAction]:
        async def episode() -> list[AgentAction]:
            details = {"episode_id": "e1", "env_id": "test/Env-v0", **spec}
            briefing = Briefing(spec=EpisodeSpec(**details), instructions="Walk to the goal.")
            player = agent.player(briefing)
            try:
                moves = [await player.act(observation, info or {}) for observation in observations]
            finally:
                await agent.close()
            return [AgentAction(action=move) if isinstance(move, str) else move for move in moves]

        return asyncio.run(episode())

    return run
