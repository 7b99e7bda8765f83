"""SGLang and vLLM servers on a cluster: an actor in a planned slot starts a server and monitors it.

Requests and weights go to the actor, weights by reference, and from there to the server, which listens on its
own machine only. If the server dies, the actor restarts it; if the actor or its node dies, a new actor
replaces it. Both restart with the last weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from rollgym.cluster.engine import RemoteEngine
from rollgym.cluster.engine_actor import EngineActor, EngineCall, EngineFacts, TakenOver
from rollgym.cluster.errors import need_ray
from rollgym.core.errors import EngineLost, RollgymError, UsageError
from rollgym.engines.base import Engine, WeightSource
from rollgym.engines.servers.server_process import BaseServerOptions

OTHER_SLOTS = "others"
"""Key in `ActorOptions`: options of the further devices of a server with tensor parallelism."""
ActorOptions = Mapping[str, Any]
"""Ray options of an actor."""


class InferenceServerActor(EngineActor):
    """The actor of a `ServerActor`: hosts a server and its engine."""

    package: ClassVar[str]
    """Module with the software's ``ServerOptions`` and ``launch``, imported by the actor."""
    _halfway = False
    """Whether the last weight update has not succeeded."""

    async def start(self, others: Sequence[tuple[str, list[str]]] = ()) -> EngineFacts:
        """Start the server on this actor's device and ``others``."""
        software = import_module(self.package)
        options = self._options
        server: BaseServerOptions = options.pop("server", None) or software.ServerOptions()
        if others:
            server = replace(server, tp=len(others) + 1, env={**server.env, **_visible(others)})
        self._engine = await asyncio.to_thread(partial(software.launch, self._model, server, **options))
        return self.describe()

    async def take_over(self) -> TakenOver:
        """Get ready for the next driver; fails if an update ended halfway, of which the server has a part."""
        if self._halfway:
            raise EngineLost("A weight update was interrupted.")
        return await super().take_over()

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Fetch what is missing of the weights, then send them to the server."""
        self._halfway = True
        await super().update_weights(version, weights)
        self._halfway = False

    async def server_pid(self) -> int | None:
        """Return the process id of the server."""
        pid: int | None = self._engine.server.pid
        return pid


class SglangServerActor(InferenceServerActor):
    """Hosts an SGLang server and an `SglangEngine`."""

    package = "rollgym.engines.sglang"


class VllmServerActor(InferenceServerActor):
    """Hosts a vLLM server and a `VllmEngine`."""

    package = "rollgym.engines.vllm"


class ServerActor(RemoteEngine):
    """An `Engine` for a server in an actor; create one with `start`."""

    async def reconnect(self) -> bool:
        """Wait until it can generate with its last weights; restarts a dead server."""
        await super().reconnect()
        return await self._call(Engine.reconnect)

    async def close(self) -> None:
        """Stop the server, and fail all pending requests."""
        client = self._client
        if client is not None and client.closed_reason is None:
            with suppress(RollgymError):
                await client.call(EngineCall("close", ()))
        await super().close()

    def _ray_options(self) -> dict[str, Any]:
        return {name: value for name, value in self._actor_options.items() if name != OTHER_SLOTS}

    async def _start_engine(self, actor: Any) -> EngineFacts:
        ray = need_ray()
        others = [
            ray.remote(_device).options(**slot).remote() for slot in self._actor_options.get(OTHER_SLOTS, ())
        ]
        # The timeout applies to getting the devices, not to starting the server.
        _, *devices = await self._wait_for(asyncio.gather(actor.__ray_ready__.remote(), *others))
        try:
            facts: EngineFacts = await actor.start.remote(devices)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UsageError):
                raise error.cause from error
            raise
        return facts


class SglangActor(ServerActor):
    """An `Engine` for an SGLang server in an actor."""

    actor_class = SglangServerActor
    label = "The SGLang server"


class VllmActor(ServerActor):
    """An `Engine` for a vLLM server in an actor."""

    actor_class = VllmServerActor
    label = "The vLLM server"


SERVER_ACTORS: Mapping[str, type[ServerActor]] = {"sglang": SglangActor, "vllm": VllmActor}
"""The actors by ``engine.kind``."""


def server_slots(
    slots: Sequence[ActorOptions], tensor_parallel: int = 1, replicas: int | None = None
) -> list[dict[str, Any]]:
    """Group the options of device slots into those of servers: all that fit, or ``replicas`` of them."""
    size = tensor_parallel
    if size < 1 or len(slots) % size:
        raise UsageError(f"{len(slots)} devices cannot be divided into servers of {size} devices each.")
    servers = [
        {**slots[at], **({OTHER_SLOTS: list(slots[at + 1 : at + size])} if size > 1 else {})}
        for at in range(0, len(slots), size)
    ]
    if replicas is not None and replicas > len(servers):
        raise UsageError(
            f"engine.replicas is {replicas}, but the plan has devices for {len(servers)} servers: lower "
            "it, or give actor_infer more devices."
        )
    return servers[:replicas]


async def start_servers(
    model: str | Path,
    slots: Sequence[ActorOptions],
    *,
    kind: str = "sglang",
    options: BaseServerOptions | None = None,
    **engine: Any,
) -> list[ServerActor]:
    """Start servers of one kind in parallel, an actor in each slot; if one fails, all are closed."""
    if not slots:
        raise UsageError("Servers on a cluster need at least one actor slot.")
    if options is not None and options.port is not None and len(slots) > 1:
        raise UsageError("Several replicas cannot share a port: leave port out to use free ones.")
    folder = Path(model).absolute()
    actor_class = SERVER_ACTORS[kind]
    actors = [actor_class(folder, actor_options=slot, server=options, **engine) for slot in slots]
    results = await asyncio.gather(*(actor.restart() for actor in actors), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            await asyncio.gather(*(actor.close() for actor in actors), return_exceptions=True)
            raise result
    return actors


def _device() -> tuple[str, list[str]]:
    """Return the node id and GPU ids of this process."""
    context = need_ray().get_runtime_context()
    return context.get_node_id(), [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]


def _visible(others: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
    """Return the environment variables with which a server sees its device and the others."""
    own_node, devices = _device()
    if any(node != own_node for node, _ in others):
        raise UsageError("A server cannot span several nodes: lower its tensor parallelism.")
    return {"CUDA_VISIBLE_DEVICES": ",".join([*devices, *(gpu for _, gpus in others for gpu in gpus)])}
