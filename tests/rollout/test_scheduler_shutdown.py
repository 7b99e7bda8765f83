"""The end of a scheduler: waiting calls, reported episodes, errors that end it."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from scenes import Scene, Timed, evaluation, now, numbers
from virtual import VirtualPlayer, VirtualSession, World, run

from rollgym.core.errors import ResultsError, RunError
from rollgym.core.types import Episode, Outcome
from rollgym.rollout.events import EventLog
from rollgym.rollout.group_state import GroupPolicy
from rollgym.rollout.inflight import STOP_SECONDS


def test_every_waiting_call_raises_when_the_scheduler_stops() -> None:
    async def main() -> list[Any]:
        scene = Scene(Timed(seconds={"g000000-0": 1e6, "eval-x": 1e6}), groups=GroupPolicy(size=4))
        async with scene.scheduler as scheduler:
            await scheduler.pause()
            calls = [
                scheduler.take(1),
                scheduler.take(1),
                scheduler.evaluate(evaluation("x", "y")),
                scheduler.evaluate(evaluation("x")),
            ]
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(10.0)
            tasks.append(asyncio.create_task(scheduler.drain()))
            await asyncio.sleep(10.0)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for late in (scheduler.take(1), scheduler.evaluate(evaluation("x")), scheduler.drain()):
            ends += await asyncio.gather(late, return_exceptions=True)
        return ends

    ends = run(main)
    assert [type(end) for end in ends] == [RunError] * 8
    assert {str(end) for end in ends} == {"The scheduler was stopped."}


def test_every_episode_is_reported_when_the_scheduler_stops() -> None:
    async def main() -> None:
        scene = Scene(max_in_flight=7)
        async with scene.scheduler:
            await asyncio.sleep(2.5)
        assert [e.outcome for e in scene.emitted] == [Outcome.CANCELLED] * 7
        assert sorted(scene.kinds("episode_finished")) == sorted(scene.kinds("episode_started"))
        assert scene.world.ledger["opened"] == scene.world.ledger["closed"] == 7

    run(main)


def test_an_error_of_the_trainer_is_not_hidden() -> None:
    async def main() -> None:
        async with Scene().scheduler:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(main)


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyError("x"), "on_episode raised: KeyError: 'x'"), (ResultsError("disk full"), "disk full")],
)
def test_an_error_in_on_episode_ends_the_run(error: Exception, said: str) -> None:
    async def main() -> None:
        def angry(episode: Episode) -> None:
            raise error

        scene = Scene()
        scene.scheduler._on_episode = angry
        async with scene.scheduler as scheduler:
            waiting = [scheduler.take(1), scheduler.evaluate(evaluation("a", "b", "c", "d"))]
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert [str(end) for end in ends] == [said, said]
        assert Counter(scene.kinds("episode_finished")) == Counter(scene.kinds("episode_started"))

    run(main)


@pytest.mark.parametrize("kind", ["episode_finished", "episode_state", "episode_started"])
def test_a_log_that_cannot_be_written_ends_the_run(kind: str) -> None:
    class Full(EventLog):
        def add(self, what: str, **facts: Any) -> None:
            if what == kind and self.now >= (0.5 if kind == "episode_state" else 2.0):
                raise OSError("no space left on device")
            super().add(what, **facts)

    async def main() -> None:
        scene = Scene(log=Full(keep=True, clock=asyncio.get_running_loop().time))
        async with scene.scheduler as scheduler:
            with pytest.raises(RunError, match="no space left on device"):
                await scheduler.take(5)
        assert scheduler.metrics()["in_flight"] == 0
        assert not scene.world.inside

    run(main)


def test_an_episode_that_does_not_end_is_abandoned_and_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stubborn(self: VirtualPlayer, *args: object) -> Any:
        until = now() + 10_000.0
        while now() < until:
            try:
                await asyncio.sleep(until - now())
            except asyncio.CancelledError:
                continue
        return "at last"

    monkeypatch.setattr(VirtualPlayer, "act", stubborn)

    async def main() -> None:
        scene = Scene()
        async with scene.scheduler:
            await asyncio.sleep(10.0)
        assert now() == 10.0 + STOP_SECONDS
        assert scene.outcomes == {"g000000-0": "cancelled", "g000001-0": "cancelled"}
        await asyncio.sleep(20_000.0)
        assert len(scene.emitted) == 2
        assert scene.kinds("episode_finished") == ["g000000-0", "g000001-0"]

    run(main)


@pytest.mark.parametrize(
    ("where", "outcome"),
    [
        ((World, "open"), "env_error"),
        ((World, "player"), "engine_error"),
        ((VirtualSession, "close"), "env_error"),
    ],
)
def test_a_bug_in_pool_or_agent_does_not_leak_a_slot(
    monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], outcome: str
) -> None:
    original = getattr(*where)
    calls = [0]

    def sometimes(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] % 2:
            raise ZeroDivisionError("a bug")
        return original(*args)

    monkeypatch.setattr(*where, sometimes)

    async def main() -> None:
        scene = Scene(groups=GroupPolicy(size=2, max_retries_per_group=9))
        async with scene.scheduler as scheduler:
            groups = await scheduler.take(4)
            assert all(group.complete for group in groups)
            assert scheduler.metrics()["outcomes"][outcome] >= 4

    run(main)


def test_a_limit_and_the_end_of_the_group_at_the_same_moment() -> None:
    """The sibling ends at 5 seconds, when the oversampled member meets its limit."""

    async def main() -> None:
        scene = Scene(
            Timed(seconds={"g000000-1": 20.0}),
            limit=5.0,
            groups=GroupPolicy(size=1, oversample=1),
            max_ahead=1,
        )
        async with scene.scheduler as scheduler:
            await scheduler.take(1)
            await scheduler.drain()
        assert Counter(scene.kinds("episode_finished")) == Counter(scene.kinds("episode_started"))
        assert scene.outcomes["g000000-0"] == "terminated"
        assert scene.outcomes["g000000-1"] in ("cancelled", "time_limit")

    run(main)


def test_numbers_for_a_dashboard() -> None:
    async def main() -> None:
        scene = Scene(
            Timed(seconds={"g000000-0": 100.0}), groups=GroupPolicy(size=1), order="ready", max_ahead=3
        )
        async with scene.scheduler as scheduler:
            assert scheduler.metrics() == {
                "groups": {"started": 2},
                "outcomes": {},
                "in_flight": 2,
                "queued": 0,
                "ready": 0,
                "length_bias": None,
            }
            await asyncio.sleep(11.0)
            assert scheduler.metrics()["ready"] == 2
            assert numbers(await scheduler.take(1)) == [1]
            told = scheduler.metrics()
            assert told["groups"] == {"started": 4, "taken": 1}
            assert told["outcomes"] == {"terminated": 2}
            assert told["length_bias"] == 2.0, "one turn taken; 0 has been overtaken and has none yet"

    run(main)
