"""The environment pool on a cluster: env actors on all nodes, each with many leases.

Each actor hosts a `LocalPool` (or, without worker processes, an `InlinePool`), so limits and failure handling
are as on one machine. When an actor or its node dies, the sessions of its leases raise `LeaseLost`, the
scheduler retries their episodes, and another actor starts on a remaining node.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from rollgym.cluster.env_actor import EnvActor
from rollgym.cluster.errors import need_ray
from rollgym.cluster.heartbeat import OPTIONS, TIMEOUT
from rollgym.cluster.rpc import ActorClient
from rollgym.cluster.wait import alive_nodes, print_status, wait_for_resources
from rollgym.core.errors import RollgymError, UsageError, WorkerLost
from rollgym.core.serialization import clean_text
from rollgym.core.types import EpisodeSpec
from rollgym.pool.base import EnvSession, LeaseLost, Reset, Step
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.protocol import Act, Begin, End, encode
from rollgym.pool.stats import PoolStats, WorkerStats

_reset = msgspec.msgpack.Decoder(Reset).decode
_step = msgspec.msgpack.Decoder(Step).decode
_RETRY = 0.2
"""Seconds before an actor is started again after a failure; doubled after each further one."""
_MAX_FAILURES = 8
_GATHER_SECONDS = 20.0
"""Seconds to wait for all actors before the first ones get all leases."""


class EnvActorHandle:
    """The driver's handle of an env actor."""

    def __init__(self, number: int, node: str, actor: Any, client: ActorClient, pid: int) -> None:
        self.number = number
        self.node = node
        self.actor = actor
        self.client = client
        self.pid = pid
        self.leases: set[RaySession] = set()
        self.opened = 0


class RayPool:
    """Environments on the nodes of a cluster.

    Args:
        actors: Number of env actors; default: one per node.
        workers: Worker processes per actor; 0 runs environments in the actor, where a blocking step blocks
            all of them.
        modules: Modules that register environments, imported in every worker.
        limits: Limits of each worker process.
        cpus: CPUs that Ray reserves for each actor.
        interval: Seconds between two status messages of an actor that waits for resources.
        report: Receives the status messages.
        heartbeat_timeout: Seconds without a heartbeat after which an actor is replaced.
    """

    def __init__(
        self,
        actors: int | None = None,
        *,
        workers: int = 2,
        modules: Iterable[str] = (),
        limits: WorkerLimits | None = None,
        cpus: float = 1.0,
        interval: float = 30.0,
        report: Callable[[str], None] = print_status,
        heartbeat_timeout: float = TIMEOUT,
    ) -> None:
        if actors is not None and actors < 1:
            raise UsageError(f"A pool needs at least 1 env actor, not {actors}.")
        if workers < 0:
            raise UsageError(f"workers must be at least 0, not {workers}.")
        ray = need_ray()
        self._count = actors or max(len(alive_nodes()), 1)
        self._arguments = (workers, list(modules), limits or WorkerLimits(), list(sys.path))
        self._cpus, self._interval, self._report = cpus, interval, report
        self._actor = ray.remote(num_cpus=cpus, max_restarts=0, max_concurrency=10_000, **OPTIONS)(EnvActor)
        self._timeout = heartbeat_timeout
        self._actors: dict[int, EnvActorHandle] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._node_of: dict[int, str] = {}
        """The node of each actor."""
        self._numbers = itertools.count(1)
        self._lease_numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._ended: Counter[str] = Counter()
        self._episodes = 0
        self._failures = 0
        self._start_error: BaseException | None = None
        self._closed = False
        self._gathering: asyncio.Future[None] | None = None

    @property
    def size(self) -> int:
        """Target number of env actors."""
        return self._count

    async def open(self, spec: EpisodeSpec) -> RaySession:
        """Open a lease on the actor with the fewest; waits until there is an actor."""
        if self._gathering is None:
            self._gathering = asyncio.ensure_future(self._gather())
        await asyncio.shield(self._gathering)
        while True:
            if self._closed:
                raise UsageError("The pool is closed.")
            self._fill()
            if self._actors:
                handle = min(self._actors.values(), key=lambda actor: len(actor.leases))
                handle.opened += 1
                session = RaySession(handle, next(self._lease_numbers), spec)
                handle.leases.add(session)
                return session
            if isinstance(self._start_error, UsageError):
                raise self._start_error
            if self._start_error is not None and not self._starting:
                raise WorkerLost(f"no env actor can be started: {self._start_error}") from self._start_error
            self._changed.clear()
            await self._changed.wait()

    async def _gather(self) -> None:
        """Wait for all actors to start, or the first one would get all leases."""
        self._fill()
        await asyncio.wait(self._starting, timeout=_GATHER_SECONDS)

    def _fill(self) -> None:
        """Start missing actors."""
        while len(self._actors) + len(self._starting) < self._count and self._failures < _MAX_FAILURES:
            task = asyncio.get_running_loop().create_task(self._launch(next(self._numbers)))
            self._starting.add(task)
            task.add_done_callback(self._launched)

    def _launched(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # A usage error, such as a missing module, will not go away.
            self._failures = _MAX_FAILURES if isinstance(error, UsageError) else self._failures + 1
            self._start_error = error
        if not self._closed:
            self._fill()
        self._changed.set()

    async def _launch(self, number: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        await asyncio.sleep(_RETRY * (2**self._failures - 1))
        node = self._choose_node(number)
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = self._actor.options(scheduling_strategy=where).remote(*self._arguments)
        starting = actor.start.remote()
        try:
            pid = await wait_for_resources(
                starting, {"CPU": self._cpus}, "an env actor", self._interval, self._report
            )
        except BaseException as error:
            self._node_of.pop(number, None)
            need_ray().kill(actor)
            cause = getattr(error, "cause", None)
            if isinstance(cause, RollgymError):
                raise cause from error
            raise
        self._failures = 0
        client = ActorClient(actor, _lost, lambda why: self._on_loss(number, why), self._timeout)
        self._actors[number] = EnvActorHandle(number, node, actor, client, pid)

    def _choose_node(self, number: int) -> str:
        """Return the node with the fewest actors, starting ones included."""
        nodes = alive_nodes()
        if not nodes:
            raise WorkerLost("no node of the cluster is alive")
        used = Counter(self._node_of.values())
        node = self._node_of[number] = min(sorted(nodes), key=lambda name: used[name])
        return node

    def _on_loss(self, number: int, why: str) -> None:
        """Replace a lost actor; its client has failed the pending calls of its leases."""
        handle = self._actors.pop(number, None)
        if handle is None:
            return
        del self._node_of[number]
        self._report(f"An env actor is lost ({why}); starting another.")
        self._ended["died"] += 1
        self._episodes += handle.opened
        if not self._closed:
            self._fill()
        self._changed.set()

    async def close(self) -> None:
        """Stop all actors, after their pools."""
        self._closed = True
        self._changed.set()
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        actors = list(self._actors.values())
        await asyncio.gather(*(self._stop(handle) for handle in actors))

    async def _stop(self, handle: EnvActorHandle) -> None:
        ray = need_ray()
        try:
            async with asyncio.timeout(10):
                await handle.actor.close.remote()
        except (ray.exceptions.RayError, TimeoutError):
            pass
        handle.client.close("the pool was closed")
        ray.kill(handle.actor)
        if self._actors.pop(handle.number, None) is not None:
            self._ended["closed"] += 1
            self._episodes += handle.opened

    async def inner_stats(self) -> dict[str, PoolStats]:
        """Return the stats of the actors' pools, by actor and node."""
        actors = list(self._actors.values())
        asked = (handle.actor.stats.remote() for handle in actors)
        all_stats = await asyncio.gather(*asked, return_exceptions=True)
        return {
            f"{handle.number}@{handle.node[:8]}": stats
            for handle, stats in zip(actors, all_stats, strict=True)
            if isinstance(stats, PoolStats)
        }

    def stats(self) -> PoolStats:
        """Return the stats of current and past actors; `inner_stats` returns those of their pools."""
        actors = self._actors.values()
        return PoolStats(
            workers=tuple(
                WorkerStats(
                    number=handle.number,
                    pid=handle.pid,
                    leases=len(handle.leases),
                    episodes=handle.opened - len(handle.leases),
                    memory_mb=0.0,
                    leaving=None,
                )
                for handle in actors
            ),
            leases=sum(len(handle.leases) for handle in actors),
            started=len(actors) + self._ended.total(),
            ended=dict(self._ended),
            episodes=self._episodes + sum(handle.opened - len(handle.leases) for handle in actors),
        )


class RaySession(EnvSession):
    """A lease in an env actor. `reset` creates the environment or reuses an idle one."""

    def __init__(self, handle: EnvActorHandle, lease: int, spec: EpisodeSpec) -> None:
        self.handle = handle
        self._lease = lease
        self._spec = spec
        self._open = True

    @property
    def worker(self) -> str:
        """Label of its env actor, for logs."""
        return f"{self.handle.number}@{self.handle.node[:8]}"

    async def reset(self) -> Reset:
        """Start the episode."""
        return _reset(await self._call(encode(Begin(self._lease, self._spec))))

    async def step(self, action: str) -> Step:
        """Apply one action."""
        return _step(await self._call(encode(Act(self._lease, clean_text(action)))))

    async def close(self) -> None:
        """Return the environment to the pool."""
        if self._open:
            self._open = False
            self.handle.leases.discard(self)
            self.handle.client.send(encode(End(self._lease, True)))

    async def _call(self, message: bytes) -> bytes:
        if not self._open:
            raise UsageError("The session is closed.")
        answer: bytes = await self.handle.client.call(message)
        return answer


def _lost(why: str) -> LeaseLost:
    return LeaseLost(f"an env actor is lost: {why}")
