"""Metadata of environments without text spaces: names of their actions, and their own step limit."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from rollgym.adapters.duck_typed import innermost
from rollgym.adapters.spaces import Names, folded

_NAMES = (
    "get_action_meanings",
    "get_action_names",
    "action_meanings",
    "action_names",
    "ACTION_MEANINGS",
    "ACTION_NAMES",
    "actions",
    "Actions",
    "Action",
    "ACTIONS",
)
"""Attributes that may hold the names of actions: an Enum, a list, a mapping, or a method that returns one."""
_LIMITS = (
    "max_steps",
    "max_episode_steps",
    "_max_episode_steps",
    "max_episode_length",
    "max_turns",
    "horizon",
)
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
