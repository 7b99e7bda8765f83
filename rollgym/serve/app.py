"""The HTTP routes. Every response, errors included, has the format of the API that was called."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollgym.core.errors import RollgymError, RunError
from rollgym.core.messages import Message
from rollgym.core.types import Episode
from rollgym.engines.base import BadRequest
from rollgym.serve.dialects import (
    AnthropicMessages,
    Delta,
    Dialect,
    DialectRequest,
    OpenAIChat,
    OpenAIResponses,
    Replies,
    StreamHead,
)
from rollgym.serve.keys import check_key, session_key
from rollgym.serve.offered_env import OfferedEnv, StepBody, answer_mcp
from rollgym.serve.options import ServeOptions
from rollgym.serve.reply_feed import ReplyFeed
from rollgym.serve.requests import ApiError, EndBody, OpenBody, RewardBody, read
from rollgym.serve.session import Answer, ServeContext, Session
from rollgym.serve.sessions import AUXILIARY, Sessions
from rollgym.utils.http_server import cross_site

T = TypeVar("T")
SESSION_HEADER = "x-rollgym-session"
IGNORED_HEADER = "x-rollgym-ignored"
"""Response header: the fields of the request that had no effect."""
RECORDED_HEADER = "x-rollgym-recorded"
"""Response header of an auxiliary call: ``false``."""
LOCAL = ("127.0.0.1", "localhost", "[::1]")
RECEIVED_AT_ONCE = 16
"""All request bodies being received may together hold this many times ``max_body``."""
CLIENT_CLOSED = 499
"""Status for a client that has disconnected; it is never delivered."""
Handler = Callable[[Request], Awaitable[Response]]
_log = logging.getLogger(__name__)
_openai, _responses, _anthropic = OpenAIChat(), OpenAIResponses(), AnthropicMessages()


class Endpoint:
    """The handlers of all routes."""

    def __init__(self, context: ServeContext, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions
        self._started = time.time()
        self._busy = 0
        self._receiving = 0

    @property
    def options(self) -> ServeOptions:
        """The server's options."""
        return self._context.options

    async def health(self, request: Request) -> Response:
        """Report that the server is up."""
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """List the one served model."""
        card = self._card(request)
        if _wants_anthropic(request):
            ends = {"first_id": card["id"], "last_id": card["id"]}
            return JSONResponse({"data": [card], "has_more": False, **ends})
        return JSONResponse({"object": "list", "data": [card]})

    async def model(self, request: Request) -> Response:
        """Describe the served model."""
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card(request))

    def replies(self, dialect: Dialect) -> Handler:
        """Return the handler of requests for replies in a dialect."""

        async def handler(request: Request) -> Response:
            return await self._reply(request, dialect)

        return handler

    async def _reply(self, request: Request, dialect: Dialect) -> Response:
        """Return the replies of the model, whole or as a stream."""
        name = _session_name(request)
        before: list[Session] = []

        def history(response_id: str) -> Sequence[Message]:
            session, messages = self._sessions.history(response_id.removeprefix("resp_"), name)
            before.append(session)
            return messages

        asked = dialect.read(await self._body(request), history)
        self._check_model(asked.chat.model)
        if self._busy >= self.options.max_requests:
            raise ApiError(429, f"{self._busy} requests are in flight, which is the limit: try again later.")
        record = not asked.chat.is_auxiliary(self.options.auxiliary, self.options.auxiliary_max_tokens)
        session = before[0] if before else self._sessions.of_request(name, asked.chat, record)
        feed = ReplyFeed() if asked.stream else None
        self._busy += 1
        task = asyncio.create_task(self._answer(asked, session, record, feed))
        task.add_done_callback(self._one_less)
        if feed is not None:
            return await self._streamed(request, dialect, asked, session, record, task, feed)
        answer = await _until_disconnect(request, task)
        headers = _headers(session, answer.head, record)
        return JSONResponse(dialect.response(asked, _replies(answer)), headers=headers)

    def _one_less(self, task: asyncio.Task[Answer]) -> None:
        self._busy -= 1

    async def _answer(
        self, asked: DialectRequest, session: Session, record: bool, feed: ReplyFeed | None
    ) -> Answer:
        try:
            answer = await session.answer(asked.chat, record=record, feed=feed)
            self._sessions.remember(session)
        finally:
            if session.name.startswith(AUXILIARY):
                await self._context.engine.forget(session.name)
        if asked.messages:
            session.keep_history(answer, (*asked.messages, answer.replies[0].message))
        return answer

    async def _streamed(
        self,
        request: Request,
        dialect: Dialect,
        asked: DialectRequest,
        session: Session,
        record: bool,
        task: asyncio.Task[Answer],
        feed: ReplyFeed,
    ) -> Response:
        """Return a response that starts with the first text, so that an error before it has its status."""
        disconnect = asyncio.create_task(_disconnected(request))
        for each in (task, disconnect):
            each.add_done_callback(lambda _: feed.changed.set())

        async def close() -> None:
            for each in (task, disconnect):
                each.cancel()
            await asyncio.gather(task, disconnect, return_exceptions=True)

        try:
            first: list[Delta] = []
            while not first and not task.done() and not disconnect.done():
                await feed.changed.wait()
                first = feed.take()
            if task.done():
                task.result()
            elif disconnect.done():
                raise ClientDisconnect
        except BaseException:
            await close()
            raise
        assert feed.head is not None
        writer = dialect.stream(asked, feed.head)

        async def events() -> AsyncIterator[str]:
            for event in writer.start():
                yield event
            deltas = first
            while not task.done() and not disconnect.done():
                for event in (event for delta in deltas for event in writer.delta(delta)):
                    yield event
                await feed.changed.wait()
                deltas = feed.take()
            if not task.done():
                return
            try:
                ending = writer.finish(_replies(task.result()))
            except (Exception, asyncio.CancelledError) as error:
                status, message, code, param = _explain(error, request)
                ending = writer.fail(status, message, code=code, param=param)
            for event in ending:
                yield event

        return _EventStream(events(), close, headers=_headers(session, feed.head, record))

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt, without a reply."""
        asked = _anthropic.read_count(await self._body(request))
        self._check_model(asked.chat.model)
        return JSONResponse({"input_tokens": await self._sessions.count_tokens(asked.chat)})

    async def begin(self, request: Request) -> Response:
        """Open a session."""
        if request.state.key_session is not None:
            raise ApiError(403, "The API key of a session opens no other session: use the server's key.")
        session = self._sessions.begin_from_request(read(await self._body(request) or b"{}", OpenBody))
        url = f"{str(request.base_url).rstrip('/')}/session/{session.name}"
        key = session_key(session.name, self.options.api_key)
        body = {"id": session.name, "url": url, "base_url": f"{url}/v1", "api_key": key}
        return JSONResponse(body, 201)

    async def status(self, request: Request) -> Response:
        """Report the turns, reward and success of a session."""
        session = self._session(request)
        return JSONResponse({"id": session.name, "open": True, **_status(session)})

    async def reward(self, request: Request) -> Response:
        """Add a reward to the latest turn of a session."""
        session = self._session(request)
        body = read(await self._body(request), RewardBody)
        _check_reward(session)
        session.reward(body.reward, body.success)
        if body.done:
            return self._ended(session, self._sessions.finish(session, session.natural_end()))
        return JSONResponse({"id": session.name, "open": True, **_status(session)})

    async def end(self, request: Request) -> Response:
        """End a session."""
        session = self._session(request)
        data = await self._body(request)
        if not data.strip():
            raise ApiError(400, "The request has no body: send {} to end the session without a reward.")
        body = read(data, EndBody)
        if body.reward or body.success is not None:
            _check_reward(session)
            session.reward(body.reward, body.success)
        return self._ended(session, self._sessions.finish(session, session.natural_end(body.truncated)))

    async def env(self, request: Request) -> Response:
        """Describe the environment of a session: instructions, tools, latest observation."""
        return JSONResponse(_offered(self._session(request)).describe())

    async def step(self, request: Request) -> Response:
        """Play an action in the environment of a session."""
        session = self._session(request)
        env, body = _offered(session), read(await self._body(request), StepBody)
        session.check_open()
        return JSONResponse(await env.step(body))

    async def mcp(self, request: Request) -> Response:
        """Answer a message to the environment of a session as an MCP server."""
        env = _offered(self._session(request))
        answer = await answer_mcp(env, read(await self._body(request), dict[str, Any]))
        return Response(status_code=202) if answer is None else JSONResponse(answer)

    def _ended(self, session: Session, episode: Episode) -> Response:
        result: dict[str, Any] = {"turns": episode.length}
        if session.rewards_from is None:
            result |= {"reward": episode.total_reward, "success": episode.success}
        return JSONResponse(
            {"id": episode.spec.episode_id, "open": False, "outcome": episode.outcome.value, **result}
        )

    def _session(self, request: Request) -> Session:
        name = _session_name(request)
        if name is None:
            raise ApiError(
                400,
                "The request names no session: send the session's API key (session/NAME), the header "
                f"{SESSION_HEADER}, or use /session/NAME.",
            )
        return self._sessions.get(name)

    def _card(self, request: Request) -> dict[str, Any]:
        if _wants_anthropic(request):
            created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started))
            return _anthropic.model_card(self.options.model, created)
        return model_card(self.options.model, self._started, self._context.engine.context_length)

    def _check_model(self, name: str) -> None:
        if name != self.options.model:
            message = f"Model {name!r} not found: this server serves {self.options.model!r}."
            raise ApiError(404, message, code="model_not_found", param="model")

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A web page can send any body but JSON to any address without a preflight, an empty one included.
        if kind != "application/json":
            raise ApiError(415, "The request must be JSON (content-type: application/json).")
        limit, body = self.options.max_body, bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                self._receiving += len(chunk)
                if len(body) > limit:
                    raise ApiError(413, f"The request is larger than {limit:,} bytes, which is the limit.")
                if self._receiving > RECEIVED_AT_ONCE * limit:
                    raise ApiError(429, "Too many large requests are being sent at once: try again later.")
            return bytes(body)
        finally:
            self._receiving -= len(body)

    def guarded(self, handler: Handler, dialect: Dialect = _openai, *, public: bool = False) -> Handler:
        """Wrap a handler: check the caller, and turn every failure into an error response of the dialect."""

        def failed(status: int, message: str, code: str | None = None, param: str | None = None) -> Response:
            wait = {"retry-after": "1"} if status == 429 else {}
            return JSONResponse(dialect.error(status, message, code=code, param=param), status, headers=wait)

        @functools.wraps(handler)
        async def answer(request: Request) -> Response:
            try:
                self._check_host(request)
                if cross_site(request.headers):
                    raise ApiError(403, "Cross-site requests are not allowed.")
                if not public:
                    request.state.key_session = check_key(request.headers, self.options.api_key)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)
            except Exception as error:
                return failed(*_explain(error, request))

        return answer

    def _check_host(self, request: Request) -> None:
        """Reject DNS rebinding: a web page must not reach a local server through its own host name."""
        if not self.options.local:
            return
        host = request.headers.get("host", "").lower()
        own = f"[{self.options.host}]" if ":" in self.options.host else self.options.host.lower()
        known = dict.fromkeys((own, *LOCAL))
        if host.rsplit(":", 1)[0] not in known and host not in known:
            raise ApiError(400, f"Unknown host name: use {own} or localhost.")


def make_app(context: ServeContext, sessions: Sessions) -> Starlette:
    """Return the endpoint as an ASGI application."""
    endpoint = Endpoint(context, sessions)
    guarded = endpoint.guarded
    chat = guarded(endpoint.replies(_openai))
    responses = guarded(endpoint.replies(_responses), _responses)
    messages = guarded(endpoint.replies(_anthropic), _anthropic)
    count_tokens = guarded(endpoint.count_tokens, _anthropic)
    models, model = guarded(endpoint.models), guarded(endpoint.model)
    routes = [Route("/health", guarded(endpoint.health, public=True))]
    for base in ("/v1", "/session/{session}/v1"):
        routes += [
            Route(f"{base}/chat/completions", chat, methods=["POST"]),
            Route(f"{base}/responses", responses, methods=["POST"]),
            Route(f"{base}/messages", messages, methods=["POST"]),
            Route(f"{base}/messages/count_tokens", count_tokens, methods=["POST"]),
            Route(f"{base}/models", models),
            Route(f"{base}/models/{{model:path}}", model),
        ]
    routes += [
        Route("/rl/reward", guarded(endpoint.reward), methods=["POST"]),
        Route("/session", guarded(endpoint.begin), methods=["POST"]),
        Route("/session/{session}", guarded(endpoint.status)),
        Route("/session/{session}/reward", guarded(endpoint.reward), methods=["POST"]),
        Route("/session/{session}/end", guarded(endpoint.end), methods=["POST"]),
        Route("/session/{session}/env", guarded(endpoint.env)),
        Route("/session/{session}/env/step", guarded(endpoint.step), methods=["POST"]),
        Route("/session/{session}/mcp", guarded(endpoint.mcp), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"No route for {request.method} {request.url.path}."
    dialect: Dialect = _anthropic if _wants_anthropic(request) else _openai
    return JSONResponse(dialect.error(status, message, code=None, param=None), status)


def _wants_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _session_name(request: Request) -> str | None:
    """Return the session that a request names by its URL, a header or its API key."""
    named = request.path_params.get("session") or request.headers.get(SESSION_HEADER)
    by_key: str | None = request.state.key_session
    if named and by_key and named != by_key:
        raise ApiError(403, f"The API key is for session {by_key}, but the request names another session.")
    return named or by_key


def _check_reward(session: Session) -> None:
    if session.rewards_from is not None:
        raise ApiError(409, f"The reward of session {session.name} comes from: {session.rewards_from}.")


def _offered(session: Session) -> OfferedEnv:
    if session.env is None:
        raise ApiError(404, f"Session {session.name} has no environment: it needs reward=environment.")
    return session.env


def _status(session: Session) -> dict[str, Any]:
    if session.rewards_from is not None:
        return {"turns": len(session.turns)}
    reward = sum(turn.reward for turn in session.turns)
    return {"turns": len(session.turns), "reward": reward, "success": session.success}


def _explain(error: BaseException, request: Request) -> tuple[int, str, str | None, str | None]:
    """Return status, message, code and parameter of a failure."""
    if isinstance(error, ApiError):
        return error.status, str(error), error.code, error.param
    if isinstance(error, RollgymError):
        status = 503 if isinstance(error, RunError) and not isinstance(error, BadRequest) else 400
        return status, str(error), None, None
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return 500, "Internal server error: see the server's log.", None, None


def _headers(session: Session, head: StreamHead, record: bool) -> dict[str, str]:
    headers = {SESSION_HEADER: session.name}
    if head.ignored:
        headers[IGNORED_HEADER] = ", ".join(head.ignored)
    if not record:
        headers[RECORDED_HEADER] = "false"
    return headers


def _replies(answer: Answer) -> Replies:
    return Replies(id=answer.head.id, created=answer.head.created, items=answer.replies)


class _EventStream(StreamingResponse):
    """Server-sent events of work that ends with the response, however that ends."""

    def __init__(
        self, events: AsyncIterator[str], close: Callable[[], Awaitable[None]], headers: dict[str, str]
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()


async def _until_disconnect(request: Request, task: asyncio.Task[T]) -> T:
    """Wait until ``task`` is done; cancel it when the client disconnects."""
    disconnect = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        disconnect.cancel()
        task.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def model_card(name: str, started: float, context: int) -> dict[str, Any]:
    """Return an entry of the model list, in OpenAI's form."""
    return {
        "id": name,
        "object": "model",
        "created": int(started),
        "owned_by": "rollgym",
        "max_model_len": context,
    }
