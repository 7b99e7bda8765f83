"""The pool: kept ready, used again, replaced, bounded; and that nothing is left of many executions."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from rollgym.errors import RunError, UsageError, WorkerLost
from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.pool import SandboxPool
from rollgym.sandbox.types import Level, Limits, Ran, SandboxSettings
from rollgym.sandbox.worker_limits import alive


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
    with pytest.raises(UsageError, match="given back already"):
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


def test_real_sandboxes_forget_and_end_with_the_process(open_or_skip: Callable[..., WorkerSandbox]) -> None:
    open_or_skip("namespaces").close()
    code = (
        "from rollgym.sandbox.pool import SandboxPool\n"
        "from rollgym.sandbox.worker_limits import descendants\n"
        "import os\n"
        "pool = SandboxPool(size=1)\n"
        "with pool.borrow() as one: one.run('x = 1')\n"
        "with pool.borrow() as one: assert 'NameError' in one.run('x').stderr\n"
        "pool.take()\n"
        "print(*descendants(os.getpid()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert pids
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


SOAK: Mapping[int, str] = {
    0: "print(sum(range(100)))",
    1: "open('a', 'w').write('x'); import os; os.makedirs('b/c')",
    2: "import os\nif not os.fork():\n  os.setsid()\n  while True: pass",
    3: "1 / 0",
    4: "import tempfile; tempfile.mkdtemp()",
}


@pytest.mark.parametrize("backend", ["namespaces", "landlock"])
@pytest.mark.parametrize(
    "times", [100, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_many_executions_leave_nothing_behind(
    open_or_skip: Callable[..., WorkerSandbox], left_behind: Callable[[], Any], backend: str, times: int
) -> None:
    before = left_behind()
    sandbox = open_or_skip(backend)
    during = left_behind()
    descriptors = len(os.listdir("/proc/self/fd"))
    for turn in range(times):
        action = sandbox.run if turn % 7 == 6 else sandbox.exec
        action(SOAK[turn % 5])
        if turn % 50 == 49:
            sandbox.reset()
    ran = sandbox.exec("import os; print(os.listdir('.'), os.listdir(os.environ.get('TMPDIR', '/tmp')))")
    assert ran.stdout == "[] []\n"
    sandbox.reset()
    assert left_behind() == during
    assert len(os.listdir("/proc/self/fd")) == descriptors
    sandbox.close()
    assert left_behind() == before
