"""The rule and the oracle in the browser: they read the page as it is shown, and act by its references."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollgym.envs.webshop.browser import MAX_TYPED
from rollgym.envs.webshop.browser.tree import TYPED
from rollgym.envs.webshop.oracle import Oracle
from rollgym.envs.webshop.rule_agent import RuleAgent

_USABLE = re.compile(r'( *)\[(e\d+)\] (\w+)(?: "(.*)")?(?: \(\w+\))*(?:: .*)?')
_GROUP = re.compile(r'( *)radiogroup "(.*)"')


class Shown(NamedTuple):
    """What a page offers, in the words of the text environment."""

    clicks: dict[str, str]
    """References by what a click is called there: ``buy now``, ``size: large``."""
    options: dict[str, list[str]]
    field: str
    """The reference of the search field; empty where there is none."""

    def by_reference(self, action: str) -> str:
        """An action of the text environment as one of the browser's."""
        said = action.partition("[")[2].removesuffix("]")
        if action.startswith("search["):
            return f"type[{self.field}][{said[:MAX_TYPED]}]"
        return f"click[{self.clicks.get(said, said)}]"


def read_page(observation: str) -> Shown:
    """Interactive elements of a page, and the options with their values."""
    shown = Shown({}, {}, "")
    group, depth = "", 0
    for line in observation.splitlines():
        if (found := _GROUP.fullmatch(line)) is not None:
            group, depth = found[2], len(found[1])
        elif (found := _USABLE.fullmatch(line)) is not None:
            ref, role, name = found[2], found[3], found[4] or ""
            if role in TYPED:
                shown = shown._replace(field=ref)
            elif role == "radio" and group and len(found[1]) > depth:
                shown.options.setdefault(group, []).append(name)
                shown.clicks[f"{group}: {name}"] = ref
            else:
                shown.clicks[name.lower()] = ref
    return shown


class _InBrowser(RuleAgent):
    """Plays by what is shown, as the class behind it would in text."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The next action, by the page one is on."""
        shown = read_page(observation)
        seen = {**info, "clickables": list(shown.clicks), "options": shown.options}
        return shown.by_reference(super().choose(observation, seen))


class BrowserRule(_InBrowser):
    """The rule in the browser: the first product found, options by string matching."""


class BrowserOracle(_InBrowser, Oracle):
    """The upper bound in the browser; needs ``reveal=True`` as in text."""
