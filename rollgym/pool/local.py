"""Pool of worker processes on this machine.

Each worker hosts many environments and calls them concurrently. When a worker dies, or is killed because a
call or its memory exceeded a limit, its sessions raise `LeaseLost`, which tells whether their episode is at
fault, and the next lease starts a new worker.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable

from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.pool.health import WorkerFailure, exit_failure, find_failure
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.protocol import Gone, Hello, Started
from rollgym.pool.stats import PoolStats, WorkerStats
from rollgym.pool.worker_handle import ForkServerClient, LocalSession, WorkerHandle

_GRACE = 2.0
"""Seconds for a worker to exit without being killed."""
_TICK = 0.25


class LocalPool:
    """Environments in up to ``workers`` processes of this machine.

    Args:
        workers: Maximum number of processes; one is started when all others are busy.
        modules: Modules that register environments, imported in every worker.
        limits: Limits on each worker.
        min_workers: Number of workers that stay when idle.
        idle_seconds: Seconds without a lease after which the others stop.
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
            raise UsageError(f"workers must be at least 1, got {workers}.")
        if not 0 <= min_workers <= workers:
            raise UsageError(f"min_workers must be between 0 and workers ({workers}), got {min_workers}.")
        self._most = workers
        self._least = min_workers
        self._idle_seconds = idle_seconds
        self._modules = list(modules)
        self._limits = limits or WorkerLimits()
        self._tick_seconds = min(_TICK, self._limits.reset_seconds / 4, self._limits.step_seconds / 4)
        self._workers: dict[int, WorkerHandle] = {}
        self._leases = itertools.count(1)
        self._numbers = itertools.count(1)
        self._ended: Counter[str] = Counter()
        self._episodes = 0
        self._forkserver: ForkServerClient | None = None
        self._old_forkservers: list[ForkServerClient] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._clock = 0.0
        self._ticked = 0.0
        self._closed = False

    # Leases.

    async def open(self, spec: EpisodeSpec) -> LocalSession:
        """Open a lease in the least loaded worker; wait while the limits leave no capacity."""
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

    def _place(self) -> WorkerHandle | None:
        taking = [worker for worker in self._workers.values() if worker.takes_leases(self._limits.leases)]
        best = min(taking, key=lambda worker: worker.in_use, default=None)
        if best is None or best.in_use:
            staying = sum(worker.takes_leases(None) for worker in self._workers.values())
            # Leaving workers do not count, but their number is bounded.
            if staying < self._most and len(self._workers) < 2 * self._most:
                return self._launch()
        return best

    def _launch(self) -> WorkerHandle:
        if self._forkserver is None:
            self._forkserver = ForkServerClient(self._on_report)
            self._ticked = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)
        limits = self._limits
        weigh = limits.hard_memory_mb is not None
        hello = Hello(list(sys.path), self._modules, limits.reset_seconds, limits.step_seconds, weigh)
        worker = WorkerHandle(next(self._numbers), hello, self._on_end, self._clock)
        self._workers[worker.number] = worker
        worker.launch(self._forkserver)
        return worker

    def _on_end(self, worker: WorkerHandle) -> None:
        """A lease of the worker has ended."""
        if worker.leaving is not None and not worker.sessions:
            worker.disconnect()
        self._wake()

    def _drain(self, worker: WorkerHandle, why: str) -> None:
        """Give this worker no more leases and stop it after its last one."""
        worker.leaving = why
        if not worker.sessions:
            worker.disconnect()

    async def _change(self) -> None:
        """Wait until a lease has ended or a worker has exited."""
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

    # Reports of the fork server.

    def _on_report(self, report: Started | Gone | None) -> None:
        if report is None:
            self._lose_forkserver()
            return
        worker = self._workers.get(report.number)
        if worker is None:
            return
        if isinstance(report, Started):
            worker.started(report.pid)
        else:
            self._reap(worker, worker.failure or exit_failure(report.code), report.output)

    def _reap(self, worker: WorkerHandle, failure: WorkerFailure, output: str) -> None:
        del self._workers[worker.number]
        self._episodes += worker.opened
        expected = worker.closed_at is not None and worker.failure is None
        self._ended[worker.leaving if expected and worker.leaving else failure.reason] += 1
        worker.reap(failure, output)
        self._wake()

    def _lose_forkserver(self) -> None:
        forkserver, self._forkserver = self._forkserver, None
        if forkserver is not None:
            self._old_forkservers.append(forkserver)
        for worker in list(self._workers.values()):
            self._reap(worker, WorkerFailure("died", "the worker was lost with its fork server"), "")

    # Health checks.

    def _tick(self) -> None:
        now = time.monotonic()
        # Time during which this process was blocked or suspended does not count.
        self._clock += min(now - self._ticked, 2 * self._tick_seconds)
        self._ticked = now
        for worker in list(self._workers.values()):
            worker.clock = self._clock
            self._look_at(worker)
        self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def _look_at(self, worker: WorkerHandle) -> None:
        if worker.closed_at is not None:
            if self._clock - worker.closed_at > _GRACE:
                self._kill(worker, worker.failure)
        elif worker.failure is None:
            failure = find_failure(worker, self._limits)
            if failure is not None:
                self._kill(worker, failure)
            elif worker.leaving is None:
                self._look_for_leave(worker)
        if worker.killed_at is not None and self._clock - worker.killed_at > _GRACE:
            # It survives SIGKILL (uninterruptible sleep): stop waiting for it.
            self._reap(worker, worker.failure or exit_failure(-9), "")

    def _look_for_leave(self, worker: WorkerHandle) -> None:
        soft = self._limits.soft_memory_mb
        if soft is not None and worker.memory_mb() > soft:
            self._drain(worker, "memory")
        elif not worker.sessions and self._clock - worker.since > self._idle_seconds:
            staying = sum(other.takes_leases(None) for other in self._workers.values())
            if staying > self._least:
                self._drain(worker, "idle")

    def _kill(self, worker: WorkerHandle, failure: WorkerFailure | None) -> None:
        if worker.killed_at is None and self._forkserver is not None:
            worker.failure, worker.killed_at = failure, self._clock
            self._forkserver.kill(worker.number)

    # Shutdown.

    async def close(self) -> None:
        """Stop every worker and wait for their exit, for a bounded time."""
        self._closed = True
        self._wake()
        for worker in self._workers.values():
            worker.leaving = "closed"
            worker.dismiss()
        try:
            # Workers that do not exit are killed by `_tick` after `_GRACE`, and finally by the fork server.
            async with asyncio.timeout(2 * _GRACE):
                while self._workers:
                    await self._change()
        except TimeoutError:
            pass
        finally:
            if self._timer is not None:
                self._timer.cancel()
            forkservers = [
                *self._old_forkservers,
                *([self._forkserver] if self._forkserver is not None else []),
            ]
            self._old_forkservers, self._forkserver = [], None
            for worker in list(self._workers.values()):
                self._reap(worker, WorkerFailure("closed", "the pool was closed"), "")
            await asyncio.gather(*(forkserver.close() for forkserver in forkservers))

    def stats(self) -> PoolStats:
        """Return statistics of current and past workers."""
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
