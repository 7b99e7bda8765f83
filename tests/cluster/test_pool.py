"""The pool on three nodes: leases, failures, and a node that dies during sixty episodes."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rollgym.cluster.connect import Connection, connect
from rollgym.cluster.pool import RayPool
from rollgym.core.agent import AgentSetup, make_agent
from rollgym.core.errors import EnvError, UsageError
from rollgym.core.roles import TeamAgent
from rollgym.core.types import Episode, EpisodeSpec, Outcome, Seconds
from rollgym.pool.base import EnvPool, LeaseLost
from rollgym.pool.inline import InlinePool
from rollgym.pool.limits import WorkerLimits
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.episode_runner import run_episode
from rollgym.rollout.group_state import GroupPolicy
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import EnvSource, TaskSampler

ray: Any = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def nodes(nodes_of: Callable[..., Any]) -> Any:
    return nodes_of(3)


@pytest.fixture(scope="module")
def joined(nodes: Any) -> Iterator[Connection]:
    with connect(nodes.address) as connection:
        yield connection


def spec(env: str = "Counting", task: int = 5, **kwargs: object) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=f"{env}-{task}",
        env_id=f"faulty:{env}",
        env_kwargs=dict(kwargs),
        task=task,
        split="test",
        env_seed=11,
    )


async def play(pool: RayPool, which: EpisodeSpec) -> list[str]:
    session = await pool.open(which)
    try:
        start = await session.reset()
        return [start.observation, *[(await session.step("yes")).observation for _ in range(3)]]
    finally:
        await session.close()


async def go_on(session: Any) -> None:
    """Step until it fails."""
    while True:
        await session.step("yes")
        await asyncio.sleep(0.01)


def test_episodes_are_spread_over_the_nodes_and_run_as_locally(joined: Connection) -> None:
    async def main() -> None:
        pool = RayPool(workers=0)
        try:
            played = await asyncio.gather(*(play(pool, spec(task=task)) for task in range(12)))
            home = InlinePool()
            for task, texts in enumerate(played):
                session = await home.open(spec(task=task))
                assert texts[0] == (await session.reset()).observation, "same seed, same episode"
            assert all(texts[1:] == ["turn 1", "turn 2", "turn 3"] for texts in played)
            stats = pool.stats()
            assert (stats.leases, stats.episodes, stats.started) == (0, 12, 3)
            inside = await pool.inner_stats()
            assert {name.partition("@")[2] for name in inside} == {name[:8] for name in joined.nodes}
        finally:
            await pool.close()
        assert pool.stats().ended == {"closed": 3}
        with pytest.raises(UsageError, match="closed"):
            await pool.open(spec())

    asyncio.run(main())


def test_episodes_of_several_roles_run_as_locally(joined: Connection) -> None:
    """Roles, their instructions, tools and rewards cross the network; the agents stay in this process."""

    def role_spec(env: str, task: int, **players: str) -> EpisodeSpec:
        return EpisodeSpec(
            episode_id=f"{env}-{task}",
            env_id=f"rollgym/{env}-v0",
            env_kwargs={"others": None},
            task=task,
            split="test",
            env_seed=11,
            role=next(iter(players)),
            players=players,
        )

    specs = [role_spec("Nim", task, player_1="expert", player_2="random") for task in range(3)]
    specs += [role_spec("ServiceDesk", task, agent="expert", user="expert") for task in range(3)]

    async def episodes(pool: EnvPool) -> list[Episode]:
        played = []
        for which in specs:
            setup = AgentSetup(env_id=which.env_id, env_kwargs=which.env_kwargs)
            team = TeamAgent({name: make_agent(name, setup) for name in ("expert", "random")}, "expert")
            episode = await run_episode(which, pool, team)
            turns = tuple(replace(turn, seconds=Seconds()) for turn in episode.turns)
            played.append(replace(episode, turns=turns, started=0.0, seconds=0.0))
        await pool.close()
        return played

    there, here = (asyncio.run(episodes(pool)) for pool in (RayPool(workers=0), InlinePool()))
    assert there == here
    assert all(episode.outcome is Outcome.TERMINATED for episode in there)
    desk = there[-1]
    assert [(role.name, bool(role.tools), role.free_text) for role in desk.roles] == [
        ("agent", True, False),
        ("user", False, True),
    ]
    assert set(desk.turns[-1].rewards) == {"agent", "user"}


def test_failures_are_data_and_limits_hold_as_in_a_local_pool(joined: Connection) -> None:
    async def main() -> None:
        pool = RayPool(1, workers=1, limits=WorkerLimits(step_seconds=1.0))
        try:
            bad = await pool.open(spec("RaisesInStep"))
            await bad.reset()
            with pytest.raises(EnvError, match="RaisesInStep.* raised in step") as raised:
                await go_on(bad)
            assert raised.value.failure is not None
            assert "Traceback" in raised.value.failure.traceback
            await bad.close()
            slow = await pool.open(spec("Hangs"))
            await slow.reset()
            with pytest.raises(LeaseLost, match="longer than 1 s") as lost:
                await go_on(slow)
            assert (lost.value.reason, lost.value.guilty, lost.value.culprits) == (
                "deadline",
                True,
                ("Hangs-5",),
            )
            await slow.close()
            assert (await play(pool, spec()))[-1] == "turn 3", "and the actor plays on"
            assert pool.stats().ended == {}
        finally:
            await pool.close()

    asyncio.run(main())


def test_a_cancelled_call_frees_the_environment_where_it_is(joined: Connection) -> None:
    async def main() -> None:
        pool = RayPool(1, workers=0)
        try:
            session = await pool.open(spec())
            await session.reset()
            task = asyncio.create_task(session.step("yes"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await session.close()
            await play(pool, spec())
            async with asyncio.timeout(20):  # closing is sent without waiting
                while [stats.leases for stats in (await pool.inner_stats()).values()] != [0]:
                    await asyncio.sleep(0.05)
        finally:
            await pool.close()

    asyncio.run(main())


def test_a_dead_actor_is_replaced_and_its_sessions_raise(joined: Connection) -> None:
    async def main() -> None:
        pool = RayPool(1, workers=0)
        try:
            session = await pool.open(spec())
            await session.reset()
            ray.kill(session.handle.actor)
            with pytest.raises(LeaseLost, match="an env actor is lost") as lost:
                await go_on(session)
            assert not lost.value.guilty
            await session.close()
            assert (await play(pool, spec()))[-1] == "turn 3"
            assert pool.stats().ended == {"died": 1}
        finally:
            await pool.close()

    asyncio.run(main())


@pytest.mark.slow
def test_a_step_longer_than_the_timeout_is_not_a_hang(joined: Connection) -> None:
    async def main() -> None:
        pool = RayPool(1, workers=0, heartbeat_timeout=4.0)
        try:
            slow = await pool.open(spec("Blocks", seconds=12.0))
            await slow.reset()
            assert (await slow.step("yes")).observation == "turn 1"
            await slow.close()
            assert pool.stats().ended == {}
        finally:
            await pool.close()

    asyncio.run(main())


def test_an_actor_that_hangs_is_replaced(joined: Connection) -> None:
    said: list[str] = []

    async def main() -> None:
        pool = RayPool(1, workers=0, report=said.append, heartbeat_timeout=2.0)
        try:
            session = await pool.open(spec())
            await session.reset()
            pid = session.handle.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(LeaseLost) as lost:
                await go_on(session)
            silent = "no heartbeat for 2 s, killed"
            assert str(lost.value) == f"an env actor is lost: {silent}"
            assert not lost.value.blamed
            assert said == [f"An env actor is lost ({silent}); starting another."]
            await session.close()
            assert (await play(pool, spec()))[-1] == "turn 3"
            assert pool.stats().ended == {"died": 1}
        finally:
            await pool.close()

    asyncio.run(main())


def test_modules_that_cannot_be_imported_are_named_and_not_retried_forever(joined: Connection) -> None:
    async def main() -> None:
        pool = RayPool(1, workers=0, modules=["no_such_module_anywhere"])
        try:
            with pytest.raises(UsageError, match="no_such_module_anywhere"):
                await pool.open(spec())
        finally:
            await pool.close()

    asyncio.run(main())


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 env actor, not 0"):
        RayPool(0)
    with pytest.raises(UsageError, match="workers must be at least 0"):
        RayPool(1, workers=-1)


def test_a_node_dies_during_sixty_episodes_and_none_is_lost_or_doubled(
    nodes: Any, joined: Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    emitted: list[Episode] = []

    async def main() -> list[Any]:
        pool = RayPool(workers=0)
        for _ in range(3):  # all actors are up before anything happens
            await play(pool, spec())
        # Long enough that many play when the node goes: an actor plays its episodes side by side.
        stream = TaskSampler([EnvSource(env_id="faulty:Blocks", env_kwargs={"seconds": 0.5})], seed=3)
        config = SchedulerConfig(max_in_flight=30, groups=GroupPolicy(size=4), max_ahead=15)
        agent = make_agent("faulty:Yes", AgentSetup(env_id="faulty:Blocks", env_kwargs={}))
        try:
            async with Scheduler(stream, pool, agent, config, on_episode=emitted.append) as scheduler:
                taking = asyncio.create_task(scheduler.take(15))
                while len(emitted) < 6:
                    await asyncio.sleep(0.01)
                home = {one.worker for one in _sessions(pool)}
                assert len(home) > 1, "several nodes play"
                await asyncio.to_thread(nodes.lose)
                groups = await taking
            assert pool.stats().ended["died"] >= 1
            return groups
        finally:
            await agent.close()
            await pool.close()

    groups = asyncio.run(main())
    members = [episode for group in groups for episode in group.episodes]
    assert [len(group.episodes) for group in groups] == [4] * 15, "all groups are complete"
    names = [(episode.spec.group_id, episode.spec.member) for episode in members]
    assert len(set(names)) == 60, "no episode twice"
    assert all(episode.outcome is Outcome.TERMINATED and episode.length == 3 for episode in members)
    ids = Counter(episode.spec.episode_id for episode in emitted)
    assert set(ids.values()) == {1}, "each episode ended once"
    lost = [episode for episode in emitted if episode.outcome is Outcome.WORKER_LOST]
    assert lost, "some were on the node that died"
    heard = capfd.readouterr()
    assert "raylet" not in heard.out + heard.err, "Ray prints nothing"
    assert all(line.endswith("; starting another.") for line in heard.err.splitlines()), heard.err
    assert {episode.spec.group_id for episode in lost} <= {group.group_id for group in groups}


def _sessions(pool: RayPool) -> list[Any]:
    return [session for handle in pool._actors.values() for session in handle.leases]
