"""The shop's web server, one per process, in the thread of the browsers."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from rollgym.browser.host import host
from rollgym.envs.webshop.server.sessions import ShopSessions


class ShopSite:
    """The server and its visits; a `rollgym.browser.host.Service`."""

    def __init__(self) -> None:
        self.visits = ShopSessions(most=1_000_000, idle=float("inf"))  # environments close their own
        self.address = ""
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls) -> Self:
        """Start the server on a free port of 127.0.0.1."""
        from rollgym.envs.webshop.server import shop_app
        from rollgym.utils.http_server import listening, web_server

        site = cls()
        listener = listening("127.0.0.1", 0)
        site.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        site._server = web_server(shop_app(site.visits))
        site._serving = asyncio.get_running_loop().create_task(site._server.serve(sockets=[listener]))
        return site

    async def close(self) -> None:
        """Stop the server."""
        assert self._serving is not None, "it has been started"
        self._server.should_exit = True
        await self._serving


def shop_site() -> ShopSite:
    """The site of this process, started if necessary."""
    return host().service(ShopSite)
