"""Text adapter for any environment with Gymnasium's methods.

``rollgym.make`` applies it to environments without text spaces; ``docs/gymnasium.md`` lists the text form
of each space.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded

from rollgym.adapters.duck_typed import ForeignEnv, innermost, is_foreign
from rollgym.adapters.env_metadata import action_names, known, own_limit, time_limit, usable
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
from rollgym.core.env import MAX_ACTION_CHARS, MAX_OBSERVATION_CHARS, TextSpace, text_interface
from rollgym.core.errors import UsageError
from rollgym.core.serialization import clean_text, jsonable
from rollgym.core.tasks import TaskSet

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
    env: Any,
    *,
    names: Names | None = None,
    instructions: str | None = None,
    success: Success | None = None,
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
    if not _speaks_text(env):
        return TextAdapter(env, names=names, instructions=instructions, success=success)
    if (names, instructions, success) != (None, None, None):
        raise UsageError(
            f"{type(env.unwrapped).__name__} is already a text environment: adapt() cannot change its names, "
            "instructions or success."
        )
    return env


def _speaks_text(env: gym.Env[Any, Any]) -> bool:
    try:
        text_interface(env)
    except UsageError:
        return False
    return True


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
        observation, self._inner_info = self.env.reset(seed=seed, options=options)
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
            observation, inner_reward, terminated, truncated, self._inner_info = self.env.step(inner)
            self._observe(observation)
            reward = float(inner_reward)
        self._turns += 1
        self._total += reward
        terminated, truncated = bool(terminated), bool(truncated) or self._used_up()
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
        known_limits = [one for one in (self._time_limit, own_limit(self.env)) if one is not None]
        limit = f"An episode has at most {min(known_limits)} turns. " if known_limits else ""
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
