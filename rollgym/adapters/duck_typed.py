"""Duck-typed environments: Gymnasium's methods without inheriting from ``gymnasium.Env``.

`ForeignEnv` gives such an object the base class that wrappers and ``gymnasium.make`` require.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from rollgym.core.env import MAX_ACTION_CHARS, MAX_OBSERVATION_CHARS, TextSpace
from rollgym.core.errors import EnvError, UsageError

_FIVE = "(observation, reward, terminated, truncated, info)"


class ForeignEnv(gym.Env[Any, Any]):
    """An object with ``reset`` and ``step``, as a ``gymnasium.Env``.

    Spaces of another library (such as ``gym``, Gymnasium's predecessor) become Gymnasium's own. Without an
    ``observation_space`` an observation is text or JSON; without an ``action_space`` an action is text.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.metadata = dict(getattr(inner, "metadata", None) or {"render_modes": []})
        self.render_mode = getattr(inner, "render_mode", None)
        self.observation_space = _space(inner, "observation_space", MAX_OBSERVATION_CHARS)
        self.action_space = _space(inner, "action_space", MAX_ACTION_CHARS)
        self._accepts = _keywords(inner.reset)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, passing those of the two arguments that the object accepts."""
        super().reset(seed=seed)
        arguments = {"seed": seed, "options": options}
        result = self.inner.reset(**{name: arguments[name] for name in self._accepts})
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvError(f"reset() of {self._name} must return (observation, info), as Gymnasium's does.")
        return result[0], dict(result[1])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play one action."""
        result = self.inner.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            count = f" of {len(result)}" if isinstance(result, tuple) else ""
            got = "a tuple" + count if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise EnvError(f"step() of {self._name} must return {_FIVE}, not {got}.")
        observation, reward, terminated, truncated, info = result
        return observation, float(reward), bool(terminated), bool(truncated), dict(info)

    def render(self) -> Any:
        """Render the object; ``None`` where it has no ``render``."""
        return self.inner.render() if hasattr(self.inner, "render") else None

    def close(self) -> None:
        """Close the object if it has ``close``."""
        if hasattr(self.inner, "close"):
            self.inner.close()

    @property
    def _name(self) -> str:
        return type(self.inner).__name__


def is_foreign(env: Any) -> bool:
    """True for an object with the methods of an environment but not Gymnasium's base class."""
    if isinstance(env, gym.Env | type):
        return False
    return all(callable(getattr(env, name, None)) for name in ("reset", "step"))


def inherited(creator: Callable[..., Any]) -> Callable[..., gym.Env[Any, Any]]:
    """Wrap a constructor so that its environments inherit from ``gymnasium.Env``."""

    def create(**kwargs: Any) -> gym.Env[Any, Any]:
        env = creator(**kwargs)
        if is_foreign(env):
            return ForeignEnv(env)
        if not isinstance(env, gym.Env):
            raise ValueError(f"not an environment: a {type(env).__name__} has no reset() and step()")
        return env

    return create


def innermost(env: gym.Env[Any, Any]) -> Any:
    """The original object inside wrappers and `ForeignEnv`."""
    base = env.unwrapped
    return base.inner if isinstance(base, ForeignEnv) else base


def _keywords(method: Callable[..., Any]) -> tuple[str, ...]:
    """Those of ``seed`` and ``options`` that a reset() accepts."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # written in C
        return ("seed", "options")
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ("seed", "options")
    return tuple(name for name in ("seed", "options") if name in parameters)


def _space(inner: Any, name: str, max_chars: int) -> gym.Space[Any]:
    space = getattr(inner, name, None)
    return TextSpace(max_chars) if space is None else convert(space, f"{type(inner).__name__}.{name}")


def convert(space: Any, name: str) -> gym.Space[Any]:
    """Convert a space of another library that uses Gymnasium's class names to Gymnasium's own class."""
    if isinstance(space, gym.Space):
        return space
    match type(space).__name__:
        case "Discrete":
            return gym.spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
        case "Box":
            dtype = np.dtype(getattr(space, "dtype", None) or np.float32).type
            return gym.spaces.Box(np.asarray(space.low, dtype), np.asarray(space.high, dtype), dtype=dtype)
        case "MultiDiscrete":
            return gym.spaces.MultiDiscrete(np.asarray(space.nvec))
        case "MultiBinary":
            return gym.spaces.MultiBinary(space.n)
    inside = getattr(space, "spaces", None)
    if isinstance(inside, Mapping):
        return gym.spaces.Dict({str(key): convert(sub, f"{name}[{key!r}]") for key, sub in inside.items()})
    if isinstance(inside, list | tuple):
        return gym.spaces.Tuple([convert(sub, f"{name}[{i}]") for i, sub in enumerate(inside)])
    raise UsageError(
        f"{name} is a {type(space).__name__}, which is not a Gymnasium space: use gymnasium.spaces."
    )
