"""The pool on a cluster: environments in actors on all nodes, many leases in each.

Each actor hosts a `LocalPool` (or, without worker processes, an `InlinePool`), so limits hold and failures
are data as on one machine. An actor that dies, alone or with its node, takes its leases with it: their
sessions raise `LeaseLost`, the scheduler plays them again, and another actor starts on what is left.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from rollgym.cluster.env_host import EnvHost
from rollgym.cluster.errors import need_ray
from rollgym.cluster.heartbeat import OPTIONS, TIMEOUT
from rollgym.cluster.mail import Line
from rollgym.cluster.waiting import tell, waiting
from rollgym.errors import RollgymError, UsageError, WorkerLost
from rollgym.pool import LeaseLost, Reset, Step
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.stats import PoolStats, WorkerStats
from rollgym.pool.wire import Act, Begin, End, encode
from rollgym.records import clean_text
from rollgym.types import EpisodeSpec

_reset = msgspec.msgpack.Decoder(Reset).decode
_step = msgspec.msgpack.Decoder(Step).decode
_RETRY = 0.2
"""Seconds after the first failed start of an actor; longer after each further one."""
_MOST_FAILURES = 8
_GATHER = 20.0
"""Seconds for actors to start before those that are there get all leases."""


class Host:
    """An env actor as the driver sees it."""

    def __init__(self, number: int, node: str, actor: Any, line: Line) -> None:
        self.number = number
        self.node = node
        self.actor = actor
        self.line = line
        self.pid: int | None = None
        self.leases: set[RaySession] = set()
        self.opened = 0


class RayPool:
    """Environments on the nodes of a cluster.

    Args:
        hosts: Env actors; default one on each node that is there.
        workers: Worker processes in each; 0 plays in the actor itself, where a blocking step blocks all.
        modules: Modules that register environments, imported in every worker.
        limits: Bounds on each worker process.
        cpus: That Ray sets aside for each actor.
        interval: Seconds between two words about what an actor that cannot start waits for.
        say: Who is told.
        heartbeat_timeout: Seconds without a sign of life after which an actor is replaced.
    """

    def __init__(
        self,
        hosts: int | None = None,
        *,
        workers: int = 2,
        modules: Iterable[str] = (),
        limits: WorkerLimits | None = None,
        cpus: float = 1.0,
        interval: float = 30.0,
        say: Callable[[str], None] = tell,
        heartbeat_timeout: float = TIMEOUT,
    ) -> None:
        if hosts is not None and hosts < 1:
            raise UsageError(f"A pool needs at least 1 env actor, not {hosts}.")
        if workers < 0:
            raise UsageError(f"workers must be at least 0, not {workers}.")
        ray = need_ray()
        self._count = hosts or max(len(_alive()), 1)
        self._arguments = (workers, list(modules), limits or WorkerLimits(), list(sys.path))
        self._cpus, self._interval, self._say = cpus, interval, say
        self._actor = ray.remote(num_cpus=cpus, max_restarts=0, max_concurrency=10_000, **OPTIONS)(EnvHost)
        self._timeout = heartbeat_timeout
        self._hosts: dict[int, Host] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._homes: dict[int, str] = {}
        """The node of each actor."""
        self._numbers = itertools.count(1)
        self._lease_numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._ended: Counter[str] = Counter()
        self._episodes = 0
        self._failures = 0
        self._trouble: BaseException | None = None
        self._closed = False
        self._gathering: asyncio.Future[None] | None = None

    @property
    def size(self) -> int:
        """How many env actors there are to be."""
        return self._count

    async def open(self, spec: EpisodeSpec) -> RaySession:
        """A lease on the actor that has the fewest; waits until there is one."""
        if self._gathering is None:
            self._gathering = asyncio.ensure_future(self._gather())
        await asyncio.shield(self._gathering)
        while True:
            if self._closed:
                raise UsageError("The pool is closed.")
            self._fill()
            if self._hosts:
                host = min(self._hosts.values(), key=lambda one: len(one.leases))
                host.opened += 1
                session = RaySession(self, host, next(self._lease_numbers), spec)
                host.leases.add(session)
                return session
            if isinstance(self._trouble, UsageError):
                raise self._trouble
            if self._trouble is not None and not self._starting:
                raise WorkerLost(f"no env actor can be started: {self._trouble}") from self._trouble
            self._changed.clear()
            await self._changed.wait()

    async def _gather(self) -> None:
        """At the beginning wait a little for all actors, or the first would get all leases."""
        self._fill()
        await asyncio.wait(self._starting, timeout=_GATHER)

    def end(self, session: RaySession) -> None:
        """A lease has ended."""
        session.host.leases.discard(session)

    def _fill(self) -> None:
        """Start as many actors as are missing."""
        while len(self._hosts) + len(self._starting) < self._count and self._failures < _MOST_FAILURES:
            task = asyncio.get_running_loop().create_task(self._launch(next(self._numbers)))
            self._starting.add(task)
            task.add_done_callback(self._launched)

    def _launched(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # A module that is not there will not be there next time.
            self._failures = _MOST_FAILURES if isinstance(error, UsageError) else self._failures + 1
            self._trouble = error
        if not self._closed:
            self._fill()
        self._changed.set()

    async def _launch(self, number: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        await asyncio.sleep(_RETRY * (2**self._failures - 1))
        node = self._place(number)
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = self._actor.options(scheduling_strategy=where).remote(*self._arguments)
        starting = actor.start.remote()
        try:
            pid = await waiting(starting, {"CPU": self._cpus}, "an env actor", self._interval, self._say)
        except BaseException as error:
            self._homes.pop(number, None)
            need_ray().kill(actor)
            cause = getattr(error, "cause", None)
            if isinstance(cause, RollgymError):
                raise cause from error
            raise
        self._failures = 0
        line = Line(actor, _lost, lambda why: self._lose(number, why), self._timeout)
        host = self._hosts[number] = Host(number, node, actor, line)
        host.pid = pid

    def _place(self, number: int) -> str:
        """The node with the fewest actors, those that start included."""
        nodes = _alive()
        if not nodes:
            raise WorkerLost("the cluster has no node left")
        used = Counter(self._homes.values())
        node = self._homes[number] = min(nodes, key=lambda name: used[name])
        return node

    def _lose(self, number: int, why: str) -> None:
        """An actor is gone: its leases have been told by its line."""
        host = self._hosts.pop(number, None)
        if host is None:
            return
        del self._homes[number]
        self._say(f"An env actor is gone ({why}); another one starts.")
        self._ended["died"] += 1
        self._episodes += host.opened
        if not self._closed:
            self._fill()
        self._changed.set()

    async def close(self) -> None:
        """Stop every actor, the pools inside first."""
        self._closed = True
        self._changed.set()
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        hosts = list(self._hosts.values())
        await asyncio.gather(*(self._stop(host) for host in hosts))

    async def _stop(self, host: Host) -> None:
        ray = need_ray()
        try:
            async with asyncio.timeout(10):
                await host.actor.close.remote()
        except (ray.exceptions.RayError, TimeoutError):
            pass
        host.line.hang_up("the pool was closed")
        ray.kill(host.actor)
        if self._hosts.pop(host.number, None) is not None:
            self._ended["closed"] += 1
            self._episodes += host.opened

    async def inside(self) -> dict[str, PoolStats]:
        """What the pools in the actors say of themselves, by actor and node."""
        hosts = list(self._hosts.values())
        found = await asyncio.gather(*(one.actor.stats.remote() for one in hosts), return_exceptions=True)
        return {
            f"{host.number}@{host.node[:8]}": stats
            for host, stats in zip(hosts, found, strict=True)
            if isinstance(stats, PoolStats)
        }

    def stats(self) -> PoolStats:
        """The actors there are, and what became of earlier ones; `inside` looks into them."""
        hosts = self._hosts.values()
        return PoolStats(
            workers=tuple(
                WorkerStats(
                    number=host.number,
                    pid=host.pid,
                    leases=len(host.leases),
                    episodes=host.opened - len(host.leases),
                    memory_mb=0.0,
                    leaving=None,
                )
                for host in hosts
            ),
            leases=sum(len(host.leases) for host in hosts),
            started=len(hosts) + self._ended.total(),
            ended=dict(self._ended),
            episodes=self._episodes + sum(host.opened - len(host.leases) for host in hosts),
        )


class RaySession:
    """One lease in an env actor. The environment is made (or taken from the idle ones) by `reset`."""

    def __init__(self, pool: RayPool, host: Host, lease: int, spec: EpisodeSpec) -> None:
        self._pool = pool
        self.host = host
        self._lease = lease
        self._spec = spec
        self._open = True

    @property
    def worker(self) -> str:
        """Who hosts it, for the log."""
        return f"{self.host.number}@{self.host.node[:8]}"

    async def reset(self) -> Reset:
        """Start the episode."""
        return _reset(await self._ask(encode(Begin(self._lease, self._spec))))

    async def step(self, action: str) -> Step:
        """Play one action."""
        return _step(await self._ask(encode(Act(self._lease, clean_text(action)))))

    async def close(self) -> None:
        """Give the environment back."""
        if self._open:
            self._open = False
            self._pool.end(self)
            self.host.line.tell(encode(End(self._lease, True)))

    async def _ask(self, message: bytes) -> bytes:
        if not self._open:
            raise UsageError("A session makes no call once it is closed.")
        answer: bytes = await self.host.line.ask(message)
        return answer


def _lost(why: str) -> LeaseLost:
    return LeaseLost(f"an env actor is gone: {why}")


def _alive() -> list[str]:
    """Ray's ids of the nodes that are there, in a fixed order."""
    return sorted(node["NodeID"] for node in need_ray().nodes() if node["Alive"])
