"""Workers killed at random: every episode is there in the end, once."""

import asyncio
import contextlib
import os
import random
import signal
from typing import Any

import pytest

from rollgym.pool.base import LeaseLost
from rollgym.pool.local import LocalPool


@pytest.mark.parametrize(("episodes", "kills"), [(100, 10), pytest.param(2_000, 200, marks=pytest.mark.slow)])
def test_no_episode_is_lost_or_doubled_by_random_kills(kit: Any, episodes: int, kills: int) -> None:
    rng = random.Random(3)
    results: dict[int, list[list[str]]] = {number: [] for number in range(episodes)}
    losses: list[LeaseLost] = []

    async def env_thread(pool: LocalPool, queue: list[int]) -> None:
        while queue:
            number = queue.pop()
            try:
                env = "Sleeps" if number % 4 == 0 else "Counting"
                spec = kit.spec(env, task=number % 1_000, name=str(number))
                results[number].append(await kit.play(pool, spec))
            except LeaseLost as loss:
                losses.append(loss)
                queue.append(number)

    async def kill(pool: LocalPool, env_threads: "asyncio.Future[Any]") -> int:
        done = 0
        while done < kills and not env_threads.done():
            finished = sum(map(len, results.values()))
            pids = [worker.pid for worker in pool.stats().workers if worker.pid and worker.leases]
            # Spread over the whole run.
            if pids and finished >= done * episodes * 0.9 / kills:
                with contextlib.suppress(ProcessLookupError):  # it may be dead before the pool knows
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    done += 1
            await asyncio.sleep(rng.random() * 0.02)
        return done

    async def use(pool: LocalPool) -> int:
        env_threads = asyncio.gather(*(env_thread(pool, queue) for _ in range(8)))
        killed = await kill(pool, env_threads)
        await env_threads
        return killed

    queue = list(range(episodes))
    assert kit.run(use, workers=2) == kills
    assert losses
    assert all("SIGKILL" in str(loss) for loss in losses)
    assert {number: len(found) for number, found in results.items()} == dict.fromkeys(range(episodes), 1)
    for number, (seen,) in results.items():
        assert seen[0].startswith(f"task {number % 1_000} ")
        assert seen[1:] == ["turn 1", "turn 2", "turn 3"]
