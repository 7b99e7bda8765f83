"""An environment that another program plays: one episode at a time, with a record of every turn.

Used by servers that offer an environment to other programs. The player sees instructions, tools and
observations; rewards and success go to the record only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import gymnasium as gym

from rollgym.core.env import MAX_ACTION_CHARS, text_interface
from rollgym.core.errors import EnvError, RollgymError, UsageError, boundary
from rollgym.core.failures import failure_of, outcome_of
from rollgym.core.messages import ToolSpec
from rollgym.core.registry import make
from rollgym.core.seeding import derive_seed
from rollgym.core.serialization import clean_text
from rollgym.core.tool_env import tools_of
from rollgym.core.tools import text_tool
from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome, Turn
from rollgym.serve.manifest import make_manifest

__all__ = ["EnvPlayer", "ServedEnv", "manifest"]

ACT = text_tool("act", "Play one action in the environment; returns what happens.", "action", "The action.")
"""The tool of an environment without tools."""
_specs_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEnv:
    """The environment that a server offers, and its tasks.

    Args:
        env_id: An id or ``module:Class``.
        kwargs: Arguments of the environment.
        split: The split whose tasks are played, in a seeded order.
        seed: Seed of that order and of the episodes.
    """

    env_id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    split: str = "train"
    seed: int = 0

    def make(self) -> gym.Env[str, str]:
        """Make the environment."""
        return make(self.env_id, **self.kwargs)

    def specs(self) -> Iterator[EpisodeSpec]:
        """Return the starts of all episodes, one after another, without an end; threads may share it."""
        env = self.make()
        try:
            tasks = text_interface(env).tasks
        finally:
            env.close()
        if tasks is not None:
            tasks.size(self.split)  # an unknown split is an error now, not at the first episode
        order = repeat(None) if tasks is None else tasks.order(self.split, self.seed)
        return _SharedIterator(self._spec(number, task) for number, task in enumerate(order))

    def _spec(self, number: int, task: int | None) -> EpisodeSpec:
        return EpisodeSpec(
            episode_id=f"{self.split}-{number}",
            env_id=self.env_id,
            env_kwargs=dict(self.kwargs),
            task=task,
            split=self.split,
            env_seed=derive_seed("served", self.seed, number),
        )


class _SharedIterator(Iterator[EpisodeSpec]):
    """An iterator that several threads may advance: a generator raises when two do so at once."""

    def __init__(self, inner: Iterator[EpisodeSpec]) -> None:
        self._inner, self._alone = inner, threading.Lock()

    def __next__(self) -> EpisodeSpec:
        with self._alone:
            return next(self._inner)


class EnvPlayer:
    """One client's environment. Calls block and must not overlap; each runs in the player's own thread.

    Args:
        served: The environment.
        specs: The starts of episodes; shared by all players of a server.
        record: Takes every finished episode.
    """

    def __init__(
        self, served: ServedEnv, specs: Iterator[EpisodeSpec], record: Callable[[Episode], None]
    ) -> None:
        self._specs, self._record = specs, record
        self._thread = ThreadPoolExecutor(1, "rollgym-served-env")
        self._env = self._thread.submit(served.make).result()
        interface = text_interface(self._env)
        self.instructions = str(interface.instructions)
        self.tools: tuple[ToolSpec, ...] = tools_of(interface) or (ACT,)
        """The tools of the environment, or `ACT`."""
        self._has_tasks = interface.tasks is not None
        self._episode_id: str | None = None
        self._spec: EpisodeSpec | None = None
        self._turns: list[Turn] = []
        self._observation = ""
        self._reset_info: dict[str, Any] = {}
        self._started = 0.0
        self.episodes = 0
        """Number of episodes that were started."""
        self.touch()

    def touch(self) -> None:
        """Note that the client is there."""
        self._used = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request of the client."""
        return time.monotonic() - self._used

    @property
    def playing(self) -> bool:
        """Whether an episode is running."""
        return self._spec is not None

    @property
    def last_turn(self) -> Turn | None:
        """The last turn of the running or last episode, with its reward."""
        return self._turns[-1] if self._turns else None

    @property
    def reset_info(self) -> Mapping[str, Any]:
        """The ``info`` of the last reset."""
        return self._reset_info

    @property
    def state(self) -> dict[str, Any]:
        """The running or last episode's id and number of turns."""
        return {"episode_id": self._episode_id, "step_count": len(self._turns)}

    @property
    def task(self) -> dict[str, Any]:
        """The task and split of the running or last episode, as the environment reports them."""
        return {name: self._reset_info[name] for name in ("task", "split") if name in self._reset_info}

    def start(self, change: Callable[[EpisodeSpec], EpisodeSpec] = lambda spec: spec) -> str:
        """Start the next episode, after ending one that runs; returns its first observation.

        Args:
            change: Changes the start, for a client that asks for a seed or task.
        """
        self._end(Outcome.CANCELLED)
        with _specs_lock:  # players of one server share the generator, each in a separate thread
            following = next(self._specs)
        spec = change(following)
        options: dict[str, Any] = {} if spec.task is None else {"task": spec.task}
        if spec.task is not None or self._has_tasks:
            options["split"] = spec.split
        self._started, self._turns = time.time(), []
        with boundary(EnvError, "The environment could not start an episode"):
            observation, info = self._call(lambda: self._env.reset(seed=spec.env_seed, options=options))
        self.episodes += 1
        self._episode_id = spec.episode_id
        self._spec, self._observation, self._reset_info = spec, clean_text(str(observation)), dict(info)
        return self._observation

    def act(self, action: str) -> tuple[str, bool]:
        """Play an action; returns the observation, and whether the episode is over.

        Raises:
            UsageError: No episode is running.
            EnvError: The environment raised; the episode is over.
        """
        if self._spec is None:
            raise UsageError("No episode is running: start one first.")
        action = clean_text(action[:MAX_ACTION_CHARS])
        try:
            with boundary(EnvError, "The environment failed"):
                observation, reward, terminated, truncated, info = self._call(lambda: self._env.step(action))
        except RollgymError as error:
            self._end(outcome_of(error), failure_of(error))
            raise
        self._turns.append(
            Turn(
                observation=self._observation,
                action=action,
                reward=float(reward),
                terminated=terminated,
                truncated=truncated and not terminated,
                info=info,
            )
        )
        self._observation = clean_text(str(observation))
        if terminated or truncated:
            self._end(Outcome.TERMINATED if terminated else Outcome.TRUNCATED)
            return self._observation, True
        return self._observation, False

    def close(self, outcome: Outcome = Outcome.CANCELLED) -> None:
        """End a running episode with this outcome, and close the environment."""
        self._end(outcome)
        self._thread.submit(self._env.close).result()
        self._thread.shutdown()

    def _call(self, work: Callable[[], Any]) -> Any:
        return self._thread.submit(work).result()

    def _end(self, outcome: Outcome, error: Failure | None = None) -> None:
        """Record the running episode, if any."""
        if self._spec is None:
            return
        spec, self._spec = self._spec, None
        success = self._turns[-1].info.get("success") if self._turns else self._reset_info.get("success")
        self._record(
            Episode(
                spec=spec,
                outcome=outcome,
                turns=tuple(self._turns),
                instructions=self.instructions,
                reset_info=self._reset_info,
                final_observation=self._observation,
                success=None if outcome.failed or success is None else bool(success),
                error=error,
                started=self._started,
                seconds=time.time() - self._started,
            )
        )


def manifest(served: ServedEnv) -> dict[str, Any]:
    """Return the manifest of a run folder with the episodes that clients played."""
    return make_manifest(
        "serve-env",
        env_id=served.env_id,
        env_kwargs=served.kwargs,
        agent={"name": "client", "options": {}},
        split=served.split,
        seed=served.seed,
    )
