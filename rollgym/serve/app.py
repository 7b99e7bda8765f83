"""The HTTP routes. Every response, errors included, has the format of the OpenAI API."""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollgym.core.errors import RollgymError, RunError
from rollgym.core.types import Episode
from rollgym.engines.base import BadRequest
from rollgym.serve.options import ServeOptions
from rollgym.serve.requests import ApiError, ChatRequest, EndBody, OpenBody, RewardBody, read, read_chat
from rollgym.serve.session import Reply, ServeContext, Session
from rollgym.serve.sessions import Sessions
from rollgym.utils.http_server import cross_site

T = TypeVar("T")
SESSION_HEADER = "x-rollgym-session"
IGNORED_HEADER = "x-rollgym-ignored"
"""Response header: the sampling fields of the request that were ignored."""
LOCAL = ("127.0.0.1", "localhost", "[::1]")
RECEIVED_AT_ONCE = 16
"""All request bodies being received may together hold this many times ``max_body``."""
CLIENT_CLOSED = 499
"""Status for a client that has disconnected; it is never delivered."""
Handler = Callable[[Request], Awaitable[Response]]
_log = logging.getLogger(__name__)


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
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """Describe the served model."""
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card())

    async def chat(self, request: Request) -> Response:
        """Return a chat completion, whole or as a stream."""
        body = read_chat(await self._body(request))
        self._check_model(body.model)
        name = request.path_params.get("session") or request.headers.get(SESSION_HEADER)
        if self._busy >= self.options.max_requests:
            raise ApiError(429, f"{self._busy} requests are in flight, which is the limit: try again later.")
        session = self._sessions.get_or_begin(name) if name else self._sessions.find_or_begin(body)
        self._busy += 1
        try:
            reply = await _until_disconnect(request, session.answer(body))
            self._sessions.remember(session)
        finally:
            self._busy -= 1
        completion_id = f"chatcmpl-{session.name}-{len(session.turns)}"
        headers = {SESSION_HEADER: session.name}
        if reply.ignored:
            headers[IGNORED_HEADER] = ", ".join(reply.ignored)
        if body.stream:
            events = completion_stream(body, reply, completion_id)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return JSONResponse(completion(body, reply, completion_id), headers=headers)

    async def begin(self, request: Request) -> Response:
        """Open a session."""
        session = self._sessions.begin_from_request(read(await self._body(request) or b"{}", OpenBody))
        base = f"{str(request.base_url).rstrip('/')}/session/{session.name}"
        return JSONResponse({"id": session.name, "url": base, "base_url": f"{base}/v1"}, 201)

    async def status(self, request: Request) -> Response:
        """Report the turns, reward and success of a session."""
        session = self._session(request)
        return JSONResponse({"id": session.name, "open": True, **_status(session)})

    async def reward(self, request: Request) -> Response:
        """Add a reward to the latest turn of a session."""
        session = self._session(request)
        body = read(await self._body(request), RewardBody)
        session.reward(body.reward, body.success)
        if body.done:
            return self._ended(self._sessions.finish(session, session.natural_end()))
        return JSONResponse({"id": session.name, "open": True, **_status(session)})

    async def end(self, request: Request) -> Response:
        """End a session."""
        session = self._session(request)
        body = read(await self._body(request) or b"{}", EndBody)
        if body.reward or body.success is not None:
            session.reward(body.reward, body.success)
        return self._ended(self._sessions.finish(session, session.natural_end(body.truncated)))

    def _ended(self, episode: Episode) -> Response:
        result = {"turns": episode.length, "reward": episode.total_reward, "success": episode.success}
        return JSONResponse(
            {"id": episode.spec.episode_id, "open": False, "outcome": episode.outcome.value, **result}
        )

    def _session(self, request: Request) -> Session:
        return self._sessions.get(request.path_params["session"])

    def _card(self) -> dict[str, Any]:
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

    def guarded(self, handler: Handler, *, public: bool = False) -> Handler:
        """Wrap a handler: check the caller, and turn every failure into an error response."""

        @functools.wraps(handler)
        async def answer(request: Request) -> Response:
            try:
                self._check_host(request)
                if cross_site(request.headers):
                    raise ApiError(403, "Cross-site requests are not allowed.")
                if not public:
                    self._check_key(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)
            except ApiError as error:
                wait = {"retry-after": "1"} if error.status == 429 else {}
                return JSONResponse(api_error_body(error), error.status, headers=wait)
            except RollgymError as error:
                status = 503 if isinstance(error, RunError) and not isinstance(error, BadRequest) else 400
                return JSONResponse(error_body(status, str(error)), status)
            except Exception:
                _log.exception("%s %s failed", request.method, request.url.path)
                return JSONResponse(error_body(500, "Internal server error: see the server's log."), 500)

        return answer

    def _check_key(self, request: Request) -> None:
        key = self.options.api_key
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode("utf-8", "replace"), (key or "").encode())
        if key and not (matches and scheme.lower() == "bearer"):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    def _check_host(self, request: Request) -> None:
        """Reject DNS rebinding: a web page must not reach a local server through its own host name."""
        host = request.headers.get("host", "")
        if self.options.local and host.rsplit(":", 1)[0] not in LOCAL and host not in LOCAL:
            raise ApiError(400, "Unknown host name: use 127.0.0.1 or localhost.")


def make_app(context: ServeContext, sessions: Sessions) -> Starlette:
    """Return the endpoint as an ASGI application."""
    endpoint = Endpoint(context, sessions)
    guarded = endpoint.guarded
    chat, models, model = guarded(endpoint.chat), guarded(endpoint.models), guarded(endpoint.model)
    routes = [Route("/health", guarded(endpoint.health, public=True))]
    for base in ("/v1", "/session/{session}/v1"):
        routes += [
            Route(f"{base}/chat/completions", chat, methods=["POST"]),
            Route(f"{base}/models", models),
            Route(f"{base}/models/{{model:path}}", model),
        ]
    routes += [
        Route("/session", guarded(endpoint.begin), methods=["POST"]),
        Route("/session/{session}", guarded(endpoint.status)),
        Route("/session/{session}/reward", guarded(endpoint.reward), methods=["POST"]),
        Route("/session/{session}/end", guarded(endpoint.end), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"No route for {request.method} {request.url.path}."
    return JSONResponse(error_body(status, message), status)


def _status(session: Session) -> dict[str, Any]:
    reward = sum(turn.reward for turn in session.turns)
    return {"turns": len(session.turns), "reward": reward, "success": session.success}


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` until it is done; cancel it when the client disconnects."""
    task = asyncio.create_task(work)
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


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CHUNK = 24
"""Characters per chunk of a stream."""


def error_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Return the body of an error response."""
    kind = "server_error" if status >= 500 else _KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def api_error_body(raised: ApiError) -> dict[str, Any]:
    """Return the body of an `ApiError`."""
    return error_body(raised.status, str(raised), code=raised.code, param=raised.param)


def model_card(name: str, started: float, context: int) -> dict[str, Any]:
    """Return an entry of the model list."""
    return {
        "id": name,
        "object": "model",
        "created": int(started),
        "owned_by": "rollgym",
        "max_model_len": context,
    }


def completion(request: ChatRequest, reply: Reply, name: str) -> dict[str, Any]:
    """Return a whole chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": reply.text, "refusal": None},
        "logprobs": _logprobs(request, reply),
        "finish_reason": reply.finish_reason,
    }
    return _head("chat.completion", request, name) | {"choices": [choice], "usage": _usage(reply)}


def completion_stream(request: ChatRequest, reply: Reply, name: str) -> Iterator[str]:
    """Yield a reply as server-sent events. It was sampled as a whole; only the transport differs."""
    head = _head("chat.completion.chunk", request, name)

    def event(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return _event(head | {"choices": [choice]})

    yield event({"role": "assistant", "content": ""}, logprobs=_logprobs(request, reply))
    for start in range(0, len(reply.text), _CHUNK):
        yield event({"content": reply.text[start : start + _CHUNK]})
    yield event({}, reply.finish_reason)
    if request.usage:
        yield _event(head | {"choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _head(kind: str, request: ChatRequest, name: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model}


def _usage(reply: Reply) -> dict[str, int]:
    read, written = reply.usage.prompt_tokens, reply.usage.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _logprobs(request: ChatRequest, reply: Reply) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    content = [
        {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for text, logprob in reply.tokens
    ]
    return {"content": content, "refusal": None}
