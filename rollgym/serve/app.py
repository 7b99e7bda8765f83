"""The routes. Every answer, errors included, has the shape that OpenAI's clients expect."""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollgym.engines import BadRequest
from rollgym.errors import RollgymError, RunError
from rollgym.serve import answers
from rollgym.serve.options import ServeOptions
from rollgym.serve.requests import EndBody, OpenBody, Refused, RewardBody, read, read_chat
from rollgym.serve.session import Desk, Session
from rollgym.serve.sessions import Sessions
from rollgym.types import Episode
from rollgym.web import cross_site

T = TypeVar("T")
SESSION_HEADER = "x-rollgym-session"
IGNORED_HEADER = "x-rollgym-ignored"
"""Of an answer: sampling fields of the request that were not used."""
LOCAL = ("127.0.0.1", "localhost", "[::1]")
RECEIVED_AT_ONCE = 16
"""Unfinished request bodies together may hold this many times ``max_body``."""
GONE = 499
"""For a client that has hung up: nobody reads it."""
Handler = Callable[[Request], Awaitable[Response]]
_log = logging.getLogger(__name__)


class Endpoint:
    """What the routes do."""

    def __init__(self, desk: Desk, sessions: Sessions) -> None:
        self._desk = desk
        self._sessions = sessions
        self._started = time.time()
        self._busy = 0
        self._receiving = 0

    @property
    def options(self) -> ServeOptions:
        """What is allowed."""
        return self._desk.options

    async def health(self, request: Request) -> Response:
        """That it lives."""
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """The one model that there is."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """The one model, by name."""
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card())

    async def chat(self, request: Request) -> Response:
        """A reply, whole or as a stream."""
        asked = read_chat(await self._body(request))
        self._check_model(asked.model)
        name = request.path_params.get("session") or request.headers.get(SESSION_HEADER)
        if self._busy >= self.options.max_requests:
            raise Refused(429, f"{self._busy} requests are under way, which is the limit: try again later.")
        session = self._sessions.named(name) if name else self._sessions.matching(asked)
        self._busy += 1
        try:
            reply = await _while_there(request, session.answer(asked))
            self._sessions.remember(session)
        finally:
            self._busy -= 1
        number = f"chatcmpl-{session.name}-{len(session.turns)}"
        headers = {SESSION_HEADER: session.name}
        if reply.ignored:
            headers[IGNORED_HEADER] = ", ".join(reply.ignored)
        if asked.stream:
            events = answers.stream(asked, reply, number)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return JSONResponse(answers.completion(asked, reply, number), headers=headers)

    async def begin(self, request: Request) -> Response:
        """Open a session."""
        session = self._sessions.begin_as_asked(read(await self._body(request) or b"{}", OpenBody))
        base = f"{str(request.base_url).rstrip('/')}/session/{session.name}"
        return JSONResponse({"id": session.name, "url": base, "base_url": f"{base}/v1"}, 201)

    async def look(self, request: Request) -> Response:
        """How a session stands."""
        session = self._session(request)
        return JSONResponse({"id": session.name, "open": True, **_standing(session)})

    async def reward(self, request: Request) -> Response:
        """Add a reward to the latest turn of a session."""
        session = self._session(request)
        said = read(await self._body(request), RewardBody)
        session.reward(said.reward, said.success)
        if said.done:
            return self._ended(self._sessions.finish(session, session.natural_end()))
        return JSONResponse({"id": session.name, "open": True, **_standing(session)})

    async def end(self, request: Request) -> Response:
        """End a session."""
        session = self._session(request)
        said = read(await self._body(request) or b"{}", EndBody)
        if said.reward or said.success is not None:
            session.reward(said.reward, said.success)
        return self._ended(self._sessions.finish(session, session.natural_end(said.truncated)))

    def _ended(self, episode: Episode) -> Response:
        told = {"turns": episode.length, "reward": episode.total_reward, "success": episode.success}
        return JSONResponse(
            {"id": episode.spec.episode_id, "open": False, "outcome": episode.outcome.value, **told}
        )

    def _session(self, request: Request) -> Session:
        return self._sessions.existing(request.path_params["session"])

    def _card(self) -> dict[str, Any]:
        return answers.model_card(self.options.model, self._started, self._desk.engine.context_length)

    def _check_model(self, name: str) -> None:
        if name != self.options.model:
            sentence = f"There is no model {name!r} here: ask for {self.options.model!r}."
            raise Refused(404, sentence, code="model_not_found", param="model")

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A page in a browser can send anything but JSON to any address; an empty body is no exception.
        if kind != "application/json":
            raise Refused(415, "The request must be JSON (content-type: application/json).")
        most, body = self.options.max_body, bytearray()
        try:
            async for piece in request.stream():
                body += piece
                self._receiving += len(piece)
                if len(body) > most:
                    raise Refused(413, f"The request is larger than {most:,} bytes, which is the limit.")
                if self._receiving > RECEIVED_AT_ONCE * most:
                    raise Refused(429, "Too many large requests are being sent at once: try again later.")
            return bytes(body)
        finally:
            self._receiving -= len(body)

    def guarded(self, handler: Handler, *, anybody: bool = False) -> Handler:
        """The handler for those who may, with every failure as an answer."""

        @functools.wraps(handler)
        async def answer(request: Request) -> Response:
            try:
                self._check_host(request)
                if cross_site(request.headers):
                    raise Refused(403, "Pages of other sites may not use this server.")
                if not anybody:
                    self._check_key(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=GONE)
            except Refused as refused:
                wait = {"retry-after": "1"} if refused.status == 429 else {}
                return JSONResponse(answers.refusal(refused), refused.status, headers=wait)
            except RollgymError as error:
                status = 503 if isinstance(error, RunError) and not isinstance(error, BadRequest) else 400
                return JSONResponse(answers.error(status, str(error)), status)
            except Exception:
                _log.exception("%s %s failed", request.method, request.url.path)
                return JSONResponse(answers.error(500, "The server failed; its log says why."), 500)

        return answer

    def _check_key(self, request: Request) -> None:
        key = self.options.api_key
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode("utf-8", "replace"), (key or "").encode())
        if key and not (known and scheme.lower() == "bearer"):
            raise Refused(401, "The API key is missing or wrong.", code="invalid_api_key")

    def _check_host(self, request: Request) -> None:
        """A page in a browser must not reach us by giving its own name our address."""
        host = request.headers.get("host", "")
        if self.options.local and host.rsplit(":", 1)[0] not in LOCAL and host not in LOCAL:
            raise Refused(400, "This server does not go by that name: use 127.0.0.1 or localhost.")


def make_app(desk: Desk, sessions: Sessions) -> Starlette:
    """The endpoint as an ASGI application."""
    place = Endpoint(desk, sessions)
    chat, models, model = place.guarded(place.chat), place.guarded(place.models), place.guarded(place.model)
    routes = [Route("/health", place.guarded(place.health, anybody=True))]
    for base in ("/v1", "/session/{session}/v1"):
        routes += [
            Route(f"{base}/chat/completions", chat, methods=["POST"]),
            Route(f"{base}/models", models),
            Route(f"{base}/models/{{model:path}}", model),
        ]
    routes += [
        Route("/session", place.guarded(place.begin), methods=["POST"]),
        Route("/session/{session}", place.guarded(place.look)),
        Route("/session/{session}/reward", place.guarded(place.reward), methods=["POST"]),
        Route("/session/{session}/end", place.guarded(place.end), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    sentence = f"There is nothing for {request.method} at {request.url.path}."
    return JSONResponse(answers.error(status, sentence), status)


def _standing(session: Session) -> dict[str, Any]:
    reward = sum(turn.reward for turn in session.turns)
    return {"turns": len(session.turns), "reward": reward, "success": session.success}


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do some work for as long as the client waits for it."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
