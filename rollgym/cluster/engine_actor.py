"""`EngineActor`: hosts an engine in a Ray actor; a `RemoteEngine` in the driver talks to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rollgym.cluster.errors import ActorLost, need_ray, why_lost
from rollgym.cluster.prompts import PromptDelta, PromptReceiver
from rollgym.cluster.rpc import ActorServer
from rollgym.core.errors import EngineLost
from rollgym.engines.base import Generation, WeightSource
from rollgym.engines.weight_sync.chain import Handle, WeightChain
from rollgym.engines.weight_sync.receiver import WeightReceiver


class EngineCall(NamedTuple):
    """A request to an `EngineActor`: a method of its engine and the arguments."""

    method: str
    args: tuple[Any, ...]


class EngineFacts(NamedTuple):
    """What an `EngineActor` reports of its engine."""

    context_length: int
    vocabulary: int
    weight_dtype: str
    weight_route: str


class TakenOver(NamedTuple):
    """What an `EngineActor` reports when another driver takes it over."""

    facts: EngineFacts
    updated: bool
    """Whether it may have other weights than those of the model folder."""


class EngineActor(ActorServer):
    """The actor of a `RemoteEngine`: hosts an `EmbeddedEngine`."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._model, self._options = model, dict(options)
        self._engine: Any = None
        self._receiver = WeightReceiver()
        self._receiving = asyncio.Lock()
        self._prompts = PromptReceiver()
        self._updated = False
        """Whether a weight update has begun."""

    async def start(self) -> EngineFacts:
        """Load the model."""
        from rollgym.engines.embedded.engine import EmbeddedEngine

        self._engine = EmbeddedEngine(self._model, **self._options)
        return self.describe()

    def describe(self) -> EngineFacts:
        """Return facts about the engine."""
        engine = self._engine
        return EngineFacts(engine.context_length, engine.vocabulary, engine.weight_dtype, engine.weight_route)

    async def take_over(self) -> TakenOver:
        """Get ready for the next driver: forget what the former one has sent, and continue if paused.

        The weights stay until the next update, of whatever version.
        """
        if self._engine is None:
            raise EngineLost("It has not loaded its model.")
        await self.replace_client()
        # Not reset: a thread may still be fetching a bucket of the former driver into the old one.
        self._receiver, self._receiving = WeightReceiver(), asyncio.Lock()
        self._prompts = PromptReceiver()
        await self._engine.resume()
        return TakenOver(self.describe(), self._updated)

    async def serve(self, body: EngineCall) -> Any:
        """Call the engine."""
        engine = self if body.method in _OF_ACTOR else self._engine
        return await getattr(engine, body.method)(*body.args)

    async def receive_weights(
        self, stamp: str, base: str | None, number: int, handles: Sequence[Handle]
    ) -> None:
        """Fetch a bucket of an update that is still being sent; the engine keeps generating."""
        async with self._receiving:
            with _named_loss():
                await asyncio.to_thread(self._receiver.take, stamp, base, number, handles)

    async def generate_delta(self, delta: PromptDelta) -> Generation | None:
        """Sample one reply; ``None`` if the conversation that the prompt continues is not here."""
        request = self._prompts.request(delta)
        if request is None:
            return None
        reply: Generation = await self._engine.generate(request)
        self._prompts.replied(delta, request, reply)
        return reply

    async def forget(self, session: str) -> None:
        """Drop the prompt and the KV cache of a session that has ended."""
        self._prompts.forget(session)
        await self._engine.forget(session)

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Fetch what is missing of the weights, then pass them to the engine."""
        self._updated = True
        if not isinstance(weights.tensors, WeightChain):
            await self._engine.update_weights(version, weights)
            return
        chain = weights.tensors
        async with self._receiving:
            with _named_loss():
                tensors = await asyncio.to_thread(self._receiver.complete, chain)
            try:
                await self._engine.update_weights(version, WeightSource(tensors=tensors))
            finally:
                if not chain.delta:
                    self._receiver.reset()  # frees the memory


_OF_ACTOR = ("update_weights", "receive_weights", "generate_delta", "forget")
"""Methods that the actor adds something to; all others are those of its engine."""


@contextmanager
def _named_loss() -> Iterator[None]:
    """Raise `ActorLost` where stored weights are gone."""
    try:
        yield
    except need_ray().exceptions.RayError as error:
        raise ActorLost(
            f"The new weights were lost with the node that stored them: {why_lost(error)}"
        ) from error
