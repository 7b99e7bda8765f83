"""The rule and the oracle in the browser: they read the displayed page and act by its references."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollgym.browser.tree import TYPED
from rollgym.envs.webshop.browser import MAX_TYPED
from rollgym.envs.webshop.oracle import Oracle
from rollgym.envs.webshop.rule_agent import RuleAgent

_USABLE = re.compile(r'( *)\[(e\d+)\] (\w+)(?: "(.*)")?(?: \(\w+\))*(?:: .*)?')
_GROUP = re.compile(r'( *)radiogroup "(.*)"')


class PageElements(NamedTuple):
    """Interactive elements of a page, by their names in the text environment."""

    clicks: dict[str, str]
    """References by click name: ``buy now``, ``size: large``."""
    options: dict[str, list[str]]
    field: str
    """Reference of the search field; empty without one."""

    def by_reference(self, action: str) -> str:
        """An action of the text environment as one of the browser's."""
        argument = action.partition("[")[2].removesuffix("]")
        if action.startswith("search["):
            return f"type[{self.field}][{argument[:MAX_TYPED]}]"
        return f"click[{self.clicks.get(argument, argument)}]"


def read_page(observation: str) -> PageElements:
    """Interactive elements of a page, and the options with their values."""
    page = PageElements({}, {}, "")
    group, depth = "", 0
    for line in observation.splitlines():
        if (match := _GROUP.fullmatch(line)) is not None:
            group, depth = match[2], len(match[1])
        elif (match := _USABLE.fullmatch(line)) is not None:
            ref, role, name = match[2], match[3], match[4] or ""
            if role in TYPED:
                page = page._replace(field=ref)
            elif role == "radio" and group and len(match[1]) > depth:
                page.options.setdefault(group, []).append(name)
                page.clicks[f"{group}: {name}"] = ref
            else:
                page.clicks[name.lower()] = ref
    return page


class _InBrowser(RuleAgent):
    """Plays the agent it is combined with on the displayed page."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """Choose the next action by the current page."""
        page = read_page(observation)
        page_info = {**info, "clickables": list(page.clicks), "options": page.options}
        return page.by_reference(super().choose(observation, page_info))


class BrowserRule(_InBrowser):
    """The rule in the browser: the first product found, options by string matching."""


class BrowserOracle(_InBrowser, Oracle):
    """The upper bound in the browser; needs ``reveal=True`` as in text."""
