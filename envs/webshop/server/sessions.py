"""Sessions of the web shop with the state of every page, so that a browser can go back and forth.

A page has a number within its session, and the number is in its address: an action is played from the page it
was posted from, even if the session has moved on. A purchase ends the session for all its pages.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from rollgym.envs.webshop.pages import Page, view
from rollgym.envs.webshop.session import Outcome, Session, act
from rollgym.envs.webshop.shop import Shop

PATHS = {
    "search": "search",
    "results": "search_results",
    "item": "item_page",
    "sub": "item_sub_page",
    "done": "done",
}
"""Path of each kind of page: the original's names, and one for the search page."""
MAX_VISITS = 1000
MAX_IDLE = 3600.0
"""Seconds of inactivity after which a session expires."""
MAX_STEPS = 500
"""Pages kept per session; the oldest are dropped."""


class Step(NamedTuple):
    """One page of a session, and the outcome that led to it."""

    session: Session
    outcome: Outcome | None = None
    """None for the first page."""


class ShopSession:
    """A customer's session with one goal."""

    def __init__(self, shop: Shop, number: int) -> None:
        self.name = secrets.token_urlsafe(16)
        """Unguessable key in every address of the session; it authorizes actions."""
        self.shop = shop
        self.number = number
        self.goal = shop.catalog.goal(number)
        self.steps: dict[int, Step] = {0: Step(Session(str(number)))}
        self.last = 0
        """The number of the newest page."""
        self.end: int | None = None
        """The number of the last page, once something was bought."""
        self.used = 0.0

    def play(self, number: int, action: str) -> int:
        """Play an action from a page; return the number of the next page."""
        if self.end is not None:
            return self.end
        session = self.steps[number].session
        return self._add(act(self.shop, self.goal, session, action))

    def search(self, number: int, words: str) -> int:
        """Search from a page; return the number of the next page."""
        if words.strip() or self.end is not None:
            return self.play(number, f"search[{words}]")
        note = "say what you are looking for"
        return self._add(Outcome(self.steps[number].session, valid=False, note=note))

    def _add(self, outcome: Outcome) -> int:
        self.last += 1
        self.steps[self.last] = Step(outcome.session, outcome)
        if outcome.done:
            self.end = self.last
        if len(self.steps) > MAX_STEPS:
            del self.steps[next(iter(self.steps))]
        return self.last

    def page(self, number: int) -> Page:
        """What page ``number`` shows."""
        return view(self.shop, self.goal, self.steps[number].session)

    def address(self, number: int) -> str:
        """The path of page ``number``."""
        return f"/{PATHS[self.steps[number].session.kind]}/{self.name}/{number}"


class ShopSessions:
    """Bounded set of sessions, each dropped after inactivity."""

    def __init__(
        self, most: int = MAX_VISITS, idle: float = MAX_IDLE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._idle, self._clock = most, idle, clock
        self._by_name: OrderedDict[str, ShopSession] = OrderedDict()  # the longest unused first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_name)

    def open(self, shop: Shop, number: int) -> ShopSession:
        """Open a session for a goal; drops the least recently used one if there are too many."""
        visit = ShopSession(shop, number)
        with self._lock:
            self._forget_idle()
            if len(self._by_name) >= self._most:
                self._by_name.popitem(last=False)
            visit.used = self._clock()
            self._by_name[visit.name] = visit
        return visit

    def get(self, name: str) -> ShopSession | None:
        """Return a session by name, None if it has expired."""
        with self._lock:
            self._forget_idle()
            visit = self._by_name.get(name)
            if visit is not None:
                visit.used = self._clock()
                self._by_name.move_to_end(name)
            return visit

    def close(self, visit: ShopSession) -> None:
        """Remove a session."""
        with self._lock:
            self._by_name.pop(visit.name, None)

    def _forget_idle(self) -> None:
        earliest = self._clock() - self._idle
        while self._by_name and next(iter(self._by_name.values())).used < earliest:
            self._by_name.popitem(last=False)
