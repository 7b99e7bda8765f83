"""The watchdog: a run without progress ends with a report of what everything waits for."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from virtual import VirtualPlayer, VirtualSession, World, run

from rollgym.core.errors import RunError
from rollgym.core.types import EpisodeSpec, Outcome
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.episode_runner import EpisodeState
from rollgym.rollout.events import EventLog
from rollgym.rollout.group_state import GroupPolicy
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import EnvSource, TaskSampler
from rollgym.rollout.watchdog import WAITS_FOR, Stalled


async def never(*args: object) -> Any:
    await asyncio.sleep(1e12)


def stage(
    scene: Callable[[Scheduler], Awaitable[Any]], world: World | None = None, **config: Any
) -> tuple[Any, EventLog]:
    async def main() -> tuple[Any, EventLog]:
        log = EventLog(keep=True, clock=asyncio.get_running_loop().time)
        pool = world or World(slow=0.0)
        settings = SchedulerConfig(**{"max_in_flight": 3, "stall_seconds": 100.0, **config})
        async with Scheduler(
            TaskSampler([EnvSource(env_id="env")]), pool, pool, settings, log=log
        ) as scheduler:
            return await scene(scheduler), log

    return run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("where", "state"),
    [
        ((World, "open"), "opening"),
        ((VirtualSession, "reset"), "resetting"),
        ((VirtualPlayer, "act"), "generating"),
        ((VirtualSession, "step"), "stepping"),
    ],
)
def test_a_run_without_progress_ends_with_a_report(
    monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], state: str
) -> None:
    monkeypatch.setattr(*where, never)

    async def scene(scheduler: Scheduler) -> str:
        with pytest.raises(Stalled) as caught:
            await scheduler.take(1)
        assert now() < 250.0
        return str(caught.value)

    report, log = stage(scene)
    assert report.startswith("No progress for 100 s.\n3 of 3 episodes in flight, 0 queued, ")
    assert f"3 waiting for {WAITS_FOR[state]}" in report
    assert f"g000000-0 (env, turn 0): {state} for 1" in report, "and for how long"
    [stalled] = [event for event in log.events if event["kind"] == "stalled"]
    assert stalled["report"] in report
    ends = [event["outcome"] for event in log.events if event["kind"] == "episode_finished"]
    assert ends == [Outcome.CANCELLED] * 3


def test_a_stalled_run_closes_everything_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualPlayer, "act", never)

    async def scene(scheduler: Scheduler) -> dict[str, int]:
        with pytest.raises(Stalled):
            await scheduler.take(1)
        await asyncio.sleep(50.0)
        return dict(scheduler.outcomes)

    outcomes, log = stage(scene)
    assert outcomes == {"cancelled": 3}
    assert sum(event["kind"] == "episode_finished" for event in log.events) == 3


def test_slow_progress_is_not_a_stall() -> None:
    class Slow(World):
        async def delay(self, *what: object, most: float = float("inf")) -> None:
            await asyncio.sleep(min(most, 90.0))

    async def scene(scheduler: Scheduler) -> float:
        await scheduler.take(20)
        return now()

    seconds, _ = stage(scene, Slow(), max_in_flight=1)
    assert seconds > 1000.0


def test_a_long_computation_of_the_trainer_is_not_a_stall() -> None:
    async def scene(scheduler: Scheduler) -> int:
        await asyncio.sleep(5000.0)
        taken = len(await scheduler.take(2))
        await asyncio.sleep(5000.0)
        return taken

    assert stage(scene)[0] == 2


def test_hanging_episodes_are_reported_once_the_trainer_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VirtualPlayer, "act", never)

    async def scene(scheduler: Scheduler) -> None:
        await asyncio.sleep(1000.0)
        with pytest.raises(Stalled):
            await scheduler.take(1)
        assert 1100.0 <= now() <= 1250.0

    stage(scene)


@pytest.mark.parametrize("halt", ["pause", "drain"])
def test_a_halted_run_is_not_a_stall(halt: str) -> None:
    async def scene(scheduler: Scheduler) -> int:
        taker = asyncio.create_task(scheduler.take(30))
        await asyncio.sleep(10.0)
        await getattr(scheduler, halt)()
        await asyncio.sleep(5000.0)
        await scheduler.resume()
        return len(await taker)

    assert stage(scene)[0] == 30


def test_a_drain_that_does_not_end_ends_with_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualPlayer, "act", never)

    async def scene(scheduler: Scheduler) -> str:
        with pytest.raises(Stalled) as caught:
            await scheduler.drain()
        return str(caught.value)

    report, _ = stage(scene)
    assert "1 in drain(), draining" in report


def test_an_evaluation_that_does_not_end_ends_with_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(scheduler: Scheduler) -> str:
        await scheduler.take(1)
        await scheduler.drain()
        await asyncio.sleep(1000.0)
        monkeypatch.setattr(VirtualPlayer, "act", never)
        with pytest.raises(Stalled) as caught:
            await scheduler.evaluate([EpisodeSpec(episode_id="x", env_id="env")])
        return str(caught.value)

    report, _ = stage(scene)
    assert "1 in evaluate(), draining" in report
    assert "eval-x (env, turn 0): generating" in report


def test_unreleased_groups_are_reported() -> None:
    async def scene(scheduler: Scheduler) -> str:
        await scheduler.take(2, release=False)
        with pytest.raises(Stalled) as caught:
            await scheduler.take(1, release=False)
        return str(caught.value)

    report, _ = stage(scene, max_ahead=2)
    assert "0 of 3 episodes in flight, 0 queued, 0 groups open, 1 in take()" in report
    assert "no group may start: 0 open + 2 taken but not released >= max_ahead (2)" in report


def test_after_a_stall_every_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualPlayer, "act", never)

    async def scene(scheduler: Scheduler) -> None:
        evaluation = asyncio.create_task(scheduler.evaluate([EpisodeSpec(episode_id="x", env_id="env")]))
        second = asyncio.create_task(scheduler.evaluate([EpisodeSpec(episode_id="y", env_id="env")]))
        waiting = [scheduler.take(1), scheduler.take(1), scheduler.drain()]
        ends = await asyncio.gather(*waiting, evaluation, second, return_exceptions=True)
        assert [type(end) for end in ends] == [Stalled] * 5
        for late in (scheduler.take(1), scheduler.drain(), scheduler.evaluate([])):
            with pytest.raises(Stalled):
                await late

    stage(scene)


def test_waiting_for_reports_at_any_time() -> None:
    async def scene(scheduler: Scheduler) -> str:
        await scheduler.pause()
        return scheduler.waiting_for()

    report, _ = stage(scene, groups=GroupPolicy(size=4), max_ahead=3)
    assert report.splitlines()[0] == "3 of 3 episodes in flight, 1 queued, 1 groups open, paused"
    assert "3 waiting for its turn on the event loop" in report


def test_every_state_can_be_explained() -> None:
    assert set(WAITS_FOR) == {state.value for state in EpisodeState}


def test_a_stall_is_an_error_of_the_run() -> None:
    assert issubclass(Stalled, RunError)
