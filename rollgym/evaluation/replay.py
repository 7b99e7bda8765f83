"""Replay: recorded actions in fresh environments must reproduce the recorded episodes.

An environment is a function of its arguments, task, seed and actions, all of which an episode records. So a
recorded episode can be replayed without its agent; the first difference is reported.

A replay compares single answers of an environment and needs no agent and no retries, so it opens sessions of
the pool directly instead of using `rollgym.rollout.inflight`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rollgym.core.errors import ResultsError, RollgymError, UsageError
from rollgym.core.files import read_bounded
from rollgym.core.registry import find_spec, is_registered
from rollgym.core.roles import ROLE, ROLE_REWARDS, ROLE_SUCCESS, main_role
from rollgym.core.seeding import derive_rng
from rollgym.core.serialization import MOST_BYTES, decode_episode
from rollgym.core.text import shorten
from rollgym.core.trust import check_recorded_env
from rollgym.core.types import Episode, Outcome, Turn
from rollgym.io.episode_blocks import stored_episodes
from rollgym.io.run_dir import BLOCKS, EPISODES
from rollgym.pool.base import EnvPool, EnvSession, Step
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool
from rollgym.rewards.composite import ENVIRONMENT
from rollgym.utils.async_runner import run_to_end
from rollgym.utils.env_info import package_versions

ABOUT_THE_MACHINE = frozenset({"sandbox", "weaknesses", "forgeable"})
"""Keys of ``info`` that describe where an environment ran, not what happened in it."""
OF_SCORERS = frozenset({"rewards", "reward_details"})
"""Keys of ``info`` that reward workers add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference to the recording."""

    turn: int
    """Counted from 1; 0 is the reset."""
    field: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        where = "at the reset" if self.turn == 0 else f"in turn {self.turn}"
        recorded, now = (shorten(repr(value), 160, middle=True) for value in (self.recorded, self.now))
        return f"{where}, {self.field}: recorded {recorded}, now {now}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of replaying one episode."""

    episode_id: str
    env_id: str
    turns: int
    difference: Difference | None

    @property
    def same(self) -> bool:
        """True if the replay equals the recording."""
        return self.difference is None

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a replay."""

    workers: int = 0
    """Worker processes; 0 runs the environments in this process."""
    modules: tuple[str, ...] = ()
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Replace recorded environment arguments, such as the path of a file."""
    scored: bool = False
    """Set if reward workers may have changed rewards and success, as in training."""
    weak_sandbox: bool = False
    """Accept recorded settings that weaken the sandbox."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise UsageError(f"--workers must be at least 0, got {self.workers}.")


def replay(
    episodes: Sequence[Episode],
    settings: Settings | None = None,
    on_episode: Callable[[Replayed], None] = lambda done: None,
) -> list[Replayed]:
    """Replay every episode in its own environment; returns the results in the same order.

    Recordings can come from others: an episode with an unregistered environment or a weakened sandbox is
    refused before anything runs (see `rollgym.core.trust`).
    """
    settings = settings or Settings()
    for episode in episodes:
        check_recorded_env(
            episode.spec.env_id,
            {**episode.spec.env_kwargs, **dict.fromkeys(settings.env_kwargs)},
            modules=settings.modules,
            weak_sandbox=settings.weak_sandbox,
        )
    return run_to_end(lambda: _replay_all(episodes, settings, on_episode))[0]


async def _replay_all(
    episodes: Sequence[Episode], settings: Settings, on_episode: Callable[[Replayed], None]
) -> list[Replayed]:
    async def one(episode: Episode, pool: EnvPool | None) -> Replayed:
        done = await _replay_one(episode, pool, settings)
        on_episode(done)
        return done

    return await for_each_episode(episodes, settings, one)


T = TypeVar("T")


async def for_each_episode(
    episodes: Sequence[Episode], settings: Settings, one: Callable[[Episode, EnvPool | None], Awaitable[T]]
) -> list[T]:
    """Call ``one`` with every episode and the pool of workers, several at once; ``None`` without workers."""
    pool = LocalPool(settings.workers, modules=settings.modules) if settings.workers else None
    slots = asyncio.Semaphore(max(1, 2 * settings.workers))

    async def limited(episode: Episode) -> T:
        async with slots:
            return await one(episode, pool)

    try:
        return list(await asyncio.gather(*map(limited, episodes)))
    finally:
        if pool is not None:
            await pool.close()


@asynccontextmanager
async def fresh_session(
    episode: Episode, pool: EnvPool | None, settings: Settings
) -> AsyncIterator[EnvSession]:
    """A session with a fresh environment of an episode, in a worker of the pool or in this process."""
    spec = replace(episode.spec, env_kwargs={**episode.spec.env_kwargs, **settings.env_kwargs})
    used = pool or InlinePool(settings.modules)
    try:
        session = await used.open(spec)
        try:
            yield session
        finally:
            session.healthy = False  # the pool does not reuse it, so the next one is fresh
            await session.close()
    finally:
        if pool is None:
            await used.close()


async def _replay_one(episode: Episode, pool: EnvPool | None, settings: Settings) -> Replayed:
    try:
        async with fresh_session(episode, pool, settings) as session:
            difference = await _first_difference(episode, session, settings.scored)
    except RollgymError as error:
        difference = Difference(turn=0, field="environment", recorded="playable", now=str(error))
    spec = episode.spec
    return Replayed(
        episode_id=spec.episode_id, env_id=spec.env_id, turns=episode.length, difference=difference
    )


async def _first_difference(episode: Episode, session: EnvSession, scored: bool) -> Difference | None:
    if episode.outcome.failed and not episode.turns and not episode.final_observation:
        return None  # it failed before anything was recorded
    start = await session.reset()
    tools = [[spec.to_openai() for spec in specs] for specs in (episode.tools, start.tools)]
    found = _compare(
        0, (("instructions", episode.instructions, start.instructions), ("tools", tools[0], tools[1]))
    )
    roles = [[(spec.name, spec.instructions) for spec in specs] for specs in (episode.roles, start.roles)]
    found = found or _compare(0, (("roles", roles[0], roles[1]),))
    found = found or _compare_info(0, episode.reset_info, start.info)
    observation, info = start.observation, start.info
    role = main_role(episode)
    for number, turn in enumerate(episode.turns, 1):
        acts = info.get(ROLE, "") if start.roles else ""
        found = found or _compare(
            number, (("role", turn.role, acts), ("observation", turn.observation, observation))
        )
        if found:
            return found
        try:
            step = await session.step(turn.action)
        except RollgymError as error:
            return Difference(turn=number, field="step", recorded="a step result", now=str(error))
        found = _compare_step(number, turn, step, scored, role)
        observation, info = step.observation, step.info
    return found or _compare_end(episode, observation, info, scored)


def _compare_step(number: int, turn: Turn, step: Step, scored: bool, role: str) -> Difference | None:
    reward, info = (turn.reward, turn.info) if not scored else unscored(turn)
    rewards = (step.info.get(ROLE_REWARDS) or {}) if turn.role else {}
    said = (
        ("reward", reward, rewards.get(role, step.reward)),
        # Reward workers change the reward of the episode's role alone.
        *(
            (f"reward of {name}", turn.rewards[name], rewards.get(name))
            for name in turn.rewards
            if name != role
        ),
        ("terminated", turn.terminated, step.terminated),
        ("truncated", turn.truncated, step.truncated),
    )
    return _compare(number, said) or _compare_info(number, info, step.info)


def unscored(turn: Turn) -> tuple[float, dict[str, Any]]:
    """The environment's own reward and info, without those of reward workers."""
    parts = turn.info.get("rewards")
    if not isinstance(parts, dict) or ENVIRONMENT not in parts:
        return turn.reward, turn.info
    return parts[ENVIRONMENT], {key: value for key, value in turn.info.items() if key not in OF_SCORERS}


def _compare_end(
    episode: Episode, observation: str, info: Mapping[str, Any], scored: bool
) -> Difference | None:
    last = episode.length
    found = _compare(last, (("final_observation", episode.final_observation, observation),))
    if found:
        return found
    said = info.get("success")
    if episode.roles and isinstance(successes := info.get(ROLE_SUCCESS), Mapping):
        said = successes.get(main_role(episode), said)
    success = None if said is None or episode.outcome.failed else bool(said)
    if not (scored and any("reward_details" in turn.info for turn in episode.turns)):
        found = _compare(last, (("success", episode.success, success),))
    return found or _compare(last, (("outcome", episode.outcome.value, _outcome(episode)),))


def _outcome(episode: Episode) -> str:
    """The outcome implied by the episode's turns and limits."""
    turns = episode.turns
    if turns and turns[-1].terminated and not episode.outcome.failed:
        return Outcome.TERMINATED
    if turns and turns[-1].truncated and not episode.outcome.failed:
        return Outcome.TRUNCATED
    if episode.outcome is Outcome.TURN_LIMIT and episode.spec.limits.turns != len(turns):
        return f"{len(turns)} turns of {episode.spec.limits.turns}"
    return episode.outcome


def _compare(turn: int, said: Iterable[tuple[str, Any, Any]]) -> Difference | None:
    for name, recorded, now in said:
        if recorded != now or isinstance(recorded, bool) != isinstance(now, bool):
            return Difference(turn=turn, field=name, recorded=recorded, now=now)
    return None


def _compare_info(turn: int, recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Difference | None:
    keys = sorted((recorded.keys() | now.keys()) - ABOUT_THE_MACHINE)
    return _compare(turn, ((f"info.{key}", recorded.get(key), now.get(key)) for key in keys))


def finished_episodes(folder: Path) -> tuple[list[Episode], bool]:
    """A folder's episodes, and whether its last line is incomplete (the run was killed, or still runs)."""
    trained = [stored.episode for stored in stored_episodes(folder / BLOCKS)]
    path = folder / EPISODES
    if (folder / BLOCKS).exists() and not path.exists():
        return trained, False
    try:
        lines = read_bounded(path, MOST_BYTES).split(b"\n")
    except OSError as error:
        raise ResultsError(f"Cannot read {path}: {error.strerror}.") from None
    episodes: list[Episode] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                episodes.append(decode_episode(line))
        except ResultsError as error:
            if number == len(lines):
                return episodes + trained, True
            raise ResultsError(f"{path}, line {number}: {error}.") from None
    return episodes + trained, False


def choose(episodes: Sequence[Episode], sample: int, seed: int) -> list[Episode]:
    """Sample episodes, reproducibly for the same seed; 0 returns all of them."""
    if sample < 0:
        raise UsageError(f"--sample must be at least 0 (all), got {sample}.")
    if not 0 < sample < len(episodes):
        return list(episodes)
    picks = derive_rng("replay", seed, len(episodes)).permutation(len(episodes))[:sample]
    return [episodes[int(pick)] for pick in sorted(picks)]


def changed_versions(episodes: Iterable[Episode], recorded: Mapping[str, Any] | None) -> list[str]:
    """Environments and packages whose version differs from the recording, one sentence each."""
    found = []
    kinds = sorted({(episode.spec.env_id, episode.spec.env_version) for episode in episodes})
    packages: dict[str, str] = {}
    for env_id, before in kinds:
        if not is_registered(env_id) and env_id.partition(":")[0] not in sys.modules:
            continue  # named only by the file: it is not imported for this check
        number = find_spec(env_id).version
        now = "" if number is None else f"v{number}"
        if now != before:
            found.append(f"{env_id} was recorded as version {before or 'none'} and is {now or 'none'} now")
        packages |= package_versions(env_id)
    for name, version in sorted((recorded or {}).items()):
        if name in packages and packages[name] != version and name not in ("platform", "cpu"):
            found.append(f"{name} was {version} and is {packages[name]} now")
    return found
