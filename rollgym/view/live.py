"""Live page: serves the report on loopback and follows a run while it is written.

Everything is a GET and nothing is ever written. Other sites cannot read it: a request must name this machine
as its host, answers allow no other origin, and the page may load nothing from elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgym.core.errors import ResultsError
from rollgym.core.extras import require
from rollgym.utils.http_server import web_server
from rollgym.view.episode_detail import EpisodeDetails
from rollgym.view.overview import overview
from rollgym.view.page import encode, page, policy
from rollgym.view.prometheus import CONTENT_TYPE, metrics_text
from rollgym.view.reader import COLUMNS, RunView
from rollgym.view.timeline import Timeline

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
MOST_ROWS = 2_000
"""Maximum rows per response; the page requests the rest."""


class Following:
    """A run that is read further with each request."""

    def __init__(self, folder: Path) -> None:
        self.run = RunView(folder)
        self._bodies = EpisodeDetails(self.run)
        self._timeline = Timeline(self.run.events)
        self._lock = threading.Lock()
        self._overview: tuple[int, bool, dict[str, Any]] | None = None

    def overview(self, seen: str) -> dict[str, Any]:
        """Return the overview, or only its version if it equals ``seen``."""
        with self._lock:
            self.run.follow()
            done = self.run.summary is not None
            tag = f"{self.run.epoch}.{self.run.version}.{int(done)}"
            if tag == seen:
                return {"same": True}
            if self._overview is None or self._overview[:2] != (self.run.version, done):
                self._overview = (self.run.version, done, overview(self.run))
            return {**self._overview[2], "tag": tag}

    def rows(self, first: int) -> dict[str, Any]:
        """Return rows of the list starting at ``first``."""
        with self._lock:
            rows = [row.values() for row in self.run.rows[first : first + MOST_ROWS]]
            return {"columns": COLUMNS, "epoch": self.run.epoch, "rows": rows}

    def body(self, n: int) -> dict[str, Any] | None:
        """Return an episode, or ``None`` if its line no longer exists."""
        with self._lock:
            if not 0 <= n < len(self.run.rows):
                return None
            try:
                return self._bodies.body(n)
            except (ResultsError, OSError):
                return None

    def metrics(self) -> str:
        """Return the newest numbers in the text format of Prometheus."""
        with self._lock:
            self.run.follow()
            return metrics_text(self.run)

    def timeline(self) -> dict[str, Any]:
        """Return the current timeline."""
        with self._lock:
            return self._timeline.read()


def make_app(folder: Path) -> Starlette:
    """Build the ASGI application."""
    require("The live page", "view")
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import Response
    from starlette.routing import Route

    run = Following(folder)
    name = run.run.manifest.get("name") or folder.resolve().name

    def answer(make: Callable[[Request], dict[str, Any] | None]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            body = await run_in_threadpool(make, request)
            if body is None:
                return _closed(Response("Episode not found.\n", 404, media_type="text/plain"))
            return _closed(Response(encode(body), media_type="application/json"))

        return handle

    async def first(request: Request) -> Response:
        return _closed(Response(page(f"{name} – rollgym, live", [], live=True), media_type="text/html"))

    def asked(request: Request) -> int:
        first_row = request.query_params.get("from", "0")
        return int(first_row) if first_row.isascii() and first_row.isdecimal() and len(first_row) < 12 else 0

    async def metrics(request: Request) -> Response:
        text = await run_in_threadpool(run.metrics)
        return _closed(Response(text, headers={"Content-Type": CONTENT_TYPE}))

    routes = [
        Route("/", first),
        Route("/api/overview", answer(lambda r: run.overview(r.query_params.get("seen", "")))),
        Route("/api/rows", answer(lambda r: run.rows(asked(r)))),
        Route("/api/episode/{n:int}", answer(lambda r: run.body(r.path_params["n"]))),
        Route("/metrics", metrics),
        Route("/api/timeline", answer(lambda r: run.timeline())),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    return Starlette(routes=routes, middleware=[hosts])


def make_server(folder: Path) -> uvicorn.Server:
    """Build a server for the page, without server headers."""
    return web_server(make_app(folder), signals=False)


def _closed(response: Response) -> Response:
    """Add headers that deny access to other sites."""
    response.headers.update(
        {
            "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
    )
    return response
