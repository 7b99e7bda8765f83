"""The environment under check: how it is made, started and played."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from rollgym.check.play import Choose, Env, Start, Trace, raising, snapshot, transitions
from rollgym.errors import EnvError, UsageError
from rollgym.registry import import_module, make
from rollgym.seeding import derive_rng
from rollgym.tasks import TaskSet
from rollgym.text import TextFace, text_face

MAX_TURNS = 10_000
"""An episode that goes on for longer, without a turn limit of its own, counts as endless."""


class Subject:
    """An environment by name, and one copy of it that is never reset (as the random agent has)."""

    def __init__(self, name: str, kwargs: Mapping[str, Any], modules: Sequence[str], quick: bool) -> None:
        self.name = name
        self.kwargs = dict(kwargs)
        self.modules = tuple(modules)
        self.quick = quick
        self.random_plays = True
        """False once ``random_action`` said that it cannot choose; then any text is played."""
        self.memory: dict[str, Any] = {}
        """What one rule found out and another can use."""
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
    def face(self) -> TextFace:
        """What the environment says of itself."""
        return text_face(self.copy)

    @property
    def adapted(self) -> bool:
        """True for an environment that does not speak text itself: its author made no promise to us."""
        return not isinstance(self.copy.unwrapped, TextFace)

    @property
    def tasks(self) -> TaskSet | None:
        """The task set, if there is one."""
        return self.face.tasks

    @property
    def turn_limit(self) -> int | None:
        """After how many turns Gymnasium's TimeLimit truncates, if it does."""
        return self.copy.spec.max_episode_steps if self.copy.spec else None

    @contextmanager
    def env(self, **extra: Any) -> Iterator[Env]:
        """A fresh instance, closed afterwards (what closing does wrong is another rule's business)."""
        env = self._make(**extra)
        try:
            yield env
        finally:
            with suppress(Exception):
                env.close()

    def starts(self, count: int, first: int = 0) -> list[Start]:
        """Different starts: one chosen by the seed alone, then numbered tasks of every split."""
        if self.tasks is None:
            return [Start(seed) for seed in range(first, first + count)]
        splits = list(self.tasks.splits.items())
        found = [Start(first)] if first == 0 else []
        for seed in range(first + len(found), first + count):
            split, size = splits[seed % len(splits)]
            found.append(Start(seed, {"task": seed % size, "split": split}))
        return found

    def player(self, seed: int) -> Choose:
        """Random valid actions from a generator of their own."""
        rng = derive_rng("check", seed)
        return lambda observation, info: self._random_action(observation, info, rng)

    def play(self, env: Env, start: Start, turns: int) -> Trace:
        """One episode of random valid actions; the same ones whenever the environment does the same."""
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
            return self.face.random_action(observation, info, rng)
        except UsageError:
            self.random_plays = False
            return "".join(rng.choice(list(string.ascii_lowercase), size=8))
