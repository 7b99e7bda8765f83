"""Recorded episodes, played again in fresh environments: do the same actions give the same episode?

An environment is a function of its arguments, task, seed and actions, all of which an episode records. So
anybody can play a recorded episode again without its agent; the first difference names what does not hold.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rollgym.errors import ResultsError, RollgymError, UsageError
from rollgym.files import read_bounded
from rollgym.pool import EnvPool, EnvSession, Step
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool
from rollgym.records import MOST_BYTES, decode_episode
from rollgym.registry import find_spec, is_registered
from rollgym.rewards.weighted import ENVIRONMENT
from rollgym.running import run_to_end
from rollgym.seeding import derive_rng
from rollgym.store import EPISODES
from rollgym.trust import check_recorded_env
from rollgym.types import Episode, Outcome, Turn
from rollgym.versions import package_versions

ABOUT_THE_MACHINE = frozenset({"sandbox", "weaknesses"})
"""Keys of ``info`` that say where an environment ran, not what happened in it."""
OF_SCORERS = frozenset({"rewards", "reward_details"})
"""Keys of ``info`` that reward workers add to what the environment said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing that is not as recorded."""

    turn: int
    """Counted from 1; 0 is the reset."""
    field: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        where = "at the reset" if self.turn == 0 else f"in turn {self.turn}"
        return f"{where}, {self.field}: recorded {_short(self.recorded)}, now {_short(self.now)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of playing one episode again."""

    episode_id: str
    env_id: str
    turns: int
    difference: Difference | None

    @property
    def same(self) -> bool:
        """Whether everything was as recorded."""
        return self.difference is None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How episodes are played again."""

    workers: int = 0
    """Worker processes; 0 plays in this one."""
    modules: tuple[str, ...] = ()
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """In place of recorded arguments of environments: where a file lies here, say."""
    scored: bool = False
    """Whether reward workers may have changed rewards and success, as in training."""
    weak_sandbox: bool = False
    """Whether recorded sandbox settings are honored where they weaken the walls."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise UsageError(f"--workers must be at least 0, not {self.workers}.")


def replay(
    episodes: Sequence[Episode],
    settings: Settings | None = None,
    on_episode: Callable[[Replayed], None] = lambda done: None,
) -> list[Replayed]:
    """Play every episode again, each in an environment of its own; the results in the same order.

    Episodes may have been recorded by others: they are refused before anything is played where they name
    an environment that is not registered, or weaken its sandbox (see `rollgym.trust`).
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
    pool = LocalPool(settings.workers, modules=settings.modules) if settings.workers else None
    places = asyncio.Semaphore(max(1, 2 * settings.workers))

    async def one(episode: Episode) -> Replayed:
        async with places:
            done = await _replay_one(episode, pool or InlinePool(settings.modules), settings)
        on_episode(done)
        return done

    try:
        return list(await asyncio.gather(*map(one, episodes)))
    finally:
        if pool is not None:
            await pool.close()


async def _replay_one(episode: Episode, pool: EnvPool, settings: Settings) -> Replayed:
    spec = replace(episode.spec, env_kwargs={**episode.spec.env_kwargs, **settings.env_kwargs})
    try:
        session = await pool.open(spec)
        try:
            difference = await _first_difference(episode, session, settings.scored)
        finally:
            if hasattr(session, "healthy"):
                session.healthy = False  # a pool keeps no environment that is not: the next one is fresh
            await session.close()
    except RollgymError as error:
        difference = Difference(turn=0, field="environment", recorded="it could be played", now=str(error))
    finally:
        if isinstance(pool, InlinePool):
            await pool.close()
    return Replayed(
        episode_id=spec.episode_id, env_id=spec.env_id, turns=episode.length, difference=difference
    )


async def _first_difference(episode: Episode, session: EnvSession, scored: bool) -> Difference | None:
    if episode.outcome.failed and not episode.turns and not episode.final_observation:
        return None  # it failed before there was anything to record
    start = await session.reset()
    found = _compare(0, (("instructions", episode.instructions, start.instructions),))
    found = found or _compare_info(0, episode.reset_info, start.info)
    observation, info = start.observation, start.info
    for number, turn in enumerate(episode.turns, 1):
        found = found or _compare(number, (("observation", turn.observation, observation),))
        if found:
            return found
        try:
            step = await session.step(turn.action)
        except RollgymError as error:
            return Difference(turn=number, field="step", recorded="an answer", now=str(error))
        found = _compare_step(number, turn, step, scored)
        observation, info = step.observation, step.info
    return found or _compare_end(episode, observation, info, scored)


def _compare_step(number: int, turn: Turn, step: Step, scored: bool) -> Difference | None:
    reward, info = (turn.reward, turn.info) if not scored else _unscored(turn)
    said = (
        ("reward", reward, step.reward),
        ("terminated", turn.terminated, step.terminated),
        ("truncated", turn.truncated, step.truncated),
    )
    return _compare(number, said) or _compare_info(number, info, step.info)


def _unscored(turn: Turn) -> tuple[float, dict[str, Any]]:
    """What the environment said, before reward workers did."""
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
    success = None if said is None or episode.outcome.failed else bool(said)
    if not (scored and any("reward_details" in turn.info for turn in episode.turns)):
        found = _compare(last, (("success", episode.success, success),))
    return found or _compare(last, (("outcome", episode.outcome.value, _outcome(episode)),))


def _outcome(episode: Episode) -> str:
    """How the episode must have ended, as far as its turns and limits tell."""
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


def _short(value: Any, most: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def finished_episodes(folder: Path) -> tuple[list[Episode], bool]:
    """A folder's episodes, and whether the last line was cut off (a run that was killed, or goes on)."""
    path = folder / EPISODES
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
                return episodes, True
            raise ResultsError(f"{path}, line {number}: {error}.") from None
    return episodes, False


def choose(episodes: Sequence[Episode], sample: int, seed: int) -> list[Episode]:
    """Some of the episodes, the same ones for the same seed; all of them for 0."""
    if sample < 0:
        raise UsageError(f"--sample must be at least 0 (all), not {sample}.")
    if not 0 < sample < len(episodes):
        return list(episodes)
    picks = derive_rng("replay", seed, len(episodes)).permutation(len(episodes))[:sample]
    return [episodes[int(pick)] for pick in sorted(picks)]


def changed_versions(episodes: Iterable[Episode], recorded: Mapping[str, Any] | None) -> list[str]:
    """What has another version now: environments, then packages, a sentence each."""
    found = []
    kinds = sorted({(episode.spec.env_id, episode.spec.env_version) for episode in episodes})
    packages: dict[str, str] = {}
    for env_id, before in kinds:
        if not is_registered(env_id) and env_id.partition(":")[0] not in sys.modules:
            continue  # code that only the file names: it is not imported to look at
        number = find_spec(env_id).version
        now = "" if number is None else f"v{number}"
        if now != before:
            found.append(f"{env_id} was recorded as version {before or 'none'} and is {now or 'none'} now")
        packages |= package_versions(env_id)
    for name, version in sorted((recorded or {}).items()):
        if name in packages and packages[name] != version and name not in ("platform", "cpu"):
            found.append(f"{name} was {version} and is {packages[name]} now")
    return found
