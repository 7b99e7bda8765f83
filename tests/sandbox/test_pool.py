"""The pool: kept ready, used again, replaced, bounded, shared."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollgym.core.errors import RunError, UsageError, WorkerLost
from rollgym.sandbox import shared_pool as warm
from rollgym.sandbox.pool import AT_ONCE, Isolation, SandboxPool
from rollgym.sandbox.types import Level, Limits, Ran, SandboxSettings


class Fake:
    """A sandbox that only counts."""

    backend, level, weaknesses = "fake", Level.NONE, ()

    def __init__(self) -> None:
        self.resets = self.closes = 0
        self.broken = False

    def reset(self) -> None:
        self.resets += 1
        if self.broken:
            raise WorkerLost("it is dead")

    def close(self) -> None:
        self.closes += 1

    def exec(self, code: str, **more: Any) -> Ran:
        raise NotImplementedError

    def run(self, code: str, *, limits: Limits | None = None) -> Ran:
        raise NotImplementedError

    def write(self, name: str, content: bytes) -> None:
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        raise NotImplementedError


@pytest.fixture
def made() -> list[Fake]:
    return []


@pytest.fixture
def pool(made: list[Fake]) -> Iterator[SandboxPool]:
    def opener(settings: SandboxSettings) -> Fake:
        made.append(Fake())
        return made[-1]

    pool = SandboxPool(size=2, uses=3, opener=opener)
    yield pool
    pool.close()


def counted(pool: SandboxPool) -> tuple[int, int, int, int, int]:
    counts = pool.counts
    return counts.idle, counts.busy, counts.started, counts.reused, counts.replaced


def test_sandboxes_are_used_again_and_replaced(pool: SandboxPool, made: list[Fake]) -> None:
    for _ in range(7):
        pool.give(pool.take())
    assert counted(pool) == (1, 0, 3, 4, 2)
    assert [(fake.resets, fake.closes) for fake in made] == [(2, 1), (2, 1), (1, 0)]


def test_warming_starts_them_before_they_are_needed(pool: SandboxPool, made: list[Fake]) -> None:
    pool.warm()
    pool.warm()
    assert counted(pool) == (2, 0, 2, 0, 0)
    pool.take()
    assert len(made) == 2


def test_a_broken_one_is_closed_and_not_used_again(pool: SandboxPool, made: list[Fake]) -> None:
    sandbox = pool.take()
    made[0].broken = True
    pool.give(sandbox)
    assert made[0].closes == 1
    assert pool.take() is made[1]


def test_no_more_than_its_size_are_open(pool: SandboxPool) -> None:
    first, _ = pool.take(), pool.take()
    with pytest.raises(TimeoutError, match="All 2 sandboxes"):
        pool.take(timeout=0.01)
    timer = threading.Timer(0.05, pool.give, [first])
    timer.start()
    assert pool.take(timeout=30) is first
    timer.join()


def test_many_threads_share_it(pool: SandboxPool, made: list[Fake]) -> None:
    most, now, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal most, now
        for _ in range(20):
            with pool.borrow():
                with lock:
                    now += 1
                    most = max(most, now)
                time.sleep(0.0005)
                with lock:
                    now -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 2
    counts = pool.counts
    assert (counts.busy, counts.started - counts.replaced) == (0, counts.idle)
    assert sum(fake.closes for fake in made) == counts.replaced


def test_an_opener_that_fails_takes_no_place() -> None:
    def opener(settings: SandboxSettings) -> Fake:
        raise RunError("no")

    pool = SandboxPool(size=1, opener=opener)
    for _ in range(3):
        with pytest.raises(RunError):
            pool.take(timeout=1)
    pool.close()


def test_closing_closes_all_and_gives_no_more(pool: SandboxPool, made: list[Fake]) -> None:
    pool.warm()
    pool.take()
    pool.close()
    assert [fake.closes for fake in made] == [1, 1]
    with pytest.raises(UsageError, match="closed"):
        pool.take()


def test_what_was_not_taken_cannot_be_given(pool: SandboxPool) -> None:
    with pytest.raises(UsageError, match="not taken from this pool"):
        pool.give(Fake())
    sandbox = pool.take()
    pool.give(sandbox)
    with pytest.raises(UsageError, match="already returned"):
        pool.give(sandbox)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        SandboxPool(size=0)


def test_a_fork_has_an_empty_pool_of_its_own(pool: SandboxPool, made: list[Fake]) -> None:
    pool.warm()
    child = os.fork()
    if not child:
        pool.take()
        os._exit(0 if len(made) == 3 and pool.counts.started == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.counts.idle == 2


def test_one_that_nobody_used_can_be_asked_for(pool: SandboxPool, made: list[Fake]) -> None:
    pool.give(pool.take())
    first = pool.take(unused=True)
    assert first is made[1]
    pool.give(first)
    assert counted(pool) == (2, 0, 2, 0, 0)
    assert pool.take(unused=True) is made[2]
    assert counted(pool) == (1, 1, 3, 0, 1)
    assert sum(fake.closes for fake in made) == 1


def test_used_ones_go_first_so_that_others_stay_unused(pool: SandboxPool, made: list[Fake]) -> None:
    pool.warm()
    used = pool.take()
    pool.give(used)
    assert pool.take() is used
    assert pool.take(unused=True) is not used


def counting(made: list[Fake], settings: SandboxSettings) -> Fake:
    made.append(Fake())
    return made[-1]


def test_without_a_size_it_grows_and_keeps_what_was_ever_needed_at_once(made: list[Fake]) -> None:
    pool = SandboxPool(size=None, opener=functools.partial(counting, made))
    for sandbox in [pool.take() for _ in range(5)]:
        pool.give(sandbox)
    assert counted(pool) == (5, 0, 5, 0, 0)
    for _ in range(3):
        pool.give(pool.take(unused=True))
    assert counted(pool) == (5, 0, 8, 0, 3)
    pool.close()
    assert all(fake.closes == 1 for fake in made)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_some_are_started_ahead_by_a_thread(made: list[Fake]) -> None:
    pool = SandboxPool(size=None, ahead=2, opener=functools.partial(counting, made))
    assert not made
    taken = pool.take()
    until(lambda: counted(pool)[:3] == (2, 1, 3))
    pool.give(taken)
    assert pool.take() is taken
    pool.take(unused=True)
    pool.settle()
    assert counted(pool)[:3] == (2, 2, 4)
    pool.close()


def test_one_that_is_being_started_while_the_pool_closes_is_closed_too(made: list[Fake]) -> None:
    go_on = threading.Event()

    def opener(settings: SandboxSettings) -> Fake:
        if made:
            assert go_on.wait(60)
        return counting(made, settings)

    pool = SandboxPool(size=None, ahead=1, opener=opener)
    pool.take()
    closing = threading.Thread(target=pool.close)
    closing.start()
    go_on.set()
    closing.join()
    assert [fake.closes for fake in made] == [1] * len(made)


def test_what_cannot_be_started_ahead_is_told_to_whoever_needs_it(made: list[Fake]) -> None:
    def opener(settings: SandboxSettings) -> Fake:
        if made:
            raise RunError("no more")
        return counting(made, settings)

    pool = SandboxPool(size=None, ahead=1, opener=opener)
    pool.take()
    with pytest.raises(RunError, match="no more"):
        pool.take()
    pool.close()


def test_a_pool_says_what_its_walls_are(pool: SandboxPool, made: list[Fake]) -> None:
    assert pool.isolation == ("fake", Level.NONE, ())
    assert (pool.isolation.backend, len(made)) == ("fake", 1)


def test_many_threads_that_ask_at_once_start_few(made: list[Fake]) -> None:
    pool = SandboxPool(size=None, ahead=1, opener=functools.partial(counting, made))
    walls: list[Isolation] = []

    def work() -> None:
        walls.append(pool.isolation)
        with pool.borrow():
            time.sleep(0.001)

    threads = [threading.Thread(target=work) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert walls == [("fake", Level.NONE, ())] * 40
    assert len(made) <= AT_ONCE + 1
    pool.close()


def test_slow_uses_do_not_keep_others_from_their_turn(
    made: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollgym.sandbox.pool.TURN_SECONDS", 0.01)
    pool = SandboxPool(size=None, opener=functools.partial(counting, made))
    with contextlib.ExitStack() as slow:
        for _ in range(AT_ONCE):
            slow.enter_context(pool.borrow())
        with pool.borrow() as mine:
            assert mine is not None
    pool.close()


def test_environments_of_one_kind_share_a_pool_until_the_last_has_left(made: list[Fake]) -> None:
    opener = functools.partial(counting, made)
    one, two = warm.join(SandboxSettings(), opener), warm.join(SandboxSettings(), opener)
    other = warm.join(SandboxSettings(limits=Limits(seconds=1)), opener)
    assert one is two is not other
    before = warm.counts()
    one.take()
    assert warm.counts().busy == before.busy + 1
    warm.leave(one)
    assert not any(fake.closes for fake in made)
    warm.leave(two)
    assert all(fake.closes == 1 for fake in made)
    warm.leave(two)
    warm.leave(other)
    again = warm.join(SandboxSettings(), opener)
    assert again is not one
    warm.leave(again)
