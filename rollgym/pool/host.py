"""What runs where the environments are: makes them, reuses them, checks what they return."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import gymnasium as gym
import msgspec

from rollgym.errors import EnvError, boundary
from rollgym.pool import Reset, Step
from rollgym.records import clean_text, jsonable
from rollgym.registry import import_module, make
from rollgym.text import text_face
from rollgym.types import EpisodeSpec

Env = gym.Env[str, str]


class EnvHost:
    """Hosts environments by lease. An environment whose episode failed is thrown away, others are reused."""

    def __init__(self, modules: Iterable[str] = ()) -> None:
        for module in modules:
            import_module(module)
        self._leases: dict[int, tuple[EpisodeSpec, Env]] = {}
        self._idle: dict[bytes, list[Env]] = defaultdict(list)

    def open(self, lease: int, spec: EpisodeSpec) -> None:
        """Take an idle environment of this kind, or make one."""
        idle = self._idle[_kind(spec)]
        with boundary(EnvError, spec.env_id):
            env = idle.pop() if idle else make(spec.env_id, **spec.env_kwargs)
        self._leases[lease] = (spec, env)

    def reset(self, lease: int) -> Reset:
        """Start the lease's episode from its spec's seed and task."""
        spec, env = self._leases[lease]
        face = text_face(env)
        options = None if face.tasks is None else {"task": spec.task, "split": spec.split}
        with boundary(EnvError, f"{spec.env_id} raised in reset()"):
            observation, info = env.reset(seed=spec.env_seed, options=options)
        return Reset(
            observation=_text(observation, spec),
            info=_info(info, spec),
            instructions=clean_text(face.instructions),
        )

    def step(self, lease: int, action: str) -> Step:
        """Play one action in the lease's episode."""
        spec, env = self._leases[lease]
        started = time.perf_counter()
        with boundary(EnvError, f"{spec.env_id} raised in step()"):
            observation, reward, terminated, truncated, info = env.step(action)
        seconds = time.perf_counter() - started
        return Step(
            observation=_text(observation, spec),
            reward=_reward(reward, spec),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=_info(info, spec),
            seconds=seconds,
        )

    def release(self, lease: int, healthy: bool) -> None:
        """End a lease; keep its environment for the next one unless something went wrong with it."""
        spec, env = self._leases.pop(lease, (None, None))
        if spec is None or env is None:
            return  # cancelled before it was opened
        if healthy:
            self._idle[_kind(spec)].append(env)
        else:
            _close(env)

    def close(self) -> None:
        """Close every environment."""
        for _, env in self._leases.values():
            _close(env)
        for idle in self._idle.values():
            for env in idle:
                _close(env)
        self._leases.clear()
        self._idle.clear()


def _kind(spec: EpisodeSpec) -> bytes:
    return msgspec.json.encode([spec.env_id, spec.env_kwargs], order="sorted")


def _close(env: Env) -> None:
    try:
        env.close()
    except Exception:
        # The environment is being thrown away; what it says on the way out changes nothing.
        return


def _text(observation: Any, spec: EpisodeSpec) -> str:
    if not isinstance(observation, str):
        raise EnvError(
            f"{spec.env_id} returned a {type(observation).__name__} as observation; it must be text"
        )
    return clean_text(observation)


def _reward(reward: Any, spec: EpisodeSpec) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError):
        raise EnvError(f"{spec.env_id} returned {reward!r} as reward; it must be a number") from None
    if not math.isfinite(value):
        raise EnvError(f"{spec.env_id} returned the reward {value}; it must be finite")
    return value


def _info(info: Any, spec: EpisodeSpec) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise EnvError(f"{spec.env_id} returned a {type(info).__name__} as info; it must be a dict")
    result: dict[str, Any] = jsonable(info, lenient=True)
    return result
