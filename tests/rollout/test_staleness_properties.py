"""Properties of asynchronous training under every policy, with random delays, failures and interruptions.

A trainer in virtual time takes batches, updates and releases. It may give up waiting, pause, evaluate beside,
and lose the learner, so that a new scheduler continues from what the last checkpoint knew.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from virtual import World, run

from rollgym.core.types import Episode, EpisodeSpec, Group, Limits
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.events import EventLog
from rollgym.rollout.group_state import GroupPolicy, version_range
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import EnvSource, TaskSampler

POLICIES = ("replay", "wait", "mask")
ACTIONS = ("step", "hasty", "pause", "evaluate", "learner lost")
SCHEDULES = int(os.environ.get("ROLLGYM_SCHEDULES", "30"))


@dataclass
class Trainer:
    """A trainer that trains on every batch once, through interruptions and restarts."""

    config: SchedulerConfig
    world: World
    batch: int
    actions: Sequence[str]
    seconds: float
    """Duration of an update."""
    trained: list[tuple[int, Group]] = field(default_factory=list)
    """Version of the weights when the update began, and the group."""
    discarded: Counter[str] = field(default_factory=Counter)
    left: list[int] = field(default_factory=list)
    """Groups that the last scheduler would play again."""
    next_group: int = 0
    logs: list[tuple[list[Episode], list[dict[str, Any]]]] = field(default_factory=list)
    """Reported episodes and events of each scheduler."""

    def train(self) -> "Trainer":
        run(self._train)
        return self

    async def _train(self) -> None:
        actions = list(self.actions)
        attempts: dict[int, int] = {}
        while True:
            log = EventLog(keep=True, clock=asyncio.get_running_loop().time)
            sampler = TaskSampler([EnvSource(env_id="env", limits=Limits(seconds=1e5))], seed=7)
            emitted: list[Episode] = []
            scheduler = Scheduler(
                sampler,
                self.world,
                self.world,
                self.config,
                log=log,
                on_episode=emitted.append,
                first_group=self.next_group,
            )
            scheduler.buffer.version = self.world.version
            scheduler.buffer.requeue(self.left, attempts)
            async with scheduler:
                while actions:
                    action = actions.pop(0)
                    if action == "learner lost":
                        break
                    await self._act(scheduler, action)
                buffer = scheduler.buffer
                self.left, self.next_group = buffer.unfinished_groups(), buffer.next_group
                # As a checkpoint after the last step: later attempts get new ids.
                attempts = {number: attempts.get(number, 0) + 100 for number in self.left}
            for event in log.events:
                if event["kind"] == "group_discarded" and event["reason"] != "stale":
                    self.discarded[event["group"]] += 1
            self.logs.append((emitted, log.events))
            if not actions:
                return

    async def _act(self, scheduler: Scheduler, action: str) -> None:
        if action == "hasty":  # gives up waiting; the groups chosen so far are kept
            try:
                async with asyncio.timeout(3.0):
                    groups = await scheduler.take(self.batch, release=False)
            except TimeoutError:
                return
        elif action == "pause":
            await scheduler.pause()
            await asyncio.sleep(5.0)
            await scheduler.resume()
            return
        elif action == "evaluate":
            limits = Limits(seconds=500.0)
            specs = [EpisodeSpec(episode_id=f"x{n}", env_id="e", env_seed=n, limits=limits) for n in range(2)]
            await scheduler.evaluate(specs)
            return
        else:
            groups = await scheduler.take(self.batch, release=False)
        self.trained += [(self.world.version, group) for group in groups]
        await asyncio.sleep(self.seconds)
        async with scheduler.updating(self.world.version + 1):
            await asyncio.sleep(0.5)
            self.world.version += 1
        scheduler.release(self.batch)


def config_of(on_stale: Any, bound: int, batch: int, **more: Any) -> SchedulerConfig:
    return SchedulerConfig(
        groups=GroupPolicy(size=2, oversample=more.pop("oversample", 0), incomplete_groups="drop"),
        order="ready",
        max_staleness=bound,
        max_ahead=batch * (bound + 1),
        on_stale=on_stale,
        stall_seconds=1e9,
        give_up_after=1000,
        **more,
    )


@settings(max_examples=SCHEDULES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    on_stale=st.sampled_from(POLICIES),
    bound=st.sampled_from([1, 2, 3]),
    batch=st.sampled_from([1, 2, 4]),
    in_flight=st.sampled_from([3, 40]),
    oversample=st.sampled_from([0, 1]),
    faults=st.sampled_from([0.0, 0.03]),
    slow=st.sampled_from([0.0, 0.1, 0.4]),
    timing=st.integers(0, 10_000),
    seconds=st.sampled_from([0.5, 8.0, 60.0]),
    actions=st.lists(st.sampled_from(ACTIONS), max_size=8),
    paced=st.booleans(),
    filtered=st.booleans(),
)
def test_every_group_is_trained_once_within_the_bound(
    on_stale: str,
    bound: int,
    batch: int,
    in_flight: int,
    oversample: int,
    faults: float,
    slow: float,
    timing: int,
    seconds: float,
    actions: list[str],
    paced: bool,
    filtered: bool,
) -> None:
    more = {"pace_slow_groups": paced, "filter_zero_variance": filtered, "max_in_flight": in_flight}
    config = config_of(on_stale, bound, batch, oversample=oversample, **more)
    world = World(faults=faults, timing=timing, slow=slow, turns=5, early=0.1)
    trainer = Trainer(config, world, batch, ["step", "step", *actions, "step", "step"], seconds).train()

    steps = sum(action == "step" for action in actions) + 4
    assert len(trainer.trained) % batch == 0
    assert len(trainer.trained) >= steps * batch, "every batch is full"
    for version, group in trainer.trained:
        oldest, newest = version_range(turn for episode in group.episodes for turn in episode.turns)
        assert oldest is not None
        assert newest is not None
        assert newest <= version
        assert version - newest <= bound, "with any policy, some tokens are within the bound"
        assert on_stale == "mask" or version - oldest <= bound, "no token is older than the bound"

    # Every group that was started ends exactly once: trained on, dropped or filtered, or to be played again.
    ends = Counter(group.group_id for _, group in trainer.trained) + trainer.discarded
    ends += Counter(f"g{number:06d}" for number in trainer.left)
    assert ends == Counter(f"g{number:06d}" for number in range(trainer.next_group))
    for emitted, _ in trainer.logs:
        ids = [episode.spec.episode_id for episode in emitted]
        assert len(set(ids)) == len(ids), "every episode is reported once"
    assert not world.inside, "every environment was closed"
    assert world.ledger["closed"] == world.ledger["opened"]


class Tasks(World):
    """Every tenth group is slow by a factor, on top of random delays."""

    factor = 30.0

    def is_slow(self, group_id: str) -> bool:
        return int(group_id[1:]) % 10 == 3

    async def delay(self, *what: object, most: float = float("inf")) -> None:
        if what[1] == "step" and self.is_slow(str(what[0]).partition("-")[0]):
            await asyncio.sleep(self.factor)
        await super().delay(*what, most=most)


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    bound=st.sampled_from([1, 2]),
    timing=st.integers(0, 10_000),
    seconds=st.sampled_from([2.0, 15.0]),
    factor=st.sampled_from([10.0, 60.0]),
)
def test_with_wait_slow_groups_are_trained_in_proportion(
    bound: int, timing: int, seconds: float, factor: float
) -> None:
    world = Tasks(timing=timing, slow=0.02, turns=4, early=0.0)
    world.factor = factor
    batch, steps = 5, 30
    config = config_of("wait", bound, batch, max_in_flight=60)
    trainer = Trainer(config, world, batch, ["step"] * steps, seconds).train()
    slow = [world.is_slow(group.group_id) for _, group in trainer.trained]
    # At most the groups ahead at the end can be missing from the count.
    ahead = sum(world.is_slow(f"g{number:06d}") for number in trainer.left)
    started = sum(world.is_slow(f"g{number:06d}") for number in range(trainer.next_group))
    assert sum(slow) + ahead == started
    assert ahead <= batch * (bound + 1) / 10 + 2
    assert sum(slow) == pytest.approx(batch * steps / 10, abs=2)
    assert not any(event["kind"] == "group_cancelled" for _, events in trainer.logs for event in events)
