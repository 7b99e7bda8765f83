"""The endpoint in a Python program: it listens, records, and hands finished conversations on."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import rollgym
from rollgym.chat import ChatTemplate, Tokenizer
from rollgym.engines import Engine
from rollgym.errors import MissingExtra
from rollgym.serve.options import ServeOptions
from rollgym.serve.session import Desk, Session
from rollgym.serve.sessions import Sessions
from rollgym.store import RunFolder
from rollgym.types import SCHEMA_VERSION, Episode, EpisodeSpec, Outcome
from rollgym.web import listening, web_server

if TYPE_CHECKING:
    import uvicorn


class RecordingServer:
    """An OpenAI-compatible endpoint whose conversations become episodes.

    In a program::

        async with RecordingServer(engine, tokenizer) as server:
            episodes = server.episodes()
            ...  # programs talk to server.base_url
            async for episode in episodes: ...

    Args:
        engine: What draws the tokens; it stays open.
        tokenizer: Of the model, or a `ChatTemplate` that is made already.
        options: Where to listen and what to allow.
        folder: Where finished episodes are written; closed with the server.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | ChatTemplate,
        options: ServeOptions | None = None,
        *,
        folder: RunFolder | None = None,
    ) -> None:
        self.options = options or ServeOptions()
        self.folder = folder
        template = tokenizer if isinstance(tokenizer, ChatTemplate) else ChatTemplate(tokenizer)
        # One thread: tokenising takes turns anyway, and tokenizers need not bear two callers.
        self._thread = ThreadPoolExecutor(1, "rollgym-serve")
        self._desk = Desk(engine=engine, template=template, options=self.options, in_thread=self._in_thread)
        self.sessions = Sessions(self._desk, self._end)
        if folder is not None:
            self.sessions.ended.update(episode.spec.episode_id for episode in folder.done)
            folder.done.clear()
        self._listeners: list[asyncio.Queue[Episode | None]] = []
        self._tidying: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._web: uvicorn.Server | None = None
        self._address = ""
        self.closed = False

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._address

    @property
    def base_url(self) -> str:
        """What clients are given as OPENAI_BASE_URL."""
        return f"{self._address}/v1"

    def session_url(self, session: Session) -> str:
        """Where a conversation is rewarded and ended; with ``/v1`` the base_url of its client."""
        return f"{self._address}/session/{session.name}"

    async def start(self) -> None:
        """Listen. `UsageError` where that is not possible."""
        check_installed()
        from rollgym.serve.app import make_app

        listener = listening(self.options.host, self.options.port, backlog=512)
        try:
            self._web = web_server(
                make_app(self._desk, self.sessions),
                grace=2,
                signals=False,
                request_seconds=self.options.request_seconds,
                max_connections=self.options.max_connections,
            )
        except BaseException:
            listener.close()
            raise
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        self._address = f"http://{host}:{listener.getsockname()[1]}"
        self._tasks = [
            asyncio.create_task(self._web.serve(sockets=[listener])),
            asyncio.create_task(self._watch()),
        ]
        while not self._web.started and not self._tasks[0].done():
            await asyncio.sleep(0.005)

    def begin(self, spec: EpisodeSpec, metadata: Mapping[str, Any] | None = None) -> Session:
        """Open a conversation for an episode."""
        return self.sessions.begin(None, spec, metadata)

    def episodes(self) -> AsyncIterator[Episode]:
        """Every episode that ends from now on, until the server is closed."""
        queue: asyncio.Queue[Episode | None] = asyncio.Queue()
        if self.closed:
            queue.put_nowait(None)
        self._listeners.append(queue)
        return self._hand_on(queue)

    def keep(self, episode: Episode) -> None:
        """Write an episode and hand it on."""
        if self.folder is not None:
            self.folder.append(episode)
            self.folder.done.clear()  # a server may run for weeks
        for queue in self._listeners:
            queue.put_nowait(episode)

    def release(self, session: Session) -> None:
        """Forget a conversation whose episode somebody else tells."""
        self.sessions.release(session)
        self._tidy(session)

    async def close(self) -> None:
        """End what is open as cancelled, write everything, stop listening. Closing twice is closing once."""
        if self.closed:
            return
        self.closed = True
        for session in list(self.sessions.open.values()):
            if not session.over:
                self.sessions.finish(session, Outcome.CANCELLED)
        if self._web is not None:
            self._web.should_exit = True
            await self._tasks[0]
            self._tasks[1].cancel()
        await asyncio.gather(*self._tidying, *self._tasks[1:], return_exceptions=True)
        self._thread.shutdown()
        if self.folder is not None:
            self._finish_folder(self.folder)
        for queue in self._listeners:
            queue.put_nowait(None)

    async def __aenter__(self) -> RecordingServer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _in_thread(self, work: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.options.idle_seconds / 4))
            self.sessions.finish_idle()

    async def _hand_on(self, queue: asyncio.Queue[Episode | None]) -> AsyncIterator[Episode]:
        while (episode := await queue.get()) is not None:
            yield episode

    def _end(self, session: Session, episode: Episode) -> None:
        self.keep(episode)
        self._tidy(session)

    def _tidy(self, session: Session) -> None:
        task = asyncio.create_task(self._desk.engine.forget(session.name))
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    def _finish_folder(self, folder: RunFolder) -> None:
        counts = {outcome.value: count for outcome, count in self.sessions.outcomes.items()}
        try:
            folder.finish({"kind": "serve", "episodes": sum(counts.values()), "outcomes": counts})
        finally:
            folder.close()


def manifest(model: str, options: ServeOptions) -> dict[str, Any]:
    """What a run folder of recorded conversations says of itself."""
    return {
        "schema": SCHEMA_VERSION,
        "kind": "serve",
        "env": {"id": options.env_id, "version": "", "kwargs": {}},
        "agent": {"name": "served", "options": {"model": model, "temperature": options.temperature}},
        "split": options.split,
        "seed": options.seed,
        "versions": {"rollgym": rollgym.__version__, "python": platform.python_version()},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def check_installed() -> None:
    """`MissingExtra` where the packages that listen are missing."""
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        raise MissingExtra("The recording endpoint", "serve")
