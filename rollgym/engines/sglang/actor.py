"""SGLang servers on a cluster: an actor, where the plan puts it, starts one, talks to it and watches it.

Requests and weights go to the actor, weights by reference, and from there to the server, which listens on its
own machine alone. Where the server dies the actor starts it again; where the actor or its node does, a new
actor takes its place. Both come back with the last weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rollgym.cluster.engine import EngineHost, RemoteEngine
from rollgym.cluster.errors import need_ray
from rollgym.engines import Engine
from rollgym.engines.replicas import ReplicaEngine
from rollgym.engines.sglang.opening import launch
from rollgym.engines.sglang.server import ServerOptions
from rollgym.errors import RollgymError, UsageError

OTHERS = "others"
"""In a place: those of the further devices of a server that is spread over several."""
Place = Mapping[str, Any]


class SglangHost(EngineHost):
    """What runs in the actor."""

    async def start(self, others: Sequence[tuple[str, list[str]]] = ()) -> tuple[int, int]:
        """Start the server, on this actor's device and the others; returns its context and vocabulary."""
        model, options = self._made
        server: ServerOptions = options.pop("server", None) or ServerOptions()
        if others:
            server = replace(server, tp=len(others) + 1, env={**server.env, **_visible(others)})
        self._engine = await asyncio.to_thread(partial(launch, model, server, **options))
        return self._engine.context_length, self._engine.vocabulary

    async def server_pid(self) -> int | None:
        """Of the server's first process."""
        pid: int | None = self._engine.server.pid
        return pid


class SglangActor(RemoteEngine):
    """An `Engine` that is an SGLang server in an actor's care; `start` makes one."""

    host = SglangHost
    called = "The SGLang server"

    async def ready(self) -> None:
        """Return when it can generate, with the weights it had; a dead server is started again for it."""
        await super().ready()
        await (await self._ready()).ask(("ready", ()))

    async def close(self) -> None:
        """Stop the server, and fail what still waits."""
        line = self._line
        if line is not None and line.gone is None:
            with suppress(RollgymError):
                await line.ask(("close", ()))
        await super().close()

    def _seat(self) -> dict[str, Any]:
        return {name: value for name, value in self._place.items() if name != OTHERS}

    async def _begin(self, actor: Any) -> tuple[int, int]:
        ray = need_ray()
        others = [ray.remote(_device).options(**one).remote() for one in self._place.get(OTHERS, ())]
        # Only devices are waited for with patience: a server takes as long as it takes.
        _, *found = await self._awaited(
            asyncio.gather(*map(_awaited, (actor.__ray_ready__.remote(), *others)))
        )
        try:
            facts: tuple[int, int] = await actor.start.remote(found)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UsageError):
                raise error.cause from error
            raise
        return facts


def server_places(
    places: Sequence[Place], size: int = 1, replicas: int | None = None
) -> list[dict[str, Any]]:
    """One place for each server, where each is spread over so many devices; as many as fit, or fewer."""
    if size < 1 or len(places) % size:
        raise UsageError(f"{len(places)} devices cannot be shared out to servers of {size} each.")
    found = [
        {**places[at], **({OTHERS: list(places[at + 1 : at + size])} if size > 1 else {})}
        for at in range(0, len(places), size)
    ]
    if replicas is not None and replicas > len(found):
        raise UsageError(
            f"engine.replicas is {replicas}, but the plan has devices for {len(found)} servers: lower "
            "it, or give actor_infer more devices."
        )
    return found[:replicas]


async def start_servers(
    model: str | Path, places: Sequence[Place], *, options: ServerOptions | None = None, **engine: Any
) -> list[SglangActor]:
    """Servers in actors, one at each place, started at once; where one fails, none is left."""
    if not places:
        raise UsageError("SGLang servers on a cluster need at least one place.")
    if options is not None and options.port is not None and len(places) > 1:
        raise UsageError("Several replicas cannot have one port: leave it out, and free ones are chosen.")
    actors = [SglangActor(Path(model).absolute(), place=one, server=options, **engine) for one in places]
    results = await asyncio.gather(*(actor.restart() for actor in actors), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            await asyncio.gather(*(actor.close() for actor in actors), return_exceptions=True)
            raise result
    return actors


async def open_sglang_on_ray(
    model: str | Path, places: Sequence[Place], *, options: ServerOptions | None = None, **engine: Any
) -> Engine:
    """One engine on the servers of `start_servers`: a session stays with one, new ones go where least is.

    Args:
        model: A folder that all nodes can read.
        places: Of the actors, such as `Seat.options`; `server_places` where a server needs several devices.
        options: How servers are started.
        engine: Further arguments of `SglangEngine` and `RemoteEngine`.
    """
    actors = await start_servers(model, places, options=options, **engine)
    return actors[0] if len(actors) == 1 else ReplicaEngine(actors)


def _device() -> tuple[str, list[str]]:
    """The node of a place, and its devices there."""
    context = need_ray().get_runtime_context()
    return context.get_node_id(), [str(one) for one in context.get_accelerator_ids().get("GPU", [])]


def _visible(others: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
    """Variables by which a server sees its own device and the others."""
    mine, devices = _device()
    if any(node != mine for node, _ in others):
        raise UsageError(
            "One SGLang server cannot be spread over several nodes: lower its tensor parallelism."
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join([*devices, *(one for _, found in others for one in found)])}


async def _awaited(reference: Any) -> Any:
    return await reference
