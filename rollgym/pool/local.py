"""The pool of worker processes on this machine.

Each worker hosts many environments and calls them concurrently. A worker that dies, or must be killed because
a call or its memory went over a limit, takes its leases with it: their sessions raise `LeaseLost`, which says
whether they are to blame, and the next lease starts a new worker.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable

from rollgym.errors import UsageError
from rollgym.pool.keeping import KeeperLink
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.link import Worker
from rollgym.pool.session import LocalSession
from rollgym.pool.stats import PoolStats, WorkerStats
from rollgym.pool.verdict import Verdict, death, judge
from rollgym.pool.wire import Gone, Hello, Started
from rollgym.types import EpisodeSpec

_GRACE = 2.0
"""Seconds for a worker to exit by itself."""
_TICK = 0.25


class LocalPool:
    """Environments in up to ``workers`` processes of this machine.

    Args:
        workers: Most processes that take leases; one is started when all others have something to do.
        modules: Modules that register environments, imported in every worker.
        limits: Bounds on each worker.
        min_workers: How many stay when there is nothing to do.
        idle_seconds: After how long without a lease the others stop.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        modules: Iterable[str] = (),
        limits: WorkerLimits | None = None,
        min_workers: int = 1,
        idle_seconds: float = 60.0,
    ) -> None:
        if workers < 1:
            raise UsageError(f"A pool needs at least 1 worker, not {workers}.")
        if not 0 <= min_workers <= workers:
            raise UsageError(f"min_workers must be between 0 and workers ({workers}), not {min_workers}.")
        self._most = workers
        self._least = min_workers
        self._idle_seconds = idle_seconds
        self._modules = list(modules)
        self._limits = limits or WorkerLimits()
        self._tick_seconds = min(_TICK, self._limits.reset_seconds / 4, self._limits.step_seconds / 4)
        self._workers: dict[int, Worker] = {}
        self._leases = itertools.count(1)
        self._numbers = itertools.count(1)
        self._ended: Counter[str] = Counter()
        self._episodes = 0
        self._keeper: KeeperLink | None = None
        self._old_keepers: list[KeeperLink] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._clock = 0.0
        self._ticked = 0.0
        self._closed = False

    # Leases.

    async def open(self, spec: EpisodeSpec) -> LocalSession:
        """A lease in the worker that has the fewest; waits where the limits leave no room."""
        while True:
            if self._closed:
                raise UsageError("The pool is closed.")
            worker = self._place()
            if worker is not None:
                break
            await self._change()
        number = next(self._leases)
        session = worker.lease(number, spec)
        if worker.opened == self._limits.episodes:
            self._drain(worker, "episodes")
        if not worker.ready.done():
            try:
                await asyncio.shield(worker.ready)
            except BaseException:
                await session.close()
                raise
        return session

    def _place(self) -> Worker | None:
        taking = [worker for worker in self._workers.values() if worker.takes_leases(self._limits.leases)]
        best = min(taking, key=lambda worker: worker.in_use, default=None)
        if best is None or best.in_use:
            staying = sum(worker.takes_leases(None) for worker in self._workers.values())
            # Those that are leaving make room for others, but not without end.
            if staying < self._most and len(self._workers) < 2 * self._most:
                return self._launch()
        return best

    def _launch(self) -> Worker:
        if self._keeper is None:
            self._keeper = KeeperLink(self._on_report)
            self._ticked = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)
        limits = self._limits
        weigh = limits.hard_memory_mb is not None
        hello = Hello(list(sys.path), self._modules, limits.reset_seconds, limits.step_seconds, weigh)
        worker = Worker(next(self._numbers), hello, self._on_end, self._clock)
        self._workers[worker.number] = worker
        worker.launch(self._keeper)
        return worker

    def _on_end(self, worker: Worker) -> None:
        """A lease of the worker has ended."""
        if worker.leaving is not None and not worker.sessions:
            worker.hang_up()
        self._wake()

    def _drain(self, worker: Worker, why: str) -> None:
        """No more leases for this worker, and its end once it has none."""
        worker.leaving = why
        if not worker.sessions:
            worker.hang_up()

    async def _change(self) -> None:
        """Wait until a lease has ended or a worker is gone."""
        change = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        try:
            await change
        finally:
            if change in self._waiting:
                self._waiting.remove(change)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)

    # Workers come and go.

    def _on_report(self, report: Started | Gone | None) -> None:
        if report is None:
            self._lose_keeper()
            return
        worker = self._workers.get(report.number)
        if worker is None:
            return
        if isinstance(report, Started):
            worker.started(report.pid)
        else:
            self._bury(worker, worker.verdict or death(report.code), report.output)

    def _bury(self, worker: Worker, verdict: Verdict, output: str) -> None:
        del self._workers[worker.number]
        self._episodes += worker.opened
        expected = worker.hung_up is not None and worker.verdict is None
        self._ended[worker.leaving if expected and worker.leaving else verdict.reason] += 1
        worker.bury(verdict, output)
        self._wake()

    def _lose_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            self._old_keepers.append(keeper)
        for worker in list(self._workers.values()):
            self._bury(worker, Verdict("died", "the worker was lost with its keeper process"), "")

    # Looking after them.

    def _tick(self) -> None:
        now = time.monotonic()
        # While this process was blocked or stopped nobody could answer it: such time does not count.
        self._clock += min(now - self._ticked, 2 * self._tick_seconds)
        self._ticked = now
        for worker in list(self._workers.values()):
            worker.clock = self._clock
            self._look_at(worker)
        self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def _look_at(self, worker: Worker) -> None:
        if worker.hung_up is not None:
            if self._clock - worker.hung_up > _GRACE:
                self._kill(worker, worker.verdict)
        elif worker.verdict is None:
            verdict = judge(worker, self._limits)
            if verdict is not None:
                self._kill(worker, verdict)
            elif worker.leaving is None:
                self._look_for_leave(worker)
        if worker.condemned is not None and self._clock - worker.condemned > _GRACE:
            # Not even a kill ends it: whoever waits for it waits no more.
            self._bury(worker, worker.verdict or death(-9), "")

    def _look_for_leave(self, worker: Worker) -> None:
        soft = self._limits.soft_memory_mb
        if soft is not None and worker.memory_mb() > soft:
            self._drain(worker, "memory")
        elif not worker.sessions and self._clock - worker.since > self._idle_seconds:
            staying = sum(other.takes_leases(None) for other in self._workers.values())
            if staying > self._least:
                self._drain(worker, "idle")

    def _kill(self, worker: Worker, verdict: Verdict | None) -> None:
        if worker.condemned is None and self._keeper is not None:
            worker.verdict, worker.condemned = verdict, self._clock
            self._keeper.kill(worker.number)

    # The end.

    async def close(self) -> None:
        """Stop every worker and wait until each is gone, for a bounded time."""
        self._closed = True
        self._wake()
        for worker in self._workers.values():
            worker.leaving = "closed"
            worker.dismiss()
        try:
            # What does not end by itself is killed by `_tick` after its grace, and by the keeper at last.
            async with asyncio.timeout(2 * _GRACE):
                while self._workers:
                    await self._change()
        except TimeoutError:
            pass
        finally:
            if self._timer is not None:
                self._timer.cancel()
            keepers = [*self._old_keepers, *([self._keeper] if self._keeper is not None else [])]
            self._old_keepers, self._keeper = [], None
            for worker in list(self._workers.values()):
                self._bury(worker, Verdict("closed", "the pool was closed"), "")
            await asyncio.gather(*(keeper.close() for keeper in keepers))

    def stats(self) -> PoolStats:
        """The workers there are, and what became of earlier ones."""
        workers = self._workers.values()
        return PoolStats(
            workers=tuple(
                WorkerStats(
                    number=worker.number,
                    pid=worker.pid,
                    leases=worker.in_use,
                    episodes=worker.opened - worker.in_use,
                    memory_mb=worker.memory_mb(),
                    leaving=worker.leaving,
                )
                for worker in workers
            ),
            leases=sum(worker.in_use for worker in workers),
            started=len(workers) + self._ended.total(),
            ended=dict(self._ended),
            episodes=self._episodes + sum(worker.opened - worker.in_use for worker in workers),
            waiting=len(self._waiting),
        )
