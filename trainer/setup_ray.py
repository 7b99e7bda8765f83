"""The parts of a run on Ray: the same as in one process, each where a plan puts it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollgym.cluster.connect import Connection, connect
from rollgym.cluster.engine import RemoteEngine
from rollgym.cluster.errors import ActorLost
from rollgym.cluster.placement import Placed, on_node, place
from rollgym.cluster.pool import RayPool
from rollgym.cluster.waiting import living_nodes, tell
from rollgym.devices.types import Plan
from rollgym.engines import Engine
from rollgym.engines.replicas import ReplicaEngine
from rollgym.errors import EngineLost, RollgymError, one_line
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.handover import Handover
from rollgym.trainer.learner_thread import LearnerThread
from rollgym.trainer.plan_record import RunPlan, ray_plan
from rollgym.trainer.ray_plan import LOOK, plan_again, plan_first
from rollgym.trainer.ray_roles import (
    ClusterLearner,
    all_leaves,
    engine_seats,
    open_learner,
    restart_learner,
    seating,
    shared_engines,
)
from rollgym.trainer.ray_sglang import sglang_places, start_sglang
from rollgym.trainer.setup import Parts, engine_options, make_parts, open_servers, prepare_model

MOVED = ".moved"
"""Of the run's folder: the learner on its way to other devices."""
PATIENCE = 300.0
"""Seconds in which an engine must be replaced where none other is left."""


@asynccontextmanager
async def open_ray_parts(config: TrainConfig, folder: Path) -> AsyncIterator[Parts]:
    """Everything, ready to use, on a cluster that is joined or started; closed again whatever happens."""
    folder = folder.absolute()
    # Counted so that every actor of a Ray of its own has one, however few there are.
    cpus = None if config.address is not None else max(os.cpu_count() or 1, (config.gpus or 0) + 2)
    with LearnerThread() as thread:
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(thread, prepare_model, config, folder)
        with connect(config.address, gpus=config.gpus, cpus=cpus) as connection:
            run = RayRun(config, folder, model, connection, thread)
            try:
                await run.start()
                yield run.parts()
            finally:
                await run.close()


class RayRun:
    """What a run has on the cluster: how it begins, what it does when nodes come and go, how it ends."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        model: Path,
        connection: Connection,
        thread: Executor,
    ) -> None:
        self._config, self._folder, self._model = config, folder, model
        self._connection, self._thread = connection, thread
        self._whole = len(connection.cluster.devices)
        """Devices that there were at the start."""
        self._nodes = frozenset(connection.nodes)
        self._placed: Placed | None = None
        self._engines: list[RemoteEngine] = []
        self._joining: set[asyncio.Task[None]] = set()
        """Engines that start on nodes that came."""
        self._parts: Parts | None = None
        self.pool: RayPool
        self.learner: ClusterLearner
        self.engine: Engine

    async def start(self) -> None:
        """Plan, take the devices, start everything on them."""
        placed = await self._place(plan_first(self._config, self._connection))
        while placed is None:
            placed = await self._place_again()
        starting = asyncio.gather(*(self._start_engine(place) for place in self._engine_places(placed)))
        try:
            self.learner = await self._compute(open_learner, self._config, self._model, placed)
        finally:
            self._engines = list(await starting)
        if not self._engines:
            self.engine = await open_servers(self._config, self._model)
        else:  # also a single one: there may be more later, and one that is lost is waited for
            self.engine = ReplicaEngine(self._engines, patience=PATIENCE)
        rollout = self._config.rollout
        self.pool = RayPool(
            workers=rollout.workers,
            modules=rollout.modules,
            heartbeat_timeout=self._config.heartbeat_timeout,
        )

    def parts(self) -> Parts:
        """For the loop."""
        self._parts = make_parts(
            self._config,
            self._folder,
            self.engine,
            self.pool,
            self.learner,
            self._thread,
            plan=self._plan(),
            turns=self._turns(),
            rebuild=self.rebuild,
            adjust=self.adjust,
        )
        return self._parts

    async def rebuild(self) -> None:
        """Plan anew for the nodes that are left, and start learner and engines there; the pool has done so.

        It waits, and says for what, where they are too few; and begins again where another one is lost.
        """
        while True:
            living = await asyncio.to_thread(living_nodes)
            try:
                await self._rebuild()
                return
            except (ActorLost, EngineLost):
                if living <= await asyncio.to_thread(living_nodes):
                    raise

    async def adjust(self) -> None:
        """Between two steps: have what came to the cluster take part again.

        A run that goes on with fewer devices moves as a whole once there are as many as at the start; engines
        whose node was lost go to one that came in its place.
        """
        living = await asyncio.to_thread(living_nodes)
        if living == self._nodes or not self._engines:
            return
        came, self._nodes = living - self._nodes, living
        if not came:
            return
        connection = await asyncio.to_thread(self._connection.again)
        shrunk = len(self._connection.cluster.devices) < self._whole <= len(connection.cluster.devices)
        if shrunk:
            await self._move_back()
        else:
            self._refill(connection, came)

    async def close(self) -> None:
        """Stop whatever was started."""
        for task in self._joining:
            task.cancel()
        if self._parts is not None and self._parts.scorer is not None:
            await self._parts.scorer.close()
        if hasattr(self, "pool"):
            await self.pool.close()
        if hasattr(self, "engine"):
            await self.engine.close()
        await asyncio.gather(*(engine.close() for engine in self._engines), return_exceptions=True)
        if hasattr(self, "learner"):
            self.learner.close()
        if self._placed is not None:
            self._placed.release()

    async def _rebuild(self) -> None:
        if isinstance(self.engine, ReplicaEngine):
            self.engine.rearrange(())  # nobody looks for those that are stopped
        for engine in self._engines:
            engine.stop("its device is planned anew")
        placed = await self._place_again()
        while placed is None:
            placed = await self._place_again()
        engines = asyncio.gather(self._restart_engines(placed))
        try:
            await self._compute(restart_learner, self.learner, self._config, placed)
        finally:
            await engines
        if self._parts is not None:
            self._parts.turns, self._parts.plan = self._turns(), self._plan()

    async def _place_again(self) -> Placed | None:
        if self._placed is not None:
            self._placed.release()
        plan, self._connection = await plan_again(self._config, self._connection, self._whole)
        self._nodes = frozenset(self._connection.nodes)
        return await self._place(plan)

    async def _place(self, plan: Plan) -> Placed | None:
        """Take the devices of a plan; ``None`` where one of its nodes is lost while it waits for them."""
        placing = asyncio.ensure_future(place(plan, self._connection))
        try:
            while not (await asyncio.wait([placing], timeout=LOOK))[0]:
                if not self._nodes <= await asyncio.to_thread(living_nodes):
                    return None
        finally:
            placing.cancel()
            await asyncio.wait([placing])
        self._placed = placing.result()
        return self._placed

    def _engine_places(self, placed: Placed) -> list[dict[str, Any]]:
        if self._config.engine.kind == "sglang":
            return sglang_places(self._config, placed)
        return [seat.options() for seat in engine_seats(placed)]

    async def _start_engine(self, place: dict[str, Any]) -> RemoteEngine:
        if self._config.engine.kind == "sglang":
            return await start_sglang(self._config, self._model, place, self._placed)
        options = {**engine_options(self._config), "heartbeat_timeout": self._config.heartbeat_timeout}
        return await RemoteEngine.start(self._model, place=place, **options)

    def _plan(self) -> RunPlan:
        assert self._placed is not None
        strategy = seating(self._config, self._placed, "policy")["strategy"]
        urls = 0 if self._config.engine.url is None else 1
        return ray_plan(self._config, self._placed, strategy, len(self._engines) or urls, self.pool.size)

    def _turns(self) -> Handover | None:
        """Whose turn it is on the devices that engines share with the learner, if they share any."""
        placed = self._placed
        shared = shared_engines(placed) if placed is not None and self._engines else []
        if placed is None or not shared:
            return None
        releases = placed.plan.placements["actor_infer"].offload
        away = all_leaves(placed)
        return Handover(self.engine, shared, self.learner, self._compute, leaves=away, releases=releases)

    async def _restart_engines(self, placed: Placed) -> None:
        """Engines where the plan has them: those there were, with others where there are more places."""
        places = self._engine_places(placed)
        kept, surplus = self._engines[: len(places)], self._engines[len(places) :]
        await asyncio.gather(
            *(one.restart(place, fresh=True) for one, place in zip(kept, places, strict=False)),
            *(one.close() for one in surplus),
        )
        more = await asyncio.gather(*(self._start_engine(place) for place in places[len(kept) :]))
        self._engines = [*kept, *more]
        if isinstance(self.engine, ReplicaEngine):
            self.engine.rearrange(self._engines)

    async def _move_back(self) -> None:
        """Carry the learner over to a plan for all devices; the engines get its weights next."""
        place = self._folder / MOVED
        place.mkdir(exist_ok=True)
        await self._compute(self.learner.save, place)
        await self.rebuild()
        await self._compute(self.learner.load, place)

    def _refill(self, connection: Connection, came: frozenset[str]) -> None:
        """Engines that lost their node start on those that came, one on each device."""
        free = [
            on_node(name, node.kind)
            for name, node in zip(connection.nodes, connection.cluster.nodes, strict=True)
            if name in came
            for _ in range(node.devices)
        ]
        lost = [engine for engine in self._engines if engine.homeless]
        for engine, where in zip(lost, free, strict=False):
            # Steps go on meanwhile; an engine that has started takes part from the next weights on.
            task = asyncio.create_task(_start_elsewhere(engine, where))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)

    async def _compute(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


async def _start_elsewhere(engine: RemoteEngine, place: dict[str, Any]) -> None:
    try:
        await engine.restart(place)
    except RollgymError as error:
        tell(f"An engine could not start on the node that came: {one_line(error)}")
