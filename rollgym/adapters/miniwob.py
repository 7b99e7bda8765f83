"""Web pages of MiniWoB++ as environments: ``miniwob:TASK``, such as ``miniwob:click-button``.

Only the pages of the package are used, in Chromium driven by Playwright. Its own Gymnasium environments,
which need Selenium and a ChromeDriver, are not imported.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np

from rollgym.adapters.miniwob_page import (
    ACTION_MS,
    ARROWS,
    FIELDS,
    KEYS,
    MiniwobTab,
    Problem,
    Seen,
    open_miniwob,
)
from rollgym.adapters.prefixes import MINIWOB
from rollgym.adapters.task_sets import draw, make_task_set
from rollgym.browser.find import find_chromium
from rollgym.browser.host import Seat
from rollgym.browser.tree import LISTS, Tree
from rollgym.core.env import StepResult, TextEnv, bare, check_whole
from rollgym.core.errors import EnvError, UnknownName, UsageError
from rollgym.core.seeding import derive_seed
from rollgym.core.serialization import clean_text
from rollgym.core.tasks import Task, TaskSet

MAX_TURNS = 30
"""Default number of actions after which an episode is truncated."""
MAX_TYPED = 200
"""Characters of one ``type`` action."""
TEXT_HINT = "your text"
PROBES, LEAST = 100, 2
"""Seeds that show in how many ways a page starts, and the different texts that each split must have among
them: with fewer, splits are only kept apart by seeds."""
_MAX_SEED = 2**31 - 1
_CLICK = re.compile(r"click\s*\[\s*(e\d+)\s*\]", re.IGNORECASE)
_TYPE = re.compile(r"type\s*\[\s*(e\d+)\s*\]\s*\[(.*)\]", re.IGNORECASE | re.DOTALL)
_SELECT = re.compile(r"select\s*\[\s*(e\d+)\s*\]((?:\s*\[[^\[\]]*\])+)", re.IGNORECASE)
_PRESS = re.compile(r"press\s*\[\s*(\w+)\s*\]", re.IGNORECASE)
_OPTION = re.compile(r"\[([^\[\]]*)\]")
_UNTYPABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_KEYS = {key.lower(): key for key in (*KEYS, *ARROWS)}

_few_starts: dict[str, bool] = {}
"""By task set and splits: whether the seed alone names a task, since most seeds give the same text."""


class MiniwobEnv(TextEnv):
    """A task of MiniWoB++ in a web browser.

    Observation: the instruction, then the accessibility tree of the page: a line for each text, and for each
    thing that can be used a line such as ``[e3] button "Submit"``. References are renumbered in every
    observation.

    Actions: ``click[e3]``; ``type[e1][text]``, which replaces the text of a field; ``select[e2][option]``,
    with more options in more brackets; ``press[Enter]``. An impossible action changes nothing but the number
    of turns left, and gives ``valid=False``.

    Reward: the page's, -1 to 1, without its discount for time; 0 until the end.

    Success: the page ends the episode with a reward above 0.

    Ends: terminated by the page; truncated after ``max_turns`` actions. The page's own time limit is off:
    its clock moves by one second with every action.

    Splits: seeds; no two splits share the text of a page, unless the task has few texts.

    A browser that crashes, is killed or does not answer raises `BrowserLost`, and the next episode starts a
    new one.
    """

    pool_thread = "own"
    tasks: TaskSet
    success_means = "the page ends the episode with a reward above 0"
    reward_range = (-1.0, 1.0)

    def __init__(
        self,
        *,
        inner_id: str,
        max_turns: int = MAX_TURNS,
        splits: Mapping[str, int] | None = None,
        chromium: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Open the task ``inner_id``; ``chromium`` is the program to start, if not the one on the path."""
        self._version = MINIWOB.require()
        self._folder = Path(str(distribution(MINIWOB.package).locate_file("miniwob/html")))
        known = sorted(page.stem for page in (self._folder / "miniwob").glob("*.html"))
        if not known:
            raise UsageError(
                f"miniwob {self._version} has no pages in {self._folder}: pip install --force-reinstall "
                f"'{MINIWOB.requirement}'"
            )
        if inner_id not in known:
            raise UnknownName("task of MiniWoB", inner_id, known)
        self._seat: Seat[MiniwobTab] = Seat(find_chromium(chromium, what="MiniWoB"))
        self._name, self._max_turns = inner_id, check_whole("max_turns", max_turns)
        self.instructions = _instructions(max_turns)
        self.tasks = make_task_set(f"miniwob:{inner_id}", self._version, {}, splits)
        super().__init__(render_mode=render_mode)
        self._problem = Problem(0, "", "")
        self._tree = Tree("", {})
        self._turns = 0
        self._finalizer = weakref.finalize(self, Seat.abandon, self._seat)

    def begin(self, task: Task) -> str:
        """Load the page with the task's seed in a new browser context."""
        self._turns = 0
        seed = self._seed_of(task)
        tab = self._open(seed)

        async def start() -> tuple[Problem, Seen]:
            return await tab.start(seed), await tab.look()

        self._problem, seen = self._seat.call(start)
        if seen.done:
            raise EnvError(f"miniwob:{self._name} is over before the first action (seed {seed}).")
        self._tree = seen.tree
        return self._text()

    def respond(self, action: str) -> StepResult:
        """Click, type, select or press a key."""
        text = bare(action)
        self._turns += 1
        if (match := _CLICK.fullmatch(text)) is not None:
            return self._click(match[1].lower())
        if (match := _TYPE.fullmatch(text)) is not None:
            return self._type(match[1].lower(), match[2])
        if (match := _SELECT.fullmatch(text)) is not None:
            return self._select(match[1].lower(), [name.strip() for name in _OPTION.findall(match[2])])
        if (match := _PRESS.fullmatch(text)) is not None:
            return self._press(match[1])
        return self._refuse("an action is click[e1], type[e1][text], select[e1][option] or press[Enter]")

    def facts(self) -> Mapping[str, Any]:
        """The instruction, the available actions and the turns left."""
        return {
            "instruction": self._problem.instruction,
            "actions": self._actions(),
            "turns_left": self._max_turns - self._turns,
        }

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random action of ``info["actions"]``, with a word or quoted text of the instruction to type."""
        actions = info["actions"]
        if not actions:
            return "press[Enter]"
        action = str(actions[int(rng.integers(len(actions)))])
        if TEXT_HINT not in action:
            return action
        instruction = str(info["instruction"])
        words = re.findall(r'"([^"\[\]]+)"', instruction) or re.findall(r"[\w.@-]+", instruction) or ["1"]
        return action.replace(TEXT_HINT, str(words[int(rng.integers(len(words)))]))

    def render_text(self) -> str:
        """The page as the agent sees it."""
        return self._text()

    def screenshot(self) -> bytes:
        """The page as a PNG image."""
        return self._seat.call(self._seat.require_tab().page.screenshot)

    def close(self) -> None:
        """Close the tab; the last environment of a process closes the browser."""
        self._seat.close()
        super().close()

    # Tasks.

    def _open(self, seed: int) -> MiniwobTab:
        return self._seat.open(lambda browser: open_miniwob(browser, self._folder, self._name, seed))

    def _seed_of(self, task: Task) -> int:
        """The page's seed of a task; it may take several draws to find one of the task's split."""
        if len(self.tasks.splits) == 1 or self._has_few_starts():
            return _draw_seed(task.rng())
        tab = self._open(0)

        def generate(rng: np.random.Generator) -> Problem:
            seed = _draw_seed(rng)
            return self._seat.call(lambda: tab.start(seed))

        return draw(self.tasks, task, generate, key=_key).seed

    def _has_few_starts(self) -> bool:
        key = " ".join([self.tasks.name, *self.tasks.splits])
        if key not in _few_starts:
            tab = self._open(0)

            async def probe() -> set[str]:
                seeds = [derive_seed("miniwob probe", number) % _MAX_SEED for number in range(PROBES)]
                return {_key(await tab.start(seed)) for seed in seeds}

            homes = Counter(map(self.tasks.home, self._seat.call(probe)))
            _few_starts[key] = any(homes[split] < LEAST for split in self.tasks.splits)
        return _few_starts[key]

    # Effects of actions.

    def _click(self, ref: str) -> StepResult:
        target = self._tree.targets.get(ref)
        if target is None:
            return self._refuse(f"there is no [{ref}] on this page")
        if target.options:
            return self._refuse(f"[{ref}] is a list: use select[{ref}][{target.options[0]}]")
        tab = self._seat.require_tab()
        return self._reply(self._seat.call(lambda: tab.click(target.ref)))

    def _type(self, ref: str, text: str) -> StepResult:
        target = self._tree.targets.get(ref)
        if target is None or target.role not in FIELDS:
            return self._refuse(f"there is no field [{ref}] to type into on this page")
        text = _UNTYPABLE.sub(" ", text)
        if len(text) > MAX_TYPED:
            return self._refuse(f"at most {MAX_TYPED} characters can be typed at once")
        tab = self._seat.require_tab()
        return self._reply(self._seat.call(lambda: tab.type(target.ref, text)))

    def _select(self, ref: str, options: list[str]) -> StepResult:
        target = self._tree.targets.get(ref)
        if target is None or target.role not in LISTS or not target.options:
            return self._refuse(f"there is no list [{ref}] to select from on this page")
        for option in options:
            if option not in target.options:
                return self._refuse(f"[{ref}] has no option {option!r}")
        tab = self._seat.require_tab()
        return self._reply(self._seat.call(lambda: tab.select(target.ref, options)))

    def _press(self, name: str) -> StepResult:
        key = _KEYS.get(name.lower())
        if key is None:
            return self._refuse(f"press takes one of {', '.join(sorted(_KEYS.values()))}")
        tab = self._seat.require_tab()
        return self._reply(self._seat.call(lambda: tab.press(key)))

    def _reply(self, seen: Seen) -> StepResult:
        self._tree = seen.tree
        if not -1.0 <= seen.reward <= 1.0:
            raise EnvError(f"miniwob:{self._name} gave the reward {seen.reward}, outside -1 to 1.")
        return StepResult(
            self._text(),
            seen.reward,
            terminated=seen.done,
            truncated=not seen.done and self._turns >= self._max_turns,
            success=seen.done and seen.reward > 0,
        )

    def _refuse(self, reason: str) -> StepResult:
        return StepResult(
            f"Not possible: {reason}.\n{self._text()}",
            valid=False,
            truncated=self._turns >= self._max_turns,
        )

    def _text(self) -> str:
        return clean_text(f"Instruction: {self._problem.instruction}\n{self._tree.text}")

    def _actions(self) -> list[str]:
        actions: list[str] = []
        for ref, target in self._tree.targets.items():
            if target.role in LISTS and target.options:
                actions += [f"select[{ref}][{option}]" for option in dict.fromkeys(target.options)]
            elif target.role in FIELDS:
                actions += [f"click[{ref}]", f"type[{ref}][{TEXT_HINT}]"]
            else:
                actions.append(f"click[{ref}]")
        return actions


def _draw_seed(rng: np.random.Generator) -> int:
    return int(rng.integers(_MAX_SEED))


def _key(problem: Problem) -> str:
    return f"{problem.instruction}\n{problem.text}"


def _instructions(max_turns: int) -> str:
    return (
        "You use a small web page in a web browser. Do what the instruction says.\n"
        'You see the page as text. What you can use has a reference, as in [e3] button "Submit"; references '
        "change with every observation.\n"
        "Answer with one action per turn, nothing else:\n"
        "- click[REF] clicks an element. Example: click[e3]\n"
        "- type[REF][text] replaces the text of a field. Example: type[e1][Anna]\n"
        "- select[REF][option] selects an option of a list; more options follow in more brackets. Example: "
        "select[e2][Norway]\n"
        f"- press[KEY] presses a key where the focus is: {', '.join(sorted((*KEYS, *ARROWS)))}. Example: "
        "press[Enter]\n"
        f"You have {max_turns} turns; {ACTION_MS // 1000} second passes on the page with each. The page ends "
        "the episode with a reward from -1 to 1, positive when the task is done."
    )
