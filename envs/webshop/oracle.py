"""Oracle agent, an upper bound: it knows the product and options of the goal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import AgentSetup, Briefing
from rollgym.core.errors import UsageError
from rollgym.envs.webshop.compact import search_words
from rollgym.envs.webshop.rule_agent import BACK, NEXT, RuleAgent, click_on, found_products


class Oracle(RuleAgent):
    """Buys the goal's own product with the goal's options. No agent that has to read can do better.

    It plays by the same pages and clicks as others, but needs ``reveal=True`` of the environment. A product
    that the search for the instruction does not show at once is searched for by its title.
    """

    def __init__(self, setup: AgentSetup) -> None:
        super().__init__(setup)
        if not setup.env_kwargs.get("reveal"):
            raise UsageError(
                "The oracle needs the goal: make the environment with reveal=True (--env-arg reveal=true)."
            )

    def start(self, briefing: Briefing) -> None:
        """Forget the last episode."""
        super().start(briefing)
        self._searches = 0

    def search(self, info: Mapping[str, Any]) -> str:
        """The instruction first, then the title."""
        self._searches += 1
        if self._searches == 1:
            return super().search(info)
        title = search_words(info["goal"]["title"])
        return f"search {title}" if "means" in info else f"search[{title}]"

    def open(self, info: Mapping[str, Any]) -> str:
        """Open the goal's product, or move on to find it."""
        asin = info["goal"]["asin"].lower()
        if asin in found_products(info):
            return f"click[{asin}]"
        return NEXT if self._searches > 1 and "next >" in info["clickables"] else BACK

    def clicks(self, info: Mapping[str, Any]) -> list[str]:
        """The goal's options; where it has only values, any option that has them."""
        options = info["goal"]["options"]
        if isinstance(options, Mapping):
            pairs = list(options.items())
        else:
            pairs = [(name, value) for name, values in info["options"].items() for value in values]
            pairs = [(name, value) for name, value in pairs if value in options]
        return [click_on(name, value, info) for name, value in pairs]
