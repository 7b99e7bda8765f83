"""What runs where the environments are: makes them, reuses them, checks what they return."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import gymnasium as gym
import msgspec

from rollgym.errors import EnvError, boundary
from rollgym.pool import Reset, Step
from rollgym.records import clean_text, jsonable
from rollgym.registry import import_module, make
from rollgym.text import TextFace, text_face
from rollgym.types import EpisodeSpec

Env = gym.Env[str, str]


@dataclass(frozen=True, slots=True)
class Lease:
    """An environment in use, or idle until the next episode of its kind."""

    kind: bytes
    spec: EpisodeSpec
    env: Env
    face: TextFace


class EnvHost:
    """Hosts environments by lease. An environment whose episode failed is thrown away, others are reused."""

    def __init__(self, modules: Iterable[str] = ()) -> None:
        for module in modules:
            import_module(module)
        self._leases: dict[int, Lease] = {}
        self._idle: dict[bytes, list[Lease]] = defaultdict(list)

    def open(self, lease: int, spec: EpisodeSpec) -> None:
        """Take an idle environment of this kind, or make one."""
        kind = msgspec.json.encode([spec.env_id, spec.env_kwargs], order="sorted")
        if self._idle[kind]:
            self._leases[lease] = replace(self._idle[kind].pop(), spec=spec)
            return
        with boundary(EnvError, spec.env_id):
            env = make(spec.env_id, **spec.env_kwargs)
        self._leases[lease] = Lease(kind, spec, env, text_face(env))

    def reset(self, lease: int) -> Reset:
        """Start the lease's episode from its spec's seed and task."""
        held = self._leases[lease]
        spec, env, face = held.spec, held.env, held.face
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
        held = self._leases[lease]
        spec, env = held.spec, held.env
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
        held = self._leases.pop(lease, None)
        if held is None:
            return  # cancelled before it was opened
        if healthy:
            self._idle[held.kind].append(held)
        else:
            _close(held.env)

    def close(self) -> None:
        """Close every environment."""
        for held in (*self._leases.values(), *chain.from_iterable(self._idle.values())):
            _close(held.env)
        self._leases.clear()
        self._idle.clear()


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
