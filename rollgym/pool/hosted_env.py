"""Environments in a worker: construction, reuse of idle ones, checks of returned values."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, Generic, Protocol, TypeVar

import gymnasium as gym
import msgspec
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rollgym.core.env import TextEnv, text_interface
from rollgym.core.env_answers import answer_parts, checked_flag, checked_info, checked_reward
from rollgym.core.errors import EnvError, RollgymError, boundary, one_line
from rollgym.core.registry import make
from rollgym.core.role_env import RoleEnv, roles_of
from rollgym.core.serialization import clean_text, jsonable
from rollgym.core.tool_env import tools_of
from rollgym.core.types import EpisodeSpec
from rollgym.pool.base import Reset, Step

Env = gym.Env[str, str]
MAX_IDLE = 256
"""Maximum idle environments per process, over all kinds."""


def kind_of(spec: EpisodeSpec) -> bytes:
    """Return a key: specs with the same key can reuse one environment."""
    return msgspec.json.encode([spec.env_id, spec.env_kwargs], order="sorted")


class HostedEnv:
    """One environment that plays episodes of its kind, one at a time."""

    def __init__(self, spec: EpisodeSpec) -> None:
        with boundary(EnvError, spec.env_id):
            self.env: Env = make(spec.env_id, **spec.env_kwargs)
        self.kind = kind_of(spec)
        self._name = spec.env_id
        self._face = text_interface(self.env)
        self._plain = _info_is_plain(self.env)

    def begin(self, spec: EpisodeSpec) -> Reset:
        """Start the spec's episode from its seed and task."""
        options = None if self._face.tasks is None else {"task": spec.task, "split": spec.split}
        started = time.perf_counter()
        with boundary(EnvError, f"{self._name} raised in reset()"):
            answer: Any = self.env.reset(seed=spec.env_seed, options=options)
        seconds = time.perf_counter() - started
        observation, info = answer_parts(answer, 2, f"{self._name} returned from reset()")
        return Reset(
            observation=self._text(observation),
            info=self._info(info),
            instructions=clean_text(self._face.instructions),
            seconds=seconds,
            tools=tools_of(self._face),
            roles=roles_of(self._face),
        )

    def step(self, action: str) -> Step:
        """Play one action."""
        started = time.perf_counter()
        try:  # not `boundary`: this is the hot path
            answer: Any = self.env.step(action)
        except RollgymError:
            raise
        except Exception as error:
            raise EnvError(f"{self._name} raised in step(): {one_line(error)}") from error
        seconds = time.perf_counter() - started
        observation, reward, terminated, truncated, info = answer_parts(
            answer, 5, f"{self._name} returned from step()"
        )
        return Step(
            observation=self._text(observation),
            reward=checked_reward(reward, self._name),
            terminated=checked_flag(terminated, self._name),
            truncated=checked_flag(truncated, self._name),
            info=self._info(info),
            seconds=seconds,
        )

    def close(self) -> None:
        """Close the environment; errors are ignored since it is discarded."""
        try:
            self.env.close()
        except Exception:
            return

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, str):
            raise EnvError(
                f"{self._name} returned a {type(observation).__name__} as observation; it must be text"
            )
        return clean_text(observation if type(observation) is str else str.__str__(observation))

    def _info(self, info: Any) -> dict[str, Any]:
        result = checked_info(info, self._name)
        return result if self._plain else jsonable(result, lenient=True)


_TRANSPARENT_WRAPPERS = (TimeLimit, OrderEnforcing, PassiveEnvChecker)


def _info_is_plain(env: Env) -> bool:
    """Whether ``info`` comes from `TextEnv` itself, which already converts it to plain JSON."""
    layer: Any = env
    while type(layer) in _TRANSPARENT_WRAPPERS:
        layer = layer.env
    kind = type(layer)
    if isinstance(layer, RoleEnv):
        return kind.step is RoleEnv.step and kind.reset is RoleEnv.reset
    return isinstance(layer, TextEnv) and kind.step is TextEnv.step and kind.reset is TextEnv.reset


class _HasKind(Protocol):
    @property
    def kind(self) -> bytes: ...


K = TypeVar("K", bound=_HasKind)


class IdleEnvs(Generic[K]):
    """Idle environments by kind; evicts the longest idle one above the limit."""

    def __init__(self, room: int = MAX_IDLE) -> None:
        self._room = room
        self._by_kind: dict[bytes, list[K]] = defaultdict(list)
        self._by_age: dict[int, K] = {}

    def take(self, kind: bytes) -> K | None:
        """Remove and return an idle environment of this kind, or ``None``."""
        stack = self._by_kind.get(kind)
        if not stack:
            return None
        kept = stack.pop()
        del self._by_age[id(kept)]
        return kept

    def put(self, kept: K) -> K | None:
        """Store an environment; return the evicted one, if any."""
        self._by_kind[kept.kind].append(kept)
        self._by_age[id(kept)] = kept
        if len(self._by_age) <= self._room:
            return None
        oldest = self._by_age.pop(next(iter(self._by_age)))
        del self._by_kind[oldest.kind][0]  # the oldest overall is the oldest of its kind
        return oldest

    def clear(self) -> list[K]:
        """Remove and return all environments."""
        kept = list(self._by_age.values())
        self._by_age.clear()
        self._by_kind.clear()
        return kept
