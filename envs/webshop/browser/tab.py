"""Page of one episode: a separate browser context that can reach only the shop."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollgym.core.errors import EnvError
from rollgym.envs.webshop.browser.tree import Tree, read_tree

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page, Response, Route

SECONDS = 30.0
"""Timeout of every browser operation."""
WINDOW = (1100, 800)
# Not urlsplit, which caches addresses: here every visit has a different one.
_ADDRESS = re.compile(r"[a-z]+://[^/?#]*([^?#]*).*", re.DOTALL)


class Tab:
    """A page and its actions. Its methods run in the browser's loop.

    Every action waits for the whole page, including the style sheet, which can hide elements.
    """

    def __init__(self, context: BrowserContext, page: Page) -> None:
        self._context = context
        self.page = page
        self.blocked: list[str] = []
        """Blocked requests to other hosts; the last few."""
        self._tree = Tree("", {})

    @classmethod
    async def open(cls, browser: Browser, home: str, path: str) -> Tab:
        """A new context with a page of the server at ``home``."""
        context = await browser.new_context(
            accept_downloads=False,
            java_script_enabled=False,  # the shop has no scripts, so product text cannot become one
            service_workers="block",
            reduced_motion="reduce",
            viewport={"width": WINDOW[0], "height": WINDOW[1]},
        )
        try:
            context.set_default_timeout(SECONDS * 1000)
            tab = cls(context, await context.new_page())
            elsewhere = re.compile(rf"^(?!{re.escape(f'{home}/')})")
            # Not a bound method: Playwright creates a new interned name for each of those.
            await context.route(elsewhere, lambda route: tab._block(route))
            context.on("page", lambda page: page.close())
            _require_shown(await tab.page.goto(home + path, wait_until="load"))
        except BaseException:
            await context.close()
            raise
        return tab

    async def _block(self, route: Route) -> None:
        self.blocked = [*self.blocked, route.request.url][-20:]
        await route.abort("blockedbyclient")

    async def look(self) -> tuple[Tree, str]:
        """The page as an agent sees it, and the path of its address."""
        self._tree = read_tree(await self.page.aria_snapshot(mode="ai"))
        match = _ADDRESS.fullmatch(self.page.url)
        return self._tree, match[1] if match else self.page.url

    async def click(self, ref: str) -> tuple[Tree, str]:
        """Click an element and return the page that it leads to."""
        async with self.page.expect_navigation(wait_until="load") as arriving:
            await self.page.locator(f"aria-ref={ref}").click(no_wait_after=True)
        _require_shown(await arriving.value)
        return await self.look()

    async def type(self, ref: str, text: str) -> tuple[Tree, str]:
        """Type into a field, press Enter and return the page that it leads to."""
        field = self.page.locator(f"aria-ref={ref}")
        await field.fill(text)
        async with self.page.expect_navigation(wait_until="load") as arriving:
            await field.press("Enter", no_wait_after=True)
        _require_shown(await arriving.value)
        return await self.look()

    async def back(self) -> tuple[Tree, str]:
        """Go back as by the browser's own button."""
        _require_shown(await self.page.go_back(wait_until="load"))
        return await self.look()

    async def close(self) -> None:
        """Close the context and its page."""
        await self._context.close()


def _require_shown(response: Response | None) -> None:
    """Raise `EnvError` for an error page, which must not become an observation."""
    if response is not None and response.status != 200:
        raise EnvError(f"the shop answered {response.status} for {response.url}")
