"""Evaluation beside training: its share of episodes, one policy version, no training statistics."""

import asyncio
from collections import Counter

import pytest
from scenes import Scene, Timed, evaluation, now
from virtual import run

from rollgym.core.agent import Briefing, Player
from rollgym.core.errors import RunError, UsageError, WorkerLost
from rollgym.core.types import Episode, EpisodeSpec
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.group_state import GroupPolicy
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import EnvSource, TaskSampler
from rollgym.rollout.watchdog import Stalled


class Played(Timed):
    """Keeps the ids of the episodes that it plays."""

    def __init__(self) -> None:
        super().__init__()
        self.played: list[str] = []

    def player(self, briefing: Briefing) -> Player:
        self.played.append(briefing.spec.episode_id)
        return super().player(briefing)


def test_evaluation_is_excluded_from_training() -> None:
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
            with pytest.raises(UsageError, match="same episode_id twice"):
                await scheduler.evaluate(evaluation("a", "a"))

    run(main)


def test_another_agent_can_play_evaluations_and_nothing_else() -> None:
    async def main() -> None:
        training, evaluating, emitted = Played(), Played(), list[Episode]()
        async with Scheduler(
            TaskSampler([EnvSource(env_id="env")]),
            training,
            training,
            SchedulerConfig(max_in_flight=2, stall_seconds=1e6),
            eval_agent=evaluating,
            on_episode=emitted.append,
        ) as scheduler:
            await scheduler.evaluate(evaluation("a", "b"))
            await scheduler.take(1)
        assert sorted(evaluating.played) == ["eval-a", "eval-b"]
        assert training.played
        assert {episode.spec.episode_id for episode in emitted} >= set(training.played)

    run(main)


def test_evaluation_runs_at_most_its_share_of_episodes() -> None:
    async def main() -> None:
        scene = Scene(max_in_flight=6, evaluation_share=0.5)
        async with scene.scheduler as scheduler:
            await scheduler.evaluate(evaluation(*"abcdefgh"))
        playing: Counter[bool] = Counter()
        most = 0
        for event in scene.log.events:
            if event["kind"] in ("episode_started", "episode_finished"):
                playing[event["episode"].startswith("eval")] += (
                    1 if event["kind"] == "episode_started" else -1
                )
                most = max(most, playing[True])
        assert most == 3

    run(main)


def test_the_smallest_share_is_one_episode() -> None:
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
                assert not [name for name in scene.kinds("episode_started") if name.startswith("eval")][3:]
                scene.world.version = 1
            versions = [{t.policy_version for e in es for t in e.turns} for es in (await first, await second)]
            assert versions == [{0}, {1}]
            assert scheduler.buffer.version == 1

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
            assert scheduler.buffer.version == 0
            assert len(await scheduler.evaluate(evaluation("x"))) == 1

    run(main)


def test_an_evaluation_under_several_versions_is_an_error() -> None:
    async def main() -> None:
        scene = Scene(Timed(turns=3, early=0.0))
        async with scene.scheduler as scheduler:
            asyncio.get_running_loop().call_later(12.5, setattr, scene.world, "version", 1)
            with pytest.raises(RunError, match="several policy versions"):
                await scheduler.evaluate(evaluation("a", "b", "c", "d"))

    run(main)


def test_evaluations_at_once_are_played_one_after_another() -> None:
    async def main() -> None:
        async with Scene().scheduler as scheduler:
            both = await asyncio.gather(*(scheduler.evaluate(evaluation("a", "b")) for _ in range(3)))
            assert [len(episodes) for episodes in both] == [2, 2, 2]

    run(main)


def test_a_cancelled_evaluation_leaves_nothing_to_the_next() -> None:
    async def main() -> None:
        scene = Scene(Timed(seconds={"eval-slow": 30.0}), max_in_flight=4)
        async with scene.scheduler as scheduler:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(8.0):
                    await scheduler.evaluate(evaluation("slow", "a", "b", "c"))
            ends = [
                e for e in scene.log.events if e["kind"] == "episode_finished" and e["episode"] == "eval-slow"
            ]
            assert not ends, "it is being cancelled"
            episodes = await scheduler.evaluate(evaluation("a", "slow"))
            assert [e.outcome.value for e in episodes] == ["terminated", "terminated"]
            assert "eval-c" not in scene.kinds("episode_started")

    run(main)


@pytest.mark.parametrize(
    ("retries", "expected", "outcomes"), [(3, 2, {"terminated"}), (1, 1, {"worker_lost"})]
)
def test_an_evaluation_retries_episodes_lost_with_a_worker(
    retries: int, expected: int, outcomes: set[str]
) -> None:
    class Lossy(Timed):
        async def suffer(self, spec: EpisodeSpec, where: str, turn: int = 0) -> str | None:
            if where == "step" and spec.episode_id.startswith("eval-") and now() < 17.0:
                raise WorkerLost("a node is gone")
            return None

    async def main() -> None:
        groups = GroupPolicy(max_infra_retries=retries)
        scene = Scene(Lossy(), groups=groups, evaluation_share=1.0, max_in_flight=3)
        async with scene.scheduler as scheduler:
            await scheduler.pause()
            episodes = await scheduler.evaluate(evaluation("a", "b", "c"))
            assert [episode.spec.episode_id for episode in episodes] == ["eval-a", "eval-b", "eval-c"]
            assert {episode.outcome.value for episode in episodes} == outcomes
            assert len(scene.kinds("eval_retried")) == scheduler.metrics()["groups"]["infra_retries"]
            assert Counter(scene.kinds("eval_retried")) == dict.fromkeys(
                ["eval-a", "eval-b", "eval-c"], expected
            )

    run(main)


class Outages(Timed):
    """Steps of evaluation episodes that end in these time spans are lost with their worker."""

    def __init__(self, *outages: tuple[float, float]) -> None:
        super().__init__()
        self.outages = outages

    async def suffer(self, spec: EpisodeSpec, where: str, turn: int = 0) -> str | None:
        out = any(start < now() < end for start, end in self.outages)
        if out and where == "step" and spec.episode_id.startswith("eval-"):
            raise WorkerLost("a node is gone")
        return None


def test_every_evaluation_has_its_own_retry_budget() -> None:
    async def main() -> None:
        scene = Scene(Outages((0.0, 10.0), (100.0, 110.0)), groups=GroupPolicy(max_infra_retries=1))
        async with scene.scheduler as scheduler:
            await scheduler.pause()
            await asyncio.sleep(5.0)
            for _ in range(2):
                [episode] = await scheduler.evaluate(evaluation("a"))
                assert episode.outcome.value == "terminated"
                await asyncio.sleep(100.0 + 5.0 - now())
        assert scene.kinds("eval_retried") == ["eval-a", "eval-a"]

    run(main)


def test_a_cancelled_evaluation_retries_nothing() -> None:
    async def main() -> None:
        scene = Scene(Outages((0.0, 10.0), (100.0, 110.0)))
        async with scene.scheduler as scheduler:
            await scheduler.pause()
            await asyncio.sleep(5.0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(4.5):  # it is lost, and its environment is being closed
                    await scheduler.evaluate(evaluation("a"))
            await asyncio.sleep(50.0)
            assert scene.kinds("eval_retried") == []
            await asyncio.sleep(105.0 - now())
            [episode] = await scheduler.evaluate(evaluation("a"))
            assert (episode.outcome.value, scene.kinds("eval_retried")) == ("terminated", ["eval-a"])

    run(main)
