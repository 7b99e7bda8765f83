"""A scheduler with a scorer: refills, exactly once, order independence, whole runs with real processes."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from auditor import AuditedGroup, Auditor
from virtual import FOREVER, World, chances, run

from rollgym.core.agent import AgentSetup, make_agent
from rollgym.core.errors import RunError
from rollgym.core.types import Episode, EpisodeSpec, Group, Limits, Outcome
from rollgym.pool.inline import InlinePool
from rollgym.rewards import CompositeScorer, Score, Scorer
from rollgym.rewards.function import FunctionScorer
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.events import EventLog
from rollgym.rollout.group_state import GroupPolicy
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import EnvSource, TaskSampler
from rollgym.rollout.trace import summary
from rollgym.rollout.watchdog import Stalled


@dataclass
class Hostile:
    """A scorer that raises, hangs or answers nonsense for some episodes; which, their ids decide."""

    faults: float = 0.3
    timing: int = 0
    inside: set[str] = field(default_factory=set)
    asked: Counter[str] = field(default_factory=Counter)

    async def score(self, episode: Episode) -> Score:
        name = episode.spec.episode_id
        assert episode.turns
        assert not episode.outcome.failed
        assert name not in self.inside
        self.asked[name] += 1
        self.inside.add(name)
        try:
            await asyncio.sleep(10.0 * chances("score", self.timing, name)[0])
            a, b, c = chances("verdict", name)
            if a <= self.faults:
                return await self.suffer(int(b * 3.999))
            return Score(round(c, 3))
        finally:
            self.inside.remove(name)

    async def suffer(self, kind: int) -> Any:
        if kind == 0:
            await asyncio.sleep(FOREVER)
        errors = [None, ValueError("no"), asyncio.CancelledError(), None]
        if errors[kind] is not None:
            raise errors[kind]
        return "nonsense"


class ScoreAuditor(Auditor):
    """An episode that closes is not over yet where it is still to be scored, so it can be called off."""

    def finish(self, group: AuditedGroup, status: str) -> None:
        super().finish(group, status)
        for name in group.running & self.in_flight.keys():
            self.cancelled.setdefault(name, self.now)

    def on_test_stop(self, event: dict[str, Any]) -> None:
        super().on_test_stop(event)
        for name in self.in_flight:
            self.cancelled.setdefault(name, self.now)

    def on_episode_finished(self, event: dict[str, Any]) -> None:
        # One that was called off while it closed after a failure, or before any turn, keeps its outcome.
        if event["outcome"] != "cancelled" and self.in_flight.get(event["episode"]) != "scoring":
            self.cancelled.pop(event["episode"], None)
        super().on_episode_finished(event)


@dataclass
class Played:
    """What came of a run in a hostile world."""

    config: SchedulerConfig
    scorer: Hostile
    world: World
    groups: list[Group] = field(default_factory=list)
    emitted: list[Episode] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def go(self, steps: int = 4) -> "Played":
        async def main() -> None:
            log = EventLog(keep=True, clock=asyncio.get_running_loop().time)
            self.events = log.events
            stream = TaskSampler([EnvSource(env_id="env", limits=Limits(seconds=500.0))], seed=3)
            scheduler = Scheduler(
                stream,
                self.world,
                self.world,
                self.config,
                scorer=CompositeScorer({"hostile": self.scorer}, timeout=50.0),
                log=log,
                on_episode=self.emitted.append,
            )
            async with scheduler:
                for _ in range(steps):
                    log.add("test_taking", release=True, count=2)
                    self.groups += await scheduler.take(2)
                    log.add("test_given", count=2)
                log.add("test_stop")

        run(main)
        return self


def member(episode: Episode) -> tuple[Any, ...]:
    """An episode without its times."""
    return (
        episode.spec,
        episode.outcome,
        [(t.action, t.reward, t.info) for t in episode.turns],
        episode.success,
    )


@pytest.mark.parametrize("seed", range(24))
def test_every_episode_is_emitted_exactly_once_whatever_its_scorer_does(seed: int) -> None:
    """rule 25"""
    rng = random.Random(seed)
    config = SchedulerConfig(
        max_in_flight=rng.choice([1, 3, 8]),
        groups=GroupPolicy(
            size=rng.choice([1, 3]), oversample=rng.choice([0, 2]), max_retries_per_group=rng.choice([2, 9])
        ),
        order=rng.choice(["strict", "ready"]),
        give_up_after=1000,
        stall_seconds=1e6,
    )
    scorer = Hostile(timing=seed)
    world = World(faults=rng.choice([0.0, 0.05]), timing=seed, grain=rng.choice([0.0, 1.0]))
    played = Played(config, scorer, world).go()
    auditor = ScoreAuditor(config, played.emitted, played.groups)
    auditor.audit(played.events)
    assert not scorer.inside, "every scorer was cancelled"
    assert max(scorer.asked.values()) == 1, "no episode is scored twice"
    for episode in played.emitted:
        rewards = episode.turns[-1].info.get("rewards") if episode.turns else None
        assert (rewards is not None) == (bool(episode.turns) and not episode.outcome.failed)
    for group in played.groups:
        for episode in (episode for episode in group.episodes if episode.turns):
            rewards = episode.turns[-1].info["rewards"]
            assert episode.turns[-1].reward == sum(rewards.values())


def test_the_same_batches_come_of_it_whatever_the_timing_and_the_places() -> None:
    """rule 34"""
    batches = []
    for timing, places in ((0, 1), (1, 4), (2, 16)):
        config = SchedulerConfig(
            max_in_flight=places,
            groups=GroupPolicy(size=2, max_retries_per_group=50),
            max_ahead=8,
            give_up_after=1000,
            stall_seconds=1e6,
        )
        played = Played(config, Hostile(timing=timing), World(timing=timing, turns=2)).go()
        batches.append([[member(episode) for episode in group.episodes] for group in played.groups])
    assert batches[0] == batches[1] == batches[2]


def test_a_member_that_could_not_be_scored_is_played_again_and_its_siblings_are_kept(says: Any) -> None:
    """rule 27"""

    def verdict(episode: Episode) -> Any:
        return ValueError("no key") if episode.spec.episode_id == "g000000-1" else Score(1.0)

    async def main() -> tuple[Group, Counter[str]]:
        world = World(turns=1)
        config = SchedulerConfig(groups=GroupPolicy(size=3), max_ahead=1)
        stream = TaskSampler([EnvSource(env_id="env")])
        async with Scheduler(stream, world, world, config, scorer=says(verdict)) as scheduler:
            (group,) = await scheduler.take(1)
            return group, scheduler.outcomes

    group, outcomes = run(main)
    assert [e.spec.episode_id for e in group.episodes] == ["g000000-0", "g000000-1-retry1", "g000000-2"]
    assert outcomes[Outcome.ENV_ERROR.value] == 1


def test_a_reward_that_never_works_ends_the_run_with_its_error(says: Any) -> None:
    async def main() -> None:
        world = World(turns=1)
        config = SchedulerConfig(give_up_after=3)
        stream = TaskSampler([EnvSource(env_id="env")])
        async with Scheduler(stream, world, world, config, scorer=says(ValueError("no key"))) as scheduler:
            with pytest.raises(RunError, match="last error: reward 'Says': ValueError: no key"):
                await scheduler.take(1)

    run(main)


def test_evaluation_is_scored_by_the_same_scorer(says: Any) -> None:
    async def main() -> list[Episode]:
        world = World(turns=1)
        stream = TaskSampler([EnvSource(env_id="env")])
        async with Scheduler(stream, world, world, scorer=says(1.0)) as scheduler:
            return await scheduler.evaluate([EpisodeSpec(episode_id="x", env_id="env")])

    (episode,) = run(main)
    assert episode.turns[-1].info["rewards"]["Says"] == 1.0


def test_a_scorer_that_hangs_for_ever_is_named_as_what_is_waited_for(says: Any) -> None:
    """rule 33"""

    async def main() -> None:
        world = World(turns=1)
        config = SchedulerConfig(max_in_flight=1, stall_seconds=100.0)
        log = EventLog(keep=True, clock=asyncio.get_running_loop().time)
        stream = TaskSampler([EnvSource(env_id="env")])
        scheduler = Scheduler(stream, world, world, config, scorer=says(1.0, seconds=1e9), log=log)
        async with scheduler:
            with pytest.raises(Stalled, match=r"turn 1\): scoring for .* s, waiting for its reward"):
                await scheduler.take(1)
        assert summary(log.events)["time_by_state"]["scoring"] > 100.0

    run(main)


def whole_run(scorer: Scorer, groups: int = 3) -> tuple[list[Group], list[Episode]]:
    emitted: list[Episode] = []

    async def main() -> list[Group]:
        stream = TaskSampler([EnvSource(env_id="faulty:Counting")], seed=1)
        config = SchedulerConfig(
            max_in_flight=4, groups=GroupPolicy(size=2, max_retries_per_group=20), max_ahead=3
        )
        agent = make_agent("random", AgentSetup(env_id="faulty:Counting"))
        pool = InlinePool()
        try:
            scheduler = Scheduler(stream, pool, agent, config, scorer=scorer, on_episode=emitted.append)
            async with scheduler:
                return await scheduler.take(groups)
        finally:
            await pool.close()
            await scorer.close()  # type: ignore[attr-defined]

    return asyncio.run(main()), emitted


def test_a_whole_run_with_a_function_in_worker_processes() -> None:
    groups, _ = whole_run(CompositeScorer({"turns": (FunctionScorer("judges:length", workers=2), 10.0)}))
    for episode in (episode for group in groups for episode in group.episodes):
        assert episode.turns[-1].info["rewards"]["turns"] == 30.0
        played = sum(turn.action == "yes" for turn in episode.turns)
        assert episode.total_reward == 30.0 + played


def test_a_whole_run_in_which_many_scorers_die_gives_the_same_groups_every_time() -> None:
    runs = []
    for workers in (1, 2):
        groups, emitted = whole_run(FunctionScorer("judges:fails_sometimes", workers=workers, timeout=60.0))
        assert all(group.complete for group in groups)
        assert all(e.error is None or e.error.type == "RewardError" for e in emitted)
        assert any(e.outcome is Outcome.ENV_ERROR for e in emitted)
        names = [e.spec.episode_id for e in emitted]
        assert len(names) == len(set(names))
        runs.append([[member(episode) for episode in group.episodes] for group in groups])
    assert runs[0] == runs[1]
