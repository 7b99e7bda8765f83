"""Warm start: supervised training on recorded or expert episodes, through the same token path."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollgym.core.agent import Agent, AgentSetup, make_agent
from rollgym.core.errors import UsageError
from rollgym.core.roles import own_trajectory
from rollgym.core.seeding import derive_seed
from rollgym.core.types import Episode, EpisodeSpec
from rollgym.evaluation.plan import Request, plan
from rollgym.evaluation.run_warnings import long_demonstrations
from rollgym.io.run_dir import read_run
from rollgym.pool.base import EnvPool
from rollgym.rollout.inflight import run_episodes
from rollgym.rollout.scheduler import Scheduler
from rollgym.trainer.config import EnvConfig, TrainConfig, WarmStartConfig, belongs_to, domain_groups
from rollgym.trainer.data.sequences import token_episode
from rollgym.trainer.imitation.examples import epoch_batches, supervised_batch
from rollgym.trainer.imitation.noisy_expert import NoisyAgent
from rollgym.trainer.imitation.retokenize import retokenize
from rollgym.trainer.runtime import Components
from rollgym.trainer.train_run import TrainRun

NOTE_SECONDS = 30.0
"""Seconds between notes on the progress of a long epoch."""


async def warm_start(components: Components, run: TrainRun, scheduler: Scheduler) -> None:
    """Train the policy on demonstrations; the run continues with the result."""
    config = components.config
    settings = config.warm_start
    assert settings is not None
    demos = await demonstrations(components, settings)
    tokens = [token_episode(retokenize(demo.episode, components.agent)) for demo in demos]
    replies = [int(count) for episode in tokens for count in episode.tokens_per_turn]
    for warning in long_demonstrations(replies, config.agent.max_tokens):
        run.console.note(f"warning: {warning.sentence}")
        run.warnings.append(warning)
    weights = [
        np.repeat(demo.weights, each.tokens_per_turn) for demo, each in zip(demos, tokens, strict=True)
    ]
    validation = _validation(config, settings, demos) if settings.until_success is not None else []
    batches = -(-len(tokens) // settings.batch)
    total = settings.epochs * batches
    targets = SuccessTargets(config, settings.until_success)
    schedule = learning_batches(
        epoch_batches(len(tokens), settings.batch, settings.epochs, config.seed),
        settings.batch,
        lambda index: demos[index].env not in targets.reached,
    )
    number, noted = 0, time.monotonic()
    await components.compute(components.start_imitation, settings.learning_rate, total)
    while chunk := list(itertools.islice(schedule, settings.check_every or batches)):
        losses: list[float] = []
        async with components.training():
            for indices in chunk:
                batch = supervised_batch([tokens[i] for i in indices], [weights[i] for i in indices])
                losses.append((await components.compute(components.learner.update, batch))["policy_loss"])
                if time.monotonic() - noted > NOTE_SECONDS:
                    noted = time.monotonic()
                    done = number + len(losses)
                    run.console.note(f"imitation, batch {done} of {total}: loss {losses[-1]:.3f}")
        number += len(chunk)
        run.state.version += 1
        async with scheduler.updating(run.state.version):
            await components.sync_weights(run.state.version)
        targets.update([await scheduler.evaluate(specs) for specs in validation])
        note = f"imitation, batch {number} of {total}: loss {np.mean(losses):.3f}"
        run.console.note(f"{note}, success {targets.text}" if targets.text else note)
        if targets.all_reached:
            break
    await components.compute(components.end_imitation)


class SuccessTargets:
    """Which domains have reached the success rate at which imitation stops.

    A domain that learns fast would otherwise raise the mean alone, or be mastered while the others learn.
    """

    def __init__(self, config: TrainConfig, until: float | None) -> None:
        """Nothing is reached before the first update."""
        self._members, self._until = domain_groups(config), until
        self._rates: dict[str, float] = {}

    def update(self, episodes: Sequence[Sequence[Episode]]) -> None:
        """Measure the success of each domain on validation episodes, which are given by environment."""
        if not episodes:
            return
        for domain, members in self._members.items():
            successes = [bool(episode.success) for number in members for episode in episodes[number]]
            if successes:
                self._rates[domain] = float(np.mean(successes))

    @property
    def reached(self) -> set[int]:
        """Numbers of the environments whose domain has reached the rate."""
        if self._until is None:
            return set()
        done = [domain for domain, rate in self._rates.items() if rate >= self._until]
        return {number for domain in done for number in self._members[domain]}

    @property
    def all_reached(self) -> bool:
        """Whether imitation can stop."""
        return len(self.reached) == sum(map(len, self._members.values()))

    @property
    def text(self) -> str:
        """The success of each domain, or empty before a validation."""
        return ", ".join(f"{domain} {rate:.3f}".lstrip() for domain, rate in self._rates.items())


def learning_batches(
    schedule: Iterable[list[int]], size: int, wanted: Callable[[int], bool]
) -> Iterator[list[int]]:
    """Leave unwanted examples out of the batches; shortened batches are joined until they have ``size``."""
    pending: list[int] = []
    for indices in schedule:
        kept = [index for index in indices if wanted(index)]
        pending += kept
        if len(kept) == len(indices) or len(pending) >= size:
            yield pending
            pending = []
    if pending:
        yield pending


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode to imitate."""

    episode: Episode
    env: int
    """Number of its environment in ``envs``."""
    erred: Sequence[bool] = ()
    """One flag per turn: True for turns that are not imitated; empty if all are."""

    @property
    def weights(self) -> NDArray[np.float64]:
        """The loss weight of each turn."""
        turns = len(self.episode.turns)
        return 1.0 - np.array(self.erred[:turns], dtype=float) if self.erred else np.ones(turns)


async def demonstrations(components: Components, settings: WarmStartConfig) -> list[Demonstration]:
    """Episodes to imitate: successful ones of a results folder, or newly played ones."""
    if settings.run is not None:
        _, episodes = read_run(Path(settings.run))
        ours = {(env.id, split) for env in components.config.envs for split in (env.split, "")}
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
                f"No episode in {settings.run} succeeded on a task of envs in its training split: there is "
                "nothing to imitate. Record some with `rollgym eval --split train`."
            )
        return [
            Demonstration(own_trajectory(episode), _env_of(episode, components.config.envs))
            for episode in good[: settings.episodes]
        ]
    played = await play(settings, components.config, components.pool)
    demos = [
        demo
        for demo in played
        if not demo.episode.outcome.failed
        and (demo.episode.success is not False or not settings.only_successful)
        and demo.weights.any()
    ]
    if not demos:
        error = next((demo.episode.error for demo in played if demo.episode.error), None)
        why = f" (first error: {error.message})" if error else ""
        raise UsageError(f"Agent {settings.agent!r} did not succeed once: there is nothing to imitate{why}.")
    return demos


async def play(
    settings: WarmStartConfig,
    config: TrainConfig,
    pool: EnvPool,
    *,
    per_task: int = 1,
    make: Callable[[EnvConfig], Agent] | None = None,
    on_episode: Callable[[Episode], object] = lambda episode: None,
) -> list[Demonstration]:
    """Play ``settings.episodes`` demonstrations on training tasks, distributed over the environments.

    Args:
        settings: The agent, the number of episodes, and random turns.
        config: The environments, the seed that selects the tasks, and the number of episodes at once.
        pool: Where the environments run.
        per_task: Episodes of each task.
        make: Makes the agent of an environment. Default: ``settings.agent``.
        on_episode: Called with each finished episode.
    """
    shares = _shares(config.envs, settings.episodes)
    max_in_flight = config.rollout.max_in_flight
    played: list[Demonstration] = []
    for number, env in enumerate(config.envs):
        setup = AgentSetup(env_id=env.id, env_kwargs=env.kwargs)
        agent = make_agent(settings.agent, setup) if make is None else make(env)
        noisy = None
        if settings.mistakes:
            noisy = NoisyAgent(agent, make_agent(settings.mistakes_agent, setup), settings.mistakes)
        count = -(-shares[number] // per_task) * per_task
        specs = _specs(config, env, "imitation", number, count, per_task)
        try:
            episodes = await run_episodes(
                specs, pool, noisy or agent, max_in_flight=max_in_flight, on_episode=on_episode
            )
        finally:
            await (noisy or agent).close()
        if settings.imitate_mistakes or noisy is None:
            played += [Demonstration(episode, number) for episode in episodes]
        else:
            played += [
                Demonstration(episode, number, noisy.erred(episode.spec.episode_id)) for episode in episodes
            ]
    return played


def _env_of(episode: Episode, envs: Sequence[EnvConfig]) -> int:
    """The environment of a recorded episode: one with its arguments, or else the first one with its id."""
    same_id = [number for number, env in enumerate(envs) if env.id == episode.spec.env_id]
    return next((number for number in same_id if belongs_to(episode, envs[number])), same_id[0])


def _specs(
    config: TrainConfig, env: EnvConfig, purpose: str, number: int, count: int, per_task: int = 1
) -> tuple[EpisodeSpec, ...]:
    request = Request(
        env_id=env.id,
        agent="lm",
        episodes=count,
        split=env.split,
        per_task=per_task,
        seed=derive_seed(purpose, config.seed, number) % 2**31,
        env_kwargs=env.kwargs,
        limits=env.limits,
    )
    return plan(request).specs


def _validation(
    config: TrainConfig, settings: WarmStartConfig, demos: Sequence[Demonstration]
) -> list[tuple[EpisodeSpec, ...]]:
    """Training tasks without a demonstration (never held-out ones), to decide when to stop."""
    shares = _shares(config.envs, settings.validation_episodes)
    result = []
    for number, env in enumerate(config.envs):
        tasks = {demo.episode.spec.task for demo in demos if demo.episode.spec.env_id == env.id} - {None}
        specs = _specs(config, env, "imitation check", number, shares[number] + len(tasks))
        result.append(tuple(spec for spec in specs if spec.task not in tasks)[: shares[number]])
    return result


def _shares(envs: Sequence[EnvConfig], count: int) -> list[int]:
    total = sum(env.weight for env in envs)
    return [max(1, round(count * env.weight / total)) for env in envs]
