"""RPC to an actor: batching, cancellation and loss, without Ray."""

import asyncio
from typing import Any

import pytest

from rollgym.cluster.rpc import ActorClient, ActorServer, Request, Response, error_from_dict, error_to_dict
from rollgym.core.errors import (
    EngineLost,
    EnvError,
    RollgymError,
    RunError,
    UnknownName,
    UsageError,
    WorkerLost,
)
from rollgym.engines.base import BadRequest
from rollgym.pool.base import LeaseLost


class EchoServer(ActorServer):
    """Responds with the request in upper case, once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.cancelled: list[str] = []

    async def serve(self, body: str) -> str:
        try:
            if body == "wait":
                await self.may.wait()
        except asyncio.CancelledError:
            self.cancelled.append(body)
            raise
        if body == "fail":
            raise EnvError("it failed")
        return body.upper()


class Handle:
    """Imitates a Ray handle: calls run in tasks, and all of them raise once the actor is dead."""

    def __init__(self, server: EchoServer) -> None:
        self.server = server
        self.batch_sizes: list[int] = []
        self.death: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.receive, self.poll = self, self.Poll(self)

    def remote(self, requests: list[Any]) -> None:
        self.batch_sizes.append(len(requests))
        asyncio.get_running_loop().create_task(self.server.receive(requests))

    class Poll:
        def __init__(self, handle: "Handle") -> None:
            self.handle = handle

        async def remote(self) -> Any:
            responses = asyncio.ensure_future(self.handle.server.poll())
            done, _ = await asyncio.wait([responses, self.handle.death], return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()


def make() -> tuple[EchoServer, Handle, ActorClient, list[str]]:
    server = EchoServer()
    handle = Handle(server)
    losses: list[str] = []
    return (
        server,
        handle,
        ActorClient(handle, lambda reason: EngineLost(f"lost: {reason}"), losses.append),
        losses,
    )


def test_concurrent_requests_share_a_message_and_responses_arrive_when_ready() -> None:
    async def main() -> None:
        server, handle, client, _ = make()
        slow = asyncio.create_task(client.call("wait"))
        quick = [asyncio.create_task(client.call(f"a{number}")) for number in range(50)]
        assert await asyncio.gather(*quick) == [f"A{number}" for number in range(50)]
        assert handle.batch_sizes == [51]
        assert not slow.done(), "the slow one does not delay the others"
        server.may.set()
        assert await slow == "WAIT"
        with pytest.raises(EnvError, match="it failed"):
            await client.call("fail")
        client.close()

    asyncio.run(main())


def test_a_cancelled_call_is_cancelled_in_the_actor() -> None:
    async def main() -> None:
        server, _, client, _ = make()
        task = asyncio.create_task(client.call("wait"))
        await client.call("a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.call("b")
        assert server.cancelled == ["wait"]
        client.close()

    asyncio.run(main())


def test_pending_and_later_calls_fail_when_the_actor_dies() -> None:
    async def main() -> None:
        _, handle, client, losses = make()
        tasks = [asyncio.create_task(client.call("wait")) for _ in range(3)]
        await client.call("a")
        handle.death.set_exception(RuntimeError("The actor died because its node did."))
        for task in tasks:
            with pytest.raises(EngineLost, match="lost: its node did"):
                await task
        with pytest.raises(EngineLost):
            await client.call("a")
        client.send("a")
        assert losses == ["its node did"], "once"

    asyncio.run(main())


def test_closing_the_client_is_not_a_loss() -> None:
    async def main() -> None:
        _, _, client, losses = make()
        task = asyncio.create_task(client.call("wait"))
        await client.call("a")
        client.close("closed")
        with pytest.raises(EngineLost, match="lost: closed"):
            await task
        assert losses == []

    asyncio.run(main())


def test_another_client_gets_only_its_own_responses() -> None:
    """One driver died with a request in the actor and an open poll, the next with an unread response."""

    async def main() -> None:
        server = EchoServer()
        await server.receive([Request(1, "wait")])
        former = asyncio.create_task(server.poll())
        await asyncio.sleep(0.01)
        await server.replace_client()
        assert server.cancelled == ["wait"]
        assert await former == []
        await server.receive([Request(1, "unread")])
        await asyncio.sleep(0.01)
        assert server._responses == [Response(1, True, "UNREAD")]
        await server.replace_client()
        client = ActorClient(Handle(server), EngineLost)
        assert await asyncio.gather(client.call("a"), client.call("b")) == ["A", "B"]
        task = asyncio.create_task(client.call("wait"))  # with an id that the former client used too
        await asyncio.sleep(0.01)
        server.may.set()
        assert await task == "WAIT"
        assert not server._tasks
        client.close()

    asyncio.run(main())


def test_a_request_that_resists_its_cancellation_does_not_answer_another_client() -> None:
    class Stubborn(EchoServer):
        async def serve(self, body: str) -> str:
            try:
                return await super().serve(body)
            except asyncio.CancelledError:
                return "late"

    async def main() -> None:
        server = Stubborn()
        await server.receive([Request(1, "wait")])
        await asyncio.sleep(0)
        await server.replace_client()
        client = ActorClient(Handle(server), EngineLost)
        assert await client.call("a") == "A"
        client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EnvError("a"), EnvError),
        (BadRequest("b"), BadRequest),
        (EngineLost("c"), EngineLost),
        (UnknownName("agent", "x", ["y"]), UsageError),
        (WorkerLost("d"), WorkerLost),
        (ValueError("e"), RunError),
    ],
)
def test_errors_keep_their_type_and_message(error: Exception, kind: type[RollgymError]) -> None:
    again = error_from_dict(error_to_dict(error))
    assert type(again) is kind
    assert str(error) in str(again)
    assert again.failure is not None
    assert again.failure.type == type(error).__name__


def test_a_lost_lease_keeps_its_culprits() -> None:
    lost = LeaseLost("too long", reason="deadline", guilty=True, culprits=("a", "b"), output="last words")
    again = error_from_dict(error_to_dict(lost))
    assert isinstance(again, LeaseLost)
    assert (again.reason, again.guilty, again.culprits) == ("deadline", True, ("a", "b"))
    assert again.failure is not None
    assert again.failure.traceback == "last words"
