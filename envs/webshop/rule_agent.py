"""The rule that learned agents are measured against: the first product found, options by string matching."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import AgentSetup, Briefing, SoloAgent
from rollgym.core.messages import ToolCall
from rollgym.core.seeding import derive_rng
from rollgym.envs.webshop.actions import action_calls
from rollgym.envs.webshop.compact import search_words, spoken
from rollgym.envs.webshop.matching import matching_values

_BUTTONS = ("back to search", "< prev", "next >")
BACK, PREV, NEXT, BUY = (f"click[{name}]" for name in (*_BUTTONS, "buy now"))


_NOT_SEARCHED = re.compile(r"^find me |,? and price lower than .*", re.IGNORECASE)
"""Parts of an instruction that no product has."""


class RuleAgent(SoloAgent):
    """Searches for the instruction, opens the first product, chooses the values the instruction has, buys.

    In the ``compact`` view it plays ``search``, which is the instruction's first clause.

    Args:
        setup: The environment to play.
        options: False buys without choosing anything.
    """

    def __init__(self, setup: AgentSetup, *, options: bool = True) -> None:
        super().__init__(setup)
        self._options = options

    def start(self, briefing: Briefing) -> None:
        """Forget the last episode."""
        self._clicks: list[str] | None = None

    def calls(self, action: str) -> list[ToolCall]:
        """Return a search or a click as a call of the tool form."""
        return action_calls(action)

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """Choose the next action by the current page."""
        page = info["page"]
        if page == "search":
            return self.search(info)
        if page == "results":
            return spoken(self.open(info), info)
        if page != "item":
            return spoken(PREV, info)
        if self._clicks is None:
            self._clicks = self.clicks(info) if self._options else []
        return spoken(self._clicks.pop(0) if self._clicks else BUY, info)

    def search(self, info: Mapping[str, Any]) -> str:
        """Return the search action."""
        return "search" if "means" in info else f"search[{search_words(info['instruction'])}]"

    def open(self, info: Mapping[str, Any]) -> str:
        """Open the first product."""
        products = found_products(info)
        return f"click[{products[0]}]" if products else BACK

    def clicks(self, info: Mapping[str, Any]) -> list[str]:
        """Return the clicks that choose options."""
        chosen = matching_values(info["options"], info["instruction"])
        return [click_on(name, value, info) for name, value in chosen.items()]


class BrowsingAgent(RuleAgent):
    """The rule, but it opens a random product of the page: demonstrations with more variety for a warm start.

    A policy that imitates the rule itself always opens the first product and never explores the others.
    """

    def start(self, briefing: Briefing) -> None:
        """Forget the last episode."""
        super().start(briefing)
        self._rng = derive_rng("browsing agent", briefing.spec.sampling_seed)

    def open(self, info: Mapping[str, Any]) -> str:
        """Open a random product."""
        products = found_products(info)
        return f"click[{products[int(self._rng.integers(len(products)))]}]" if products else BACK


class WanderingAgent(BrowsingAgent):
    """Opens random products and leaves them again.

    As ``warm_start.mistakes_agent`` it takes `PatientAgent` to products that lack what the instruction asks
    for: demonstrations then show how to recognize one and go back.
    """

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """Open a random product, or leave the open one."""
        return spoken(PREV, info) if info["page"] == "item" else super().choose(observation, info)

    def search(self, info: Mapping[str, Any]) -> str:
        """Search for the instruction without its price, as `PatientAgent` does."""
        return patient_search(info)


class PatientAgent(RuleAgent):
    """The rule, but it buys the first product whose page offers every option that the instruction names.

    Products are opened in the order of the first page of results. If none of the first ``products`` offers
    everything, the one that offers most is bought. To make it easy to imitate, it searches for a part of the
    instruction, without the price, and clicks on products by their ids as the page shows them.

    Args:
        setup: The environment to play.
        products: How many products are opened at most.
    """

    def __init__(self, setup: AgentSetup, *, products: int = 4) -> None:
        super().__init__(setup)
        self._products = products

    def start(self, briefing: Briefing) -> None:
        """Forget the last episode."""
        super().start(briefing)
        self._seen: dict[str, int] = {}
        """Number of named options that each opened product offers, in order."""
        self._opened = ""
        self._options_shown: Mapping[str, Any] = {}

    def search(self, info: Mapping[str, Any]) -> str:
        """Search for the instruction without its price."""
        return patient_search(info)

    def open(self, info: Mapping[str, Any]) -> str:
        """Open the next product, or the best one if there is no other to look at."""
        products = found_products(info)
        new = [product for product in products if product not in self._seen]
        if not new or len(self._seen) >= self._products:
            if not self._seen:
                return BACK
            self._opened = max(self._seen, key=lambda product: self._seen[product])
        else:
            self._opened = new[0]
        return f"click[{self._opened if 'means' in info else self._opened.upper()}]"

    def clicks(self, info: Mapping[str, Any]) -> list[str]:
        """Choose the named options and buy; leave a product that lacks one of them."""
        final = self._opened in self._seen
        found = super().clicks(info)
        if self._opened:
            self._seen[self._opened] = len(found)
        if final or len(found) >= count_named(info["instruction"]):
            return found
        return [PREV]

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """Choose the next action by the current page."""
        if info["page"] == "results":
            self._clicks = None
        elif info["page"] == "item" and (not info["options"] or info["options"] != self._options_shown):
            if self._clicks is not None:
                # With `warm_start.mistakes` another agent plays some turns: it has opened this product.
                self._clicks, self._opened = None, ""
            self._options_shown = info["options"]
        return super().choose(observation, info)


def patient_search(info: Mapping[str, Any]) -> str:
    """Search for the instruction without its price."""
    if "means" in info:
        return "search"
    return f"search[{_NOT_SEARCHED.sub('', search_words(info['instruction']))}]"


def count_named(instruction: str) -> int:
    """Return how many options an instruction names, as ``size: large``.

    Example:
        >>> count_named("Find me a shirt with color: grey, and size: small, and price below 40 dollars")
        2
    """
    return len(re.findall(r"\b(?:with|and) [^,:]+: ", instruction))


def found_products(info: Mapping[str, Any]) -> list[str]:
    """Return the click names of the products on a page of results."""
    return [name for name in info["clickables"] if name not in _BUTTONS]


def click_on(name: str, value: str, info: Mapping[str, Any]) -> str:
    """The click that chooses a value; by the option's name too, where the page lists it so."""
    plain, named = " ".join(value.split()), f"{name}: {' '.join(value.split())}"
    return f"click[{next((key for key in (named, value, plain) if key in info['clickables']), named)}]"
