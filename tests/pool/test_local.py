"""Worker processes: what crosses the boundary, and what happens when one dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollgym.errors import EnvError, UsageError, WorkerLost
from rollgym.pool import EnvPool
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool
from rollgym.pool.wire import Unpacker, pack
from rollgym.types import EpisodeSpec


def spec(env: str = "faulty:Counting", task: int = 5, **kwargs: object) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id="e", env_id=env, env_kwargs=dict(kwargs), task=task, split="test", env_seed=11
    )


async def play(pool: EnvPool, spec: EpisodeSpec, actions: list[str]) -> list[object]:
    session = await pool.open(spec)
    try:
        seen: list[object] = [await session.reset()]
        for action in actions:
            step = await session.step(action)
            seen.append((step.observation, step.reward, step.terminated, step.truncated, step.info))
        return seen
    finally:
        await session.close()


def test_a_worker_plays_the_same_episode_as_this_process() -> None:
    async def both() -> tuple[list[object], list[object]]:
        local, inline = LocalPool(1), InlinePool()
        try:
            actions = ["yes", "no ö √", "yes"]
            return await play(local, spec(), actions), await play(inline, spec(), actions)
        finally:
            await local.close()
            await inline.close()

    there, here = asyncio.run(both())
    assert there == here
    assert here[0].instructions == "Say yes or no, three times."  # type: ignore[attr-defined]


def test_an_exception_keeps_its_type_message_and_traceback_and_spares_the_worker() -> None:
    async def go() -> tuple[EnvError, list[object]]:
        pool = LocalPool(1)
        try:
            with pytest.raises(EnvError) as caught:
                await play(pool, spec("faulty:RaisesInStep"), ["yes", "yes"])
            return caught.value, await play(pool, spec(), ["yes"])
        finally:
            await pool.close()

    error, after = asyncio.run(go())
    assert error.failure is not None
    assert error.failure.type == "ZeroDivisionError"
    assert "faulty:RaisesInStep raised in step()" in str(error)
    assert "one too many" in error.failure.traceback
    assert len(after) == 2


def test_a_dead_worker_fails_its_leases_and_is_replaced() -> None:
    async def go() -> tuple[str, list[object]]:
        pool = LocalPool(1)
        try:
            with pytest.raises(WorkerLost) as caught:
                await play(pool, spec("faulty:DiesOnSomeTasks", task=3), ["yes"])
            return str(caught.value), await play(pool, spec(), ["yes"])
        finally:
            await pool.close()

    message, after = asyncio.run(go())
    assert message == "a worker process died with exit code 7"
    assert len(after) == 2


def test_a_hanging_environment_is_killed_at_the_deadline() -> None:
    async def go() -> str:
        pool = LocalPool(1, answer_seconds=1.0)
        try:
            with pytest.raises(WorkerLost) as caught:
                await play(pool, spec("faulty:Hangs"), ["yes"])
            return str(caught.value)
        finally:
            await pool.close()

    assert asyncio.run(go()) == "a worker did not answer within 1 s and was killed"


def test_what_an_environment_prints_does_not_disturb_the_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    async def go() -> list[object]:
        pool = LocalPool(1)
        try:
            return await play(pool, spec("faulty:PrintsGarbage"), ["yes", "yes", "yes"])
        finally:
            await pool.close()

    assert len(asyncio.run(go())) == 4
    out, err = capfd.readouterr()
    assert out == ""
    assert "garbage on stdout" in err


def test_modules_are_imported_in_the_workers_and_missing_ones_named() -> None:
    async def go() -> None:
        pool = LocalPool(1, modules=["no_such_module_here"])
        try:
            await pool.open(spec())
        finally:
            await pool.close()

    with pytest.raises(EnvError, match="no_such_module_here"):
        asyncio.run(go())


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 worker"):
        LocalPool(0)


PARENT = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from rollgym.pool.local import LocalPool
from rollgym.types import EpisodeSpec

async def main():
    pool = LocalPool(2)
    for number in range(2):
        session = await pool.open(EpisodeSpec(episode_id=str(number), env_id="faulty:Hangs", task=0))
        await session.reset()
        asyncio.ensure_future(session.step("yes"))
    await asyncio.sleep(0.2)
    print(*[worker._process.pid for worker in pool._workers], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="dying with the parent needs Linux")
def test_no_worker_survives_a_killed_parent() -> None:
    folder = Path(__file__).parents[1] / "fixtures"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_messages_survive_any_cutting_of_the_stream() -> None:
    messages = [b"", b"a", b"b" * 1000, b"c" * 3]
    stream = b"".join(pack(message) for message in messages)
    for size in (1, 2, 3, 5, 7, 1000, len(stream)):
        unpacker = Unpacker()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        found = [message for piece in pieces for message in unpacker.feed(piece)]
        assert len(found) == len(messages)


def test_a_length_beyond_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than"):
        Unpacker().feed(b"\xff\xff\xff\xff")
