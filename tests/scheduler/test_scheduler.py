"""The scheduler, scene by scene: who waits, who is cancelled, who is told."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from virtual import VirtualPlayer, VirtualSession, World, run

from rollgym.errors import ResultsError, RunError, UsageError
from rollgym.scheduler.config import SchedulerConfig
from rollgym.scheduler.events import EventLog
from rollgym.scheduler.groups import GroupPolicy
from rollgym.scheduler.places import STOP_SECONDS
from rollgym.scheduler.scheduler import Scheduler
from rollgym.scheduler.stream import Source, TaskStream
from rollgym.scheduler.watchdog import Stalled
from rollgym.types import Episode, EpisodeSpec, Limits, Outcome


@dataclass
class Timed(World):
    """Everything takes a second, but for the episodes named here; an episode has one turn: five seconds."""

    turns: int = 1
    seconds: dict[str, float] = field(default_factory=dict)

    async def delay(self, *what: object, most: float = float("inf")) -> None:
        await asyncio.sleep(min(most, self.seconds.get(str(what[0]), 1.0)))


class Scene:
    """A scheduler in a world, and what was emitted."""

    def __init__(
        self,
        world: World | None = None,
        limit: float | None = None,
        log: EventLog | None = None,
        **config: Any,
    ) -> None:
        self.world = world or Timed()
        self.emitted: list[Episode] = []
        self.log = log or EventLog(keep=True, clock=asyncio.get_running_loop().time)
        settings = SchedulerConfig(**{"max_in_flight": 2, "stall_seconds": 1e6, **config})
        stream = TaskStream([Source(env_id="env", limits=Limits(seconds=limit))])
        self.scheduler = Scheduler(
            stream, self.world, self.world, settings, log=self.log, on_episode=self.emitted.append
        )

    def kinds(self, *kinds: str) -> list[Any]:
        """The events of these kinds, each as its episode or group."""
        return [e.get("episode") or e.get("group") for e in self.log.events if e["kind"] in kinds]

    @property
    def outcomes(self) -> dict[str, str]:
        return {e.spec.episode_id: e.outcome.value for e in self.emitted}


def now() -> float:
    return asyncio.get_running_loop().time()


def numbers(groups: list[Any]) -> list[int]:
    return [int(group.group_id[1:]) for group in groups]


def evaluation(*names: str) -> list[EpisodeSpec]:
    return [EpisodeSpec(episode_id=name, env_id="env", env_seed=7) for name in names]


async def never(*args: object) -> Any:
    await asyncio.sleep(1e9)


# Taking and releasing


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
            assert scene.kinds("started") == ["g000000-0", "g000001-0"]
            scheduler.release(1)
            await asyncio.sleep(100.0)
            assert scene.kinds("started") == ["g000000-0", "g000001-0", "g000002-0"]
            scheduler.release(1)
            assert scene.kinds("started")[3:] == ["g000003-0"]

    run(main)


def test_a_take_that_is_cancelled_loses_nothing() -> None:
    async def main() -> None:
        scene = Scene(Timed(seconds={"g000001-0": 100.0}))
        async with scene.scheduler as scheduler:
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(20.0):
                        await scheduler.take(2)
            assert scheduler.board.tickets_to_play()[:2] == [0, 1]
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
            assert scene.kinds("stale_over")[0] == "g000000"

    run(main)


def test_two_who_take_at_once_get_different_groups_each_in_order() -> None:
    async def main() -> None:
        async with Scene().scheduler as scheduler:
            batches = await asyncio.gather(scheduler.take(3), scheduler.take(2))
            assert [numbers(batch) for batch in batches] == [[0, 1, 2], [3, 4]]

    run(main)


def test_the_next_group_starts_as_soon_as_a_place_is_free() -> None:
    async def main() -> None:
        scene = Scene(Timed(seconds={"g000000-0": 100.0}))
        async with scene.scheduler:
            await asyncio.sleep(16.0)
        starts = {e["episode"]: e["t"] for e in scene.log.events if e["kind"] == "started"}
        assert starts == {"g000000-0": 0, "g000001-0": 0, "g000002-0": 5, "g000003-0": 10, "g000004-0": 15}

    run(main)


# Groups


def test_extras_are_cancelled_where_they_play_and_forgotten_where_they_wait() -> None:
    async def main() -> None:
        groups = GroupPolicy(size=1, extra=2)
        scene = Scene(Timed(seconds={"g000000-1": 50.0}), groups=groups)
        async with scene.scheduler as scheduler:
            await scheduler.take(1)
            assert scene.kinds("started")[:3] == ["g000000-0", "g000000-1", "g000001-0"], "-2 never played"
            await asyncio.sleep(0.5)
            assert scene.outcomes == {"g000000-0": "terminated", "g000000-1": "cancelled"}
            assert scene.kinds("started")[3:] == ["g000001-1"], "its place is free at once"
        assert Counter(scene.kinds("ready"))["g000000"] == 1, "a group is ready once"

    run(main)


def test_a_refill_goes_before_everything_else() -> None:
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
        assert scene.kinds("started")[:4] == ["g000000-0", "g000000-1", "g000000-0-retry1", "g000000-2"]
        assert scheduler.metrics()["groups"]["refilled"] == 1

    run(main)


def test_groups_that_cannot_be_filled_end_the_run_with_what_they_met(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: World, spec: EpisodeSpec) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(World, "open", broken)

    async def main() -> None:
        scene = Scene(groups=GroupPolicy(size=2, refills=1), give_up_after=5)
        async with scene.scheduler as scheduler:
            with pytest.raises(RunError) as caught:
                await scheduler.take(1)
        said = str(caught.value)
        assert said.startswith("5 groups in a row could not be filled: ")
        last = "the environment could not be opened: OSError: no space left"
        assert said.endswith(f" x env_error (the last error: {last})")

    run(main)


def test_a_filled_group_starts_the_count_anew_even_one_that_is_skipped() -> None:
    class Moody(Timed):
        async def suffer(self, spec: EpisodeSpec, where: str, turn: int = 0) -> str | None:
            if where == "act" and int(spec.group_id[1:]) % 3:
                raise RuntimeError("two of three groups fail")
            return None

    async def main() -> None:
        scene = Scene(
            Moody(same_returns=True),
            groups=GroupPolicy(size=2, refills=0),
            give_up_after=3,
            skip_equal_returns=True,
            max_skipped=3,
        )
        async with scene.scheduler as scheduler:
            assert numbers(await scheduler.take(2)) == [9, 21]

    run(main)


def test_equal_returns_are_left_out_but_not_for_ever() -> None:
    async def main() -> None:
        scene = Scene(
            Timed(same_returns=True), groups=GroupPolicy(size=2), skip_equal_returns=True, max_skipped=3
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
                assert scheduler.board.version - oldest <= 1
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
                assert scene.kinds("recalled") == ["g000000"] * (version - 1)
            await asyncio.sleep(3.0)
            assert scene.outcomes == {"g000000-0": "cancelled"}
            assert scene.kinds("started") == ["g000000-0", "g000000-0-retry3"]

    run(main)


def test_episodes_under_way_begin_again_where_that_is_asked_for() -> None:
    async def main() -> None:
        scene = Scene(Timed(turns=10, early=0.0), under_way="restart", max_in_flight=2)
        async with scene.scheduler as scheduler:
            await asyncio.sleep(15.0)
            async with scheduler.updating(1):
                scene.world.version = 1
            groups = await scheduler.take(2)
            played = [t.policy_version for g in groups for e in g.episodes for t in e.turns]
            assert set(played) == {1}
            assert scene.kinds("restarted") == ["g000000-0-retry1", "g000001-0-retry1"]
            assert scene.outcomes["g000000-0"] == "cancelled"

    run(main)


# Pause and drain


def test_pause_starts_nothing_and_lets_go_on_what_plays() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.scheduler as scheduler:
            await asyncio.sleep(1.0)
            await scheduler.pause()
            await asyncio.sleep(100.0)
            assert scene.outcomes == {"g000000-0": "terminated", "g000001-0": "terminated"}
            assert len(scene.kinds("started")) == 2
            assert numbers(await scheduler.take(2)) == [0, 1], "what is ready can be taken"
            await scheduler.resume()
            assert len(scene.kinds("started")) == 4

    run(main)


def test_drain_finishes_the_groups_that_have_begun_and_starts_no_other() -> None:
    async def main() -> None:
        scene = Scene(groups=GroupPolicy(size=5))
        async with scene.scheduler as scheduler:
            await asyncio.sleep(1.0)
            await scheduler.drain()
            assert (now(), scheduler.metrics()["in_flight"]) == (15.0, 0)
            await asyncio.sleep(100.0)
            assert len(scene.kinds("started")) == 5
            assert numbers(await scheduler.take(1)) == [0]
            await scheduler.resume()
            assert numbers(await scheduler.take(1)) == [1]

    run(main)


def test_drain_ends_a_pause_rather_than_wait_for_ever() -> None:
    async def main() -> None:
        scene = Scene(groups=GroupPolicy(size=5))
        async with scene.scheduler as scheduler:
            await scheduler.pause()
            await asyncio.sleep(100.0)
            await scheduler.drain()
            assert len(scene.emitted) == 5

    run(main)


def test_resume_calls_a_drain_off() -> None:
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


# Evaluation


def test_evaluation_is_no_part_of_training() -> None:
    async def main() -> None:
        scene = Scene(max_in_flight=4)
        async with scene.scheduler as scheduler:
            episodes = await scheduler.evaluate(evaluation("b", "a"))
            assert [episode.spec.episode_id for episode in episodes] == ["eval-b", "eval-a"]
            before = scheduler.metrics()
            assert sum(before["outcomes"].values()) == len(scene.emitted)
            assert not [e for e in scene.emitted if e.spec.episode_id.startswith("eval")]
            again = await scheduler.evaluate(evaluation("b", "a"))
            assert [e.turns[0].action for e in again] == [e.turns[0].action for e in episodes]
            assert await scheduler.evaluate([]) == []
            with pytest.raises(UsageError, match="holds an episode twice"):
                await scheduler.evaluate(evaluation("a", "a"))

    run(main)


def test_evaluation_has_its_share_of_the_places_and_no_more() -> None:
    async def main() -> None:
        scene = Scene(max_in_flight=6, evaluation_share=0.5)
        async with scene.scheduler as scheduler:
            await scheduler.evaluate(evaluation(*"abcdefgh"))
        playing: Counter[bool] = Counter()
        most = 0
        for event in scene.log.events:
            if event["kind"] in ("started", "emitted"):
                playing[event["episode"].startswith("eval")] += 1 if event["kind"] == "started" else -1
                most = max(most, playing[True])
        assert most == 3

    run(main)


def test_even_the_smallest_share_is_one_place() -> None:
    async def main() -> None:
        async with Scene(max_in_flight=1, evaluation_share=0.1).scheduler as scheduler:
            assert len(await scheduler.evaluate(evaluation("a", "b"))) == 2

    run(main)


@pytest.mark.parametrize("halt", ["pause", "drain"])
def test_evaluation_is_played_while_training_is_halted(halt: str) -> None:
    async def main() -> None:
        async with Scene().scheduler as scheduler:
            await getattr(scheduler, halt)()
            assert len(await scheduler.evaluate(evaluation("a", "b", "c"))) == 3

    run(main)


def test_weights_change_only_between_evaluations() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.scheduler as scheduler:
            first = asyncio.create_task(scheduler.evaluate(evaluation("a", "b", "c")))
            await asyncio.sleep(1.0)
            async with scheduler.updating(1):
                assert first.done(), "the update waited"
                second = asyncio.create_task(scheduler.evaluate(evaluation("a", "b", "c")))
                await asyncio.sleep(100.0)
                assert not [name for name in scene.kinds("started") if name.startswith("eval")][3:]
                scene.world.version = 1
            versions = [{t.policy_version for e in es for t in e.turns} for es in (await first, await second)]
            assert versions == [{0}, {1}]
            assert scheduler.board.version == 1

    run(main)


def test_an_evaluation_inside_an_update_would_wait_for_itself() -> None:
    async def main() -> None:
        async with Scene(stall_seconds=100.0).scheduler as scheduler:
            async with scheduler.updating(1):
                with pytest.raises(UsageError, match="would wait for itself"):
                    await scheduler.evaluate(evaluation("x"))
            assert len(await scheduler.evaluate(evaluation("x"))) == 1
            with pytest.raises(Stalled, match=r"1 in evaluate\(\)"):
                async with scheduler.updating(2):
                    await asyncio.create_task(scheduler.evaluate(evaluation("x")))

    run(main)


def test_an_update_that_fails_changes_no_version() -> None:
    async def main() -> None:
        async with Scene().scheduler as scheduler:
            with pytest.raises(ZeroDivisionError):
                async with scheduler.updating(1):
                    raise ZeroDivisionError
            assert scheduler.board.version == 0
            assert len(await scheduler.evaluate(evaluation("x"))) == 1

    run(main)


def test_an_evaluation_under_several_versions_is_an_error() -> None:
    async def main() -> None:
        scene = Scene(Timed(turns=3, early=0.0))
        async with scene.scheduler as scheduler:
            asyncio.get_running_loop().call_later(12.5, setattr, scene.world, "version", 1)
            with pytest.raises(RunError, match="several versions"):
                await scheduler.evaluate(evaluation("a", "b", "c", "d"))

    run(main)


def test_evaluations_at_once_are_played_one_after_another() -> None:
    async def main() -> None:
        async with Scene().scheduler as scheduler:
            both = await asyncio.gather(*(scheduler.evaluate(evaluation("a", "b")) for _ in range(3)))
            assert [len(episodes) for episodes in both] == [2, 2, 2]

    run(main)


def test_an_evaluation_that_is_called_off_leaves_nothing_to_the_next() -> None:
    async def main() -> None:
        scene = Scene(Timed(seconds={"eval-slow": 30.0}), max_in_flight=4)
        async with scene.scheduler as scheduler:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(8.0):
                    await scheduler.evaluate(evaluation("slow", "a", "b", "c"))
            ends = [e for e in scene.log.events if e["kind"] == "emitted" and e["episode"] == "eval-slow"]
            assert not ends, "it is being cancelled"
            episodes = await scheduler.evaluate(evaluation("a", "slow"))
            assert [e.outcome.value for e in episodes] == ["terminated", "terminated"]
            assert "eval-c" not in scene.kinds("started")

    run(main)


# Ends


def test_whoever_waits_when_the_scheduler_stops_is_told() -> None:
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


def test_every_episode_is_emitted_when_the_scheduler_stops() -> None:
    async def main() -> None:
        scene = Scene(max_in_flight=7)
        async with scene.scheduler:
            await asyncio.sleep(2.5)
        assert [e.outcome for e in scene.emitted] == [Outcome.CANCELLED] * 7
        assert sorted(scene.kinds("emitted")) == sorted(scene.kinds("started"))
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
        assert Counter(scene.kinds("emitted")) == Counter(scene.kinds("started"))

    run(main)


@pytest.mark.parametrize("kind", ["emitted", "state", "started"])
def test_a_log_that_cannot_be_written_ends_the_run(kind: str) -> None:
    class Full(EventLog):
        def add(self, what: str, **facts: Any) -> None:
            if what == kind and self.now >= (0.5 if kind == "state" else 2.0):
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


def test_an_episode_that_will_not_end_is_left_behind_and_still_emitted_once(
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
        assert scene.kinds("emitted") == ["g000000-0", "g000001-0"]

    run(main)


@pytest.mark.parametrize(
    ("where", "outcome"),
    [
        ((World, "open"), "env_error"),
        ((World, "player"), "engine_error"),
        ((VirtualSession, "close"), "env_error"),
    ],
)
def test_a_bug_in_pool_or_agent_costs_the_episode_and_not_its_place(
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
        scene = Scene(groups=GroupPolicy(size=2, refills=9))
        async with scene.scheduler as scheduler:
            groups = await scheduler.take(4)
            assert all(group.complete for group in groups)
            assert scheduler.metrics()["outcomes"][outcome] >= 4

    run(main)


def test_a_limit_and_the_end_of_the_group_at_the_same_moment() -> None:
    """The sibling ends at 5 seconds, when the extra member meets its limit."""

    async def main() -> None:
        scene = Scene(
            Timed(seconds={"g000000-1": 20.0}), limit=5.0, groups=GroupPolicy(size=1, extra=1), max_ahead=1
        )
        async with scene.scheduler as scheduler:
            await scheduler.take(1)
            await scheduler.drain()
        assert Counter(scene.kinds("emitted")) == Counter(scene.kinds("started"))
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
                "groups": {"handed_out": 2},
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
            assert told["groups"] == {"handed_out": 4, "taken": 1}
            assert told["outcomes"] == {"terminated": 2}
            assert told["length_bias"] == 2.0, "one turn taken; 0 has been overtaken and has none yet"

    run(main)
