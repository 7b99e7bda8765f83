import asyncio

import pytest

from rollgym.agents.chat.rate_limit import RateLimiter


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def bucket(per_minute: float, time: Time, burst: float = 0.0) -> RateLimiter:
    return RateLimiter(per_minute, burst=burst, clock=time.clock, sleep=time.sleep)


def test_takes_are_spaced_by_the_rate() -> None:
    time = Time()
    taken = []

    async def run() -> None:
        shared = bucket(30, time)
        for _ in range(4):
            await shared.take()
            taken.append(time.now)

    asyncio.run(run())
    assert taken == [100, 102, 104, 106]


def test_a_burst_lets_the_first_ones_through() -> None:
    time = Time()

    async def run() -> None:
        shared = bucket(120, time, burst=1.0)
        for _ in range(3):
            await shared.take()
        assert time.now == 100
        await shared.take()
        assert time.now == 100.5

    asyncio.run(run())


def test_a_take_larger_than_the_bucket_goes_first_and_the_next_waits_for_it() -> None:
    time = Time()

    async def run() -> None:
        shared = bucket(60, time)
        await shared.take(10)
        assert time.now == 100
        shared.give_back(4)
        await shared.take(1)
        assert time.now == 106

    asyncio.run(run())


def test_players_that_wait_at_once_share_one_rate() -> None:
    waits = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    async def run() -> None:
        shared = RateLimiter(60, burst=0.0, clock=lambda: 0.0, sleep=note)
        await asyncio.gather(*(shared.take() for _ in range(4)))

    asyncio.run(run())
    assert waits == [1, 2, 3]


def test_a_cancelled_wait_gives_its_units_back() -> None:
    async def run() -> None:
        shared = RateLimiter(1, burst=0.0)
        await shared.take()
        waiting = asyncio.create_task(shared.take(100))
        await asyncio.sleep(0)
        before = shared._refilled_at
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert shared._refilled_at == pytest.approx(before - 6000)

    asyncio.run(run())
