"""rollgym's environments for GEM: registered there, they work with ``gem.make`` and ``gem.make_vec``.

import gem
from rollgym.integrations.gem import register

register("rollgym/Sokoban-v0")
env = gem.make("rollgym:Sokoban-v0", split="train")
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rollgym.core.env import text_interface
from rollgym.core.errors import UsageError
from rollgym.core.registry import env_id_of, find_spec, make

__all__ = ["register"]


def register(env: str | Callable[..., Any], gem_id: str | None = None, **kwargs: Any) -> str:
    """Register an environment with GEM; returns its id there.

    Args:
        env: An id, ``PREFIX:NAME``, ``module:Class``, a class, or a function that makes an environment.
        gem_id: The id in GEM. Default: ``rollgym:NAME``.
        kwargs: Arguments of the environment.

    Raises:
        UsageError: GEM is not installed, the id is taken, or the environment is unknown.
    """
    try:
        library = importlib.import_module("gem")
    except ImportError:
        raise UsageError("Registration with GEM needs the package gem-llm: pip install gem-llm") from None
    name = env_id_of(env)
    find_spec(name)
    gem_id = gem_id or f"rollgym:{name.rsplit('/', 1)[-1]}"
    try:
        library.register(gem_id, functools.partial(_make, name), **kwargs)
    except ValueError as error:
        raise UsageError(f"GEM does not register {gem_id}: {error}") from error
    return gem_id


def _make(name: str, *, split: str | None = None, seed: int | None = None, **kwargs: Any) -> Any:
    """Make the environment as GEM's; ``seed`` is what `gem.make_vec` passes to each of several."""
    return _gem_class()(name, kwargs, split, seed)


@functools.cache
def _gem_class() -> Any:
    base: Any = importlib.import_module("gem.core").Env

    class RollgymEnv(base):  # type: ignore[misc]  # the base class is known when GEM is imported
        """A rollgym environment with GEM's methods. The first observation starts with the instructions."""

        def __init__(self, name: str, kwargs: dict[str, Any], split: str | None, seed: int | None) -> None:
            self._name, self._kwargs, self._split = name, kwargs, split
            self._env = make(name, **kwargs)
            self._interface = text_interface(self._env)
            self._rng = np.random.default_rng(seed)
            self._observation, self._info = "", dict[str, Any]()

        def reset(self, seed: int | None = None, **options: Any) -> tuple[str, dict[str, Any]]:
            """Start an episode; the seed decides the task too. GEM's global seeding is not used."""
            seed = int(self._rng.integers(2**31)) if seed is None else seed
            if self._interface.tasks is not None and self._split is not None:
                options.setdefault("split", self._split)
            self._observation, self._info = self._env.reset(seed=seed, options=options)
            return f"{self._interface.instructions}\n\n{self._observation}".strip(), dict(self._info)

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            """Play one action."""
            self._observation, reward, terminated, truncated, self._info = self._env.step(action)
            return self._observation, float(reward), terminated, truncated, dict(self._info)

        def sample_random_action(self) -> str:
            """A random valid action."""
            return self._interface.random_action(self._observation, self._info, self._rng)

        def spawn(self, same_state: bool = False, **kwargs: Any) -> Any:
            """Make another one with the same settings; a copy of a running episode is not supported."""
            if same_state:
                raise NotImplementedError("a rollgym environment cannot copy a running episode")
            return RollgymEnv(self._name, {**self._kwargs, **kwargs}, self._split, None)

    return RollgymEnv
