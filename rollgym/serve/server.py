"""The recording server: listens, records, and hands out finished conversations as episodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rollgym.chat import ChatTemplate, Tokenizer
from rollgym.core.extras import require
from rollgym.core.types import Episode, EpisodeSpec, Outcome
from rollgym.engines.base import Engine
from rollgym.io.run_dir import RunFolder
from rollgym.serve.keys import session_key
from rollgym.serve.manifest import make_manifest
from rollgym.serve.options import ServeOptions
from rollgym.serve.session import ServeContext, Session
from rollgym.serve.session_log import FileSessionLog
from rollgym.serve.sessions import Sessions
from rollgym.utils.http_server import listening, web_server

if TYPE_CHECKING:
    import uvicorn

_log = logging.getLogger(__name__)


class RecordingServer:
    """An endpoint for OpenAI's and Anthropic's clients whose conversations become episodes.

    In a program::

        async with RecordingServer(engine, tokenizer) as server:
            episodes = server.episodes()
            ...  # programs call server.base_url
            async for episode in episodes: ...

    Args:
        engine: Samples the replies; it stays open.
        tokenizer: The model's tokenizer, or a `ChatTemplate`.
        options: Address and limits.
        folder: Run folder for finished episodes, and for the turns of open sessions, which continue after a
            crash; closed with the server.
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
        log = FileSessionLog(folder.path) if folder is not None else None
        # One thread: tokenizing is serial anyway, and tokenizers need not be thread-safe.
        self._thread = ThreadPoolExecutor(1, "rollgym-serve")
        self._context = ServeContext(
            engine=engine, template=template, options=self.options, in_thread=self._in_thread, log=log
        )
        self.sessions = Sessions(self._context, self._end)
        if folder is not None:
            self.sessions.ended.update(episode.spec.episode_id for episode in folder.done)
            folder.done.clear()
        if log is not None:
            for logged in log.restore(self.sessions.ended):
                self.sessions.restore(logged)
        self._listeners: list[asyncio.Queue[Episode | None]] = []
        self._cleanups: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._web: uvicorn.Server | None = None
        self.url = ""
        """The server's address, once it has started."""
        self.closed = False

    @property
    def base_url(self) -> str:
        """The value of OPENAI_BASE_URL for clients."""
        return f"{self.url}/v1"

    def session_url(self, session: Session) -> str:
        """Return the address of a session's routes; with ``/v1``, the base_url of its client."""
        return f"{self.url}/session/{session.name}"

    async def start(self) -> None:
        """Start listening; raise a `UsageError` where that is not possible."""
        check_installed()
        from rollgym.serve.app import make_app

        listener = listening(self.options.host, self.options.port, backlog=512)
        try:
            self._web = web_server(
                make_app(self._context, self.sessions),
                grace=2,
                signals=False,
                request_seconds=self.options.request_seconds,
                max_connections=self.options.max_connections,
            )
        except BaseException:
            listener.close()
            raise
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        self._tasks = [
            asyncio.create_task(self._web.serve(sockets=[listener])),
            asyncio.create_task(self._watch()),
        ]
        while not self._web.started and not self._tasks[0].done():
            await asyncio.sleep(0.005)

    def session_key(self, session: Session) -> str:
        """Return the API key that names a session."""
        return session_key(session.name, self.options.api_key)

    def begin(
        self,
        spec: EpisodeSpec,
        metadata: Mapping[str, Any] | None = None,
        *,
        recorded_elsewhere: bool = False,
    ) -> Session:
        """Open a session for an episode, which the caller may record itself."""
        return self.sessions.begin(None, spec, metadata, recorded_elsewhere=recorded_elsewhere)

    def episodes(self) -> AsyncIterator[Episode]:
        """Iterate over the episodes that end from now on, until the server is closed."""
        queue: asyncio.Queue[Episode | None] = asyncio.Queue()
        if self.closed:
            queue.put_nowait(None)
        self._listeners.append(queue)
        return self._stream(queue)

    def keep(self, episode: Episode) -> None:
        """Write an episode and pass it to every `episodes` iterator."""
        if self.folder is not None:
            self.folder.append(episode)
            self.folder.done.clear()  # a server may run for weeks
        for queue in self._listeners:
            queue.put_nowait(episode)

    def release(self, session: Session) -> None:
        """Drop a session whose episode is recorded elsewhere."""
        self.sessions.release(session)
        self._forget(session)

    async def close(self) -> None:
        """End open sessions as cancelled, write everything, stop listening. Can be called again."""
        if self.closed:
            return
        self.closed = True
        failed: list[Exception] = []
        for session in list(self.sessions.open.values()):
            if not session.ended:
                try:
                    self.sessions.finish(session, Outcome.CANCELLED)
                except Exception as error:  # such as a full disk: the server must stop anyway
                    failed.append(error)
        if self._web is not None:
            self._web.should_exit = True
            await self._tasks[0]
            self._tasks[1].cancel()
        await asyncio.gather(*self._cleanups, *self._tasks[1:], return_exceptions=True)
        self._thread.shutdown()
        for queue in self._listeners:
            queue.put_nowait(None)
        if self.folder is not None:
            self._finish_folder(self.folder)
        if failed:
            raise failed[0]

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
            for session in self.sessions.idle():
                try:
                    self.sessions.finish_idle(session)
                except Exception:
                    # Its turns stay in the log of open sessions. Others must still end.
                    _log.exception("Session %s could not be ended", session.name)

    async def _stream(self, queue: asyncio.Queue[Episode | None]) -> AsyncIterator[Episode]:
        try:
            while (episode := await queue.get()) is not None:
                yield episode
        finally:
            self._listeners.remove(queue)  # else episodes would gather for a reader that has left

    def _end(self, session: Session, episode: Episode) -> None:
        self.keep(episode)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        task = asyncio.create_task(self._context.engine.forget(session.name))
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)

    def _finish_folder(self, folder: RunFolder) -> None:
        counts = {outcome.value: count for outcome, count in self.sessions.outcomes.items()}
        try:
            folder.finish({"kind": "serve", "episodes": sum(counts.values()), "outcomes": counts})
        finally:
            folder.close()


def manifest(model: str, options: ServeOptions) -> dict[str, Any]:
    """Return the manifest of a run folder of recorded conversations."""
    return make_manifest(
        "serve",
        env_id=options.env_id,
        env_kwargs={},
        agent={"name": "served", "options": {"model": model, "temperature": options.temperature}},
        split=options.split,
        seed=options.seed,
    )


def check_installed() -> None:
    """Raise `MissingExtra` where starlette or uvicorn is missing."""
    require("The recording endpoint", "serve")
