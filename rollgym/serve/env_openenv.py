"""Any environment as an OpenEnv server: reset, step and state over a WebSocket, one session per connection.

Speaks the protocol of OpenEnv's own server (package ``openenv`` 0.10): ``/ws`` for sessions, and over HTTP
``/reset``, ``/step`` and ``/state`` (one shared session), ``/schema``, ``/metadata``, ``/health``,
``/openapi.json``, ``/mcp`` and the task API. Rewards are sent: OpenEnv's clients train on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollgym.core.env import text_interface
from rollgym.core.errors import RollgymError, UsageError
from rollgym.core.extras import require
from rollgym.core.tool_env import tools_of
from rollgym.core.types import Episode, EpisodeSpec, Outcome
from rollgym.core.version import __version__
from rollgym.serve.env_player import EnvPlayer, ServedEnv
from rollgym.utils.http_server import cross_site

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.websockets import WebSocket

__all__ = ["EnvOpenEnvServer", "OpenEnvError"]

API_VERSION = "1.0.0"
"""Version of OpenEnv's HTTP API, in ``/openapi.json``."""
MAX_MESSAGE_BYTES = 1_000_000
_TEXT = {"type": "string"}
_METADATA = {"type": "object", "additionalProperties": True, "default": {}}
_PATHS = {
    "/reset": "post", "/step": "post", "/state": "get", "/schema": "get", "/metadata": "get",
    "/health": "get", "/mcp": "post", "/list_environments": "get", "/{env}/splits": "get",
    "/{env}/num_tasks": "post", "/{env}/task": "post", "/{env}/task_range": "post", "/{env}/tasks": "post",
}  # fmt: skip
MAX_LISTED_TASKS = 1000
"""Tasks in one answer of the task API."""


class OpenEnvError(Exception):
    """An error that a client gets, with OpenEnv's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EnvOpenEnvServer:
    """Offers an environment to OpenEnv clients, and records what they play.

    Args:
        served: The environment.
        record: Takes every finished episode.
        max_sessions: Sessions at once; a further client gets ``CAPACITY_REACHED``.
        idle_seconds: A session without a message for so long is closed; its episode ends as ``time_limit``.

    Example:
        >>> server = EnvOpenEnvServer(ServedEnv(env_id="rollgym/Sokoban-v0"), max_sessions=8)
        >>> async with server.http_app() as app:
        ...     await web_server(app, websockets=True).serve()
    """

    def __init__(
        self,
        served: ServedEnv,
        record: Callable[[Episode], None] = lambda episode: None,
        *,
        max_sessions: int = 64,
        idle_seconds: float = 600.0,
    ) -> None:
        require("An environment as an OpenEnv server", "openenv")
        if max_sessions < 1:
            raise UsageError(f"--max-sessions must be at least 1, not {max_sessions}.")
        self._served, self._record = served, record
        self._max_sessions, self._idle_seconds = max_sessions, idle_seconds
        self._specs: Iterator[EpisodeSpec] = served.specs()
        self._players: set[EnvPlayer] = set()
        self._opening = 0
        self._shared: EnvPlayer | None = None
        self._alone = asyncio.Lock()
        env = served.make()  # fails early for a wrong id or argument
        try:
            interface = text_interface(env)
            self._tasks = interface.tasks
            self._instructions = str(interface.instructions)
            self._plain_text = not tools_of(interface)
        finally:
            env.close()

    @contextlib.asynccontextmanager
    async def http_app(self, *, host: str = "127.0.0.1", api_key: str | None = None) -> AsyncIterator[Any]:
        """Yield the ASGI app; closes all environments at the end.

        Args:
            host: The address that the app is served at.
            api_key: The bearer token that clients must send.
        """
        from starlette.applications import Starlette
        from starlette.routing import Route, WebSocketRoute

        routes = [
            Route("/health", self._answer(lambda request: {"status": "healthy"})),
            Route("/metadata", self._answer(lambda request: self._metadata())),
            Route("/schema", self._answer(lambda request: self._schema())),
            Route("/openapi.json", self._answer(lambda request: _openapi())),
            Route("/list_environments", self._answer(lambda request: [self._name])),
            Route("/reset", self._answer(self._http_reset), methods=["POST"]),
            Route("/step", self._answer(self._http_step), methods=["POST"]),
            Route("/state", self._answer(self._http_state)),
            Route("/mcp", self._answer(_mcp), methods=["POST"]),
            Route("/{env}/splits", self._answer(self._splits)),
            *(
                Route(f"/{{env}}/{name}", self._answer(self._task_api), methods=["POST"])
                for name in ("num_tasks", "task", "task_range", "tasks")
            ),
            WebSocketRoute("/ws", self._session),
        ]
        app: Any = _Guarded(Starlette(routes=routes), api_key)
        try:
            yield app
        finally:
            await self.close()

    async def close(self) -> None:
        """Record running episodes as cancelled, and close all environments."""
        for player in list(self._players):
            await self._drop(player, Outcome.CANCELLED)
        self._shared = None

    # Sessions.

    async def _session(self, socket: WebSocket) -> None:
        """Play with one client until it leaves."""
        from starlette.websockets import WebSocketDisconnect

        await socket.accept()
        player: EnvPlayer | None = None
        outcome = Outcome.CANCELLED
        try:
            player = await self._open()
            while True:
                text = await asyncio.wait_for(socket.receive_text(), self._idle_seconds)
                try:
                    answer = await self._handle(player, text)
                except OpenEnvError as error:
                    answer = _error(error)
                if answer is None:
                    break
                await socket.send_text(json.dumps(answer))
        except TimeoutError:
            outcome = Outcome.TIME_LIMIT
        except OpenEnvError as error:
            with contextlib.suppress(Exception):
                await socket.send_text(json.dumps(_error(error)))
        except (WebSocketDisconnect, KeyError):  # binary messages have no text
            pass
        finally:
            if player is not None:
                await self._drop(player, outcome)
            with contextlib.suppress(Exception):  # the client may have closed it
                await socket.close()

    async def _handle(self, player: EnvPlayer, text: str) -> dict[str, Any] | None:
        """Answer one message; ``None`` ends the session."""
        if len(text) > MAX_MESSAGE_BYTES:
            raise OpenEnvError("VALIDATION_ERROR", f"A message has at most {MAX_MESSAGE_BYTES:,} characters.")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OpenEnvError("INVALID_JSON", f"Invalid JSON: {error}") from None
        if not isinstance(message, dict):
            raise OpenEnvError("VALIDATION_ERROR", "A message must be a JSON object.")
        data = message.get("data")
        if data is not None and not isinstance(data, dict):
            raise OpenEnvError("VALIDATION_ERROR", "data must be a JSON object.")
        match message.get("type"):
            case "reset":
                return {"type": "observation", "data": await self._reset(player, data or {})}
            case "step":
                return {"type": "observation", "data": await self._step(player, data or {})}
            case "state":
                return {"type": "state", "data": player.state}
            case "close":
                return None
        raise OpenEnvError(
            "UNKNOWN_TYPE",
            f"Unknown message type {message.get('type')!r}: expected reset, step, state or close.",
        )

    async def _open(self) -> EnvPlayer:
        if len(self._players) + self._opening >= self._max_sessions:
            raise OpenEnvError(
                "CAPACITY_REACHED", f"{self._max_sessions} of {self._max_sessions} sessions are active."
            )
        self._opening += 1
        try:
            player = await asyncio.to_thread(EnvPlayer, self._served, self._specs, self._record)
        except RollgymError as error:
            raise OpenEnvError("FACTORY_ERROR", str(error)) from error
        finally:
            self._opening -= 1
        self._players.add(player)
        return player

    async def _drop(self, player: EnvPlayer, outcome: Outcome) -> None:
        if player in self._players:
            self._players.discard(player)
            await asyncio.to_thread(player.close, outcome)

    async def _reset(self, player: EnvPlayer, data: Mapping[str, Any]) -> dict[str, Any]:
        change = self._start_of(data)
        try:
            text = await asyncio.to_thread(player.start, change)
        except UsageError as error:
            raise OpenEnvError("VALIDATION_ERROR", str(error)) from error
        except RollgymError as error:
            raise OpenEnvError("EXECUTION_ERROR", str(error)) from error
        return _result(text, None, False, {**_shown(player.reset_info), **player.task})

    def _start_of(self, data: Mapping[str, Any]) -> Callable[[EpisodeSpec], EpisodeSpec]:
        """How a reset's data change the next start; without any, the server's order of tasks counts."""
        seed, split, task = (data.get(name) for name in ("seed", "split", "task"))
        for name, value in (("seed", seed), ("task", task)):
            if value is not None and (type(value) is not int or value < 0):
                raise OpenEnvError("VALIDATION_ERROR", f"{name} must be a whole number, 0 or more.")
        if split is not None and not isinstance(split, str):
            raise OpenEnvError("VALIDATION_ERROR", "split must be text.")
        changes: dict[str, Any] = {}
        if seed is not None:
            # The seed alone must name the episode, so it also decides the task.
            changes = {"env_seed": seed, "task": None}
        if task is not None:
            changes["task"] = task
        if split is not None:
            changes["split"] = split
        return lambda spec: replace(spec, **changes)

    async def _step(self, player: EnvPlayer, data: Mapping[str, Any]) -> dict[str, Any]:
        unknown = set(data) - {"text", "metadata"}
        if unknown or not isinstance(data.get("text"), str):
            raise OpenEnvError("VALIDATION_ERROR", 'An action must be {"text": "..."}.')
        try:
            text, over = await asyncio.to_thread(player.act, data["text"])
        except RollgymError as error:
            raise OpenEnvError("EXECUTION_ERROR", str(error)) from error
        turn = player.last_turn
        assert turn is not None
        ends = {"terminated": turn.terminated, "truncated": turn.truncated}
        metadata = {**_shown(turn.info), **ends, **player.task}
        return _result(text, turn.reward, over, metadata)

    # HTTP.

    def _answer(self, work: Callable[[Request], Any]) -> Callable[[Request], Any]:
        from starlette.responses import JSONResponse

        async def answer(request: Request) -> JSONResponse:
            try:
                value = work(request)
                return JSONResponse(await value if asyncio.iscoroutine(value) else value)
            except OpenEnvError as error:
                status = {"CAPACITY_REACHED": 503, "EXECUTION_ERROR": 500}.get(error.code, 422)
                return JSONResponse({"detail": str(error), "code": error.code}, status)
            except UsageError as error:
                return JSONResponse({"detail": str(error)}, 404)

        return answer

    async def _http_reset(self, request: Request) -> dict[str, Any]:
        data = await _body(request)
        async with self._alone:
            if self._shared is None:
                self._shared = await self._open()
            return await self._reset(self._shared, data)

    async def _http_step(self, request: Request) -> dict[str, Any]:
        data = await _body(request)
        action = data.get("action")
        if not isinstance(action, dict):
            raise OpenEnvError("VALIDATION_ERROR", 'The body must be {"action": {"text": "..."}}.')
        async with self._alone:
            if self._shared is None:
                raise OpenEnvError("EXECUTION_ERROR", "No episode is running: POST /reset first.")
            return await self._step(self._shared, action)

    def _http_state(self, request: Request) -> dict[str, Any]:
        return {"episode_id": None, "step_count": 0} if self._shared is None else self._shared.state

    @property
    def _name(self) -> str:
        return self._served.env_id.rsplit("/", 1)[-1]

    def _metadata(self) -> dict[str, Any]:
        return {"name": self._name, "description": self._instructions, "version": __version__}

    def _schema(self) -> dict[str, Any]:
        hint = "The action." if self._plain_text else "A call of a tool, as JSON."
        action = {
            "type": "object",
            "properties": {"text": {**_TEXT, "description": hint}, "metadata": _METADATA},
        }
        observation = {
            "type": "object",
            "properties": {
                "text": _TEXT,
                "done": {"type": "boolean"},
                "reward": {"type": ["number", "null"]},
                "metadata": _METADATA,
            },
        }
        state = {
            "type": "object",
            "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
        }
        return {
            "action": {**action, "required": ["text"], "additionalProperties": False},
            "observation": {**observation, "required": ["text"]},
            "state": state,
        }

    # Task API.

    def _splits(self, request: Request) -> list[dict[str, Any]]:
        self._require_name(request)
        splits = {} if self._tasks is None else self._tasks.splits
        return [{"name": name, "num_tasks": size} for name, size in splits.items()]

    async def _task_api(self, request: Request) -> dict[str, Any]:
        self._require_name(request)
        if self._tasks is None:
            raise UsageError("The environment has no task set.")
        data = await _body(request)
        split = str(data.get("split", ""))
        size = self._tasks.size(split)
        kind = request.url.path.rsplit("/", 1)[-1]
        if kind == "num_tasks":
            return {"num_tasks": size}
        if kind == "task":
            index = _whole(data, "index", 0)
            return {"task": _task(self._tasks.task(split, index).split, index)}
        start, stop = _whole(data, "start", 0), min(_whole(data, "stop", size), size)
        if stop - start > MAX_LISTED_TASKS:
            raise OpenEnvError(
                "VALIDATION_ERROR",
                f"One request lists at most {MAX_LISTED_TASKS} tasks: POST task_range with start and stop.",
            )
        return {"tasks": [_task(split, index) for index in range(start, stop)]}

    def _require_name(self, request: Request) -> None:
        if request.path_params["env"] != self._name:
            raise UsageError(f"There is no environment {request.path_params['env']!r}: it is {self._name!r}.")


class _Guarded:
    """Refuses requests of web pages of other sites, and ones without the bearer token."""

    def __init__(self, app: Any, api_key: str | None) -> None:
        self._app, self._api_key = app, api_key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode("latin-1").lower(): v.decode("latin-1") for name, v in scope["headers"]}
        sent, key = headers.get("authorization", ""), self._api_key
        wrong = key is not None and not hmac.compare_digest(sent.encode(), f"Bearer {key}".encode())
        if not (wrong or cross_site(headers)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            reason = b"A bearer token is required." if wrong else b"Requests of other sites are refused."
            await send({"type": "http.response.start", "status": 401 if wrong else 403, "headers": []})
            await send({"type": "http.response.body", "body": reason})


def _shown(info: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a turn that clients see; other facts may be meant for experts."""
    return {name: info[name] for name in ("success", "valid", "actions") if name in info}


def _result(text: str, reward: float | None, done: bool, metadata: Mapping[str, Any]) -> dict[str, Any]:
    metadata = dict(metadata)
    return {
        "observation": {"text": text, "metadata": metadata},
        "reward": reward,
        "done": done,
        "metadata": metadata,
    }


def _error(error: OpenEnvError) -> dict[str, Any]:
    return {"type": "error", "data": {"message": str(error), "code": error.code}}


def _task(split: str, index: int) -> dict[str, Any]:
    """What a client passes to reset."""
    return {"split": split, "task": index}


def _whole(data: Mapping[str, Any], name: str, default: int) -> int:
    value = data.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 0:
        raise OpenEnvError("VALIDATION_ERROR", f"{name} must be a whole number, 0 or more.")
    return value


async def _body(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_MESSAGE_BYTES:
            raise OpenEnvError("VALIDATION_ERROR", f"A body has at most {MAX_MESSAGE_BYTES:,} bytes.")
    try:
        data = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise OpenEnvError("INVALID_JSON", f"Invalid JSON: {error}") from None
    if not isinstance(data, dict):
        raise OpenEnvError("VALIDATION_ERROR", "The body must be a JSON object.")
    return data


def _mcp(request: Request) -> dict[str, Any]:
    message = "Tools over MCP have their own server: rollgym serve-env ENV --mcp."
    return {"jsonrpc": "2.0", "id": None, "error": {"code": -32601, "message": message}}


def _openapi() -> dict[str, Any]:
    answer = {"responses": {"200": {"description": "OK"}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenEnv environment served by rollgym", "version": API_VERSION},
        "paths": {path: {method: answer} for path, method in _PATHS.items()},
    }
