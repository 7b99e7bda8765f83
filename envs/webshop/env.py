"""WebShop as a text environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, check_whole
from rollgym.core.errors import UsageError
from rollgym.core.seeding import stable_digest
from rollgym.core.tasks import Task, TaskSet
from rollgym.core.tool_env import ToolEnv, tool
from rollgym.core.tools import write_calls
from rollgym.envs.arguments import check_choice
from rollgym.envs.webshop.actions import action_calls
from rollgym.envs.webshop.compact import compact, compact_actions, shop_action, shop_words
from rollgym.envs.webshop.html import html, template_called
from rollgym.envs.webshop.pages import SEPARATOR, Page, shortened, text, text_rich, view
from rollgym.envs.webshop.prompts import prompt
from rollgym.envs.webshop.session import Outcome, Session, act
from rollgym.envs.webshop.shop import Shop, open_shop
from rollgym.envs.webshop.types import Goal

OBSERVATIONS: Mapping[str, Callable[[Page], str]] = {
    "text": text,
    "text_rich": text_rich,
    "url": lambda page: page.url,
    "html": html,
}
"""Observation renderers by name; ``compact`` also reads the shop."""
GOALS = ("synthetic", "human")
SPLITS = ("auto", "original", "disjoint")
SEARCH_HINT = "search[your words]"
"""Entry of ``info["actions"]`` for a search."""


class WebShopEnv(ToolEnv):
    """Find the product that an instruction describes, choose its options, and buy it.

    Observation: the current page, as ``text`` (pieces joined by ``[SEP]``), ``text_rich`` (a line each,
    with buttons marked), ``url``, ``html``, or ``compact`` (a few words, for small models); the instruction
    is on every page but the last.

    Actions: ``search[words]``, and ``click[name]`` for a button, a product or the value of an option.
    In the compact view: ``search``, ``open a``, ``choose red``, ``buy`` and so on, as ``info["actions"]`` has
    them. With ``tools=True`` the tools ``search`` and ``click``; each call counts as a turn. An impossible
    action changes nothing and gives ``valid=False`` with reward 0.

    Reward: 0 until ``click[buy now]``; then between 0 and 1: the share of attributes, options and price that
    the purchase gets right, times how well the product type matches.

    Success: the purchase earned 1.

    Ends: terminated by a purchase, good or not; truncated after ``max_turns``.

    Splits: ``disjoint`` (no product in two splits) for a synthetic shop, ``original`` (goals 0-499 test,
    500-1499 dev, the rest train) for an imported one, unless ``splits`` says otherwise.
    """

    pool_thread = "any"  # its calls are quick
    reward_range = (0.0, 1.0)
    success_means = "a purchase that fulfils the instruction in everything: reward 1"

    def __init__(
        self,
        shop: str = "synthetic",
        *,
        rules: str = "clean",
        observation: str = "text",
        search: str = "auto",
        goals: str = "synthetic",
        splits: str = "auto",
        max_turns: int = 15,
        title_words: int | None = None,
        option_values: int | None = None,
        separator: str | None = None,
        reveal: bool = False,
        tools: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if tools and observation == "compact":
            raise UsageError("tools=true requires another observation than compact, which has other actions.")
        check_choice("observation", observation, (*OBSERVATIONS, "compact"))
        check_choice("kind of goals", goals, GOALS)
        check_choice("kind of splits", splits, SPLITS)
        check_whole("max_turns", max_turns)
        for name, count in (("title_words", title_words), ("option_values", option_values)):
            if count is None:
                continue
            check_whole(name, count)
            if observation not in ("text", "text_rich"):
                raise UsageError(f"{name} requires observation=text or text_rich, not {observation}.")
        if separator is not None and (observation != "text" or not separator):
            raise UsageError("separator requires observation=text, and at least one character.")
        if observation == "html":
            template_called("page.html")  # fails now if a package is missing
        self.shop = open_shop(shop, rules=rules, search=search, goals=goals)
        self.tasks, self._numbers = _tasks(self.shop, goals, splits)
        super().__init__(render_mode=render_mode)
        if not tools:
            self.tools = ()
        self._show = OBSERVATIONS.get(observation) or functools.partial(compact, shop=self.shop)
        if separator is not None:
            self._show = functools.partial(text, separator=separator)
        self._title_words, self._option_values = title_words, option_values
        self._separator = "\n" if observation == "text_rich" else separator or SEPARATOR
        self._max_turns = max_turns
        self._spoken = observation in ("text", "text_rich", "compact")
        self._compact, self._reveal = observation == "compact", reveal
        self.instructions = prompt(
            self.shop.rules, observation, max_turns, separator or SEPARATOR, tools=tools
        )
        self._goal = self.shop.catalog.goal(0)
        self._move(Session("0"))
        self._turns = 0

    def begin(self, task: Task) -> str:
        """Enter the shop with the task's goal."""
        number = int(self._numbers[task.split][task.index])
        self._goal = self.shop.catalog.goal(number)
        self._move(Session(str(number)))
        self._turns = 0
        return self._shown()

    @tool
    def search(self, words: str) -> StepResult:
        """Search for products.

        Args:
            words: What to look for, such as red cotton shirt.
        """
        return self._act(f"search[{' '.join(words.split())}]")

    @tool
    def click(self, name: str) -> StepResult:
        """Click something on the page.

        Args:
            name: A product's id, a button such as buy now, or the value of an option.
        """
        return self._act(f"click[{' '.join(name.split())}]")

    def refuse(self, reason: str) -> StepResult:
        """Count an invalid action as a turn, and show the page again."""
        self._turns += 1
        return StepResult(
            f"{reason}{self._separator}{self._shown()}",
            truncated=self._turns >= self._max_turns,
            valid=False,
        )

    def respond(self, action: str) -> StepResult:
        """Search or click."""
        return super().respond(action) if self.tools else self._act(action)

    def _act(self, action: str) -> StepResult:
        shop_text = shop_action(action, self._page) if self._compact else action
        outcome = act(self.shop, self._goal, self._session, shop_text, self._page)
        self._turns += 1
        if outcome.session is not self._session:
            self._move(outcome.session)
        return self._result(self._observe(outcome), outcome)

    def facts(self) -> Mapping[str, Any]:
        """Available actions: clickable names, whether search is possible, and both as actions."""
        page = self._page
        means = {"means": compact_actions(page)} if self._compact else {}
        return {
            "instruction": self._goal.instruction,
            "page": page.kind,
            "has_search_bar": page.has_search_bar,
            "clickables": page.clickables,
            "options": _options(page),
            "actions": list(means["means"]) if means else self._listed(page),
            "turns_left": self._max_turns - self._turns,
            "purchased": None,
            **means,
            **(self._revealed() if self._reveal else {}),
        }

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random click; where there is a search bar, a search for some words of the instruction."""
        if self._compact:
            return super().random_action(observation, info, rng)
        action = self._random_text(info, rng)
        return write_calls(action_calls(action)) if self.tools else action

    def _listed(self, page: Page) -> list[str]:
        actions = _actions(page)
        return [write_calls(action_calls(action)) for action in actions] if self.tools else actions

    def _random_text(self, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        if info["has_search_bar"]:
            words = str(info["instruction"]).replace(",", " ").replace("[", " ").replace("]", " ").split()
            start = int(rng.integers(max(len(words) - 2, 1)))
            return f"search[{' '.join(words[start : start + int(rng.integers(2, 5))]) or 'anything'}]"
        names = info["clickables"]
        return f"click[{names[int(rng.integers(len(names)))]}]" if names else SEARCH_HINT

    def render_text(self) -> str:
        """The page with its buttons marked, for every kind of observation."""
        return text_rich(self._page)

    @property
    def words(self) -> tuple[str, ...]:
        """Common words of this shop, for a tokenizer of the compact view."""
        return tuple(shop_words(self.shop.catalog)) if self._compact else ()

    @property
    def page(self) -> Page:
        """The page the agent is on."""
        return self._page

    @property
    def goal(self) -> Goal:
        """The goal. For upper bounds and tests only; agents see the instruction."""
        return self._goal

    def _result(self, observation: str, outcome: Outcome) -> StepResult:
        return StepResult(
            observation,
            outcome.reward,
            terminated=outcome.done,
            truncated=not outcome.done and self._turns >= self._max_turns,
            success=outcome.done and outcome.reward == 1,
            valid=outcome.valid,
            info=_purchase(outcome),
        )

    def _move(self, session: Session) -> None:
        self._session, self._page = session, view(self.shop, self._goal, session)

    def _observe(self, outcome: Outcome) -> str:
        observation = self._shown()
        if outcome.valid or not (self._spoken and self.shop.rules.explain):
            return observation
        if self._compact:
            return f"not possible\n{observation}"
        return f"Not possible: {outcome.note}.{self._separator}{observation}"

    def _shown(self) -> str:
        """The page as the agent sees it."""
        if self._title_words is None and self._option_values is None:
            return self._show(self._page)
        return self._show(shortened(self._page, self._title_words, self._option_values))

    def _revealed(self) -> dict[str, Any]:
        """Goal facts for an oracle."""
        goal = self._goal
        title = self.shop.by_asin(goal.asin).title
        return {"goal": {"asin": goal.asin, "title": title, "options": goal.options}}


def _tasks(shop: Shop, goals: str, splits: str) -> tuple[TaskSet, Mapping[str, Any]]:
    """The task set, and the goal numbers behind its splits; ``train`` comes first."""
    catalog = shop.catalog
    if splits == "auto":
        imported = getattr(catalog, "manifest", {}).get("kind") == "imported"
        splits = "original" if imported else "disjoint"
    numbers = catalog.splits[splits]
    sizes = {name: len(numbers[name]) for name in ("train", "dev", "test") if len(numbers[name])}
    if not sizes:
        raise UsageError(f"This shop has no {goals} goals: there is nothing to look for in it.")
    content = stable_digest(catalog.fingerprint, shop.search.name).hex()[:12]
    return TaskSet(f"WebShop {content} {shop.rules.name} {goals} {splits}", sizes), numbers


def _actions(page: Page) -> list[str]:
    clicks = [f"click[{key}]" for key, element in page.targets.items() if element.kind != "submit"]
    return [SEARCH_HINT, *clicks] if page.has_search_bar else clicks


def _options(page: Page) -> dict[str, list[str]]:
    """The options on a product's page: their values by name."""
    options: dict[str, list[str]] = {}
    for element in page.elements:
        if element.kind == "option":
            options.setdefault(element.name, []).append(element.value)
    return options


def _purchase(outcome: Outcome) -> dict[str, Any]:
    """Return the purchase for ``info``: the product, its options and the parts of the reward."""
    if outcome.score is None:
        return {}
    session = outcome.session
    bought = {"asin": session.asin, "options": dict(session.options)}
    return {"purchased": bought, "score": outcome.score.parts()}
