"""`RemoteEngine`: an engine in a Ray actor on another device or machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

from rollgym.cluster.engine_actor import EngineActor, EngineCall, EngineFacts, TakenOver
from rollgym.cluster.errors import ActorLost, need_ray, why_lost
from rollgym.cluster.heartbeat import OPTIONS, TIMEOUT
from rollgym.cluster.kept_engines import ANSWER_SECONDS, NAMESPACE, EngineLease, detached, result_of
from rollgym.cluster.object_store import share_weights
from rollgym.cluster.prompts import PromptSender
from rollgym.cluster.rpc import ActorClient
from rollgym.cluster.wait import INTERVAL, Report, print_status, wait_for_resources
from rollgym.core.errors import EngineLost, one_line
from rollgym.engines.base import (
    MEMORY_TAGS,
    Engine,
    EngineStats,
    GenerateRequest,
    Generation,
    WeightSource,
)
from rollgym.engines.weight_sync.chain import WeightChain

P = ParamSpec("P")
R = TypeVar("R")


class RemoteEngine(Engine):
    """An `Engine` in a Ray actor; create one with `start`.

    If the actor dies, its in-flight requests fail with `EngineLost`, and a new actor starts with the last
    weights; new requests wait for it.

    Args:
        model: Model folder that the node can read.
        actor_options: Ray options of the actor, such as `ActorSlot.options`.
        interval: Seconds between two status messages while waiting for resources.
        patience: Seconds within which an actor must get its resources.
        report: Receives status messages.
        heartbeat_timeout: Seconds without a heartbeat after which the actor is replaced.
        lease: Lets its actors outlive this process.
        options: Options of `EmbeddedEngine`.
    """

    actor_class: ClassVar[type[EngineActor]] = EngineActor
    label: ClassVar[str] = "The engine"
    """Subject of messages about it."""

    def __init__(
        self,
        model: str | Path,
        *,
        actor_options: Mapping[str, Any] | None = None,
        interval: float = INTERVAL,
        patience: float = 300.0,
        report: Report = print_status,
        heartbeat_timeout: float = TIMEOUT,
        lease: EngineLease | None = None,
        **options: Any,
    ) -> None:
        self._model = str(model)
        self._options = options
        self._actor_options = dict(actor_options or {"num_cpus": 1})
        self._interval, self._patience, self._report = interval, patience, report
        self._timeout = heartbeat_timeout
        self._version: int = options.get("version", 0)
        self._weights: WeightSource | None = None
        self._paused = False
        self._released = False
        """Whether its actor has released its weights."""
        self._facts = EngineFacts(0, 0, "float32", "object_store")
        self._client: ActorClient | None = None
        self._prompts = PromptSender()
        self._known_by: ActorClient | None = None
        """The client of the actor that ``_prompts`` is about."""
        self._starting: asyncio.Task[None] | None = None
        self._closed = False
        self._former_weights = False
        """Whether its actor has weights that another driver has sent."""
        self._replacing = asyncio.Lock()
        self.lease = lease
        """Of the actors that it starts from now on."""
        self.actor_name: str | None = None
        """Name of its actor if that outlives this process."""
        self.deaths = 0
        """Number of times its actor was lost."""

    @classmethod
    async def start(
        cls, model: str | Path, *, actor_options: Mapping[str, Any] | None = None, **options: Any
    ) -> RemoteEngine:
        """Create an engine and wait until it can generate; the arguments are those of the class."""
        engine = cls(model, actor_options=actor_options, **options)
        await engine.restart()
        return engine

    async def rejoin(self, name: str) -> bool:
        """Use the running actor of a former driver; returns whether that was possible. Else it is killed.

        Until the next weight update it generates with the weights of the model folder, as a new actor does.
        """
        ray = need_ray()
        try:
            actor = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        except ValueError:
            return False
        try:
            taken: TakenOver = await asyncio.wait_for(result_of(actor.take_over.remote()), ANSWER_SECONDS)
        except (TimeoutError, ray.exceptions.RayError):
            ray.kill(actor)
            return False
        except BaseException:
            ray.kill(actor)
            raise
        self._facts, self._former_weights = taken
        self._client = ActorClient(actor, self._lost_error, self._on_loss, self._timeout)
        self.actor_name = name
        return True

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._version

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and reply together."""
        return self._facts.context_length

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary: valid ids are 0 to ``vocabulary - 1``."""
        return self._facts.vocabulary

    @property
    def weight_dtype(self) -> str:
        """The dtype of the actor's engine."""
        return self._facts.weight_dtype

    @property
    def weight_route(self) -> str:
        """Route of weights from the actor to a server; of the embedded engine, that to the actor."""
        return self._facts.weight_route

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply. A cancelled call stops generating at once."""
        client = await self._ready_client()
        if self._former_weights:
            await self._replace_former_weights(client)
        if client is not self._known_by:
            self._prompts.clear()
            self._known_by = client
        for whole in (False, True):
            delta = self._prompts.delta(request, whole=whole)
            if delta is None:
                return await self._call(Engine.generate, request)
            reply: Generation | None = await client.call(EngineCall("generate_delta", (delta,)))
            if reply is not None:
                if client is self._known_by:
                    self._prompts.replied(request, delta.serial, reply)
                return reply
        raise EngineLost(f"{self.label}'s actor did not take a whole prompt.")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these replies now. A lost actor has stopped all."""
        if self._client is not None and self._client.closed_reason is None:
            await self._client.call(EngineCall("abort", (tuple(request_ids),)))

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Use new weights from the next token on. They are sent by reference, see `share_weights`."""
        shared = share_weights(weights)
        if isinstance(shared.tensors, WeightChain):
            await self._receive(shared.tensors)
        if self._failed():  # the previous weights may be lost with the process that stored them
            self._weights, self._version = shared, version
            await self.restart()
            return
        await self._call(Engine.update_weights, version, shared)
        self._weights, self._version = shared, version
        self._released = self._former_weights = False

    async def pause(self) -> None:
        """Stop generating until `resume`; requests wait."""
        self._paused = True
        await self._call(Engine.pause)

    async def resume(self) -> None:
        """Continue after `pause` or `sleep`, with the last weights if they were released."""
        self._paused = False
        client = await self._ready_client()
        if self._released:
            await self._restore_weights(client)
        await client.call(EngineCall("resume", ()))

    async def sleep(self, tags: Sequence[str] = MEMORY_TAGS, *, replicas: Sequence[int] | None = None) -> int:
        """Pause and free memory; the next weights reallocate theirs. Returns bytes freed."""
        self._paused = True
        freed = await self._call(Engine.sleep, tuple(tags))
        self._released = self._released or "weights" in tags
        return freed

    async def forget(self, session: str) -> None:
        """Drop the KV cache of a session that has ended."""
        self._prompts.forget(session)
        if self._client is not None:
            self._client.send(EngineCall("forget", (session,)))

    async def stats(self) -> EngineStats:
        """Counters and memory of the engine."""
        return await self._call(Engine.stats)

    async def close(self) -> None:
        """Stop, and fail all pending requests."""
        self._closed = True
        self.stop("the engine was closed")
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)

    @property
    def actor_options(self) -> Mapping[str, Any]:
        """Ray options of its actor."""
        return self._actor_options

    @property
    def needs_placement(self) -> bool:
        """Whether it has no actor: one may be starting, or waiting for a node that is lost."""
        return not self._closed and self._client is None

    def stop(self, reason: str = "the engine was stopped") -> None:
        """Kill its actor; `restart` starts another."""
        if self._starting is not None:
            self._starting.cancel()
        client, self._client = self._client, None
        if client is not None:
            client.close(reason)
            need_ray().kill(client.actor)

    async def reconnect(self) -> bool:
        """Wait until it can generate with its last weights; starts a new actor if necessary."""
        if self._failed():
            await self.restart()
        await self._ready_client()
        return True

    async def restart(self, actor_options: Mapping[str, Any] | None = None, *, fresh: bool = False) -> None:
        """Start a new actor with the last weights.

        Args:
            actor_options: New Ray options of the actor; default: the previous ones.
            fresh: Use the weights of the model folder instead, because new ones will follow.
        """
        if actor_options is not None:
            self._actor_options = dict(actor_options)
        if fresh:
            self._weights, self._version = None, self._options.get("version", 0)
            self._paused = False
        self.stop("the engine is restarted")
        self._starting = asyncio.create_task(self._start())
        await self._ready_client()  # of this start, or of one that has replaced it

    async def _receive(self, chain: WeightChain) -> None:
        """Let the actor fetch the buckets of an update as they are stored; returns when all are stored.

        An actor that cannot take part now gets the weights with `update_weights`.
        """
        link, number = chain.last, 0
        async for handles in link.follow():
            if (client := self._client) is not None:
                client.send(EngineCall("receive_weights", (link.stamp, link.base, number, handles)))
            number += 1

    def _failed(self) -> bool:
        return not self._closed and self._client is None and (self._starting is None or self._starting.done())

    async def _call(
        self, method: Callable[Concatenate[Engine, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a method of the actor's engine, once there is a working actor."""
        client = await self._ready_client()
        return cast(R, await client.call(EngineCall(method.__name__, args)))

    async def _ready_client(self) -> ActorClient:
        """Wait for a working actor and return its client."""
        if self._closed:
            raise EngineLost("The engine is closed.")
        while self._starting is not None:
            starting = self._starting
            try:
                await asyncio.shield(starting)
                break
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not starting.cancelled() or (task is not None and task.cancelling()):
                    raise
                if starting is self._starting:
                    raise EngineLost("The start of the engine was cancelled.") from None
                # Another start has replaced it.
        if self._client is None:
            raise EngineLost("The engine's actor is lost and was not restarted.")
        return self._client

    async def _start(self) -> None:
        ray = need_ray()
        name = None if self.lease is None else self.lease.new_name("engine")
        options = self._ray_options() | ({} if name is None else detached(name))
        actor = ray.remote(max_restarts=0, **OPTIONS)(self.actor_class).options(**options)
        actor = actor.remote(self._model, self._options)
        # Every failure kills the actor: one that outlives its driver does not end with its last handle.
        try:
            self._facts = await self._start_engine(actor)
        except ray.exceptions.RayError as error:
            ray.kill(actor)
            task = isinstance(error, ray.exceptions.RayTaskError)
            reason = one_line(error.cause or error) if task else why_lost(error)
            raise EngineLost(f"{self.label} could not be started: {reason}") from error
        except BaseException:
            ray.kill(actor)
            raise
        client = ActorClient(actor, self._lost_error, self._on_loss, self._timeout)
        try:
            self._released = self._former_weights = False
            if self._weights is not None:
                await self._restore_weights(client)
            if self._paused:
                await client.call(EngineCall("pause", ()))
        except ActorLost as error:
            client.close()
            ray.kill(actor)
            raise EngineLost(f"{self.label} could not be started with its last weights: {error}") from error
        except BaseException:
            client.close()
            ray.kill(actor)
            raise
        self._client, self.actor_name = client, name
        if self.lease is not None:
            self.lease.on_start()

    def _ray_options(self) -> dict[str, Any]:
        """Ray options of the actor."""
        return self._actor_options

    async def _start_engine(self, actor: Any) -> EngineFacts:
        """Start the engine of a new actor."""
        facts: EngineFacts = await self._wait_for(actor.start.remote())
        return facts

    async def _wait_for(self, result: Awaitable[Any]) -> Any:
        """Await a result of an actor that may have to wait for its resources first."""
        options = self._actor_options
        needs = {"GPU": options.get("num_gpus", 0.0), "CPU": options.get("num_cpus", 0.0)}
        return await wait_for_resources(
            result, needs, self.label, self._interval, self._report, self._patience
        )

    def _lost_error(self, reason: str) -> EngineLost:
        return EngineLost(f"{self.label}'s actor is lost: {reason}")

    async def _restore_weights(self, client: ActorClient) -> None:
        """Send the last weights to an actor again."""
        last = self._weights or WeightSource(path=Path(self._model))
        await client.call(EngineCall("update_weights", (self._version, last)))
        self._released = False

    async def _replace_former_weights(self, client: ActorClient) -> None:
        """Before the first weights of this driver: give an actor of a former one those of the model."""
        async with self._replacing:
            if self._former_weights and client is self._client:
                await self._restore_weights(client)
                self._former_weights = False

    def _on_loss(self, reason: str) -> None:
        self.deaths += 1
        lost, self._client = self._client, None
        if lost is not None and self.actor_name is not None:
            need_ray().kill(lost.actor)  # it may only be out of reach, and does not end with its last handle
        if lost is not None and not self._closed:  # an actor that dies while starting would do so again
            self._report(f"An engine actor is lost ({reason}); starting another.")
            self._starting = asyncio.get_running_loop().create_task(self._start())
            self._starting.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Mark the error as retrieved: waiting callers get it, and it is not logged otherwise."""
    if not task.cancelled():
        task.exception()
