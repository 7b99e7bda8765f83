"""Calls to different environments overlap; which thread makes them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollgym.pool.local import LocalPool
from rollgym.pool.threads import SLOW, InlineBudget


@pytest.mark.parametrize("env", ["Waits", "Computes"])
def test_one_slow_environment_does_not_delay_others(kit: Any, tmp_path: Path, env: str) -> None:
    """While one of 32 is still in its first step, the others play all their episodes, in the same worker."""

    async def use(pool: LocalPool) -> tuple[int, bool]:
        slow = asyncio.create_task(kit.play(pool, kit.spec(env, task=0, folder=str(tmp_path))))
        assert await kit.until_async((tmp_path / "waiting").exists)

        async def env_thread(number: int) -> int:
            for episode in range(4):
                task = 1 + 4 * number + episode
                assert len(await kit.play(pool, kit.spec(env, task=task, folder=str(tmp_path)))) == 4
            return 4

        played = sum(await asyncio.gather(*(env_thread(number) for number in range(31))))
        still_waiting = not slow.done()
        (tmp_path / "go").touch()
        assert len(await slow) == 4
        return played, still_waiting

    assert kit.run(use) == (124, True)


def test_an_environment_is_made_and_called_by_one_thread_unless_it_says_otherwise(kit: Any) -> None:
    """Of a kind that holds a database connection many play at once, are reused, and never notice."""

    async def use(pool: LocalPool) -> None:
        for _ in range(3):
            await asyncio.gather(*(kit.play(pool, kit.spec("HasDatabase", task=task)) for task in range(8)))
        assert pool.stats().episodes == 24

    kit.run(use)


async def threads_of(pool: LocalPool, kit: Any, env: str, *actions: str) -> list[str]:
    session = await pool.open(kit.spec(env))
    await session.reset()
    seen = [str((await session.step(action)).info["thread"]) for action in actions]
    await session.close()
    return seen


def test_a_quick_environment_that_does_not_care_is_called_without_a_change_of_thread(kit: Any) -> None:
    async def use(pool: LocalPool) -> list[str]:
        return await threads_of(pool, kit, "AnyThread", "yes", "yes", "yes")

    # A hiccup of the machine may cost it a little trust; most of the time it has it.
    assert "service" in kit.run(use)


def test_a_quick_environment_that_proves_slow_gets_a_thread(kit: Any) -> None:
    async def use(pool: LocalPool) -> list[str]:
        return await threads_of(pool, kit, "QuickUntilTold", *["sleep"] * 24)

    seen = kit.run(use)
    assert seen.count("service") <= 2  # the first, and one more after eight calls of penance


def test_inline_calls_stop_at_once_and_resume_slowly() -> None:
    inline_budget = InlineBudget()
    calls = []
    for _ in range(100):
        calls.append(inline_budget.allows_inline())
        if calls[-1]:
            inline_budget.record(2 * SLOW)
    assert [number for number, given in enumerate(calls) if given] == [0, 9, 26, 59]


def test_a_hiccup_is_forgiven() -> None:
    inline_budget = InlineBudget()
    assert inline_budget.allows_inline()
    inline_budget.record(2 * SLOW)
    assert [inline_budget.allows_inline() for _ in range(9)] == [False] * 8 + [True]
    for _ in range(8):
        inline_budget.record(0.0)
    inline_budget.record(2 * SLOW)
    assert [inline_budget.allows_inline() for _ in range(9)] == [False] * 8 + [True]


def test_main_thread_environments_share_a_worker_with_others(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        specs = [kit.spec(env, task=task) for task in range(4) for env in ("HasSignals", "Counting")]
        await asyncio.gather(*(kit.play(pool, spec) for spec in specs))
        assert pool.stats().ended == {}

    kit.run(use)
