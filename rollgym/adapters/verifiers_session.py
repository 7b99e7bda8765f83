"""Episodes of a verifiers environment: it asks for replies, and rollgym's agent gives them.

verifiers drives its model, while rollgym's agents drive their environment. So the environment runs on the
event loop of a thread, and its model is an endpoint on loopback whose answer is the next action.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.core.errors import EnvError, one_line

HARNESS = "rollgym-verifiers"
"""The harness of `rollgym.integrations.verifiers`: one chat completion per turn."""
_KEY_HEADER = "X-Rollgym-Key"
_STOP_SECONDS = 10.0
_MAX_BODY_BYTES = 64_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The environment waits for a reply to a conversation."""

    messages: Sequence[dict[str, Any]]
    """All messages at the first turn, later those since the last reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The episode is over."""

    episode: Any
    """verifiers' episode."""


class VerifiersSession:
    """A thread with the event loop that one verifiers environment runs on.

    Raises:
        EnvError: The environment did not go on within ``timeout`` seconds, or cannot run.
    """

    def __init__(self, name: str, make_env: Callable[[], Any], timeout: float) -> None:
        self._name, self._make_env, self._timeout = name, make_env, timeout
        self._key = secrets.token_hex(16)
        self._events: queue.Queue[tuple[int, Asked | Over | Exception]] = queue.Queue()
        self._number = 0
        """Counts episodes: what an abandoned one still sends is left out."""
        self._reply: asyncio.Future[str] | None = None
        self._trace_id = ""
        self._playing: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._close = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"verifiers {name}", daemon=True)
        self._thread.start()
        event = self._next()
        if not isinstance(event, Over):
            raise EnvError(f"verifiers:{name} did not start.")

    def begin(self, task: Any) -> Asked | Over:
        """Start an episode; one that still runs is cancelled."""
        self._number += 1
        self._loop.call_soon_threadsafe(self._start, task, self._number)
        return self._next()

    def reply(self, text: str) -> Asked | Over:
        """Answer the environment."""
        self._loop.call_soon_threadsafe(self._give, text)
        return self._next()

    def close(self) -> None:
        """Cancel the episode and end the thread."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop may end at the same moment
                self._loop.call_soon_threadsafe(self._close.set)
            self._thread.join(_STOP_SECONDS)

    def _next(self) -> Asked | Over:
        while True:
            try:
                number, event = self._events.get(timeout=self._timeout)
            except queue.Empty:
                raise EnvError(
                    f"verifiers:{self._name} did not go on within {self._timeout:g} s (option timeout)."
                ) from None
            if number == self._number:
                if isinstance(event, Exception):
                    raise event
                return event

    # On the thread's event loop.

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            failure = EnvError(f"verifiers:{self._name} cannot run: {one_line(error)}.")
            failure.__cause__ = error
            self._events.put((self._number, failure))
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        web: Any = importlib.import_module("aiohttp.web")
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._context = self._model(site._server.sockets[0].getsockname()[1])
            self._env = self._make_env()
            async with self._env.serving():
                self._events.put((0, Over(episode=None)))
                await self._close.wait()
                await self._cancel(self._playing)
        finally:
            await runner.cleanup()

    def _model(self, port: int) -> Any:
        vf: Any = importlib.import_module("verifiers.v1")
        client = vf.EvalClientConfig(
            base_url=f"http://127.0.0.1:{port}/v1",
            # Another variable than the default, with which verifiers reads its configuration in the home.
            api_key_var="ROLLGYM_VERIFIERS_KEY",
            headers={_KEY_HEADER: self._key},
        )
        return vf.ModelContext(model="rollgym", client=client)

    def _start(self, task: Any, number: int) -> None:
        self._playing = self._loop.create_task(self._play(task, number, self._playing))

    async def _play(self, task: Any, number: int, before: asyncio.Task[None] | None) -> None:
        await self._cancel(before)
        self._trace_id = ""
        try:
            episode = await self._env.run_episode(task, self._context)
        except Exception as error:
            failure = EnvError(f"verifiers:{self._name} failed: {one_line(error)}.")
            failure.__cause__ = error
            self._events.put((number, failure))
        else:
            self._events.put((number, Over(episode=episode)))

    async def _cancel(self, playing: asyncio.Task[None] | None) -> None:
        if self._reply is not None:
            self._reply.cancel()  # the endpoint does not notice that its client is gone
        if playing is not None and not playing.done():
            playing.cancel()
            await asyncio.wait([playing])

    def _give(self, text: str) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(text)

    async def _complete(self, request: Any) -> Any:
        """Answer a request for a chat completion with the next action."""
        web: Any = importlib.import_module("aiohttp.web")
        if not secrets.compare_digest(request.headers.get(_KEY_HEADER, ""), self._key):
            return web.json_response({"error": {"message": "wrong key"}}, status=403)
        body = await request.json()
        trace_id = request.headers.get("X-Session-ID", "")
        problem = self._problem(body, trace_id)
        if problem:
            self._events.put((self._number, EnvError(f"verifiers:{self._name} {problem}.")))
            return web.json_response({"error": {"message": problem}}, status=400)
        messages = list(body["messages"])
        if self._trace_id:
            last = max(
                (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1
            )
            messages = messages[last + 1 :]
        self._trace_id = trace_id
        self._reply = self._loop.create_future()
        self._events.put((self._number, Asked(messages=messages)))
        text = await self._reply
        message = {"role": "assistant", "content": text}
        return web.json_response(
            {
                "id": "rollgym",
                "object": "chat.completion",
                "created": 0,
                "model": "rollgym",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
        )

    def _problem(self, body: Any, trace_id: str) -> str:
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return "sent a request without messages"
        if body.get("tools"):
            return "offers tools to its agent, which the adapter does not support"
        if self._trace_id and self._trace_id != trace_id:
            return "runs its agent more than once in an episode, which the adapter does not support"
        return ""


def text_of(messages: Sequence[dict[str, Any]]) -> str:
    """The text of messages; with roles where they are not only the user's and the system's.

    Raises:
        EnvError: A message has an image or another part that is not text.
    """
    plain = all(message.get("role") in ("system", "developer", "user") for message in messages)
    texts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            if any(part.get("type") != "text" for part in content):
                raise EnvError("The environment sent an image or file; the adapter supports text only.")
            content = "\n".join(str(part["text"]) for part in content)
        texts.append(content if plain else f"{str(message.get('role')).capitalize()}: {content}")
    return "\n\n".join(text for text in texts if text)
