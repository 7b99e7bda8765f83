"""The staleness bound under every policy, with a trainer that takes, updates and releases as in training."""

import asyncio
from typing import Any

import pytest
from auditor import Auditor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_story import Story, check
from virtual import World

from rollgym.core.errors import UsageError
from rollgym.core.types import Group, Limits
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.group_state import GroupPolicy, version_range
from rollgym.rollout.task_sampler import EnvSource, TaskSampler

POLICIES = ("replay", "wait", "mask")


class Tail(World):
    """Turns take a second, those of some environments' seeds many."""

    def __init__(self, share: float, seconds: float, **more: Any) -> None:
        super().__init__(early=0.0, turns=6, **more)
        self.share, self.seconds = share, seconds

    def is_slow(self, group_id: str) -> bool:
        return self.share > 0 and int(group_id[1:]) % round(1 / self.share) == 3

    async def delay(self, *what: object, most: float = float("inf")) -> None:
        if what[1] == "step":
            group_id = str(what[0]).partition("-")[0]
            await asyncio.sleep(self.seconds if self.is_slow(group_id) else 1.0)


def trained(
    on_stale: Any, bound: int, batch: int, world: World, steps: int = 30, in_flight: int = 60, **more: Any
) -> Story:
    config = SchedulerConfig(
        max_in_flight=in_flight,
        groups=GroupPolicy(size=2),
        order="ready",
        max_staleness=bound,
        max_ahead=batch * (bound + 1),
        on_stale=on_stale,
        stall_seconds=1e9,
        **more,
    )
    return Story(config, world, limit=1e6, script=[("train", batch)] * steps).tell()


def ages(story: Story, batch: int) -> list[tuple[int, int]]:
    """Age of the oldest and of the newest token of each taken group, when its update began."""
    found = []
    for number, group in enumerate(story.groups):
        oldest, newest = version_range(turn for episode in group.episodes for turn in episode.turns)
        assert oldest is not None
        assert newest is not None
        found.append((number // batch - oldest, number // batch - newest))
    return found


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    on_stale=st.sampled_from(POLICIES),
    bound=st.sampled_from([0, 1, 2, 3]),
    batch=st.sampled_from([1, 2, 3, 5]),
    share=st.sampled_from([0.0, 0.1, 0.5]),
    seconds=st.sampled_from([4.0, 20.0, 100.0]),
    in_flight=st.sampled_from([2, 7, 60]),
    faults=st.sampled_from([0.0, 0.02]),
    paced=st.booleans(),
    skip=st.booleans(),
)
def test_the_bound_holds_under_every_policy(
    on_stale: str,
    bound: int,
    batch: int,
    share: float,
    seconds: float,
    in_flight: int,
    faults: float,
    paced: bool,
    skip: bool,
) -> None:
    world = Tail(share, seconds, faults=faults)
    more = {"pace_slow_groups": paced, "filter_zero_variance": skip, "give_up_after": 1000}
    story = trained(on_stale, bound, batch, world, 12, in_flight, **more)
    check(story)
    assert story.failure is None
    assert len(story.groups) == 12 * batch, "every batch is full"
    numbers = [group.group_id for group in story.groups]
    assert len(set(numbers)) == len(numbers), "no group is trained on twice"
    for oldest, newest in ages(story, batch):
        assert newest <= bound
        assert on_stale == "mask" or oldest <= bound
    if on_stale == "wait":
        assert story.metrics["groups"].get("stale", 0) == 0, "no group is ever played again"


def slow_share(groups: list[Group], world: Tail) -> float:
    return sum(world.is_slow(group.group_id) for group in groups) / len(groups)


@pytest.mark.parametrize("on_stale", POLICIES)
def test_slow_groups_are_trained_in_proportion(on_stale: str) -> None:
    """One group in ten takes about ten updates; the bound is two. The first ones take their time."""
    world = Tail(0.1, 10.0)
    story = trained(on_stale, 2, 8, world, steps=80)
    # With mask fewer are trained in as many updates, which come sooner (docs/asynchronous_training.md).
    near = 0.2 if on_stale == "mask" else 0.1
    assert slow_share(story.groups[160:], world) == pytest.approx(0.1, rel=near)
    first = next(i for i, group in enumerate(story.groups) if world.is_slow(group.group_id))
    assert first // 8 < 20
    turns = story.scheduler.buffer.turns
    wasted = turns["stale"] / (turns["stale"] + turns["taken"])
    # With mask, a group is played again whose last step alone takes longer than the bound.
    assert wasted <= {"replay": 0.1, "mask": 0.03, "wait": 0.0}[on_stale]


def test_only_with_mask_is_a_token_older_than_the_bound() -> None:
    oldest = {name: max(ages(trained(name, 1, 4, Tail(0.1, 40.0)), 4))[0] for name in POLICIES}
    assert oldest["replay"] <= 1
    assert oldest["wait"] <= 1
    assert oldest["mask"] > 1


def test_waiting_costs_no_time_without_slow_groups() -> None:
    ends = {name: trained(name, 2, 4, Tail(0.0, 0.0)).events[-1]["t"] for name in POLICIES}
    assert len(set(ends.values())) == 1


def test_waves_of_slow_groups_need_fewer_waits() -> None:
    """The second environment of a mixture is slow, which is known after some of its groups."""
    sampler = TwoSources.sampler(TwoSources(SchedulerConfig(), World()))
    slow = {f"g{number:06d}" for number in range(2000) if sampler.group_task(number).source == 1}

    class Two(Tail):
        def is_slow(self, group_id: str) -> bool:
            return group_id in slow

    def told(paced: bool) -> Story:
        config = SchedulerConfig(
            max_in_flight=200,
            groups=GroupPolicy(size=2),
            order="ready",
            max_staleness=2,
            max_ahead=24,
            on_stale="wait",
            pace_slow_groups=paced,
            stall_seconds=1e9,
        )
        return TwoSources(config, Two(0.1, 30.0), limit=1e6, script=[("train", 8)] * 80).tell()

    eager, paced = told(False), told(True)
    deferred = [event for event in paced.events if event["kind"] == "group_deferred"]
    assert deferred
    assert paced.events[-1]["t"] < 0.9 * eager.events[-1]["t"]
    numbers = sorted(int(group.group_id[1:]) for group in paced.groups)
    left = paced.scheduler.buffer.unfinished_groups()
    assert sorted([*numbers, *left]) == list(range(paced.scheduler.buffer.next_group)), "none is left out"
    Auditor(paced.config, paced.emitted, paced.groups).audit(paced.events)


class TwoSources(Story):
    """A mixture whose second environment, with one group of eleven, is slow."""

    def sampler(self) -> TaskSampler:
        limits = Limits(seconds=1e6)
        sources = [EnvSource(env_id=f"e{n}", weight=w, limits=limits) for n, w in enumerate((10.0, 1.0))]
        return TaskSampler(sources, seed=self.seed)


def test_metrics_of_a_step_show_what_was_wasted() -> None:
    world = Tail(0.1, 30.0)
    story = trained("replay", 2, 8, world, steps=60)
    metrics = story.scheduler.step_metrics()
    turns = story.scheduler.buffer.turns
    assert metrics["turns_discarded"] == turns["stale"] + turns["lost"] > 0
    assert metrics["groups_replayed"] == story.metrics["groups"]["stale"] > 0
    assert metrics["slow_trained_frac"] == pytest.approx(slow_share(story.groups, world), abs=0.02)
    assert metrics["slow_started_frac"] == pytest.approx(0.1, abs=0.04)
    assert story.scheduler.step_metrics()["turns_discarded"] == 0, "each turn is reported once"


def test_restarts_require_replay() -> None:
    with pytest.raises(UsageError, match="on_stale"):
        SchedulerConfig(on_weight_update="restart", on_stale="wait")
