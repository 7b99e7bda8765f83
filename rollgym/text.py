"""Environments that speak text: `TextEnv`, its space, and what everybody may ask of one.

A custom environment is a class with two methods::

    class Coin(TextEnv):
        '''Guess how a coin falls.'''

        instructions = "Guess how the coin falls. Answer `heads` or `tails`."
        reward_range = (0.0, 1.0)

        def begin(self, task: Task) -> str:
            self.side = str(self.np_random.choice(["heads", "tails"]))
            return "The coin is in the air. Your guess?"

        def respond(self, action: str) -> Reply:
            right = action.strip().lower() == self.side
            return Reply(f"It fell {self.side}.", float(right), terminated=True, success=right)

The base class does the rest of Gymnasium's contract: seeds, tasks, flags, spaces, ``info``.
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

from rollgym.errors import UsageError
from rollgym.records import clean_text, jsonable
from rollgym.tasks import Task, TaskSet

_SAMPLE_CHARS = np.array(list(string.ascii_letters + string.digits + string.punctuation + " "))
MAX_OBSERVATION_CHARS = 1_000_000
MAX_ACTION_CHARS = 32_768


def bare(action: str) -> str:
    """An action without the white space, quotes and backticks around it, and without a full stop."""
    edges = " \t\r\n`'\""
    return action.strip(edges).rstrip(edges + ".")


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """Refuse an argument that is no whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number, {least} or more, not {value!r}.")
    return value


class TextSpace(gym.spaces.Space[str]):
    """Any text up to a length: newlines, symbols and every script included."""

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
class Reply:
    """What an environment answers to one action."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    """Whether the task is achieved, now and for good; separate from the reward."""
    valid: bool = True
    """False where the action was not one the environment knows; it then changed nothing it need not."""
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class TextFace(Protocol):
    """What agents, checks and tables may ask of an environment besides Gymnasium's own methods."""

    instructions: str
    tasks: TaskSet | None
    reward_range: tuple[float, float]
    success_means: str
    palette: Mapping[str, str]

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random valid action, from what an agent can see."""


class TextEnv(gym.Env[str, str]):
    """Base of multi-turn text environments; override `begin` and `respond`.

    Class attributes describe the environment: ``instructions`` (what to tell an agent once, before the
    first observation), ``success_means`` (one sentence), ``reward_range`` (least and greatest reward of a
    single turn), ``tasks``, and ``palette`` (rich styles by character, for play in a terminal).
    An instance may set its own in ``__init__``.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}
    instructions: str = ""
    success_means: str = "the episode reports success"
    reward_range: tuple[float, float] = (-float("inf"), float("inf"))
    tasks: TaskSet | None = None
    palette: Mapping[str, str] = {}
    pool_thread: str = "own"
    """Where a pool calls it: on a thread of its ``own``; on ``any``, for quick ones; on the ``main`` one."""

    def __init__(self, *, render_mode: str | None = None) -> None:
        self.observation_space = TextSpace(MAX_OBSERVATION_CHARS)
        self.action_space = TextSpace(MAX_ACTION_CHARS)
        self.render_mode = render_mode
        if self.tasks is None:
            self.tasks = TaskSet(type(self).__name__)
        self._running = False
        self._observation = ""

    # What a custom environment writes.

    def begin(self, task: Task) -> str:
        """Start an episode of ``task`` and return the first observation.

        Take the task's content from ``task.rng()`` and everything else random from ``self.np_random``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define begin(task)")

    def respond(self, action: str) -> Reply:
        """Play one action. It may be any text: answer nonsense with ``valid=False``, never raise."""
        raise NotImplementedError(f"{type(self).__name__} must define respond(action)")

    def facts(self) -> Mapping[str, Any]:
        """What ``info`` says of the state, at reset and after every step. An agent may read it.

        ``actions``, a list of the actions that are valid now, is what prompts and the random agent use.
        """
        return {}

    @property
    def words(self) -> Sequence[str]:
        """Words that tasks may use and playing a few does not show: for a tokenizer made to measure."""
        return ()

    def render_text(self) -> str:
        """The state as text for a person; the last observation by default."""
        return self._observation

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random valid action. It may use its arguments and constants, never the running episode."""
        actions = info.get("actions")
        if not actions:
            raise UsageError(
                f"{type(self).__name__} gives no info['actions'] and defines no random_action, "
                "so a random agent cannot play it."
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
        """Play one action; refused once the episode is over."""
        if not self._running:
            raise ResetNeeded("This episode is over (or never began): call reset() before step().")
        text = action if isinstance(action, str) else str(action)
        reply = self.respond(clean_text(text[:MAX_ACTION_CHARS]))
        self._observation = clean_text(reply.observation)
        self._running = not (reply.terminated or reply.truncated)
        info = {
            "success": bool(reply.success),
            "valid": bool(reply.valid),
            **jsonable(self.facts()),
            **jsonable(reply.info),
        }
        return (
            self._observation,
            float(reply.reward),
            bool(reply.terminated),
            bool(reply.truncated),
            info,
        )

    def render(self) -> str | None:
        """The state as text with ``render_mode="ansi"``, else nothing."""
        return self.render_text() if self.render_mode == "ansi" else None

    def _choose_task(self, options: dict[str, Any]) -> Task:
        assert self.tasks is not None
        unknown = set(options) - {"task", "split"}
        if unknown:
            raise UsageError(
                f"reset() does not know the option {sorted(unknown)[0]!r}; it knows task and split."
            )
        split = str(options.get("split") or next(iter(self.tasks.splits)))
        index = options.get("task")
        if index is None:
            index = self.np_random.integers(self.tasks.size(split))
        try:
            number = operator.index(index)
        except TypeError:
            raise UsageError(f"The option task must be a whole number, not {index!r}.") from None
        return self.tasks.task(split, number)


def text_face(env: gym.Env[Any, Any]) -> TextFace:
    """The text environment (or adapter) inside however many wrappers."""
    layer: Any = env
    while not isinstance(layer, (TextEnv, TextFace)):
        if not isinstance(layer, gym.Wrapper):
            raise UsageError(
                f"{type(env.unwrapped).__name__} does not speak text: use rollgym.make() or adapt()."
            )
        layer = layer.env
    return layer
