"""The shop's page of one episode: a context that can reach only the shop, and the actions in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollgym.browser.tab import Tab
from rollgym.browser.tree import Tree, read_tree
from rollgym.core.errors import EnvError

if TYPE_CHECKING:
    from playwright.async_api import Browser, Response

WINDOW = (1100, 800)
# Not urlsplit, which caches addresses: here every visit has a different one.
_ADDRESS = re.compile(r"[a-z]+://[^/?#]*([^?#]*).*", re.DOTALL)


class ShopTab(Tab):
    """A page of the shop and its actions.

    Every action waits for the whole page, including the style sheet, which can hide elements.
    """

    @classmethod
    async def open(cls, browser: Browser, home: str, path: str) -> ShopTab:
        """A new context with a page of the server at ``home``."""
        # The shop has no scripts, so product text cannot become one.
        tab = await cls.in_context(browser, window=WINDOW, scripts=False)
        try:
            elsewhere = re.compile(rf"^(?!{re.escape(f'{home}/')})")
            # Not a bound method: Playwright creates a new interned name for each of those.
            await tab.page.context.route(elsewhere, lambda route: tab.block(route))
            _require_shown(await tab.page.goto(home + path, wait_until="load"))
        except BaseException:
            await tab.close()
            raise
        return tab

    async def look(self) -> tuple[Tree, str]:
        """The page as an agent sees it, and the path of its address."""
        tree = read_tree(await self.page.aria_snapshot(mode="ai"))
        match = _ADDRESS.fullmatch(self.page.url)
        return tree, match[1] if match else self.page.url

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


def _require_shown(response: Response | None) -> None:
    """Raise `EnvError` for an error page, which must not become an observation."""
    if response is not None and response.status != 200:
        raise EnvError(f"the shop answered {response.status} for {response.url}")
