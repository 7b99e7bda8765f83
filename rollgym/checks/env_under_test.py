"""The environment under test: making, starting and playing it."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from rollgym.checks.rollout import Choose, Env, Start, Trace, raising, snapshot, transitions
from rollgym.core.env import TextInterface, text_interface
from rollgym.core.errors import EnvError, UsageError
from rollgym.core.registry import import_module, make
from rollgym.core.seeding import derive_rng
from rollgym.core.tasks import TaskSet

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
        """True for an environment behind the text adapter: its author does not know rollgym's rules."""
        return not isinstance(self.copy.unwrapped, TextInterface)

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
