"""The Ray runtime: the same components as in one process, each on the devices that a plan gives it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rollgym.cluster.connect import Connection, connect
from rollgym.cluster.engine import RemoteEngine
from rollgym.cluster.errors import ActorLost
from rollgym.cluster.kept_engines import (
    RECORD,
    EngineLease,
    EngineRecord,
    find_groups,
    leave_to_lease,
    remove,
)
from rollgym.cluster.node_info import local_node_info
from rollgym.cluster.placement import PlacedPlan, bundles, node_options, place
from rollgym.cluster.pool import RayPool
from rollgym.cluster.server_actor import SERVER_ACTORS, server_slots
from rollgym.cluster.wait import alive_nodes, print_status
from rollgym.core.errors import EngineLost, RollgymError, one_line
from rollgym.devices.types import Plan
from rollgym.engines.base import Engine
from rollgym.engines.router import RoutedEngine
from rollgym.trainer.cluster.planning import LOOK, plan_again, plan_first, run_plan
from rollgym.trainer.cluster.roles import (
    all_offloads,
    engine_slots,
    engines_are_apart,
    open_learner,
    placement,
    restart_learner,
    shared_engines,
)
from rollgym.trainer.colocation import Colocation
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.distillation import open_teachers
from rollgym.trainer.learner.multi_role import MultiRoleLearner
from rollgym.trainer.runtime import (
    Components,
    RunPlan,
    engine_options,
    make_components,
    open_servers,
    server_options,
    weight_options,
)
from rollgym.trainer.weight_sync import FOLDER, sync_plan

MOVED = ".moved"
"""Folder of a run: the learner's state while it moves to other devices."""
PATIENCE = 300.0
"""Seconds to wait for a replacement if no engine is left."""


class KeptEngines(NamedTuple):
    """Engines of a former process that the plan can use."""

    record: EngineRecord
    groups: Mapping[str, Any]
    """The placement groups of the record."""


class RayRuntime:
    """Starts components on a cluster, follows nodes that join and leave, and stops everything.

    ``ray.address`` joins a cluster; without it a Ray is started on this machine. All nodes must be able to
    read the model's folder.
    """

    def __init__(self, config: TrainConfig, folder: Path, model: Path, thread: Executor) -> None:
        self._config, self._thread = config, thread
        self._folder, self._model = folder.absolute(), model.absolute()
        self._stack = ExitStack()
        self._connection: Connection
        self._all_devices = 0
        """Number of devices at the start."""
        self._nodes: frozenset[str] = frozenset()
        self._placed: PlacedPlan | None = None
        self._lease: EngineLease | None = None
        """Set if engines may outlive this process."""
        self._engines: list[RemoteEngine] = []
        self._starting: set[asyncio.Task[None]] = set()
        """Engines that start on other nodes than planned."""
        self._watching: asyncio.Task[None] | None = None
        self._looked: tuple[frozenset[str], list[str | None]] = frozenset(), []
        """The living nodes and those of the engines when free devices were last searched."""
        self._moving = asyncio.Lock()
        """Held while components get other devices."""
        self._components: Components | None = None
        self._pool: RayPool | None = None
        self._learner: MultiRoleLearner
        self._engine: Engine | None = None
        self._router: RoutedEngine | None = None
        """Router over ``_engines``; ``None`` with servers at ``engine.url``."""

    async def start(self) -> Components:
        """Connect, plan, reserve the devices, and start everything on them."""
        config = self._config
        # With a Ray started here every actor needs a CPU to count, even if the machine has fewer.
        settings = config.ray
        cpus = (
            None if settings.address is not None else max(os.cpu_count() or 1, (settings.num_gpus or 0) + 2)
        )
        self._connection = self._stack.enter_context(
            connect(settings.address, gpus=settings.num_gpus, cpus=cpus)
        )
        self._stack.callback(self._release)
        self._all_devices = len(self._connection.cluster.devices)
        self._nodes = frozenset(self._connection.nodes)
        plan = plan_first(config, self._connection)
        kept = await self._take_lease(plan)
        placed = await self._place(plan, kept)
        while placed is None:
            kept, placed = None, await self._place_again()
        slots = self._engine_slots(placed)
        names: list[str | None] = [None] * len(slots)
        if kept is not None:
            names = [*kept.record.engines, *names][: len(slots)]
        starting = asyncio.gather(*map(self._start_engine, slots, names))
        try:
            self._learner = await self._compute(open_learner, config, self._model, placed)
            self._stack.callback(self._learner.close)
        finally:
            self._engines = list(await starting)
        self._record_engines()
        if any(names):
            rejoined = sum(one.actor_name in names for one in self._engines if one.actor_name is not None)
            print_status(f"Rejoined {rejoined} of {len(slots)} engines that were still running.")
        if not self._engines:
            self._engine = await open_servers(config, self._model)
        else:  # also for one engine: more may join, and a lost one is waited for
            self._engine = self._router = RoutedEngine(self._engines, patience=PATIENCE)
        self._pool = RayPool(
            workers=config.rollout.workers,
            modules=config.imports,
            heartbeat_timeout=config.ray.heartbeat_timeout,
        )
        self._components = make_components(
            config,
            self._folder,
            self._engine,
            self._pool,
            self._learner,
            self._thread,
            runtime=self,
            plan=self._plan(),
            colocation=self._colocation(),
        )
        self._components.teachers = await self._compute(open_teachers, config, self._folder, self._model)
        if self._engines:
            self._watching = asyncio.create_task(self._watch())
        return self._components

    async def rebuild(self) -> None:
        """Plan for the remaining nodes and restart learner and engines there; the pool restarts itself.

        Waits, with messages, while there are too few nodes; starts over if another node is lost.
        """
        async with self._moving:
            await self._rebuild()

    async def adjust(self) -> None:
        """Between two steps: use nodes that joined.

        A run that shrank moves as a whole once there are as many devices as at the start. Otherwise engines
        that lost their node start on free devices of other nodes.
        """
        async with self._moving:
            living = await asyncio.to_thread(alive_nodes)
            if not self._engines:
                return
            joined, self._nodes = living - self._nodes, living
            if joined:
                connection = await asyncio.to_thread(self._connection.refresh)
                devices = len(self._connection.cluster.devices)
                if devices < self._all_devices <= len(connection.cluster.devices):
                    await self._move_back()
                    return
            await self._place_lost_engines(living)

    async def close(self) -> None:
        """Stop everything that was started, and leave the cluster."""
        with self._stack:
            for task in (*self._starting, *([self._watching] if self._watching else ())):
                task.cancel()
            if self._components is not None and self._components.scorer is not None:
                await self._components.scorer.close()
            if self._components is not None and self._components.team is not None:
                await self._components.team.close()
            if self._pool is not None:
                await self._pool.close()
            if self._engine is not None:
                await self._engine.close()
            await asyncio.gather(*(engine.close() for engine in self._engines), return_exceptions=True)
            shutil.rmtree(self._folder / FOLDER, ignore_errors=True)

    def _release(self) -> None:
        if self._placed is not None:
            self._placed.release()

    async def _take_lease(self, plan: Plan) -> KeptEngines | None:
        """Let engines outlive this process; returns those of a former process if they can be used again.

        All others that it has left are removed.
        """
        settings = self._config.ray
        keeps = settings.address is not None and settings.keep_engines > 0 and engines_are_apart(plan)
        former = EngineRecord.read(self._folder)
        if former is not None:
            if keeps:
                self._lease = await EngineLease.take(settings.keep_engines, former.prefix)
            if self._lease is None:
                await asyncio.to_thread(remove, former.prefix)
                former = None
        if keeps and self._lease is None:
            self._lease = EngineLease.start(settings.keep_engines)
        if self._lease is None:
            (self._folder / RECORD).unlink(missing_ok=True)
            return None
        self._stack.callback(self._end_lease, self._lease)
        self._lease.on_start = self._record_engines
        if former is None:  # from now on the next process can find what has this prefix
            EngineRecord(self._lease.prefix).write(self._folder)
            return None
        groups = None
        if former.made_for == self._made_for(plan):
            groups = await asyncio.to_thread(find_groups, former.groups)
        kept = None if groups is None else KeptEngines(former, groups)
        used = () if kept is None else (*former.groups.values(), *filter(None, former.engines))
        await asyncio.to_thread(remove, former.prefix, (*leave_to_lease(former.prefix), *used))
        return kept

    def _end_lease(self, lease: EngineLease) -> None:
        lease.end()
        (self._folder / RECORD).unlink(missing_ok=True)

    def _made_for(self, plan: Plan) -> dict[str, Any]:
        """Describe what engines depend on: those made for anything else are not used again."""
        options = hashlib.sha256(repr(sorted(self._engine_options(plan).items())).encode()).hexdigest()
        placements = {role: repr(placement) for role, placement in sorted(plan.placements.items())}
        return {
            "placements": placements,
            "nodes": {str(node): self._connection.nodes[node] for node in bundles(plan)},
            "model": str(self._model),
            "options": options,
            "code": local_node_info().digest,
            "versions": {name: version(name) for name in ("torch", "transformers")},
        }

    def _record_engines(self) -> None:
        """Write the engines that run now into the run folder."""
        placed = self._placed
        if self._lease is None or placed is None:
            return
        names = [
            None if _has_moved(engine) or engine.needs_placement else engine.actor_name
            for engine in self._engines
        ]
        groups = {str(node): name for node, name in placed.names.items()}
        record = EngineRecord(self._lease.prefix, self._made_for(placed.plan), groups, tuple(names))
        with suppress(OSError):  # then the next process starts engines
            record.write(self._folder)

    async def _watch(self) -> None:
        """Also within a step: a run whose engines are all lost finishes no step until one has a device."""
        while True:
            await asyncio.sleep(LOOK)
            if any(engine.needs_placement for engine in self._engines):
                async with self._moving:
                    await self._place_lost_engines(await asyncio.to_thread(alive_nodes))

    async def _rebuild(self) -> None:
        while True:
            living = await asyncio.to_thread(alive_nodes)
            try:
                await self._restart()
                return
            except (ActorLost, EngineLost):
                if living <= await asyncio.to_thread(alive_nodes):
                    raise

    async def _restart(self) -> None:
        if self._router is not None:
            self._router.set_replicas(())  # engines that are stopped on purpose are not searched for
        for engine in self._engines:
            engine.stop("its devices are planned again")
        placed = await self._place_again()
        while placed is None:
            placed = await self._place_again()
        for engine in self._engines:
            engine.lease = self._lease_for(placed.plan)
        engines = asyncio.gather(self._restart_engines(placed))
        try:
            await self._compute(restart_learner, self._learner, self._config, placed)
        finally:
            await engines
        if self._components is not None:
            self._components.colocation, self._components.plan = self._colocation(), self._plan()

    async def _place_again(self) -> PlacedPlan | None:
        self._release()
        plan, self._connection = await plan_again(self._config, self._connection, self._all_devices)
        self._nodes = frozenset(self._connection.nodes)
        return await self._place(plan)

    async def _place(self, plan: Plan, kept: KeptEngines | None = None) -> PlacedPlan | None:
        """Reserve the devices of a plan, except ``kept``; ``None`` if one of its nodes is lost meanwhile."""
        names: dict[int, str] = {}
        groups: dict[int, Any] = {}
        if kept is not None:
            names = {int(node): name for node, name in kept.record.groups.items()}
            groups = {int(node): group for node, group in kept.groups.items()}
        elif (lease := self._lease_for(plan)) is not None:
            nodes = {device.node for device in plan.placements["actor_infer"].devices}
            names = {node: lease.new_name("devices") for node in sorted(nodes)}
        placing = asyncio.ensure_future(place(plan, self._connection, names=names, kept=groups))
        try:
            while not (await asyncio.wait([placing], timeout=LOOK))[0]:
                if not self._nodes <= await asyncio.to_thread(alive_nodes):
                    return None
        finally:
            placing.cancel()
            await asyncio.wait([placing])
        self._placed = placing.result()
        return self._placed

    def _engine_slots(self, placed: PlacedPlan) -> list[dict[str, Any]]:
        """Actor options for each engine; none if servers already run at ``engine.url``."""
        config = self._config.engine
        if config.kind == "embedded":
            return [slot.options() for slot in engine_slots(placed)]
        if config.url is not None:
            return []
        slots = [slot.options() for slot in placed.slots["actor_infer"]]
        size = placed.plan.placements["actor_infer"].tensor_parallel
        return server_slots(slots, size, config.replicas)

    async def _start_engine(self, slot: dict[str, Any], name: str | None = None) -> RemoteEngine:
        """Start an engine, or use the running one with this name if that is possible."""
        assert self._placed is not None
        plan, kind = self._placed.plan, self._config.engine.kind
        kinds: Mapping[str, type[RemoteEngine]] = {"embedded": RemoteEngine, **SERVER_ACTORS}
        engine = kinds[kind](
            self._model,
            actor_options=slot,
            heartbeat_timeout=self._config.ray.heartbeat_timeout,
            lease=self._lease_for(plan),
            **self._engine_options(plan),
        )
        if name is None or not await engine.rejoin(name):
            await engine.restart()
        return engine

    def _engine_options(self, plan: Plan) -> dict[str, Any]:
        config = self._config
        if config.engine.kind == "embedded":
            return engine_options(config)
        releases = bool(plan.placements["actor_infer"].offload)
        return {"server": server_options(config, memory_saver=releases), **weight_options(config)}

    def _lease_for(self, plan: Plan) -> EngineLease | None:
        """The lease of the engines of a plan; none if they share devices with the learner."""
        return self._lease if engines_are_apart(plan) else None

    def _plan(self) -> RunPlan:
        assert self._placed is not None
        assert self._pool is not None
        strategy = placement(self._config, self._placed, "policy")["strategy"]
        urls = 0 if self._config.engine.url is None else 1
        assert self._engine is not None
        plan = self._placed.plan
        sync = sync_plan(self._config, self._engine, self._folder, len(plan.cluster.nodes))
        return run_plan(
            self._config, self._placed, strategy, len(self._engines) or urls, self._pool.size, sync
        )

    def _colocation(self) -> Colocation | None:
        """Set if engines share devices with the learner."""
        placed = self._placed
        shared = shared_engines(placed) if placed is not None and self._engines else []
        if placed is None or self._engine is None or not shared:
            return None
        releases = placed.plan.placements["actor_infer"].offload
        offloads = all_offloads(placed)
        return Colocation(
            self._engine, shared, self._learner, self._compute, offloads=offloads, releases=releases
        )

    async def _restart_engines(self, placed: PlacedPlan) -> None:
        """Restart engines on the slots of a new plan; start more or close some if the number changed."""
        slots = self._engine_slots(placed)
        kept, surplus = self._engines[: len(slots)], self._engines[len(slots) :]
        await asyncio.gather(
            *(engine.restart(slot, fresh=True) for engine, slot in zip(kept, slots, strict=False)),
            *(engine.close() for engine in surplus),
        )
        more = await asyncio.gather(*(self._start_engine(slot) for slot in slots[len(kept) :]))
        self._engines = [*kept, *more]
        self._record_engines()
        if self._router is not None:
            self._router.set_replicas(self._engines)

    async def _move_back(self) -> None:
        """Move the learner to a plan for all devices; the engines get its weights next."""
        folder = self._folder / MOVED
        folder.mkdir(exist_ok=True)
        await self._compute(self._learner.save, folder)
        await self._rebuild()
        await self._compute(self._learner.load, folder)

    async def _place_lost_engines(self, living: frozenset[str]) -> None:
        """Start engines that lost their node on free devices of nodes without a part of the plan."""
        placed = self._placed
        if placed is None:
            return
        homes = [placed.node_of(engine.actor_options) for engine in self._engines]
        lost = [
            engine
            for engine, home in zip(self._engines, homes, strict=True)
            if engine.needs_placement and home not in living
        ]
        if not lost or self._looked == (living, homes):
            return
        self._looked = living, homes
        connection = await asyncio.to_thread(self._connection.refresh)
        (kind, *_) = {placed.plan.cluster.nodes[at.device.node].kind for at in placed.slots["actor_infer"]}
        free = [
            node_options(name, node.kind)
            for name, node in zip(connection.nodes, connection.cluster.nodes, strict=True)
            if name in living and name not in placed.nodes and node.kind == kind
            for _ in range(node.devices - homes.count(name))
        ]
        for engine, slot in zip(lost, free, strict=False):
            # Training continues meanwhile; a started engine takes part from the next weight sync on.
            task = asyncio.create_task(_restart_on(engine, slot))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _compute(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


def _has_moved(engine: RemoteEngine) -> bool:
    """Whether an engine is on another node than planned, without a reservation."""
    return hasattr(engine.actor_options.get("scheduling_strategy"), "node_id")


async def _restart_on(engine: RemoteEngine, slot: dict[str, Any]) -> None:
    try:
        await engine.restart(slot)
    except RollgymError as error:
        print_status(f"An engine could not start on the node that joined: {one_line(error)}")
