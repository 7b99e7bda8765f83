"""State of a session (page, search, chosen options) and its transitions.

All functions are pure: `act` returns a new `Session` and changes nothing. `rollgym.envs.webshop.pages.view`
renders the page of a session.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rollgym.envs.webshop.actions import SEARCH, parse
from rollgym.envs.webshop.pages import Element, Page, view
from rollgym.envs.webshop.reward import Score, score
from rollgym.envs.webshop.shop import Shop
from rollgym.envs.webshop.types import Goal

BASE_URL = "http://127.0.0.1:3000"
PageKind: TypeAlias = Literal["search", "results", "item", "sub", "done"]


@dataclass(frozen=True, slots=True)
class Session:
    """The state of a visit."""

    name: str
    """Name in addresses: the number of the goal."""
    kind: PageKind = "search"
    words: tuple[str, ...] = ()
    """The words last searched for."""
    hits: tuple[int, ...] = ()
    """The products found by them, best first."""
    number: int = 1
    """Which page of results."""
    asin: str = ""
    """The open or bought product."""
    options: tuple[tuple[str, str], ...] = ()
    """Chosen values by option name, in the order of the first choice."""
    sub: str = ""
    """Open sub-page of the product: ``Description``, ``Features`` or ``Reviews``."""
    visited: frozenset[str] = frozenset()
    """Products opened since the search page."""
    reward: float = 0.0
    """Reward of the purchase."""

    @property
    def done(self) -> bool:
        """Whether a purchase was made, which ends the session."""
        return self.kind == "done"

    @property
    def url(self) -> str:
        """The address of the page, in the original's scheme (which writes options in two ways)."""
        words, chosen = "+".join(self.words), dict(self.options)
        item = f"{self.name}/{self.asin}/{words}/{self.number}"
        match self.kind:
            case "search":
                path = self.name
            case "results":
                path = f"search_results/{self.name}/{words}/{self.number}"
            case "item":
                path = f"item_page/{item}/{json.dumps(chosen)}"
            case "sub":
                path = f"item_sub_page/{item}/{self.sub}/{chosen}"
            case "done":
                path = f"done/{self.name}/{self.asin}/{chosen}"
        return f"{BASE_URL}/{path}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an action."""

    session: Session
    reward: float = 0.0
    done: bool = False
    valid: bool = True
    note: str = ""
    """Reason if the action was not possible."""
    score: Score | None = None
    """Reward breakdown after a purchase."""


def act(shop: Shop, goal: Goal, session: Session, text: str, page: Page | None = None) -> Outcome:
    """Play one action; an impossible one changes nothing. ``page`` is the current page, if known."""
    page = page or view(shop, goal, session)
    action = parse(text, shop.rules)
    if session.done or action is None:
        return _refused(session, "an action is search[words] or click[name]")
    if action.name == SEARCH:
        return _search(shop, session, action.argument)
    element = page.find(action.argument)
    if element is None or element.kind == "submit":
        return _refused(session, f"there is nothing called {action.argument[:60]!r} to click on this page")
    return _click(shop, goal, session, element)


def _refused(session: Session, reason: str) -> Outcome:
    return Outcome(session, valid=False, note=reason)


def _search(shop: Shop, session: Session, argument: str) -> Outcome:
    if session.kind != "search" and not shop.rules.search_anywhere:
        return _refused(session, "this page has no search bar; click[back to search] leads to it")
    words = tuple(argument.split(" "))
    if shop.rules.special_searches and words[0] == "<a>":
        return _refused(session, "the original fails on <a>")
    return Outcome(_results(session, words, shop.find(words), 1))


def _results(session: Session, words: tuple[str, ...], hits: tuple[int, ...], number: int) -> Session:
    return Session(session.name, "results", words, hits, number, visited=session.visited)


def _click(shop: Shop, goal: Goal, session: Session, element: Element) -> Outcome:
    if element.kind == "link":
        asin = element.text
        item = dataclasses.replace(session, kind="item", asin=asin, visited=session.visited | {asin})
        return Outcome(item)
    if element.kind == "option":
        chosen = dict(session.options) | {element.name: element.value}
        return Outcome(dataclasses.replace(session, kind="item", options=tuple(chosen.items())))
    if element.key == "buy now":
        return _buy(shop, goal, session)
    if element.key == "back to search":
        return Outcome(Session(session.name))
    if element.key in ("next >", "< prev"):
        return Outcome(_turn(shop, session, forward=element.key == "next >"))
    return Outcome(dataclasses.replace(session, kind="sub", sub=element.text))


def _turn(shop: Shop, session: Session, forward: bool) -> Session:
    """Where ``Next >`` and ``< Prev`` lead: other results; from an item to them; from a part to the item."""
    kind = _kind_by_url(session) if shop.rules.page_by_url else session.kind
    if kind == "sub":
        return dataclasses.replace(session, kind="item", sub="")
    step = 0 if kind == "item" else 1 if forward else -1
    return _results(session, session.words, session.hits, session.number + step)


def _kind_by_url(session: Session) -> PageKind:
    """The page that the original takes this one for, by the first name found in its address."""
    names: dict[str, PageKind] = {"search_results": "results", "item_page": "item", "item_sub_page": "sub"}
    url = session.url
    return next((kind for name, kind in names.items() if name in url), session.kind)


def _buy(shop: Shop, goal: Goal, session: Session) -> Outcome:
    bought, target = shop.by_asin(session.asin), shop.by_asin(goal.asin)
    result = score(bought, target, goal, dict(session.options), shop.rules)
    final = dataclasses.replace(session, kind="done", sub="", reward=result.reward)
    return Outcome(final, result.reward, done=True, score=result)
