"""WebShop in a real browser: the same shop, goals and rewards, seen through the accessibility tree."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.browser.find import find_chromium
from rollgym.browser.host import BrowserLost, Seat
from rollgym.browser.tree import CLICKED, TYPED, Tree
from rollgym.core.env import StepResult, bare
from rollgym.core.errors import MissingExtra
from rollgym.core.tasks import Task
from rollgym.envs.webshop.browser.site import shop_site
from rollgym.envs.webshop.browser.tab import ShopTab
from rollgym.envs.webshop.env import WebShopEnv
from rollgym.envs.webshop.html import template_called
from rollgym.envs.webshop.server.sessions import ShopSession
from rollgym.envs.webshop.session import Outcome

BACK = "back"
WORDS_HINT = "your words"
MAX_TYPED = 1000
"""Characters that the search field takes."""
_CLICK = re.compile(r"click\s*\[\s*(e\d+)\s*\]", re.IGNORECASE)
_TYPE = re.compile(r"type\s*\[\s*(e\d+)\s*\]\s*\[(.*)\]", re.IGNORECASE | re.DOTALL)
_UNTYPABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class WebShopBrowserEnv(WebShopEnv):
    """Find the product that an instruction describes, choose its options, and buy it, in a web browser.

    Observation: the accessibility tree of the page, a line for each text, and for each thing that can be used
    a line such as ``[e3] button "Buy Now"``. References are renumbered on every page.

    Actions: ``click[e3]``; ``type[e1][words]``, which types into a field and presses Enter; ``back``. An
    impossible action changes nothing and gives ``valid=False`` with reward 0.

    Reward, Success, Ends, Splits: those of `WebShopEnv`; a task is the same in both, and a purchase earns the
    same.

    A browser that crashes, is killed or does not answer raises `BrowserLost`, and the next episode starts a
    new one.
    """

    pool_thread = "own"

    def __init__(
        self,
        shop: str = "synthetic",
        *,
        rules: str = "clean",
        search: str = "auto",
        goals: str = "synthetic",
        splits: str = "auto",
        max_turns: int = 15,
        reveal: bool = False,
        render_mode: str | None = None,
        chromium: str | None = None,
    ) -> None:
        self._seat: Seat[ShopTab] = Seat(find_chromium(chromium))
        try:
            from rollgym.envs.webshop import server  # noqa: F401 - fails now if a package is missing
        except ModuleNotFoundError as error:
            raise MissingExtra("WebShop in a browser", "webshop") from error
        template_called("visit.html")
        super().__init__(
            shop,
            rules=rules,
            search=search,
            goals=goals,
            splits=splits,
            max_turns=max_turns,
            reveal=reveal,
            render_mode=render_mode,
        )
        self.instructions = _instructions(max_turns)
        self._visit: ShopSession | None = None
        self._tree = Tree("", {})
        self._history: list[int] = []
        """Page numbers in the browser's history, the current one last."""
        self._finalizer = weakref.finalize(self, Seat.abandon, self._seat)

    def begin(self, task: Task) -> str:
        """Enter the shop with the task's goal in a new browser context."""
        super().begin(task)
        self._leave()
        number = int(self._numbers[task.split][task.index])
        site = shop_site()
        self._visit = site.visits.open(self.shop, number)
        self._history = []
        path = self._visit.address(0)
        tab = self._seat.open(lambda browser: ShopTab.open(browser, site.address, path))
        self._arrive(*self._seat.call(tab.look))
        return self._tree.text

    def respond(self, action: str) -> StepResult:
        """Click, type or go back."""
        text = bare(action)
        self._turns += 1
        if (match := _CLICK.fullmatch(text)) is not None:
            return self._click(match[1].lower())
        if (match := _TYPE.fullmatch(text)) is not None:
            return self._type(match[1].lower(), match[2])
        if text.lower() == BACK:
            return self._back()
        return self._refuse("an action is click[e1], type[e1][words] or back")

    def facts(self) -> Mapping[str, Any]:
        """The available actions."""
        return {
            "instruction": self._goal.instruction,
            "page": self._page.kind,
            "has_search_bar": self._page.has_search_bar,
            "actions": self._actions(),
            "turns_left": self._max_turns - self._turns,
            "purchased": None,
            **(self._revealed() if self._reveal else {}),
        }

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random click or ``back``; on a page with a field, a search for words of the instruction."""
        actions = info["actions"]
        hint = next((action for action in actions if WORDS_HINT in action), None)
        if hint is None:
            return str(actions[int(rng.integers(len(actions)))]) if actions else BACK
        searched = super().random_action(observation, info, rng)
        return str(hint).replace(WORDS_HINT, searched.partition("[")[2][:-1])

    def render_text(self) -> str:
        """The page as the agent sees it."""
        return self._tree.text

    def screenshot(self) -> bytes:
        """The page as a PNG image."""
        tab = self._seat.require_tab()
        return self._seat.call(tab.page.screenshot)

    def close(self) -> None:
        """Close the tab; the last environment of a process closes the browser."""
        self._leave()
        self._seat.close()
        super().close()

    # Effects of actions.

    def _click(self, ref: str) -> StepResult:
        target = self._tree.targets.get(ref)
        if target is None or target.role not in CLICKED:
            reason = (
                f"there is no [{ref}] on this page" if target is None else f"[{ref}] is a field to type into"
            )
            return self._refuse(reason)
        tab = self._seat.require_tab()
        self._arrive(*self._seat.call(lambda: tab.click(target.ref)))
        return self._reply()

    def _type(self, ref: str, words: str) -> StepResult:
        target = self._tree.targets.get(ref)
        if target is None or target.role not in TYPED:
            return self._refuse(f"there is no field [{ref}] to type into on this page")
        words = _UNTYPABLE.sub(" ", words)
        if not words.strip() or len(words) > MAX_TYPED:
            return self._refuse(f"a search has words, and {MAX_TYPED} characters at most")
        tab = self._seat.require_tab()
        self._arrive(*self._seat.call(lambda: tab.type(target.ref, words)))
        return self._reply()

    def _back(self) -> StepResult:
        if len(self._history) < 2:
            return self._refuse("there is no page to go back to")
        tab = self._seat.require_tab()
        self._history = self._history[:-2]
        self._arrive(*self._seat.call(tab.back))
        return self._result(self._tree.text, Outcome(self._session))

    def _arrive(self, tree: Tree, path: str) -> None:
        """Update the state to the page that the browser shows."""
        visit = self._open_visit()
        number = int(path.rpartition("/")[2]) if re.fullmatch(r"/\w+/[\w-]+/\d+", path) else -1
        if number not in visit.steps or visit.address(number) != path:
            self._seat.close()
            raise BrowserLost(f"the browser was lost: {path[:100]!r} is not a page of the session")
        self._tree = tree
        self._history.append(number)
        self._move(visit.steps[number].session)

    def _reply(self) -> StepResult:
        outcome = self._open_visit().steps[self._history[-1]].outcome
        assert outcome is not None, "only the first page has none"
        return self._result(self._tree.text, outcome)

    def _refuse(self, reason: str) -> StepResult:
        note = f"Not possible: {reason}.\n" if self.shop.rules.explain else ""
        return self._result(note + self._tree.text, Outcome(self._session, valid=False))

    def _actions(self) -> list[str]:
        typed = [f"type[{ref}][{WORDS_HINT}]" for ref in self._tree.refs(TYPED)]
        # A search without words leads nowhere.
        clicks = [f"click[{ref}]" for ref in self._tree.refs(CLICKED)] if not typed else []
        return [*typed, *clicks, *([BACK] if len(self._history) > 1 else [])]

    def _open_visit(self) -> ShopSession:
        assert self._visit is not None, "an episode has begun"
        return self._visit

    def _leave(self) -> None:
        if self._visit is not None:
            shop_site().visits.close(self._visit)
            self._visit = None


def _instructions(max_turns: int) -> str:
    return (
        "You are shopping in a web shop, in a web browser. Find a product that fits the instruction, choose "
        "the options it asks for, and buy it.\n"
        'You see the page as text. What you can use has a reference, as in [e3] button "Buy Now"; references '
        "change with every page.\n"
        "Answer with one action per turn, nothing else:\n"
        "- type[REF][words] types words into a field and presses Enter. Example: type[e1][red cotton shirt]\n"
        "- click[REF] clicks a button, a product's link or an option. Example: click[e3]\n"
        "- back goes back to the page before.\n"
        'The button "Buy Now" on a product\'s page buys it with the options chosen so far, and ends the '
        "visit. Choose every option that the instruction names before you buy, and mind the price.\n"
        f"You have {max_turns} turns. Only a purchase earns a reward: 1 when everything fits, less when "
        "something does not."
    )
