"""A real model with random weights behind a real server on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("uvicorn")

from rollgym.chat import load_tokenizer
from rollgym.engines.base import Engine, GenerateRequest, Generation, OnToken
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.io.run_dir import RunFolder
from rollgym.serve import RecordingServer, ServeOptions
from rollgym.trainer.builtin_policy.model import make_policy

ENV = "rollgym/FrozenLake-v0"


class Spy:
    """An engine that notes what another was asked and said."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.made: list[tuple[GenerateRequest, Generation]] = []
        self.cancelled = 0
        self.before: Callable[[], Awaitable[None]] | None = None

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def context_length(self) -> int:
        return self.inner.context_length

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._noted(request, self.inner.generate(request))

    async def stream(self, request: GenerateRequest, on_token: OnToken) -> Generation:
        return await self._noted(request, self.inner.stream(request, on_token))

    async def _noted(self, request: GenerateRequest, work: Coroutine[Any, Any, Generation]) -> Generation:
        try:
            if self.before is not None:
                await self.before()
            made = await work
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            work.close()
        self.made.append((request, made))
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class Place:
    """A server, a client for it, and what its engine did."""

    server: RecordingServer
    http: httpx.AsyncClient
    spy: Spy
    tokenizer: Any

    async def ask(self, messages: Sequence[Any], session: str | None = None, **more: Any) -> httpx.Response:
        """A request; a message may be plain text, by turns the user's and the model's."""
        roles = ("user", "assistant")
        said = [
            message if isinstance(message, dict) else {"role": roles[place % 2], "content": message}
            for place, message in enumerate(messages)
        ]
        path = f"/session/{session}/v1/chat/completions" if session else "/v1/chat/completions"
        return await self.http.post(path, json={"model": "policy", "max_tokens": 6, "messages": said} | more)

    async def say(self, messages: Sequence[Any], session: str | None = None, **more: Any) -> str:
        """The text of a reply."""
        answer = await self.ask(messages, session, **more)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    async def end(self, session: str, **body: Any) -> dict[str, Any]:
        """End a session."""
        answer = await self.http.post(f"/session/{session}/end", json=body)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    torch.set_num_threads(1)
    return make_policy([ENV], tmp_path_factory.mktemp("policy") / "policy", size="tiny", context=256).path


@pytest.fixture(scope="session")
def engine(model: Path) -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(model, threads=1, device="cpu")
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model)


@pytest.fixture
def serving(engine: EmbeddedEngine, tokenizer: Any) -> Callable[..., Any]:
    """``async with serving(...) as place``; options are those of `ServeOptions`."""

    @asynccontextmanager
    async def start(
        *, folder: RunFolder | None = None, inner: Engine | None = None, tokens: Any = None, **options: Any
    ) -> AsyncIterator[Place]:
        spy = Spy(inner or engine)
        served = RecordingServer(spy, tokens or tokenizer, ServeOptions(**options), folder=folder)
        async with served as server, httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            yield Place(server, http, spy, tokens or tokenizer)

    return start
