"""The scheduler's invariants, on many schedules with crashes, hangs, bugs, slow replies and cancellations.

Each schedule is a random configuration, a random world with faults and a random trainer; the `Auditor` checks
the event log with an independent model. ``ROLLGYM_SCHEDULES=5000`` tries as many new schedules; without it
they are the same every time.
"""

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_story import Script, Story, check
from virtual import World

from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.group_state import GroupPolicy

ASKED = os.environ.get("ROLLGYM_SCHEDULES")
EXAMPLES = int(ASKED or 150)
SETTINGS = settings(
    max_examples=EXAMPLES // 2,
    deadline=None,
    derandomize=ASKED is None,
    suppress_health_check=list(HealthCheck),
)

ACTS = [
    *["train"] * 6,
    "take",
    "take in a hurry",
    "update",
    "evaluate",
    "evaluate beside",
    "cancel an evaluation",
    "pause",
    "drain",
    "think",
]
Choose = Callable[[Sequence[Any]], Any]


def any_story(choose: Choose) -> Story:
    """A configuration, a world and a trainer; ``choose`` picks every detail."""
    groups = GroupPolicy(
        size=choose([1, 2, 3, 4]),
        oversample=choose([0, 0, 1, 2]),
        max_retries_per_group=choose([0, 1, 2, 4]),
        max_infra_retries=choose([0, 1, 3, 64]),
        incomplete_groups=choose(["keep", "drop"]),
    )
    on_stale = choose(["replay", "wait", "mask"])
    config = SchedulerConfig(
        max_in_flight=choose([1, 2, 3, 4, 5, 7, 9]),
        groups=groups,
        order=choose(["strict", "ready"]),
        max_overtakes=choose([None, 0, 1, 2, 3]),
        max_ahead=choose([None, None, None, 1, 2, 3, 6]),
        max_staleness=choose([None, 0, 1, 2]),
        on_stale=on_stale,
        pace_slow_groups=choose([False, True]),
        on_weight_update=choose(["finish", "finish", "restart"] if on_stale == "replay" else ["finish"]),
        filter_zero_variance=choose([False, True]),
        max_skipped=choose([0, 1, 2, 3]),
        give_up_after=12,
        evaluation_share=choose([0.3, 0.5, 1.0]),
        stall_seconds=1e7,
    )
    world = World(
        faults=choose([0.0, 0.02, 0.05, 0.15]),
        timing=choose(range(10_000)),
        slow=choose([0.0, 0.05, 0.2]),
        grain=choose([0.0, 1.0]),
        same_returns=choose([False, False, False, True]),
    )
    acts = [(choose(ACTS), choose([1, 2, 3])) for _ in range(choose(range(8, 15)))]
    hasty = choose([False, True])
    return Story(config, world, choose(range(1000)), choose([1, 2, 3]), script=acts, hasty=hasty)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    return any_story(lambda choices: draw(st.sampled_from(choices)))


@SETTINGS
@given(story=stories())
def test_every_invariant_holds_on_any_schedule(story: Story) -> None:
    check(story.tell())


def test_every_invariant_holds_on_numbered_schedules() -> None:
    """The same with a plain generator: more even than what a search for small counterexamples tries."""
    first = 0 if ASKED is None else random.SystemRandom().randrange(10**9)
    for number in range(first, first + EXAMPLES // 2):
        story = any_story(random.Random(number).choice)
        try:
            check(story.tell())
        except BaseException as error:
            error.add_note(f"schedule {number}: {story.config} {story.world} {story.script}")
            raise


@settings(SETTINGS, max_examples=max(20, EXAMPLES // 5))
@given(
    seed=st.integers(0, 1000),
    timings=st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)),
    limits=st.tuples(st.sampled_from([1, 3, 8]), st.sampled_from([1, 8, 40])),
    ahead=st.tuples(st.none(), st.sampled_from([None, 2, 9])),
    faults=st.sampled_from([0.0, 0.03]),
    skip=st.booleans(),
    noise=st.sampled_from(["pause", "drain", "evaluate", "think", "take in a hurry"]),
)
def test_strict_batches_do_not_depend_on_timing_or_concurrency(
    seed: int,
    timings: tuple[int, int],
    limits: tuple[int, int],
    ahead: tuple[int | None, int | None],
    faults: float,
    skip: bool,
    noise: str,
) -> None:
    def batches(which: int, script: Script) -> list[Any]:
        config = SchedulerConfig(
            max_in_flight=limits[which],
            groups=GroupPolicy(size=3, max_retries_per_group=60),
            filter_zero_variance=skip,
            max_ahead=ahead[which],
            stall_seconds=1e9,
        )
        # No natural delay comes near the limit: only hanging calls meet it, whatever the timing.
        world = World(faults=faults, timing=timings[which], grain=float(which))
        story = Story(config, world, seed, 2, limit=1e6, script=script).tell()
        assert story.failure is None
        return [
            (g.group_id, [(e.spec, [(t.action, t.reward) for t in e.turns]) for e in g.episodes])
            for g in story.groups[:4]
        ]

    assert batches(0, [("take", 2), ("take", 2)]) == batches(
        1, [("take", 1), (noise, 1), ("train", 2), ("take", 3)]
    )


def test_one_slow_episode_delays_no_other() -> None:
    """1 of 128 environments is 40 times slower: the time between batches must not move."""

    class Even(World):
        async def delay(self, *what: object, most: float = float("inf")) -> None:
            lame = self.timing and "g000064" in str(what[0])
            await asyncio.sleep(40.0 if lame else 1.0)

    def gaps(lame: int) -> list[float]:
        config = SchedulerConfig(max_in_flight=128, order="ready", stall_seconds=1e9)
        story = Story(config, Even(timing=lame), limit=1e9, script=[("take", 32)] * 20).tell()
        times = [event["t"] for event in story.events if event["kind"] == "test_given"]
        return sorted(after - before for before, after in zip(times, times[1:], strict=False))

    usual, lame = gaps(0), gaps(1)
    assert lame[len(lame) // 2] == pytest.approx(usual[len(usual) // 2], rel=0.05)
    assert sum(lame) == pytest.approx(sum(usual), rel=0.05)


def test_order_ready_prefers_short_episodes_and_metrics_show_it() -> None:
    class Even(World):
        async def delay(self, *what: object, most: float = float("inf")) -> None:
            await asyncio.sleep(1.0)

    def told(order: Any) -> tuple[float, float]:
        config = SchedulerConfig(max_in_flight=40, order=order, max_ahead=200, stall_seconds=1e9)
        story = Story(config, Even(turns=60), limit=1e9, script=[("take", 3)] * 20).tell()
        numbers = [int(group.group_id[1:]) for group in story.groups]
        assert (numbers == list(range(60))) == (order == "strict")
        taken = [group.episodes[0].length for group in story.groups]
        return sum(taken) / len(taken), story.bias

    strict, ready = told("strict"), told("ready")
    assert ready[0] < 0.9 * strict[0]
    assert strict[1] == 1.0
    assert ready[1] < 0.9
