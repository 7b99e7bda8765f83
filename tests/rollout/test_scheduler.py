"""The scheduler in single scenes: taking, waiting, cancelling."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from scenes import Scene, Timed, evaluation, now, numbers
from virtual import World, run

from rollgym.core.errors import EngineLost, RunError, UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.rollout.events import EventLog
from rollgym.rollout.group_state import GroupPolicy


def test_more_than_may_be_ahead_cannot_be_taken_without_releasing() -> None:
    async def main() -> None:
        scene = Scene(max_ahead=2)
        async with scene.scheduler as scheduler:
            with pytest.raises(UsageError, match=r"take\(3, release=False\) .* at most max_ahead \(2\)"):
                await scheduler.take(3, release=False)
            with pytest.raises(UsageError, match="at least one group"):
                await scheduler.take(0)
            assert len(await scheduler.take(3)) == 3, "with releasing it can"

    run(main)


def test_nothing_starts_in_place_of_taken_groups_until_they_are_released() -> None:
    async def main() -> None:
        scene = Scene(max_ahead=2)
        async with scene.scheduler as scheduler:
            await scheduler.take(2, release=False)
            await asyncio.sleep(100.0)
            assert scene.kinds("episode_started") == ["g000000-0", "g000001-0"]
            scheduler.release(1)
            await asyncio.sleep(100.0)
            assert scene.kinds("episode_started") == ["g000000-0", "g000001-0", "g000002-0"]
            scheduler.release(1)
            assert scene.kinds("episode_started")[3:] == ["g000003-0"]

    run(main)


def test_a_take_that_is_cancelled_loses_nothing() -> None:
    async def main() -> None:
        scene = Scene(Timed(seconds={"g000001-0": 100.0}))
        async with scene.scheduler as scheduler:
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(20.0):
                        await scheduler.take(2)
            assert scheduler.buffer.unfinished_groups()[:2] == [0, 1]
            assert numbers(await scheduler.take(1)) == [0]
            assert numbers(await scheduler.take(2)) == [1, 2]
            assert scheduler.metrics()["groups"]["taken"] == 3

    run(main)


def test_what_a_cancelled_take_left_may_have_become_too_old() -> None:
    async def main() -> None:
        scene = Scene(Timed(seconds={"g000001-0": 100.0}), max_staleness=0)
        async with scene.scheduler as scheduler:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(20.0):
                    await scheduler.take(2)
            async with scheduler.updating(1):
                scene.world.version = 1
            [group] = await scheduler.take(1)
            assert group.episodes[0].turns[0].policy_version == 1
            assert scene.kinds("group_discarded")[0] == "g000000"

    run(main)


def test_concurrent_takes_get_different_groups_each_in_order() -> None:
    async def main() -> None:
        async with Scene().scheduler as scheduler:
            batches = await asyncio.gather(scheduler.take(3), scheduler.take(2))
            assert [numbers(batch) for batch in batches] == [[0, 1, 2], [3, 4]]

    run(main)


def test_the_next_group_starts_as_soon_as_a_slot_is_free() -> None:
    async def main() -> None:
        scene = Scene(Timed(seconds={"g000000-0": 100.0}))
        async with scene.scheduler:
            await asyncio.sleep(16.0)
        starts = {e["episode"]: e["t"] for e in scene.log.events if e["kind"] == "episode_started"}
        assert starts == {"g000000-0": 0, "g000001-0": 0, "g000002-0": 5, "g000003-0": 10, "g000004-0": 15}

    run(main)


# Groups


def test_oversampled_members_are_cancelled_if_running_and_dropped_if_queued() -> None:
    async def main() -> None:
        groups = GroupPolicy(size=1, oversample=2)
        scene = Scene(Timed(seconds={"g000000-1": 50.0}), groups=groups)
        async with scene.scheduler as scheduler:
            await scheduler.take(1)
            assert scene.kinds("episode_started")[:3] == ["g000000-0", "g000000-1", "g000001-0"], (
                "-2 never started"
            )
            await asyncio.sleep(0.5)
            assert scene.outcomes == {"g000000-0": "terminated", "g000000-1": "cancelled"}
            assert scene.kinds("episode_started")[3:] == ["g000001-1"], "its slot is free at once"
        assert Counter(scene.kinds("group_ready"))["g000000"] == 1, "a group is ready once"

    run(main)


def test_a_retry_goes_first() -> None:
    async def main() -> None:
        class Lossy(Timed):
            async def suffer(self, spec: EpisodeSpec, where: str, turn: int = 0) -> str | None:
                if spec.episode_id == "g000000-0" and where == "act":
                    raise RuntimeError("once")
                return None

        scene = Scene(Lossy(), groups=GroupPolicy(size=3))
        async with scene.scheduler as scheduler:
            [group] = await scheduler.take(1)
            assert group.complete
        assert scene.kinds("episode_started")[:4] == [
            "g000000-0",
            "g000000-1",
            "g000000-0-retry1",
            "g000000-2",
        ]
        assert scheduler.metrics()["groups"]["retried"] == 1

    run(main)


def test_groups_that_cannot_be_filled_end_the_run_with_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: World, spec: EpisodeSpec) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(World, "open", broken)

    async def main() -> None:
        scene = Scene(groups=GroupPolicy(size=2, max_retries_per_group=1), give_up_after=5)
        async with scene.scheduler as scheduler:
            with pytest.raises(RunError) as caught:
                await scheduler.take(1)
        said = str(caught.value)
        assert said.startswith("5 groups in a row could not be filled: ")
        last = "the environment could not be opened: OSError: no space left"
        assert said.endswith(f" x env_error (last error: {last})")

    run(main)


class Unplugged(Timed):
    """Episodes that generate at this moment lose their engine; later ones have another."""

    def __init__(self, at: float, often: int = 1, **options: Any) -> None:
        super().__init__(turns=4, early=0.0, **options)
        self.losses = [at + 4.0 * number for number in range(often)]

    async def suffer(self, spec: EpisodeSpec, where: str, turn: int = 0) -> str | None:
        if where == "act" and any(at < now() <= at + 1.0 for at in self.losses):
            raise EngineLost("the engine is gone")
        return None


@pytest.mark.parametrize("incomplete_groups", ["keep", "drop"])
def test_a_lost_engine_loses_no_episode_of_a_batch(incomplete_groups: Any) -> None:
    """Eight groups of eight lose all members at once: more than the budget for failures."""

    async def main() -> None:
        groups = GroupPolicy(size=8, incomplete_groups=incomplete_groups)
        scene = Scene(Unplugged(at=2.5, often=3), groups=groups, max_in_flight=64, max_ahead=8)
        async with scene.scheduler as scheduler:
            batch = await scheduler.take(8, release=False)
            assert [len(group.episodes) for group in batch] == [8] * 8
            counts = scheduler.metrics()["groups"]
            assert (counts["infra_retries"], counts.get("retried", 0)) == (192, 0)
            assert scheduler.last_infra_error == "the engine is gone"
        flags = [event["infrastructure"] for event in scene.log.events if event["kind"] == "episode_retried"]
        assert flags == [True] * 192

    run(main)


def test_an_engine_that_stays_away_ends_the_run() -> None:
    async def main() -> None:
        groups = GroupPolicy(size=2, max_infra_retries=3)
        scene = Scene(Unplugged(at=2.5, often=1000), groups=groups, give_up_after=2)
        async with scene.scheduler as scheduler:
            with pytest.raises(RunError, match="2 groups in a row .*last error: the engine is gone"):
                await scheduler.take(1)
            assert scheduler.metrics()["groups"]["infra_retries"] == 6

    run(main)


def test_a_filled_group_resets_the_count_even_if_it_is_filtered() -> None:
    class Moody(Timed):
        async def suffer(self, spec: EpisodeSpec, where: str, turn: int = 0) -> str | None:
            if where == "act" and int(spec.group_id[1:]) % 3:
                raise RuntimeError("two of three groups fail")
            return None

    async def main() -> None:
        scene = Scene(
            Moody(same_returns=True),
            groups=GroupPolicy(size=2, max_retries_per_group=0),
            give_up_after=3,
            filter_zero_variance=True,
            max_skipped=3,
        )
        async with scene.scheduler as scheduler:
            assert numbers(await scheduler.take(2)) == [9, 21]

    run(main)


def test_equal_returns_are_filtered_up_to_a_limit() -> None:
    async def main() -> None:
        scene = Scene(
            Timed(same_returns=True), groups=GroupPolicy(size=2), filter_zero_variance=True, max_skipped=3
        )
        async with scene.scheduler as scheduler:
            assert numbers(await scheduler.take(3)) == [3, 7, 11]

    run(main)


def test_only_fresh_groups_are_taken_and_stale_ones_are_played_again() -> None:
    async def main() -> None:
        scene = Scene(max_staleness=1, max_ahead=4)
        async with scene.scheduler as scheduler:
            for version in range(1, 6):
                await asyncio.sleep(50.0)
                groups = await scheduler.take(1)
                oldest = min(t.policy_version or 0 for g in groups for e in g.episodes for t in e.turns)
                assert scheduler.buffer.version - oldest <= 1
                async with scheduler.updating(version):
                    scene.world.version = version
            assert scheduler.metrics()["groups"]["stale"] > 0

    run(main)


def test_a_group_that_is_too_old_already_is_not_played_to_its_end() -> None:
    async def main() -> None:
        scene = Scene(Timed(turns=100, early=0.0), max_staleness=1, max_in_flight=1)
        async with scene.scheduler as scheduler:
            for version in (1, 2):
                await asyncio.sleep(10.0)
                async with scheduler.updating(version):
                    scene.world.version = version
                assert scene.kinds("group_cancelled") == ["g000000"] * (version - 1)
            await asyncio.sleep(3.0)
            assert scene.outcomes == {"g000000-0": "cancelled"}
            assert scene.kinds("episode_started") == ["g000000-0", "g000000-0-retry1"]

    run(main)


def test_running_episodes_restart_on_a_weight_update() -> None:
    async def main() -> None:
        scene = Scene(Timed(turns=10, early=0.0), on_weight_update="restart", max_in_flight=2)
        async with scene.scheduler as scheduler:
            await asyncio.sleep(15.0)
            async with scheduler.updating(1):
                scene.world.version = 1
            groups = await scheduler.take(2)
            played = [t.policy_version for g in groups for e in g.episodes for t in e.turns]
            assert set(played) == {1}
            assert scene.kinds("episode_restarted") == ["g000000-0-retry1", "g000001-0-retry1"]
            assert scene.outcomes["g000000-0"] == "cancelled"

    run(main)


@pytest.mark.parametrize(
    ("seconds", "states"),
    [(1.5, []), (2.5, ["g000000-0-retry1"]), (3.5, ["g000000-0-retry1"])],
    ids=["resetting", "generating", "stepping"],
)
def test_an_episode_in_its_first_turn_restarts(seconds: float, states: list[str]) -> None:
    async def main() -> None:
        scene = Scene(Timed(turns=2, early=0.0), on_weight_update="restart", max_in_flight=1)
        async with scene.scheduler as scheduler:
            await asyncio.sleep(seconds)
            async with scheduler.updating(1):
                scene.world.version = 1
            [group] = await scheduler.take(1)
            assert {turn.policy_version for turn in group.episodes[0].turns} == {1}
            assert scene.kinds("episode_restarted") == states

    run(main)


def test_a_full_group_does_not_restart() -> None:
    """The weights change after it is full and before its oversampled member has ended."""

    class Eager(EventLog):
        def add(self, kind: str, **facts: Any) -> None:
            super().add(kind, **facts)
            if kind == "group_ready":
                assert "g000000-1" not in scene.outcomes
                scene.scheduler._replace_outdated()

    scene: Scene

    async def main() -> None:
        nonlocal scene
        log = Eager(keep=True, clock=asyncio.get_running_loop().time)
        slow = Timed(turns=9, early=0.0, seconds={"g000000-1": 5.0})
        scene = Scene(
            slow, log=log, groups=GroupPolicy(size=1, oversample=1), on_weight_update="restart", max_ahead=1
        )
        async with scene.scheduler as scheduler:
            await scheduler.take(1)
        assert scene.kinds("episode_restarted") == []

    run(main)


def test_pause_starts_nothing_and_running_episodes_continue() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.scheduler as scheduler:
            await asyncio.sleep(1.0)
            await scheduler.pause()
            await asyncio.sleep(100.0)
            assert scene.outcomes == {"g000000-0": "terminated", "g000001-0": "terminated"}
            assert len(scene.kinds("episode_started")) == 2
            assert numbers(await scheduler.take(2)) == [0, 1], "ready groups can be taken"
            await scheduler.resume()
            assert len(scene.kinds("episode_started")) == 4

    run(main)


def test_drain_finishes_the_groups_that_have_begun_and_starts_no_other() -> None:
    async def main() -> None:
        scene = Scene(groups=GroupPolicy(size=5))
        async with scene.scheduler as scheduler:
            await asyncio.sleep(1.0)
            await scheduler.drain()
            assert (now(), scheduler.metrics()["in_flight"]) == (15.0, 0)
            await asyncio.sleep(100.0)
            assert len(scene.kinds("episode_started")) == 5
            assert numbers(await scheduler.take(1)) == [0]
            await scheduler.resume()
            assert numbers(await scheduler.take(1)) == [1]

    run(main)


def test_drain_ends_a_pause() -> None:
    async def main() -> None:
        scene = Scene(groups=GroupPolicy(size=5))
        async with scene.scheduler as scheduler:
            await scheduler.pause()
            await asyncio.sleep(100.0)
            await scheduler.drain()
            assert len(scene.emitted) == 5

    run(main)


def test_resume_ends_a_drain() -> None:
    async def main() -> None:
        scene = Scene(Timed(seconds={"g000000-0": 1000.0}))
        async with scene.scheduler as scheduler:
            drain = asyncio.create_task(scheduler.drain())
            await asyncio.sleep(10.0)
            await scheduler.resume()
            await drain
            assert now() == 10.0
            assert scheduler.metrics()["in_flight"] == 2

    run(main)


def test_several_may_wait_at_once_and_all_are_woken() -> None:
    async def main() -> None:
        async with Scene(groups=GroupPolicy(size=4)).scheduler as scheduler:
            await asyncio.sleep(1.0)
            waiting = [scheduler.take(1), scheduler.drain(), scheduler.evaluate(evaluation("x"))]
            [group], _, episodes = await asyncio.gather(*waiting)
            assert (group.group_id, len(episodes)) == ("g000000", 1)

    run(main)
