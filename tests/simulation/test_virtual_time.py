"""The virtual event loop."""

import asyncio

import pytest

from rollgym.core.errors import RunError
from rollgym.simulation.virtual_time import Deadlock, run_virtual


def test_the_clock_jumps_to_the_next_timer() -> None:
    order: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, asyncio.get_running_loop().time()))

    async def main() -> float:
        async with asyncio.timeout(1e7):
            await asyncio.gather(sleeper("late", 5e6), sleeper("early", 3.0))
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 5e6
    assert order == [("early", 3.0), ("late", 5e6)]


def test_a_timeout_ends_a_wait_and_tasks_left_over_are_cancelled() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(1e12)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        asyncio.create_task(forever())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.Event().wait()

    run_virtual(main)
    assert ended == ["cancelled"]


def test_a_wait_without_end_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(main)


def test_an_exception_that_no_task_handles_is_an_error() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 // 0)
        await asyncio.sleep(2.0)

    with pytest.raises(RunError, match="division"):
        run_virtual(main)
