"""Page of one episode: a separate browser context with the limits that all environments share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page, Route

SECONDS = 30.0
"""Timeout of every browser operation."""
MOST_BLOCKED = 20
"""Blocked addresses that a tab remembers."""


class Tab:
    """A page in a separate context, without downloads, service workers and further windows.

    A subclass decides which requests are answered, and adds the actions. Methods run in the browser's loop.
    """

    def __init__(self, context: BrowserContext, page: Page) -> None:
        self._context = context
        self.page = page
        self.blocked: list[str] = []
        """Blocked requests; the last few."""

    @classmethod
    async def in_context(
        cls, browser: Browser, *, window: tuple[int, int], scripts: bool, offline: bool = False
    ) -> Self:
        """Open an empty page in a new context."""
        context = await browser.new_context(
            accept_downloads=False,
            java_script_enabled=scripts,
            offline=offline,
            service_workers="block",
            reduced_motion="reduce",
            locale="en-US",
            timezone_id="UTC",
            viewport={"width": window[0], "height": window[1]},
        )
        try:
            context.set_default_timeout(SECONDS * 1000)
            tab = cls(context, await context.new_page())
            context.on("page", lambda page: page.close())
        except BaseException:
            await context.close()
            raise
        return tab

    async def block(self, route: Route) -> None:
        """Refuse a request."""
        self.blocked = [*self.blocked, route.request.url][-MOST_BLOCKED:]
        await route.abort("blockedbyclient")

    async def close(self) -> None:
        """Close the context and its page."""
        await self._context.close()
