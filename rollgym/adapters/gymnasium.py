"""Text adapter for any environment with Gymnasium's methods.

``rollgym.make`` applies it to environments without text spaces; ``docs/gymnasium.md`` lists the text form
of each space.
"""

from __future__ import annotations

import copy
import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import TimeLimit

from rollgym.adapters.duck_typed import ForeignEnv, innermost, is_foreign
from rollgym.adapters.spaces import (
    AnySpace,
    BadAction,
    Names,
    action_text,
    describe,
    folded,
    observation_text,
    parse_action,
    without_addresses,
)
from rollgym.core.env import MAX_ACTION_CHARS, MAX_OBSERVATION_CHARS, TextSpace, find_text_interface
from rollgym.core.env_answers import answer_parts, checked_flag, checked_info, checked_reward
from rollgym.core.errors import UsageError
from rollgym.core.serialization import clean_text, jsonable
from rollgym.core.tasks import TaskSet

_NAMES = (
    "get_action_meanings", "get_action_names", "action_meanings", "action_names", "ACTION_MEANINGS",
    "ACTION_NAMES", "actions", "Actions", "Action", "ACTIONS",
)  # fmt: skip
"""Attributes that may hold the names of actions: an Enum, a list, a mapping, or a method that returns one."""
_LIMITS = (
    "max_steps", "max_episode_steps", "_max_episode_steps", "max_episode_length", "max_turns", "horizon",
)  # fmt: skip
"""Attributes that may hold the step limit of environments that count their own steps."""

_KNOWN: Mapping[str, tuple[tuple[str, ...], str]] = {
    "CliffWalkingEnv": (
        ("up", "right", "down", "left"),
        "It is where you are: row * 12 + column, both counted from 0 at the top left. You start at 36; the "
        "goal is 47. The cliff, 37 to 46, costs 100 and puts you back at the start; other moves cost 1.",
    ),
    "FrozenLakeEnv": (
        ("left", "down", "right", "up"),
        "It is where you are: row * (number of columns) + column, both counted from 0 at the top left.",
    ),
    "TaxiEnv": (
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "It is ((row * 5 + column) * 5 + passenger) * 4 + destination, all counted from 0. Row and column "
        "are the taxi's; passenger and destination are 0 red (row 0, column 0), 1 green (row 0, column 4), "
        "2 yellow (row 4, column 0), 3 blue (row 4, column 3); passenger 4 is in the taxi.",
    ),
    "BlackjackEnv": (
        ("stick", "hit"),
        "Item 1 is the sum of your cards, item 2 the card the dealer shows (1 is an ace), item 3 is 1 if "
        "you hold an ace that counts 11.",
    ),
    "CartPoleEnv": (
        ("left", "right"),
        "It is the cart's position and speed, then the pole's angle (radians) and angular speed.",
    ),
    "MountainCarEnv": (("left", "wait", "right"), "It is the car's position and its speed."),
}
"""Gymnasium's own environments, by class: names of their actions, and the meaning of an observation."""


def known(env: gym.Env[Any, Any]) -> tuple[tuple[str, ...], str]:
    """Names of the actions and the meaning of an observation, for Gymnasium's own environments."""
    kind = type(env.unwrapped)
    ours = kind.__module__.startswith("gymnasium.envs.")
    return _KNOWN.get(kind.__name__, ((), "")) if ours else ((), "")


def action_names(env: gym.Env[Any, Any]) -> Names:
    """The names of the actions of a Discrete space; empty unless the environment names every action."""
    space = env.action_space
    if not isinstance(space, gym.spaces.Discrete):
        return {}
    numbers = range(int(space.start), int(space.start + space.n))
    for layer in _layers(env):
        own = layer if isinstance(layer, gym.Wrapper) else env.unwrapped
        if own.action_space != space:
            break  # a wrapper renumbers the actions: names further in belong to other numbers
        for attribute in _NAMES:
            if names := _complete(_written(layer, attribute, numbers), numbers):
                return names
    words, _ = known(env)
    return dict(enumerate(words)) if env.action_space == env.unwrapped.action_space else {}


def time_limit(env: gym.Env[Any, Any]) -> int | None:
    """The smallest step limit of the TimeLimit wrappers around the environment."""
    limits = [layer._max_episode_steps for layer in _layers(env) if isinstance(layer, TimeLimit)]
    if env.spec is not None and env.spec.max_episode_steps is not None:
        limits.append(env.spec.max_episode_steps)
    return min(limits, default=None)


def own_limit(env: gym.Env[Any, Any]) -> int | None:
    """The step limit that an environment enforces itself, or ``None`` if it declares none.

    Some set it in reset(), so it is read in every episode.
    """
    inner = innermost(env)
    for name in _LIMITS:
        value: Any = None
        with suppress(Exception):  # an attribute may be a property that raises
            value = getattr(inner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _layers(env: gym.Env[Any, Any]) -> Iterator[Any]:
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        yield layer
        layer = layer.env
    yield innermost(env)


def _written(layer: Any, attribute: str, numbers: range) -> dict[int, str]:
    """Names of actions from an attribute; empty where it holds something else."""
    # A wrapper that forwards attributes would return the names of another numbering.
    if isinstance(layer, gym.Wrapper) and not hasattr(type(layer), attribute):
        return {}
    with suppress(Exception):
        value = getattr(layer, attribute, None)
        if isinstance(value, type) and issubclass(value, enum.Enum):
            words = {member.value: member.name.lower().replace("_", " ") for member in value}
            return {int(number): name for number, name in words.items() if isinstance(number, int)}
        if attribute.startswith("get_") and callable(value):
            value = value()
        if isinstance(value, Mapping):
            pairs = value.items()
            # Both directions are in use: {0: "left"} and {"left": 0}.
            return {int(k): v for k, v in pairs} if _texts(value.values()) else {int(v): k for k, v in pairs}
        if isinstance(value, list | tuple) and len(value) == len(numbers) and _texts(value):
            return dict(zip(numbers, value, strict=True))
    return {}


def _texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _complete(names: Mapping[int, str], numbers: range) -> dict[int, str]:
    """Names for all of the numbers, if they are distinct and usable; otherwise none."""
    clean = {number: " ".join(str(names[number]).split()) for number in numbers if number in names}
    distinct = len({folded(name) for name in clean.values()}) == len(numbers)
    return clean if distinct and all(usable(name) for name in clean.values()) else {}


def usable(name: str) -> bool:
    """True for a name that is not empty and cannot be mistaken for a number."""
    return bool(name) and name[0] not in "0123456789+-."


Success: TypeAlias = Callable[[float, bool, dict[str, Any]], bool]
"""Success from (sum of rewards so far, whether the episode terminated, the environment's own info)."""

MAX_LISTED_ACTIONS = 64
"""Maximum number of actions that ``info["actions"]`` lists."""
MAX_INVALID_TURNS = 200
"""Invalid turns after which an episode without a known step limit is truncated."""

_MAX_ABOUT_CHARS = 600
_MAX_EXAMPLE_CHARS = 300
_OURS = ("success", "valid", "actions")


def adapt(
    env: Any, *, names: Names | None = None, instructions: str | None = None, success: Success | None = None
) -> gym.Env[str, str]:
    """Wrap an environment as a text environment; a text environment is returned unchanged.

    Args:
        env: Any Gymnasium environment, with any wrappers, or an object with its ``reset`` and ``step``
            that does not inherit from ``gymnasium.Env``.
        names: Names for the numbers of a Discrete action space, such as ``{0: "left", 1: "right"}``.
        instructions: Instructions for the agent, instead of the generated text.
        success: Decides ``info["success"]`` after every step from the sum of rewards so far, whether
            the episode terminated, and the environment's own info.

    Raises:
        UsageError: ``env`` is not an environment, or the names do not fit its actions.

    Example:
        >>> env = rollgym.adapt(gymnasium.make("CartPole-v1"), names={0: "left", 1: "right"})
        >>> env.reset(seed=0)[1]["actions"]
        ['left', 'right']
    """
    if is_foreign(env):
        env = ForeignEnv(env)
    if not isinstance(env, gym.Env):
        raise UsageError(
            f"adapt() takes an environment with Gymnasium's reset() and step(), not a {type(env).__name__}."
        )
    if find_text_interface(env) is None:
        return TextAdapter(env, names=names, instructions=instructions, success=success)
    if (names, instructions, success) != (None, None, None):
        raise UsageError(
            f"{type(env.unwrapped).__name__} is already a text environment: adapt() cannot change its names, "
            "instructions or success."
        )
    return env


class TextAdapter(gym.Wrapper[str, str, Any, Any], gym.utils.RecordConstructorArgs):
    """Text environment around an environment with other spaces; see `adapt`.

    Observation: the inner observation as text. Actions: text that stands for an action of the inner space.
    Any other text returns the reason and the last observation: the inner environment is not stepped, the
    reward is 0, ``info["valid"]`` is False, and a turn is used up. Reward and ends: the inner environment's.
    In addition, the episode is truncated once valid and invalid turns together reach the inner step limit: a
    TimeLimit's, or the one that the environment enforces itself. Without a known limit, `MAX_INVALID_TURNS`
    invalid turns end it. Success: see `success_means`.
    """

    tasks: TaskSet | None = None
    reward_range: tuple[float, float] = (-float("inf"), float("inf"))
    palette: Mapping[str, str] = {}

    def __init__(
        self,
        env: gym.Env[Any, Any],
        *,
        names: Names | None = None,
        instructions: str | None = None,
        success: Success | None = None,
    ) -> None:
        gym.utils.RecordConstructorArgs.__init__(
            self, names=names, instructions=instructions, success=success
        )
        gym.Wrapper.__init__(self, env)
        self.observation_space = TextSpace(MAX_OBSERVATION_CHARS)
        self.action_space = TextSpace(MAX_ACTION_CHARS)
        self._inner_observations: AnySpace = env.observation_space
        self._inner_actions: AnySpace = env.action_space
        self._names = action_names(env) if names is None else _checked_names(names, env.action_space)
        self._time_limit = time_limit(env)
        self._success = success
        self._threshold = env.spec.reward_threshold if env.spec is not None else None
        self.success_means = _success_means(success, self._threshold)
        self.instructions = instructions if instructions is not None else self._explain()
        self._running = self._closed = False
        self._turns, self._invalid, self._total, self._observation = 0, 0, 0.0, ""
        self._inner_info: dict[str, Any] = {}
        self._name = type(innermost(env)).__name__ if env.spec is None else env.spec.id

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random action from ``rng``; for a Discrete space one that ``info["action_mask"]`` allows."""
        actions = self._listed(info.get("action_mask"))
        if actions:
            return actions[int(rng.integers(len(actions)))]
        return _random_text(self._inner_actions, rng)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode of the inner environment."""
        self._running = False
        answer = self.env.reset(seed=seed, options=options)
        observation, info = answer_parts(answer, 2, f"{self._name} returned from reset()")
        self._inner_info = checked_info(info, self._name)
        self._observe(observation)
        self._turns, self._invalid, self._total, self._running = 0, 0, 0.0, True
        return self._observation, self._info(valid=True, success=False)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one action, or return the reason why the text is invalid."""
        if not self._running:
            raise ResetNeeded("The episode is over or was not started: call reset() before step().")
        text = clean_text((action if isinstance(action, str) else str(action))[:MAX_ACTION_CHARS])
        reward, terminated, truncated, problem = 0.0, False, False, ""
        try:
            inner = parse_action(self._inner_actions, text, self._names)
        except BadAction as error:
            problem = f"Invalid action, nothing happened: {error}\n"
            self._invalid += 1
        else:
            answer = self.env.step(inner)
            where = f"{self._name} returned from step()"
            observation, inner_reward, *ends, info = answer_parts(answer, 5, where)
            self._observe(observation)
            self._inner_info = checked_info(info, self._name)
            reward = checked_reward(inner_reward, self._name)
            terminated, truncated = (checked_flag(end, self._name) for end in ends)
        self._turns += 1
        self._total += reward
        truncated = truncated or self._used_up()
        self._running = not (terminated or truncated)
        info = self._info(valid=not problem, success=self._judge(terminated))
        shown = (problem + self._observation)[:MAX_OBSERVATION_CHARS]
        return shown, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the inner environment, once."""
        if not self._closed:
            self._closed = True
            self.env.close()

    def _used_up(self) -> bool:
        """True once valid and invalid turns together reach the step limit."""
        if self._time_limit is not None and self._turns >= self._time_limit:
            return True
        if not self._invalid:
            return False  # the environment has counted every turn itself
        own = own_limit(self.env)
        if own is not None:
            return self._turns >= own
        return self._time_limit is None and self._invalid >= MAX_INVALID_TURNS

    def _observe(self, observation: Any) -> None:
        text = clean_text(observation_text(self._inner_observations, observation))
        self._observation = text[:MAX_OBSERVATION_CHARS]

    def _info(self, *, valid: bool, success: bool) -> dict[str, Any]:
        inner = jsonable(self._inner_info, lenient=True)
        info = {f"inner_{key}" if key in _OURS else key: value for key, value in inner.items()}
        if isinstance(info.get("episode"), dict):
            # RecordEpisodeStatistics: the time an episode took is not the same twice.
            info["episode"].pop("t", None)
        if actions := self._listed(info.get("action_mask")):
            info["actions"] = actions
        defined = self._success is not None or self._threshold is not None
        return {"success": success if defined else None, "valid": valid, **info}

    def _judge(self, terminated: bool) -> bool:
        if self._success is not None:
            return bool(self._success(self._total, terminated, self._inner_info))
        return self._threshold is not None and not self._running and self._total >= self._threshold

    def _listed(self, mask: Any) -> list[str]:
        """The actions of a small Discrete space, without those that a mask excludes."""
        space = self._inner_actions
        if not isinstance(space, gym.spaces.Discrete):
            return []
        allowed: Sequence[int] = range(int(space.start), int(space.start + space.n))
        if isinstance(mask, list) and len(mask) == space.n and any(mask):
            allowed = [number for number, fine in zip(allowed, mask, strict=True) if fine]
        elif space.n > MAX_LISTED_ACTIONS:
            return []
        return [self._names.get(number, str(number)) for number in allowed]

    def _explain(self) -> str:
        limits = [limit for limit in (self._time_limit, own_limit(self.env)) if limit is not None]
        limit = f"An episode has at most {min(limits)} turns. " if limits else ""
        parts = (
            _about(self.env),
            _observation_help(self.env),
            _action_help(self._inner_actions, self._names),
            f"{limit}An answer that cannot be understood changes nothing but uses up a turn.",
        )
        return without_addresses("\n".join(part for part in parts if part))


def _random_text(space: AnySpace, rng: np.random.Generator) -> str:
    sampler = copy.deepcopy(space)
    sampler.seed(int(rng.integers(2**31)))
    value = sampler.sample()
    rounded = action_text(space, value, brief=True)
    try:
        parse_action(space, rounded)
    except BadAction:
        # Rounding took it out of the space, or it is too large to be written briefly.
        return action_text(space, value)
    return rounded


def _checked_names(names: Names, space: AnySpace) -> Names:
    if not isinstance(space, gym.spaces.Discrete):
        raise UsageError(f"names are for Discrete actions, but the actions here are {describe(space)}.")
    # A spec that went through JSON has text for keys.
    checked = {int(number): " ".join(str(name).split()) for number, name in names.items()}
    if len({folded(name) for name in checked.values()}) < len(checked):
        raise UsageError("names must be distinct, ignoring case.")
    for number, name in checked.items():
        if not space.contains(number):
            raise UsageError(f"names contains {number}, but an action must be {describe(space)}.")
        if not usable(name):
            raise UsageError(f"The action name {name!r} must not be empty or start like a number.")
    return checked


def _success_means(success: Success | None, threshold: float | None) -> str:
    if success is not None:
        written = success.__doc__ if inspect.isfunction(success) or inspect.ismethod(success) else None
        return (written or "the success function given to adapt() says so").strip().split("\n")[0]
    if threshold is not None:
        return f"the rewards of the whole episode add up to at least {threshold:g}, its reward threshold"
    return "not defined: the environment has no reward threshold, and adapt() was given no success"


def _about(env: gym.Env[Any, Any]) -> str:
    """The environment's id, and the first paragraph of its documentation unless that is long."""
    kind = type(innermost(env))
    name = env.spec.id if env.spec is not None else kind.__name__
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    prose = next((text for text in paragraphs if text and not text.startswith("#")), "")
    about = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return f"{name}: {about}" if 0 < len(about) <= _MAX_ABOUT_CHARS else f"This is {name}."


def _observation_help(env: gym.Env[Any, Any]) -> str:
    space = env.observation_space
    note = known(env)[1] if space == env.unwrapped.observation_space else ""
    if isinstance(space, gym.spaces.Dict):
        lines = [f"{key}: <{describe(sub)}>" for key, sub in space.spaces.items()]
    elif isinstance(space, gym.spaces.Tuple):
        lines = [f"item {i}: <{describe(sub)}>" for i, sub in enumerate(space.spaces, 1)]
    else:
        return f"Each observation is {describe(space)}. {note}".strip()
    return "\n".join(["Each observation has these lines:", *lines, note]).strip()


def _action_help(space: AnySpace, names: Names) -> str:
    example = _random_text(space, np.random.default_rng(0))
    if isinstance(space, gym.spaces.Discrete) and names:
        numbered = ", ".join(f"{number} {name}" for number, name in sorted(names.items()))
        example = names.get(int(example), example)
        help_text = f"Answer with one action, by its name or as {describe(space)}: {numbered}."
    else:
        many = isinstance(space, gym.spaces.Box | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary)
        how = " (separated by spaces)" if many and " " in example else ""
        help_text = f"Answer with {describe(space)}{how}."
    return f"{help_text} Example: {example}" if len(example) <= _MAX_EXAMPLE_CHARS else help_text
