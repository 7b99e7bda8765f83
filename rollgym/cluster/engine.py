"""An engine in an actor: the embedded engine on another device or machine, behind the same protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rollgym.cluster.errors import ActorLost, need_ray, why_lost
from rollgym.cluster.heartbeat import OPTIONS, TIMEOUT
from rollgym.cluster.mail import Line, Mailbox
from rollgym.cluster.tensors import SharedTensors, share_weights
from rollgym.cluster.waiting import INTERVAL, Say, tell, waiting
from rollgym.engines import GenerateRequest, Generation, WeightSource
from rollgym.errors import EngineLost, one_line


class EngineHost(Mailbox):
    """What runs in an engine actor."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._made = (model, dict(options))
        self._engine: Any = None

    async def start(self) -> tuple[int, int]:
        """Load the model; returns its context length and vocabulary."""
        from rollgym.engines.torch import TorchEngine

        model, options = self._made
        self._engine = TorchEngine(model, **options)
        return self._engine.context_length, self._engine.vocabulary

    async def serve(self, body: tuple[Any, ...]) -> Any:
        """Call a method of the engine: its name, its arguments and, where there are any, those by name."""
        name, args, *more = body
        try:
            for one in args:
                if isinstance(one, WeightSource) and isinstance(one.tensors, SharedTensors):
                    await asyncio.to_thread(one.tensors.fetch)  # replies go on meanwhile
            return await getattr(self._engine, name)(*args, **(more[0] if more else {}))
        except need_ray().exceptions.RayError as error:
            raise ActorLost(
                f"The new weights are gone, with the rank that stored them: {why_lost(error)}"
            ) from error


class RemoteEngine:
    """An `Engine` in an actor of its own; `start` makes one.

    Where the actor dies, its replies under way fail with `EngineLost`, and a new actor with the last weights
    takes its place; what is asked meanwhile waits for it.
    """

    host: ClassVar[type[EngineHost]] = EngineHost
    """What runs in the actor."""
    called: ClassVar[str] = "The engine"
    """In sentences about it."""

    def __init__(
        self,
        model: str | Path,
        *,
        place: Mapping[str, Any] | None = None,
        interval: float = INTERVAL,
        patience: float = 300.0,
        say: Say = tell,
        heartbeat_timeout: float = TIMEOUT,
        **options: Any,
    ) -> None:
        self._model = str(model)
        self._options = options
        self._place = dict(place or {"num_cpus": 1})
        self._interval, self._patience, self._say = interval, patience, say
        self._timeout = heartbeat_timeout
        self._version: int = options.get("version", 0)
        self._weights: WeightSource | None = None
        self._paused = False
        self._released = False
        """Whether its actor has given up its weights."""
        self._context, self.vocabulary = 0, 0
        self._line: Line | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False
        self.deaths = 0
        """How often its actor was lost."""

    @classmethod
    async def start(
        cls, model: str | Path, *, place: Mapping[str, Any] | None = None, **options: Any
    ) -> RemoteEngine:
        """An engine for a model folder that the node can read.

        Args:
            model: The folder.
            place: Options of the actor, such as `Seat.options`.
            options: Of `TorchEngine`; also ``patience``, the seconds in which a lost actor must be replaced,
                ``interval`` and ``say``, for what it waits for, and ``heartbeat_timeout``, the seconds
                without a sign of life after which an actor is replaced.
        """
        engine = cls(model, place=place, **options)
        await engine.restart()
        return engine

    @property
    def version(self) -> int:
        """Of the weights in use."""
        return self._version

    @property
    def context_length(self) -> int:
        """The longest prompt and reply together."""
        return self._context

    async def generate(self, request: GenerateRequest) -> Generation:
        """Draw one reply. A cancelled call stops generating at once. `EngineLost` where the actor died."""
        reply: Generation = await (await self._ready()).ask(("generate", (request,)))
        return reply

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these replies now. A lost actor has ended them all."""
        if self._line is not None and self._line.gone is None:
            await self._line.ask(("abort", (tuple(request_ids),)))

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Use new weights from the next token on. They go by reference: `share_weights` stores them once."""
        shared = share_weights(weights)
        if self._failed():  # what it had may be gone with whoever stored it
            self._weights, self._version = shared, version
            await self.restart()
            return
        await (await self._ready()).ask(("update_weights", (version, shared)))
        self._weights, self._version, self._released = shared, version, False

    async def pause(self) -> None:
        """Generate nothing until `resume`; requests wait."""
        self._paused = True
        await (await self._ready()).ask(("pause", ()))

    async def resume(self) -> None:
        """Go on; where the weights' memory was given up and no new ones came, with the last."""
        self._paused = False
        line = await self._ready()
        if self._released:
            await self._renew(line)
        await line.ask(("resume", ()))

    async def release(self, *, weights: bool = True) -> int:
        """Pause, and give up the memory of keys and values and, unless told otherwise, of the weights.

        Returns how many bytes that were. New weights take their memory back as they come.
        """
        self._paused = True
        given: int = await (await self._ready()).ask(("release", (), {"weights": weights}))
        self._released = weights
        return given

    async def forget(self, session: str) -> None:
        """Drop what is kept for a session that has ended."""
        if self._line is not None:
            self._line.tell(("forget", (session,)))

    async def stats(self) -> Any:
        """What the engine has done and holds."""
        return await (await self._ready()).ask(("stats", ()))

    async def close(self) -> None:
        """Stop, and fail what still waits."""
        self._closed = True
        self.stop("the engine was closed")
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)

    @property
    def homeless(self) -> bool:
        """Whether it has no actor now: one may be on its way, or wait for a node that is gone."""
        return not self._closed and self._line is None

    def stop(self, why: str = "the engine was stopped") -> None:
        """End its actor; `restart` starts another."""
        if self._starting is not None:
            self._starting.cancel()
        line, self._line = self._line, None
        if line is not None:
            line.hang_up(why)
            need_ray().kill(line.actor)

    async def ready(self) -> None:
        """Return when it can generate, with the weights it had."""
        if self._failed():
            await self.restart()
        await self._ready()

    async def restart(self, place: Mapping[str, Any] | None = None, *, fresh: bool = False) -> None:
        """A new actor with the last weights.

        Args:
            place: Elsewhere.
            fresh: With the weights of the model folder instead; new ones are to follow.
        """
        if place is not None:
            self._place = dict(place)
        if fresh:
            self._weights, self._version = None, self._options.get("version", 0)
            self._paused = False
        self.stop("the engine is started anew")
        self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    def _failed(self) -> bool:
        return not self._closed and self._line is None and (self._starting is None or self._starting.done())

    async def _ready(self) -> Line:
        """The line to an actor that works, once there is one."""
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
                    raise EngineLost("The engine's start was called off.") from None
                # It starts elsewhere now.
        if self._line is None:
            raise EngineLost("The engine's actor is gone, and no other was started.")
        return self._line

    async def _start(self) -> None:
        ray = need_ray()
        actor = ray.remote(max_restarts=0, **OPTIONS)(self.host).options(**self._seat())
        actor = actor.remote(self._model, self._options)
        try:
            self._context, self.vocabulary = await self._begin(actor)
        except ray.exceptions.RayTaskError as error:
            ray.kill(actor)
            why = one_line(error.cause or error)
            raise EngineLost(f"{self.called} could not be started: {why}") from error
        except ray.exceptions.RayError as error:
            raise EngineLost(f"{self.called} could not be started: {why_lost(error)}") from error
        except BaseException:
            ray.kill(actor)
            raise
        line = Line(actor, self._lost, self._on_loss, self._timeout)
        try:
            self._released = False
            if self._weights is not None:
                await self._renew(line)
            if self._paused:
                await line.ask(("pause", ()))
        except ActorLost as error:
            line.hang_up()
            ray.kill(actor)
            raise EngineLost(f"{self.called} could not be started with its last weights: {error}") from error
        self._line = line

    def _seat(self) -> dict[str, Any]:
        """Options of the actor."""
        return self._place

    async def _begin(self, actor: Any) -> tuple[int, int]:
        """Have a new actor start its engine; context length and vocabulary."""
        facts: tuple[int, int] = await self._awaited(actor.start.remote())
        return facts

    async def _awaited(self, what: Awaitable[Any]) -> Any:
        """What an actor answers that may have to wait for its devices first."""
        needs = {"GPU": self._place.get("num_gpus", 0.0), "CPU": self._place.get("num_cpus", 0.0)}
        return await waiting(what, needs, self.called, self._interval, self._say, self._patience)

    def _lost(self, why: str) -> EngineLost:
        return EngineLost(f"{self.called}'s actor is gone: {why}")

    async def _renew(self, line: Line) -> None:
        """Have an actor use the last weights again."""
        last = self._weights or WeightSource(path=Path(self._model))
        await line.ask(("update_weights", (self._version, last)))
        self._released = False

    def _on_loss(self, why: str) -> None:
        self.deaths += 1
        working, self._line = self._line is not None, None
        if working and not self._closed:  # one that dies while it starts would do so again
            self._say(f"An engine actor is gone ({why}); another one starts.")
            self._starting = asyncio.get_running_loop().create_task(self._start())
            self._starting.add_done_callback(_seen)


def _seen(task: asyncio.Task[None]) -> None:
    """Whoever waits for the engine is told; where nobody does, nothing is to be logged."""
    if not task.cancelled():
        task.exception()
