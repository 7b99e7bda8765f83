"""Text environments: the base class `TextEnv`, its space, its step result and its interface.

A custom environment is a class with two methods, `TextEnv.begin` and `TextEnv.respond`. The base class
implements the rest of Gymnasium's contract: seeds, tasks, flags, spaces, ``info``.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded

from rollgym.core.errors import UsageError
from rollgym.core.messages import ToolSpec
from rollgym.core.serialization import clean_text, jsonable
from rollgym.core.tasks import Task, TaskSet

_SAMPLE_CHARS = np.array(list(string.ascii_letters + string.digits + string.punctuation + " "))
MAX_OBSERVATION_CHARS = 1_000_000
MAX_ACTION_CHARS = 32_768


def bare(action: str) -> str:
    """Strip white space, quotes and backticks around an action, and a full stop after it."""
    edges = " \t\r\n`'\""
    return action.strip(edges).rstrip(edges + ".")


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """Return an argument that is an int of at least ``least``; otherwise raise `UsageError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number, {least} or more, not {value!r}.")
    return value


def check_number(name: str, value: Any) -> float:
    """Return an argument that is an int or a float as a float; otherwise raise `UsageError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} must be a number, not {value!r}.")
    return float(value)


class TextSpace(gym.spaces.Space[str]):
    """Gymnasium space of any text up to a length: newlines, symbols and every script included.

    Example:
        >>> TextSpace(5).contains("up"), TextSpace(5).contains("upwards")
        (True, False)
    """

    def __init__(self, max_chars: int, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=str, seed=seed)
        self.max_chars = max_chars

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed-size array form."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A short string of printable characters; masks do not apply to text."""
        if mask is not None or probability is not None:
            raise ValueError("a text space cannot be sampled with a mask")
        length = int(self.np_random.integers(1, min(self.max_chars, 24) + 1))
        return "".join(self.np_random.choice(_SAMPLE_CHARS, size=length))

    def contains(self, x: Any) -> bool:
        """True for every string within the length."""
        return isinstance(x, str) and len(x) <= self.max_chars

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and other.max_chars == self.max_chars

    def __hash__(self) -> int:
        return hash((TextSpace, self.max_chars))

    def __repr__(self) -> str:
        return f"TextSpace({self.max_chars})"


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one action in an environment.

    Example:
        >>> StepResult("The lock opens.", reward=1.0, terminated=True, success=True)
    """

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    """True where the task is solved for good; separate from the reward."""
    valid: bool = True
    """False for an action that the environment does not accept; it changes no state but counters."""
    info: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The reward of each role, in a `RoleEnv`, which does not read ``reward``; 0 for a role left out."""
    successes: Mapping[str, bool] = field(default_factory=dict)
    """Success by role, in a `RoleEnv` whose roles do not succeed together; otherwise ``success`` counts."""


@runtime_checkable
class TextInterface(Protocol):
    """Attributes of a text environment, besides Gymnasium's, that agents, checks and tables use."""

    instructions: str
    tasks: TaskSet | None
    reward_range: tuple[float, float]
    success_means: str
    palette: Mapping[str, str]

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random valid action, from what an agent can see."""


class TextEnv(gym.Env[str, str]):
    """Base class of multi-turn text environments; override `begin` and `respond`.

    Class attributes describe the environment: ``instructions`` (shown to an agent once, before the first
    observation), ``success_means`` (one sentence), ``reward_range`` (minimum and maximum reward of a single
    turn), ``tasks``, and ``palette`` (rich styles by character, for play in a terminal). An instance may set
    its own in ``__init__``.

    Example:
        >>> class Coin(TextEnv):
        ...     instructions = "Guess how the coin falls. Answer `heads` or `tails`."
        ...     def begin(self, task):
        ...         self.side = str(self.np_random.choice(["heads", "tails"]))
        ...         return "The coin is in the air. Your guess?"
        ...     def respond(self, action):
        ...         right = action.strip().lower() == self.side
        ...         return StepResult(f"It fell {self.side}.", float(right), terminated=True, success=right)
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}
    instructions: str = ""
    success_means: str = "the episode reports success"
    reward_range: tuple[float, float] = (-float("inf"), float("inf"))
    tasks: TaskSet | None = None
    palette: Mapping[str, str] = {}
    tools: tuple[ToolSpec, ...] = ()
    """Tools that an agent may call (see `rollgym.core.tool_env`); empty where actions are plain text."""
    pool_thread: str = "own"
    """Thread that a pool calls it on: its ``own``, ``any`` (for quick environments), or ``main``."""

    def __init__(self, *, render_mode: str | None = None) -> None:
        self.observation_space = TextSpace(MAX_OBSERVATION_CHARS)
        self.action_space = TextSpace(MAX_ACTION_CHARS)
        self.render_mode = render_mode
        if self.tasks is None:
            self.tasks = TaskSet(type(self).__name__)
        self._running = False
        self._observation = ""

    # Methods of a custom environment.

    def begin(self, task: Task) -> str:
        """Start an episode of ``task`` and return the first observation.

        Take the task's content from ``task.rng()`` and everything else random from ``self.np_random``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define begin(task)")

    def respond(self, action: str) -> StepResult:
        """Play one action. It may be any text: answer nonsense with ``valid=False``, never raise."""
        raise NotImplementedError(f"{type(self).__name__} must define respond(action)")

    def facts(self) -> Mapping[str, Any]:
        """Facts about the state that ``info`` includes at reset and after every step. An agent may read them.

        ``actions``, a list of the actions that are valid now, is used by prompts and the random agent.
        """
        return {}

    @property
    def words(self) -> Sequence[str]:
        """Words of rare tasks, for a tokenizer that is built from a sample of episodes."""
        return ()

    def render_text(self) -> str:
        """The state as text for a person; the last observation by default."""
        return self._observation

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random valid action. It may use its arguments and constants, never the running episode."""
        actions = info.get("actions")
        if not actions:
            raise UsageError(
                f"A random agent cannot play {type(self).__name__}: list the valid actions in "
                "info['actions'] (see facts()) or define random_action()."
            )
        return str(actions[int(rng.integers(len(actions)))])

    # Gymnasium's contract.

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode: ``options={"task": 7, "split": "test"}``, or a random training task."""
        super().reset(seed=seed)
        task = self._choose_task(options or {})
        self._running = False
        self._observation = clean_text(self.begin(task))
        self._running = True
        facts = jsonable(self.facts())
        info = {"success": False, "valid": True, "task": task.index, "split": task.split, **facts}
        return self._observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one action; raises `ResetNeeded` once the episode is over."""
        if not self._running:
            raise ResetNeeded("The episode is over or was not started: call reset() before step().")
        text = action if isinstance(action, str) else str(action)
        result = self.respond(clean_text(text[:MAX_ACTION_CHARS]))
        self._observation = clean_text(result.observation)
        self._running = not (result.terminated or result.truncated)
        info = {
            "success": bool(result.success),
            "valid": bool(result.valid),
            **jsonable(self.facts()),
            **jsonable(result.info),
        }
        return self._observation, float(result.reward), bool(result.terminated), bool(result.truncated), info

    def render(self) -> str | None:
        """The state as text with ``render_mode="ansi"``, else nothing."""
        return self.render_text() if self.render_mode == "ansi" else None

    def _choose_task(self, options: dict[str, Any]) -> Task:
        assert self.tasks is not None
        unknown = set(options) - {"task", "split"}
        if unknown:
            raise UsageError(
                f"Unknown reset() option {sorted(unknown)[0]!r}: the options are task and split."
            )
        split = str(options.get("split") or next(iter(self.tasks.splits)))
        index = options.get("task")
        if index is None:
            index = self.np_random.integers(self.tasks.size(split))
        try:
            number = operator.index(index)
        except TypeError:
            raise UsageError(f"The reset() option task must be a whole number, not {index!r}.") from None
        return self.tasks.task(split, number)


def find_text_interface(env: gym.Env[Any, Any]) -> TextInterface | None:
    """The text environment or adapter inside any number of wrappers; ``None`` where there is none."""
    layer: Any = env
    while not isinstance(layer, (TextEnv, TextInterface)):
        if not isinstance(layer, gym.Wrapper):
            return None
        layer = layer.env
    return layer


def text_interface(env: gym.Env[Any, Any]) -> TextInterface:
    """The text environment or adapter inside any number of wrappers; raises `UsageError` if there is none."""
    interface = find_text_interface(env)
    if interface is None:
        raise UsageError(
            f"{type(env.unwrapped).__name__} is not a text environment: use rollgym.make() or adapt()."
        )
    return interface
