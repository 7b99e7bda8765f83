"""The page of a MiniWoB task in a browser context without a network and with a simulated clock.

Files of the installed package answer the page's requests, every other request is blocked. Timers and dates of
the page follow a clock that moves by `ACTION_MS` with every action, so an episode does not depend on the
machine's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rollgym.browser.tab import Tab
from rollgym.browser.tree import CLICKED, LISTS, TYPED, Tree, read_tree
from rollgym.core.errors import EnvError

if TYPE_CHECKING:
    from playwright.async_api import Browser, Route

HOME = "http://miniwob.invalid/"
"""Origin of the pages; the name never resolves (RFC 6761), and no request for it reaches a network."""
WINDOW = (500, 400)
ACTION_MS = 1000
"""Time that passes in the page with every action."""
START_SECONDS = 1_600_000_000
"""The page's date when it is loaded, in seconds since 1970."""
NUMBERS = frozenset({"spinbutton", "slider"})
FIELDS = TYPED | {"spinbutton"}
"""Roles of elements to type into."""
CLICKABLE = CLICKED | NUMBERS | {"switch", "treeitem", "gridcell", "menuitemcheckbox", "menuitemradio"}
KEYS = frozenset(
    {"Enter", "Tab", "Escape", "Backspace", "Delete", "Space", "Home", "End", "PageUp", "PageDown"}
)
ARROWS = frozenset({"ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"})

_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'none'; worker-src 'none'; "
    "form-action 'none'; frame-src 'self'"
)
_STYLE = """\
#reward-display, #click-canvas, #sync-task-cover { display: none !important; }
#query { visibility: hidden !important; }
*, *::before, *::after { transition: none !important; animation: none !important; }
[data-listens], [onclick] { cursor: pointer; }"""
"""Hides scores and the timer, which are not for agents, and the instruction, which has a separate line."""
_BEFORE = """\
(seed) => {
  // Numbers that a page draws while it loads, before its generator is seeded.
  let state = seed >>> 0;
  Math.random = () => {
    state = (state + 0x6D2B79F5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  for (const name of ['RTCPeerConnection', 'webkitRTCPeerConnection', 'WebTransport']) delete window[name];
  // Elements that react to the mouse, whatever they are: the accessibility tree does not tell.
  const mark = (element) => {
    if (!(element instanceof Element) || ['HTML', 'BODY'].includes(element.tagName) ||
        ['wrap', 'area', 'query'].includes(element.id)) return;
    element.setAttribute('data-listens', '');
    // Words in running text have no line in the tree without a role.
    if (element.tagName === 'SPAN' && !element.hasAttribute('role')) element.setAttribute('role', 'link');
  };
  const add = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (kind, ...rest) {
    if (['click', 'mousedown', 'mouseup', 'dblclick'].includes(kind)) mark(this);
    return add.call(this, kind, ...rest);
  };
  for (const type of [HTMLElement, SVGElement]) {
    const plain = Object.getOwnPropertyDescriptor(type.prototype, 'onclick');
    Object.defineProperty(type.prototype, 'onclick', {
      ...plain, set(handler) { if (handler) mark(this); plain.set.call(this, handler); },
    });
  }
}"""
_START = """\
(seed) => {
  const said = () => { const found = core.getUtterance(); return found.utterance ?? found; };
  try {
    Math.seedrandom(String(seed));
    core.EPISODE_MAX_TIME = 2147483647;  // never in an episode: turns are limited instead
    core.startEpisodeReal();
    return {instruction: said(), text: document.body.textContent, error: ''};
  } catch (error) {
    return {instruction: '', text: '', error: String(error)};
  }
}"""
_STATE = "() => [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"


class Problem(NamedTuple):
    """A task that a page has generated."""

    seed: int
    instruction: str
    text: str
    """All text of the page; pages with the same text are the same task."""


class Seen(NamedTuple):
    """The page after an action."""

    tree: Tree
    done: bool
    reward: float
    """The page's reward without its discount for time; 0 until the end."""


class MiniwobTab(Tab):
    """A task's page and its actions."""

    async def load(self, folder: Path, task: str, seed: int) -> None:
        """Load the page; ``folder`` has the package's HTML files."""
        self._task = task
        root, loaded = folder.resolve(), False

        async def answer(route: Route) -> None:
            nonlocal loaded
            request = route.request
            if request.is_navigation_request() and request.frame == self.page.main_frame:
                if loaded:  # an empty answer keeps the browser on the page, as after a click on a link
                    await route.fulfill(status=204)
                    return
                loaded = True
            name = request.url.removeprefix(HOME).partition("?")[0].partition("#")[0]
            path = (root / name).resolve()
            if request.url.startswith(HOME) and path.is_relative_to(root) and path.is_file():
                await route.fulfill(path=path, headers={"Content-Security-Policy": _POLICY, **_type_of(path)})
            else:
                await self.block(route)

        context, clock = self.page.context, self.page.clock
        await context.route("**/*", lambda route: answer(route))
        await context.add_init_script(f"({_BEFORE})({seed});")
        await clock.install(time=START_SECONDS)
        await clock.pause_at(START_SECONDS + 1)
        await self.page.goto(f"{HOME}miniwob/{task}.html", wait_until="load")
        await self.page.add_style_tag(content=_STYLE)

    async def start(self, seed: int) -> Problem:
        """Generate the task of a seed."""
        found = await self.page.evaluate(_START, seed)
        if found["error"]:
            raise EnvError(f"miniwob:{self._task} cannot generate a task: {found['error'][:200]}")
        return Problem(seed, " ".join(str(found["instruction"]).split()), str(found["text"]))

    async def look(self) -> Seen:
        """Let time pass, and return the page as an agent sees it."""
        await self.page.clock.run_for(ACTION_MS)
        done, reward = await self.page.evaluate(_STATE)
        snapshot = await self.page.aria_snapshot(mode="ai")
        if not isinstance(reward, int | float) or isinstance(reward, bool):
            raise EnvError(f"miniwob:{self._task} has the reward {reward!r}, not a number.")
        return Seen(
            read_tree(snapshot, CLICKABLE | FIELDS | LISTS, pointers=True),
            done is True,
            float(reward) if done is True else 0.0,
        )

    async def click(self, ref: str) -> Seen:
        """Click the middle of an element; whatever lies on top receives the click."""
        # Without the wait for an uncovered element, whose end would depend on the machine's speed.
        await self.page.locator(f"aria-ref={ref}").click(force=True, no_wait_after=True)
        return await self.look()

    async def type(self, ref: str, text: str) -> Seen:
        """Replace the text of a field, key by key."""
        await self.page.locator(f"aria-ref={ref}").focus()
        await self.page.keyboard.press("ControlOrMeta+a")
        if text:
            await self.page.keyboard.type(text)
        else:
            await self.page.keyboard.press("Delete")
        return await self.look()

    async def select(self, ref: str, options: Sequence[str]) -> Seen:
        """Select options of a list by their names."""
        await self.page.locator(f"aria-ref={ref}").select_option(label=list(options), force=True)
        return await self.look()

    async def press(self, key: str) -> Seen:
        """Press a key in the element that has the focus."""
        await self.page.keyboard.press(key)
        return await self.look()


async def open_miniwob(browser: Browser, folder: Path, task: str, seed: int) -> MiniwobTab:
    """A new context with a task's page."""
    tab = await MiniwobTab.in_context(browser, window=WINDOW, scripts=True, offline=True)
    try:
        await tab.load(folder, task, seed)
    except BaseException:
        await tab.close()
        raise
    return tab


def _type_of(path: Path) -> dict[str, str]:
    """The content type by the file's name, the same on every system."""
    types = {
        ".css": "text/css",
        ".gif": "image/gif",
        ".html": "text/html; charset=utf-8",
        ".jpg": "image/jpeg",
        ".js": "text/javascript; charset=utf-8",
        ".json": "application/json",
        ".png": "image/png",
        ".svg": "image/svg+xml",
    }
    return {"Content-Type": types.get(path.suffix.lower(), "application/octet-stream")}
