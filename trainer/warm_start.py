"""Learning from others: supervised training on recorded or expert episodes, through the same token path."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollgym.agent import AgentSetup, make_agent
from rollgym.errors import UsageError
from rollgym.evalplan import Request, plan
from rollgym.run_warnings import long_demonstrations
from rollgym.scheduler.episode import play_episode
from rollgym.scheduler.scheduler import Scheduler
from rollgym.seeding import derive_rng, derive_seed
from rollgym.store import load_run
from rollgym.trainer.batch import Batch, make_batch
from rollgym.trainer.config import EnvChoice, TrainConfig, WarmStart
from rollgym.trainer.mistakes import ErringAgent
from rollgym.trainer.retell import retell
from rollgym.trainer.rows import TokenEpisode, token_episode
from rollgym.trainer.run import Run
from rollgym.trainer.setup import Parts
from rollgym.types import Episode, EpisodeSpec


async def warm_start(parts: Parts, run: Run, scheduler: Scheduler) -> None:
    """Make the policy imitate; the run's learner and engine then go on from there."""
    config = parts.config
    settings = config.warm_start
    assert settings is not None
    shown = await demonstrations(parts, settings)
    tokens = [token_episode(retell(one.episode, parts.agent)) for one in shown]
    replies = [int(count) for told in tokens for count in told.per_turn]
    for warning in long_demonstrations(replies, config.agent.max_tokens):
        run.console.note(f"warning: {warning.sentence}")
        run.warnings.append(warning)
    weights = [np.repeat(one.weights, told.per_turn) for one, told in zip(shown, tokens, strict=True)]
    check = _validation(config, settings, shown) if settings.until_success is not None else []
    batches = -(-len(tokens) // settings.batch)
    total = settings.epochs * batches
    parts_of = _parts(len(tokens), settings, config.seed)
    number = 0
    await parts.compute(parts.start_imitation, settings.learning_rate, total)
    while lessons := list(itertools.islice(parts_of, settings.check_every or batches)):
        losses: list[float] = []
        async with parts.handover():
            for part in lessons:
                batch = _batch([tokens[i] for i in part], [weights[i] for i in part])
                losses.append((await parts.compute(parts.learner.update, batch))["policy_loss"])
        number += len(lessons)
        run.progress.version += 1
        async with scheduler.updating(run.progress.version):
            await parts.renew(run.progress.version)
        success = await _succeeds(scheduler, check)
        note = f"imitation, batch {number} of {total}: loss {np.mean(losses):.3f}"
        run.console.note(note if success is None else f"{note}, success {success:.3f}")
        if success is not None and success >= (settings.until_success or 0):
            break
    await parts.compute(parts.end_imitation)


def _parts(count: int, settings: WarmStart, seed: int) -> Iterator[list[int]]:
    """Which demonstrations each batch is of: all of them in each epoch, in an order of its own."""
    for epoch in range(settings.epochs):
        order = derive_rng("imitation", seed, epoch).permutation(count).tolist()
        for first in range(0, count, settings.batch):
            yield order[first : first + settings.batch]


@dataclass(frozen=True, slots=True)
class Shown:
    """An episode to imitate."""

    episode: Episode
    erred: Sequence[bool] = ()
    """For each turn, whether it is one that is not to be imitated; empty where all are."""

    @property
    def weights(self) -> NDArray[np.float64]:
        """What each turn counts."""
        turns = len(self.episode.turns)
        return 1.0 - np.array(self.erred[:turns], dtype=float) if self.erred else np.ones(turns)


async def demonstrations(parts: Parts, settings: WarmStart) -> list[Shown]:
    """Episodes to imitate: those of a results folder that succeeded, or played now."""
    if settings.run is not None:
        _, episodes = load_run(Path(settings.run))
        ours = {(env.id, split) for env in parts.config.envs for split in (env.split, "")}
        good = [
            episode
            for episode in episodes
            if (episode.success or not settings.only_successful)
            and episode.turns
            and not episode.outcome.failed
            and (episode.spec.env_id, episode.spec.split) in ours
        ]
        if not good:
            raise UsageError(
                f"No episode in {settings.run} succeeded on a task of envs and of its training split: there "
                "is nothing to imitate. Record some with `rollgym eval --split train`."
            )
        return [Shown(episode) for episode in good[: settings.episodes]]
    shares = _shares(parts.config.envs, settings.episodes)
    played: list[Shown] = []
    for number, env in enumerate(parts.config.envs):
        played += await _played(parts, settings, env, number, shares[number])
    shown = [
        one
        for one in played
        if not one.episode.outcome.failed
        and (one.episode.success is not False or not settings.only_successful)
        and one.weights.any()
    ]
    if not shown:
        error = next((one.episode.error for one in played if one.episode.error), None)
        why = f" (the first error: {error.message})" if error else ""
        raise UsageError(f"Agent {settings.agent!r} did not succeed once: there is nothing to imitate{why}.")
    return shown


async def _played(parts: Parts, settings: WarmStart, env: EnvChoice, number: int, count: int) -> list[Shown]:
    setup = AgentSetup(env_id=env.id, env_kwargs=env.kwargs)
    agent = make_agent(settings.agent, setup)
    if settings.mistakes:
        agent = ErringAgent(agent, make_agent("random", setup), settings.mistakes)
    specs = _specs(parts.config, env, "imitation", number, count)
    busy = asyncio.Semaphore(parts.config.rollout.max_in_flight)

    async def play(spec: EpisodeSpec) -> Episode:
        async with busy:
            return await play_episode(spec, parts.pool, agent)

    try:
        episodes = await asyncio.gather(*(play(spec) for spec in specs))
    finally:
        await agent.close()
    if settings.imitate_mistakes or not isinstance(agent, ErringAgent):
        return [Shown(episode) for episode in episodes]
    return [Shown(episode, agent.erred(episode.spec.episode_id)) for episode in episodes]


def _specs(
    config: TrainConfig, env: EnvChoice, purpose: str, number: int, count: int
) -> tuple[EpisodeSpec, ...]:
    request = Request(
        env_id=env.id,
        agent="lm",
        episodes=count,
        split=env.split,
        seed=derive_seed(purpose, config.seed, number) % 2**31,
        env_kwargs=env.kwargs,
        limits=env.limits,
    )
    return plan(request).specs


def _validation(
    config: TrainConfig, settings: WarmStart, shown: Sequence[Shown]
) -> list[tuple[EpisodeSpec, ...]]:
    """Training tasks that were not shown (never held-out ones), to see when enough has been imitated."""
    shares = _shares(config.envs, settings.validation_episodes)
    found = []
    for number, env in enumerate(config.envs):
        tasks = {one.episode.spec.task for one in shown if one.episode.spec.env_id == env.id} - {None}
        specs = _specs(config, env, "imitation check", number, shares[number] + len(tasks))
        found.append(tuple(spec for spec in specs if spec.task not in tasks)[: shares[number]])
    return found


async def _succeeds(scheduler: Scheduler, check: Sequence[Sequence[EpisodeSpec]]) -> float | None:
    episodes = [episode for specs in check for episode in await scheduler.evaluate(specs)]
    return float(np.mean([bool(episode.success) for episode in episodes])) if episodes else None


def _shares(envs: Sequence[EnvChoice], count: int) -> list[int]:
    total = sum(env.weight for env in envs)
    return [max(1, round(count * env.weight / total)) for env in envs]


def _batch(tokens: Sequence[TokenEpisode], weights: Sequence[NDArray[np.float64]]) -> Batch:
    return make_batch(tokens, advantages=weights, old=[one.behaviour for one in tokens])
