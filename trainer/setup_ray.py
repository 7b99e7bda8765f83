"""The parts of a run on Ray: the same as in one process, each where a plan puts it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollgym.cluster.connect import Connection, connect
from rollgym.cluster.engine import RemoteEngine
from rollgym.cluster.placement import Placed, Seat, place
from rollgym.cluster.pool import RayPool
from rollgym.devices.detail import DetailedPlan
from rollgym.devices.planner import make_plan
from rollgym.engines import Engine
from rollgym.engines.replicas import ReplicaEngine
from rollgym.registry import import_module
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.learner.remote import LOCAL, RemoteLearner
from rollgym.trainer.planning import WhatIf, job_of
from rollgym.trainer.setup import (
    Parts,
    engine_options,
    learner_options,
    make_parts,
    open_servers,
    prepare_model,
)

STRATEGIES = {"none": "ddp", "optimiser": "zero1", "gradients": "zero2", "weights": "fsdp2"}
"""What the ranks of training hold a part of, by what the plan says."""


@asynccontextmanager
async def open_ray_parts(config: TrainConfig, folder: Path) -> AsyncIterator[Parts]:
    """Everything, ready to use, on a cluster that is joined or started; closed again whatever happens."""
    for module in config.rollout.modules:
        import_module(module, "rollout.modules")
    folder = folder.absolute()
    # Counted so that every actor of a Ray of its own has one, however few there are.
    cpus = None if config.address is not None else max(os.cpu_count() or 1, (config.gpus or 0) + 2)
    with ThreadPoolExecutor(1, thread_name_prefix="rollgym-learner") as thread:
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(thread, prepare_model, config, folder)
        with connect(config.address, gpus=config.gpus, cpus=cpus) as connection:
            run = RayRun(config, model, connection, thread)
            try:
                await run.start()
                yield run.parts(folder)
            finally:
                await run.close()


class RayRun:
    """What a run has on the cluster; `rebuild` makes all of it anew on what is left."""

    def __init__(
        self, config: TrainConfig, model: Path, connection: Connection, thread: ThreadPoolExecutor
    ) -> None:
        self._config, self._model, self._thread = config, model, thread
        self._connection = connection
        self._placed: Placed | None = None
        self._engines: list[RemoteEngine] = []
        self._shared: list[int] = []
        """The engines whose device is also trained on."""
        self._scorer: Any = None
        self.plan: DetailedPlan
        self.pool: RayPool
        self.learner: RemoteLearner
        self.engine: Engine

    async def start(self) -> None:
        """Plan, take the devices, start everything on them."""
        config = self._config
        placed = await self._place()
        places = _engine_places(placed) if config.engine.kind == "torch" else []
        starting = asyncio.gather(
            *(RemoteEngine.start(self._model, place=one, **engine_options(config)) for one in places),
        )
        try:
            self.learner = await self._compute(self._make_learner, placed)
        finally:
            self._engines = list(await starting)
        if not self._engines:
            self.engine = await open_servers(config, self._model)
        else:
            self.engine = self._engines[0] if len(self._engines) == 1 else ReplicaEngine(self._engines)
        self.pool = RayPool(workers=config.rollout.workers, modules=config.rollout.modules)

    def parts(self, folder: Path) -> Parts:
        """For the loop."""
        parts = make_parts(
            self._config,
            folder,
            self.engine,
            self.pool,
            self.learner,
            self._thread,
            handover=self.handover,
            rebuild=self.rebuild,
        )
        self._scorer = parts.scorer
        return parts

    @asynccontextmanager
    async def handover(self) -> AsyncIterator[None]:
        """Engines on devices that are trained on rest meanwhile; others play on."""
        shared = [number for number in self._shared if number < len(self._engines)]
        if isinstance(self.engine, ReplicaEngine):
            for number in shared:
                await self.engine.suspend(number)
        elif shared:
            await self.engine.pause()
        try:
            yield
        finally:
            if isinstance(self.engine, ReplicaEngine):
                for number in shared:
                    await self.engine.restore(number)
            elif shared:
                await self.engine.resume()

    async def rebuild(self) -> None:
        """Plan anew for the nodes that are left, and start learner and engines there; the pool has done so.

        It waits, and says for what, where they are too few.
        """
        for engine in self._engines:
            engine.stop("its device is planned anew")
        if self._placed is not None:
            self._placed.release()
        self._connection = await asyncio.to_thread(self._connection.again)
        placed = await self._place()
        seats = [seat.options() for seat in placed.seats["actor_train"]]
        places = _engine_places(placed)
        restarts = [engine.restart(at, fresh=True) for engine, at in zip(self._engines, places, strict=False)]
        surplus = [engine.close() for engine in self._engines[len(places) :]]
        engines = asyncio.gather(*restarts, *surplus)
        try:
            await self._compute(self.learner.restart, None, seats)
        finally:
            await engines

    async def close(self) -> None:
        """Stop whatever was started."""
        if self._scorer is not None:
            await self._scorer.close()
        if hasattr(self, "pool"):
            await self.pool.close()
        if hasattr(self, "engine"):
            await self.engine.close()
        await asyncio.gather(*(engine.close() for engine in self._engines), return_exceptions=True)
        if hasattr(self, "learner"):
            self.learner.close()
        if self._placed is not None:
            self._placed.release()

    async def _place(self) -> Placed:
        cluster = self._connection.cluster
        self.plan = make_plan(cluster, job_of(self._config, cluster, WhatIf()), self._config.devices)
        self._placed = await place(self.plan.plan, self._connection)
        train = {seat.device for seat in self._placed.seats["actor_train"]}
        self._shared = [at for at, seat in enumerate(_engine_seats(self._placed)) if seat.device in train]
        return self._placed

    def _make_learner(self, placed: Placed) -> RemoteLearner:
        config = self._config
        seats = placed.seats["actor_train"]
        strategy: str = config.strategy
        if strategy == "auto":
            alone = len(seats) == 1
            strategy = LOCAL if alone else STRATEGIES[placed.plan.placements["actor_train"].sharding]
        offload = {"offload": True} if self.plan.offload == "host" and strategy not in (LOCAL, "ddp") else {}
        return RemoteLearner(
            strategy,
            self._model,
            config.learner,
            config.loss,
            places=[seat.options() for seat in seats],
            **learner_options(config),
            **offload,
        )

    async def _compute(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


def _engine_seats(placed: Placed) -> Sequence[Seat]:
    """One for each copy of the policy that generates: the first device of those that hold it together."""
    return placed.seats["actor_infer"][:: placed.plan.placements["actor_infer"].tensor_parallel]


def _engine_places(placed: Placed) -> list[dict[str, Any]]:
    return [seat.options() for seat in _engine_seats(placed)]
