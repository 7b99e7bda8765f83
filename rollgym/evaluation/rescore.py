"""Rescoring: rewards of stored episodes computed again, by the environment and by reward functions.

The recorded actions are played in a fresh environment, which gives the environment's own rewards; scorers are
added as in training. The result is a new run folder; the old one is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from rollgym.core.errors import ResultsError, RollgymError, UsageError
from rollgym.core.roles import ROLE_REWARDS, ROLE_SUCCESS, main_role
from rollgym.core.trust import check_recorded_env
from rollgym.core.types import Episode, Outcome, Turn
from rollgym.evaluation.metrics import summarize
from rollgym.evaluation.replay import Settings, for_each_episode, fresh_session, unscored
from rollgym.evaluation.run_results import load_run
from rollgym.evaluation.trajectory_import import recorded_manifest
from rollgym.io.run_dir import RunFolder
from rollgym.pool.base import EnvPool, EnvSession, Step
from rollgym.rewards.composite import CompositeScorer, score_episode
from rollgym.rewards.scoring import Scorer
from rollgym.utils.async_runner import run_to_end

CHANGES = "changes.jsonl"
"""One line per episode of a rescored run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Rewards of one episode, before and after."""

    episode_id: str
    env_id: str
    reward_before: float
    reward_after: float
    success_before: bool | None
    success_after: bool | None
    first_turn: int | None = None
    """The first turn whose reward differs, counted from 1."""
    note: str = ""
    """The first difference to the recording, or the reason for not rescoring the episode."""
    skipped: bool = False
    """True where the episode was not rescored: it is in the new folder as it was recorded."""

    @property
    def changed(self) -> bool:
        """True where a reward or the success differs."""
        return self.first_turn is not None or self.success_before != self.success_after

    def __str__(self) -> str:
        parts = [f"return {self.reward_before:g} -> {self.reward_after:g}"]
        if self.first_turn is not None:
            parts.append(f"from turn {self.first_turn}")
        if self.success_before != self.success_after:
            parts.append(f"success {self.success_before} -> {self.success_after}")
        text = ", ".join(parts) if self.changed else "unchanged"
        return f"{self.episode_id}: {text}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True, slots=True)
class Rescored:
    """The result of rescoring a run."""

    path: Path
    changes: tuple[Change, ...]

    @property
    def changed(self) -> list[Change]:
        """The episodes whose rewards or success differ."""
        return [change for change in self.changes if change.changed]

    def to_json(self) -> dict[str, Any]:
        """Counts, and the episodes that changed or were skipped."""
        return {
            "path": str(self.path),
            "episodes": len(self.changes),
            "changed": [asdict(change) for change in self.changed],
            "skipped": [asdict(change) for change in self.changes if change.skipped],
        }


def rescore(
    run: str | Path,
    out: str | Path,
    *,
    scorer: Scorer | None = None,
    replay: bool = True,
    settings: Settings | None = None,
    on_episode: Callable[[Change], None] = lambda change: None,
) -> Rescored:
    """Compute the rewards of a run's episodes again and write them to a new folder.

    Args:
        run: A run folder.
        out: New or empty folder.
        scorer: Adds its score, as ``rewards`` of a training config does; `make_scorer` of
            `rollgym.rewards.settings` makes one from settings. It is closed at the end.
        replay: Play the recorded actions again for the environment's rewards; otherwise the recorded
            rewards of the environment are kept, and only the scorer runs.
        settings: Workers, modules and arguments of environments, as in a replay.
        on_episode: Called with each result.

    Raises:
        UsageError: ``out`` holds results, or an episode names code that was not trusted.

    Example:
        >>> rescore("runs/demo", "runs/demo-rescored").changed
        []
    """
    settings = settings or Settings()
    source, folder = Path(run), Path(out)
    episodes = list(load_run(source).episodes)
    if not episodes:
        raise ResultsError(f"{source} contains no episodes: nothing to rescore.")
    ids = [episode.spec.episode_id for episode in episodes]
    if len(set(ids)) < len(ids):
        raise UsageError(f"{source} contains an episode twice: rescore the entries of a suite one by one.")
    if replay:
        for episode in episodes:
            kwargs = {**episode.spec.env_kwargs, **dict.fromkeys(settings.env_kwargs)}
            weak = settings.weak_sandbox
            check_recorded_env(episode.spec.env_id, kwargs, modules=settings.modules, weak_sandbox=weak)
    elif scorer is None:
        raise UsageError("Nothing to compute: pass a reward (--reward), or replay the environment.")
    manifest = _manifest(source, folder, episodes, scorer, replay)
    target = RunFolder.create(folder, manifest)
    try:
        work = _Rescoring(scorer, replay, settings)
        results = run_to_end(lambda: work.run(episodes, on_episode))[0]
        for episode, _ in results:
            target.append(episode)
        changes = tuple(change for _, change in results)
        lines = [msgspec.json.encode({**asdict(c), "changed": c.changed}) for c in changes]
        (folder / CHANGES).write_bytes(b"\n".join(lines) + b"\n")
        target.finish(summarize(manifest, [episode for episode, _ in results]))
    finally:
        target.close()
    return Rescored(folder, changes)


def _manifest(
    source: Path, folder: Path, episodes: Sequence[Episode], scorer: Scorer | None, replay: bool
) -> dict[str, Any]:
    spec = episodes[0].spec
    recorded = load_run(source).manifest
    about = {
        "run": str(source),
        "manifest": recorded,
        "replay": replay,
        "rewards": list(scorer.scorers) if isinstance(scorer, CompositeScorer) else [],
    }
    manifest = recorded_manifest(folder, spec.env_id, len(episodes), rescored=about)
    same = ("env", "agent", "split", "seed", "per_task", "success_means", "task_set", "versions")
    kept = {key: recorded[key] for key in same if key in recorded}
    env = {"id": spec.env_id, "version": spec.env_version, "kwargs": spec.env_kwargs}
    return manifest | {"env": env} | (kept if recorded.get("kind", "eval") == "eval" else {})


class _Rescoring:
    """Plays and scores episodes, several at once."""

    def __init__(self, scorer: Scorer | None, replay: bool, settings: Settings) -> None:
        self._scorer, self._replay, self._settings = scorer, replay, settings

    async def run(
        self, episodes: Sequence[Episode], on_episode: Callable[[Change], None]
    ) -> list[tuple[Episode, Change]]:
        async def one(episode: Episode, pool: EnvPool | None) -> tuple[Episode, Change]:
            done = await self._one(episode, pool)
            on_episode(done[1])
            return done

        try:
            return await for_each_episode(episodes, self._settings, one)
        finally:
            close = getattr(self._scorer, "close", None)
            if close is not None:
                await close()

    async def _one(self, episode: Episode, pool: EnvPool | None) -> tuple[Episode, Change]:
        if episode.outcome.failed or not episode.turns:
            return episode, _change(episode, episode, "it ended by an error or has no turns", skipped=True)
        note = ""
        try:
            again = _without_scores(episode)
            if self._replay:
                async with fresh_session(again, pool, self._settings) as session:
                    again, note = await _play(again, session)
            if self._scorer is not None:
                again = await score_episode(self._scorer, again)
        except RollgymError as error:
            return episode, _change(episode, episode, str(error), skipped=True)
        return again, _change(episode, again, note)


async def _play(episode: Episode, session: EnvSession) -> tuple[Episode, str]:
    """The episode with the rewards that the environment gives now, and where it answered differently."""
    start = await session.reset()
    observation, note = start.observation, ""
    turns: list[Turn] = []
    step: Step | None = None
    for number, turn in enumerate(episode.turns, 1):
        if not note and observation != turn.observation:
            note = f"the observation of turn {number} differs"
        step = await session.step(turn.action)
        turns.append(_with_step(episode, turn, step))
        observation = step.observation
        if step.terminated or step.truncated:
            break
    assert step is not None
    if not note and len(turns) < episode.length:
        note = f"the environment ended in turn {len(turns)} of {episode.length}"
    elif not note and (step.terminated or step.truncated) != episode.turns[-1].ends:
        note = "the environment ended, or did not end, unlike the recording"
    outcome = episode.outcome
    if step.terminated or step.truncated:
        outcome = Outcome.TERMINATED if step.terminated else Outcome.TRUNCATED
    elif outcome in (Outcome.TERMINATED, Outcome.TRUNCATED):
        outcome = Outcome.TURN_LIMIT
    again = replace(
        episode,
        turns=tuple(turns),
        outcome=outcome,
        final_observation=observation,
        success=_success(episode, step),
    )
    return again, note


def _with_step(episode: Episode, turn: Turn, step: Step) -> Turn:
    rewards = (step.info.get(ROLE_REWARDS) or {}) if turn.role else {}
    reward = rewards.get(main_role(episode), step.reward) if turn.role else step.reward
    return replace(
        turn,
        reward=float(reward),
        rewards={name: float(value) for name, value in rewards.items()},
        terminated=step.terminated,
        truncated=step.truncated,
        info=step.info,
    )


def _success(episode: Episode, step: Step) -> bool | None:
    success = step.info.get("success")
    if episode.roles and isinstance(successes := step.info.get(ROLE_SUCCESS), dict):
        success = successes.get(main_role(episode), success)
    return None if success is None else bool(success)


def _without_scores(episode: Episode) -> Episode:
    """The episode with the environment's own rewards, as recorded."""
    turns = []
    for turn in episode.turns:
        reward, info = unscored(turn)
        turns.append(replace(turn, reward=reward, info=info))
    return replace(episode, turns=tuple(turns))


def _change(before: Episode, after: Episode, note: str, *, skipped: bool = False) -> Change:
    old, new = ([turn.reward for turn in episode.turns] for episode in (before, after))
    differing = (n for n, pair in enumerate(zip(old, new, strict=False), 1) if pair[0] != pair[1])
    first = next(differing, min(len(old), len(new)) + 1 if len(old) != len(new) else None)
    return Change(
        episode_id=before.spec.episode_id,
        env_id=before.spec.env_id,
        reward_before=before.total_reward,
        reward_after=after.total_reward,
        success_before=before.success,
        success_after=after.success,
        first_turn=first,
        note=note,
        skipped=skipped,
    )
