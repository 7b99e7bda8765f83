"""Workers come and go: by demand, by age, by size, and all of them with their pool."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import EnvError, UsageError
from rollgym.pool import linux
from rollgym.pool.base import LeaseLost
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.local import LocalPool

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_workers_grow_with_demand_and_go_when_idle(kit: Any) -> None:
    async def use(pool: LocalPool) -> tuple[int, int, dict[str, int]]:
        sessions = [await pool.open(kit.spec(task=task)) for task in range(5)]
        grown = len(pool.stats().workers)
        assert pool.stats().leases == 5
        for session in sessions:
            await session.close()
        assert await kit.until_async(lambda: pool.stats().ended == {"idle": 2})
        await asyncio.sleep(0.5)
        assert await kit.play(pool, kit.spec())
        return grown, len(pool.stats().workers), pool.stats().ended

    assert kit.run(use, workers=3, min_workers=1, idle_seconds=0.3) == (3, 1, {"idle": 2})


def test_one_episode_after_another_needs_one_worker(kit: Any) -> None:
    async def use(pool: LocalPool) -> int:
        for task in range(10):
            await kit.play(pool, kit.spec(task=task))
        return pool.stats().started

    assert kit.run(use, workers=4) == 1


def test_a_worker_is_replaced_after_its_episodes_and_keeps_its_leases_until_they_end(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        first = await pool.open(kit.spec(name="a"))
        second = await pool.open(kit.spec(name="b"))
        assert [worker.leaving for worker in pool.stats().workers] == ["episodes"]
        third = await pool.open(kit.spec(name="c"))
        assert pool.stats().started == 2
        for session in (first, second, third):
            await session.reset()
            await session.close()
        assert await kit.until_async(lambda: pool.stats().ended == {"episodes": 1})
        for task in range(5):
            await kit.play(pool, kit.spec(task=task))
        assert await kit.until_async(lambda: pool.stats().ended == {"episodes": 4})
        assert pool.stats().episodes == 8

    kit.run(use, limits=WorkerLimits(episodes=2))


def test_workers_that_leave_make_room_but_not_without_end(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        first, second = await pool.open(kit.spec(name="a")), await pool.open(kit.spec(name="b"))
        third = asyncio.create_task(pool.open(kit.spec(name="c")))
        await asyncio.sleep(0.1)
        assert not third.done()
        assert pool.stats().waiting == 1
        await first.close()
        await (await third).close()
        await second.close()

    kit.run(use, limits=WorkerLimits(episodes=1))


def test_a_full_worker_makes_the_next_lease_wait(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        first = await pool.open(kit.spec(name="a"))
        others = [asyncio.create_task(kit.play(pool, kit.spec(task=task))) for task in range(3)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in others)
        await first.close()
        assert [len(seen) for seen in await asyncio.gather(*others)] == [4, 4, 4]
        assert pool.stats().started == 1

    kit.run(use, limits=WorkerLimits(leases=1))


def test_a_worker_over_its_soft_limit_leaves_when_its_leases_have_ended(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        large = await pool.open(kit.spec("Leaks"))
        await large.reset()
        for _ in range(4):
            await large.step("yes")
        assert await kit.until_async(lambda: pool.stats().workers[0].leaving == "memory")
        assert pool.stats().workers[0].memory_mb > 200
        await large.step("yes")
        assert await kit.play(pool, kit.spec())
        assert pool.stats().started == 2
        await large.close()
        assert await kit.until_async(lambda: pool.stats().ended == {"memory": 1})

    kit.run(use, limits=WorkerLimits(soft_memory_mb=200))


def test_a_cancelled_step_costs_the_environment_and_not_the_worker(kit: Any, tmp_path: Path) -> None:
    async def use(pool: LocalPool) -> None:
        folder = str(tmp_path)
        session = await pool.open(kit.spec("Waits", task=0, folder=folder))
        await session.reset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await session.step("yes")
        with pytest.raises(UsageError, match="one call at a time"):
            await session.step("yes")
        await session.close()
        assert len(await kit.play(pool, kit.spec("Waits", task=1, folder=folder))) == 4
        (tmp_path / "go").touch()
        assert len(await kit.play(pool, kit.spec("Waits", task=0, folder=folder))) == 4
        assert pool.stats().ended == {}
        assert pool.stats().episodes == 3

    kit.run(use)


def test_an_abandoned_call_is_killed_at_its_deadline(kit: Any) -> None:
    async def use(pool: LocalPool) -> LeaseLost:
        other = await pool.open(kit.spec(name="other"))
        await other.reset()
        hung = await pool.open(kit.spec("Hangs", name="given up"))
        await hung.reset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await hung.step("yes")
        await hung.close()
        assert await kit.until_async(lambda: pool.stats().ended == {"deadline": 1})
        with pytest.raises(LeaseLost) as caught:
            await other.step("yes")
        return caught.value

    loss = kit.run(use, limits=WorkerLimits(step_seconds=1.0))
    assert not loss.guilty
    assert loss.culprits == ("given up",)
    why = "step() took longer than 1 s during a call of episode given up"
    assert str(loss) == f"the worker was killed because {why}"


def test_a_blocked_pool_process_blames_no_worker(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        session = await pool.open(kit.spec("Sleeps"))
        await session.reset()
        step = asyncio.create_task(session.step("yes"))
        await asyncio.sleep(0)
        time.sleep(2.0)
        assert (await step).observation == "turn 1"
        await asyncio.sleep(0.6)
        assert (await session.step("yes")).observation == "turn 2"
        await session.close()
        assert pool.stats().ended == {}

    kit.run(use, limits=WorkerLimits(step_seconds=1.5, silent_seconds=1.5))


def test_closing_ends_what_hangs_and_what_waits(kit: Any) -> None:
    async def go() -> tuple[Any, Any, list[int]]:
        pool = LocalPool(1, limits=WorkerLimits(leases=1))
        session = await pool.open(kit.spec("Hangs"))
        await session.reset()
        hung = asyncio.create_task(session.step("yes"))
        waits = asyncio.create_task(pool.open(kit.spec()))
        await asyncio.sleep(0.1)
        pids = [worker.pid or 0 for worker in pool.stats().workers]
        await pool.close()
        await session.close()
        results = await asyncio.gather(hung, waits, return_exceptions=True)
        with pytest.raises(UsageError, match="The pool is closed"):
            await pool.open(kit.spec())
        await pool.close()
        return (*results, pids)

    hung, waits, pids = asyncio.run(go())
    assert isinstance(hung, LeaseLost)
    assert str(hung) == "the pool was closed"
    assert not hung.guilty
    assert isinstance(waits, UsageError)
    assert not any(kit.alive(pid) for pid in pids)


def test_a_pool_recovers_from_a_lost_fork_server(kit: Any) -> None:
    async def use(pool: LocalPool) -> str:
        session = await pool.open(kit.spec("Hangs"))
        await session.reset()
        step = asyncio.create_task(session.step("yes"))
        await asyncio.sleep(0.1)
        worker = pool.stats().workers[0].pid or 0
        assert pool._forkserver is not None
        os.kill(pool._forkserver.pid, signal.SIGKILL)
        with pytest.raises(LeaseLost) as caught:
            await step
        assert await kit.until_async(lambda: not kit.alive(worker))
        assert len(await kit.play(pool, kit.spec())) == 4
        return str(caught.value)

    assert "the worker was lost with its fork server" in kit.run(use)


@pytest.mark.parametrize(
    ("code", "seconds", "complaint"),
    [
        ("import no_such_module_here", 60.0, "it imports 'no_such_module_here', which is not installed"),
        ("import os; os._exit(3)", 60.0, "died with exit code 3 before it was ready"),
        ("import time; time.sleep(3600)", 1.0, "did not start within 1 s and was killed"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, seconds: float, complaint: str
) -> None:
    (tmp_path / "broken_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)

    async def use(pool: LocalPool) -> None:
        with pytest.raises((EnvError, LeaseLost), match=complaint):
            await pool.open(kit.spec())

    kit.run(use, modules=["broken_module"], limits=WorkerLimits(start_seconds=seconds))


PARENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from rollgym.pool.local import LocalPool
from rollgym.core.types import EpisodeSpec

async def main():
    pool = LocalPool(2)
    try:
        spec = EpisodeSpec(episode_id="a", env_id="faulty:LeavesChildren", env_kwargs={"folder": sys.argv[2]})
        session = await pool.open(spec)
        await session.reset()
        await session.step("yes")
        other = await pool.open(EpisodeSpec(episode_id="b", env_id="faulty:Hangs"))
        await other.reset()
        asyncio.ensure_future(other.step("yes"))
        await asyncio.sleep(0.2)
        print(pool._forkserver.pid, *[worker.pid for worker in pool.stats().workers], flush=True)
        await asyncio.sleep(60)
    finally:
        await pool.close()
        print("closed", flush=True)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="dying with the parent needs Linux")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_survives_a_killed_or_interrupted_pool(kit: Any, tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, str(FIXTURES), str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert kit.until(lambda: len(list(tmp_path.iterdir())) == 3)
        pids += [int(path.name) for path in tmp_path.iterdir()]
        assert all(kit.alive(pid) for pid in pids)
        os.killpg(parent.pid, how)  # as a terminal does it
        rest = parent.stdout.read()
    assert rest == (b"closed\n" if how is signal.SIGINT else b"")
    assert kit.until(lambda: not any(kit.alive(pid) for pid in pids))


def test_no_descriptor_is_left_behind(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        for task in range(3):
            await kit.play(pool, kit.spec(task=task))

    kit.run(use, limits=WorkerLimits(episodes=1))
    before = sorted(os.listdir("/proc/self/fd"))
    kit.run(use, limits=WorkerLimits(episodes=1))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert linux.children() == [] or all(kit.alive(pid) for pid in linux.children())
