"""The shop as a web site: a thin shell over the pages, for a browser that is driven and for people.

`shop_app` is the site; `serve` runs it for a person until it is interrupted. Pages have no scripts and load
nothing from other hosts. GET shows a page; a button posts its action, and the answer leads to a new page.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from rollgym.core.errors import UsageError
from rollgym.envs.webshop.html import TEMPLATES, template_called
from rollgym.envs.webshop.pages import Block
from rollgym.envs.webshop.server.pictures import picture
from rollgym.envs.webshop.server.sessions import PATHS, ShopSession, ShopSessions, Step
from rollgym.envs.webshop.shop import Shop, open_shop
from rollgym.envs.webshop.types import Goal
from rollgym.utils.http_server import listening, web_server

MAX_BODY = 16_384
"""Bytes of a form that are read; the search field takes a thousand characters."""
MAX_FIELDS = 8
LOCAL = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # without it, browsers send no origin with a form
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[Request], Awaitable[Response]]


class Site:
    """Data of the pages."""

    def __init__(self, visits: ShopSessions, shop: Shop | None, hosts: tuple[str, ...]) -> None:
        self.visits = visits
        self.shop = shop
        """Task chooser for people; None for an automated site, which shows no score."""
        self._hosts = hosts

    def guarded(self, handler: Handler) -> Handler:
        """The handler, for requests that come from our own pages or straight from a person."""

        @functools.wraps(handler)
        async def answer(request: Request) -> Response:
            host = request.headers.get("host", "")
            if self._hosts and host.rsplit(":", 1)[0] not in self._hosts and host not in self._hosts:
                raise HTTPException(400, "This shop does not go by that name.")
            if request.method == "POST" and not _from_here(request, host):
                raise HTTPException(403, "That form was not one of this shop's own pages.")
            response = await handler(request)
            return _with_headers(response)

        return answer

    async def start(self, request: Request) -> Response:
        """The start page, where a person takes a task."""
        shop = self._lobby()
        sizes = {name: len(numbers) for name, numbers in _splits(shop).items()}
        catalog = shop.catalog
        return _page(
            "start.html", products=len(catalog), goals=catalog.goal_count, sizes=sizes, rules=shop.rules.name
        )

    async def new(self, request: Request) -> Response:
        """Begin a visit: with the goal of a number, or a random one of a split."""
        shop = self._lobby()
        form = await _form(request)
        visit = self.visits.open(shop, _goal_number(shop, form.get("goal", ""), form.get("split", "")))
        return RedirectResponse(visit.address(0), 303)

    async def show(self, request: Request) -> Response:
        """A page of a visit."""
        visit, number = self._find_page(request)
        if visit.end is not None and number != visit.end:
            return RedirectResponse(visit.address(visit.end), 303)
        step = visit.steps[number]
        explained = step.outcome is not None and not step.outcome.valid and visit.shop.rules.explain
        return _page(
            "visit.html",
            page=visit.page(number),
            target=visit.address(number),
            note=step.outcome.note if explained and step.outcome else "",
            picture=functools.partial(_picture, visit.shop, step),
            visit=visit,
            people=self.shop is not None,
            score=step.outcome.score if step.outcome else None,
            wanted=_option_text(visit.goal),
        )

    async def act(self, request: Request) -> Response:
        """Play an action from a page of a visit."""
        visit, number = self._find_page(request)
        form = await _form(request)
        action = form.get("action", "")
        if action == "search":
            return RedirectResponse(visit.address(visit.search(number, form.get("search", ""))), 303)
        if not action.startswith("click["):
            raise HTTPException(400, "A form must say what to do.")
        return RedirectResponse(visit.address(visit.play(number, action)), 303)

    async def style(self, request: Request) -> Response:
        """The style sheet, which never changes while the shop is open."""
        headers = {"Cache-Control": "max-age=86400, immutable"}
        return Response(_style(), media_type="text/css", headers=headers)

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Return an error page."""
        status, detail = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "")
        message = detail if detail and detail[-1] == "." else _MESSAGES.get(status, "That did not work.")
        page = _page("message.html", status=status, message=message, people=self.shop is not None)
        return _with_headers(page)

    def _lobby(self) -> Shop:
        if self.shop is None:
            raise HTTPException(404)
        return self.shop

    def _find_page(self, request: Request) -> tuple[ShopSession, int]:
        params = request.path_params
        visit, number = self.visits.get(params["visit"]), int(params["number"])
        if visit is None:
            raise HTTPException(404, "This session has expired or does not exist.")
        if number not in visit.steps or PATHS[visit.steps[number].session.kind] != params["page"]:
            raise HTTPException(404)
        return visit, number


_MESSAGES = {404: "Page not found.", 405: "This page cannot be used in that way."}


def shop_app(visits: ShopSessions, shop: Shop | None = None, hosts: tuple[str, ...] = LOCAL) -> Starlette:
    """The web site.

    Args:
        visits: The visits it shows; they know their shops.
        shop: A shop for people: a start page offers its goals, and the last page shows the score. Without
            one the site shows sessions opened elsewhere, and nothing that would help an agent.
        hosts: Names the site answers to; none for any.
    """
    site = Site(visits, shop, hosts)
    path = "/{page}/{visit}/{number:int}"
    routes = [
        Route("/", site.guarded(site.start)),
        Route("/new", site.guarded(site.new), methods=["POST"]),
        Route("/shop.css", site.guarded(site.style)),
        Route(path, site.guarded(site.show), methods=["GET"]),
        Route(path, site.guarded(site.act), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: site.refuse, 500: site.refuse})


def serve(
    folder: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    rules: str = "clean",
    *,
    search: str = "auto",
    goals: str | None = None,
    say: Callable[[str], object] | None = None,
) -> None:
    """Serve a shop to people until Ctrl-C.

    Args:
        folder: The shop.
        host: Address to listen on. Non-loopback addresses expose the shop to the network.
        port: The port to listen on; 0 takes a free one.
        rules: ``clean`` or ``original``.
        search: The search engine.
        goals: Which goals to hand out; None for those the shop has first.
        say: Called with the message that has the address, instead of printing it.
    """
    from rollgym.envs.webshop.catalog.store import read_manifest

    kinds = list(read_manifest(Path(folder))["goals"])
    if not kinds:
        raise UsageError(f"The shop {folder} has no goals: there is nothing to look for in it.")
    shop = open_shop(str(folder), rules=rules, search=search, goals=goals or kinds[0])
    with listening(host, port) as listener:
        names = () if host in ("0.0.0.0", "::", "") else (*LOCAL, host)
        server = web_server(shop_app(ShopSessions(), shop, names))
        shown_host = f"[{host}]" if ":" in host else host
        address = f"http://{shown_host}:{listener.getsockname()[1]}"
        message = f"A shop of {len(shop.catalog):,} products is open at {address} (Ctrl-C closes it)."
        say(message) if say else print(message, flush=True)
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return


def _page(template: str, status: int = 200, **values: object) -> HTMLResponse:
    document = template_called(template).render(status=status, **values)
    return HTMLResponse(document, status)


def _with_headers(response: Response) -> Response:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _from_here(request: Request, host: str) -> bool:
    """Whether a form was sent by a page of this shop; non-browser clients send no origin."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None and site not in ("same-origin", "none"):
        return False
    return origin is None or urlsplit(origin).netloc == host


async def _form(request: Request) -> dict[str, str]:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/x-www-form-urlencoded":
        raise HTTPException(415, "A form must be sent as one.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(413, "That is too much to send at once.")
    try:
        fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
    except ValueError:
        raise HTTPException(400, "That form cannot be read.") from None
    return dict(fields)


def _splits(shop: Shop) -> dict[str, Sequence[int]]:
    splits = shop.catalog.splits.get("disjoint", {})
    return {name: splits[name] for name in ("train", "dev", "test") if len(splits.get(name, ()))}


def _goal_number(shop: Shop, goal: str, split: str) -> int:
    count = shop.catalog.goal_count
    if goal.strip():
        if not re.fullmatch(r"[0-9]{1,9}", goal.strip()) or int(goal) >= count:
            raise HTTPException(404, f"Task not found: tasks are numbered 0 to {count - 1}.")
        return int(goal)
    numbers = _splits(shop).get(split, range(count)) if split in ("", *_splits(shop)) else ()
    if not numbers:
        raise HTTPException(404, "Tasks not found.")
    return int(numbers[secrets.randbelow(len(numbers))])


def _picture(shop: Shop, step: Step, block: Block) -> Markup:
    if block.role == "product":
        return picture(shop.by_asin(block.elements[0].text))
    return picture(shop.by_asin(step.session.asin)) if block.role == "facts" else Markup()


def _option_text(goal: Goal) -> str:
    """Return the options of a goal as text."""
    if isinstance(goal.options, dict):
        return ", ".join(f"{name}: {value}" for name, value in goal.options.items())
    return ", ".join(goal.options)


@functools.lru_cache(maxsize=1)
def _style() -> bytes:
    return (TEMPLATES / "shop.css").read_bytes()
