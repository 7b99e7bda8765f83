"""Raw transitions of an environment, comparable traces, and their differences."""

from __future__ import annotations

import string
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import gymnasium as gym
import numpy as np

from rollgym.checks.report import EnvRaised, RuleFailed, RuleSkipped, RuleWarning
from rollgym.core.env import TextInterface, text_interface
from rollgym.core.env_prefixes import find_prefix
from rollgym.core.errors import EnvError, UsageError, one_line
from rollgym.core.registry import import_module, make
from rollgym.core.seeding import derive_rng
from rollgym.core.serialization import jsonable
from rollgym.core.tasks import TaskSet
from rollgym.core.text import shorten

Env = gym.Env[Any, Any]
Choose = Callable[[Any, Mapping[str, Any]], str]
"""Maps (observation, info) to the next action."""
Frame = dict[str, Any]
Trace = list[Frame]
"""An episode as plain JSON values: the start, then one frame for each turn."""

HERE = str(PurePath(__file__).parent)


@dataclass(frozen=True, slots=True)
class Start:
    """The start of an episode: the seed and, with a task set, the task."""

    seed: int
    options: dict[str, Any] | None = None

    def __str__(self) -> str:
        if self.options is None:
            return f"seed {self.seed}"
        return f"task {self.options['task']} of split {self.options['split']!r} with seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Transition:
    """The unmodified result of one call; ``action`` is ``None`` for the reset."""

    turn: int
    action: str | None
    observation: Any
    info: Any
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False

    @property
    def ends(self) -> bool:
        """True where the episode is over."""
        return bool(self.terminated or self.truncated)

    @property
    def call(self) -> str:
        """The call that returned this transition, for messages."""
        return "reset()" if self.action is None else f"step({short(self.action)})"


def short(value: object, length: int = 60) -> str:
    """The repr of a value, cut in the middle."""
    return plain(repr(value), length)


def plain(text: str, length: int = 240) -> str:
    """Untrusted text as one printable line, cut in the middle."""
    line = " ".join(text.split())
    line = line if line.isprintable() else ascii(line)[1:-1]
    return shorten(line, length, middle=True)


def named(error: BaseException) -> str:
    """An error and the line that raised it, for messages."""
    return f"{plain(one_line(error))} at {raised_at(error)}"


@contextmanager
def raising(call: str) -> Iterator[None]:
    """Convert an exception of the environment to `EnvRaised`, with the call and the line that raised it."""
    try:
        yield
    except (RuleFailed, RuleWarning, RuleSkipped, EnvRaised):
        raise
    except (Exception, SystemExit) as error:
        raise EnvRaised(f"{call} raised {named(error)}.", f"{type(error)} {raised_at(error)}") from error


def raised_at(error: BaseException) -> str:
    """``file.py line 12``: the innermost line of the traceback that belongs to a file."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith("<")), frames[-1])
    return f"{PurePath(frame.filename).name} line {frame.lineno}"


def reset(env: Env, start: Start) -> Transition:
    """Reset the environment; raises `EnvRaised` if that fails."""
    with raising(f"reset() from {start}"):
        observation, info = env.reset(seed=start.seed, options=start.options)
    return Transition(0, None, observation, info)


def step(env: Env, action: str, turn: int) -> Transition:
    """Play one action; raises `EnvRaised` if that fails."""
    with raising(f"step({short(action)}) at turn {turn}"):
        observation, reward, terminated, truncated, info = env.step(action)
    return Transition(turn, action, observation, info, reward, terminated, truncated)


def transitions(env: Env, start: Start, choose: Choose, turns: int) -> Iterator[Transition]:
    """One episode, transition by transition, until it ends or ``turns`` were played."""
    now = reset(env, start)
    yield now
    for turn in range(1, turns + 1):
        with raising("choosing an action with random_action()"):
            action = choose(now.observation, now.info)
        now = step(env, action, turn)
        yield now
        if now.ends:
            return


def last_of(episode: Iterator[Transition]) -> Transition:
    """Play to the end and return the last transition."""
    return deque(episode, maxlen=1)[0]


def snapshot(now: Transition) -> Frame:
    """A transition as plain JSON values, sharing nothing with the environment."""
    frame = {"observation": now.observation, "info": now.info}
    if now.action is not None:
        frame = {
            "action": now.action,
            **frame,
            "reward": now.reward,
            "terminated": now.terminated,
            "truncated": now.truncated,
        }
    plain: Frame = jsonable(frame, lenient=True)
    return plain


def replay(trace: Trace) -> Choose:
    """The actions of a trace again, whatever is observed."""
    actions = iter([frame["action"] for frame in trace[1:]])
    return lambda observation, info: str(next(actions))


def difference(first: Trace, second: Trace) -> str | None:
    """The first difference between two traces in words, or ``None``."""
    for turn, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            where = f"at turn {turn}" if turn else "at the start"
            return f"{where}, {frame_difference(left, right)}"
    if len(first) != len(second):
        return f"one episode took {len(first) - 1} turns and the other {len(second) - 1}"
    return None


def frame_difference(left: Frame, right: Frame) -> str:
    """The first difference between two frames that do differ, in words."""
    key = next(key for key in {**left, **right} if left.get(key) != right.get(key))
    name, a, b = key, left.get(key), right.get(key)
    if isinstance(a, dict) and isinstance(b, dict):
        inner = next(k for k in {**a, **b} if a.get(k, "missing") != b.get(k, "missing"))
        name, a, b = f"{key}[{inner!r}]", a.get(inner, "missing"), b.get(inner, "missing")
    a, b = _around(a, b)
    return f"{name} was {short(a)} once and {short(b)} the other time"


def _around(a: Any, b: Any) -> tuple[Any, Any]:
    """Of two long texts, the parts around the first difference."""
    if not (isinstance(a, str) and isinstance(b, str)) or max(len(a), len(b)) <= 50:
        return a, b
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    cut = slice(max(0, at - 15), at + 35)
    return a[cut], b[cut]


MAX_TURNS = 10_000
"""A longer episode of an environment without a turn limit counts as endless."""


class EnvUnderTest:
    """An environment by name, and one instance that is never reset (as the random agent has)."""

    def __init__(self, name: str, kwargs: Mapping[str, Any], modules: Sequence[str], quick: bool) -> None:
        self.name = name
        self.kwargs = dict(kwargs)
        self.modules = tuple(modules)
        self.quick = quick
        self.random_plays = True
        """False once ``random_action`` raised `UsageError`; then random text is played."""
        self.memory: dict[str, Any] = {}
        """Results of one rule that another uses."""
        self._copy: Env | None = None

    @property
    def copy(self) -> Env:
        """The copy that is never reset."""
        if self._copy is None:
            for module in self.modules:
                import_module(module)
            self._copy = self._make()
        return self._copy

    @property
    def interface(self) -> TextInterface:
        """The text interface of the environment."""
        return text_interface(self.copy)

    @property
    def adapted(self) -> bool:
        """True for an environment behind an adapter: its author does not know rollgym's rules."""
        return find_prefix(self.name) is not None or not isinstance(self.copy.unwrapped, TextInterface)

    @property
    def tasks(self) -> TaskSet | None:
        """The task set, or ``None``."""
        return self.interface.tasks

    @property
    def turn_limit(self) -> int | None:
        """The turn limit of Gymnasium's TimeLimit, or ``None``."""
        return self.copy.spec.max_episode_steps if self.copy.spec else None

    @contextmanager
    def env(self, **extra: Any) -> Iterator[Env]:
        """A fresh instance, closed afterwards (errors in close() are checked by another rule)."""
        env = self._make(**extra)
        try:
            yield env
        finally:
            with suppress(Exception):
                env.close()

    def starts(self, count: int, first: int = 0) -> list[Start]:
        """Different starts: one determined by the seed alone, then numbered tasks of every split."""
        if self.tasks is None:
            return [Start(seed) for seed in range(first, first + count)]
        splits = list(self.tasks.splits.items())
        starts = [Start(first)] if first == 0 else []
        for seed in range(first + len(starts), first + count):
            split, size = splits[seed % len(splits)]
            starts.append(Start(seed, {"task": seed % size, "split": split}))
        return starts

    def player(self, seed: int) -> Choose:
        """Random valid actions from a separate generator."""
        rng = derive_rng("check", seed)
        return lambda observation, info: self._random_action(observation, info, rng)

    def play(self, env: Env, start: Start, turns: int) -> Trace:
        """One episode of random valid actions; the same ones whenever the environment behaves the same."""
        return [snapshot(now) for now in transitions(env, start, self.player(start.seed), turns)]

    def close(self) -> None:
        """Close the copy."""
        if self._copy is not None:
            with suppress(Exception):
                self._copy.close()

    def _make(self, **extra: Any) -> Env:
        try:
            return make(self.name, **{**self.kwargs, **extra})
        except EnvError as error:
            with raising("making it"):
                raise error.__cause__ or error from None

    def _random_action(self, observation: Any, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        try:
            return self.interface.random_action(observation, info, rng)
        except UsageError:
            self.random_plays = False
            return "".join(rng.choice(list(string.ascii_lowercase), size=8))
