"""Letters to an actor: what goes together, what is cancelled, who is told when it dies. Without Ray."""

import asyncio
from typing import Any

import pytest

from rollgym.cluster.mail import Line, Mailbox, remade, trouble
from rollgym.engines import BadRequest
from rollgym.errors import EngineLost, EnvError, RollgymError, RunError, UnknownName, UsageError, WorkerLost
from rollgym.pool import LeaseLost


class Clerk(Mailbox):
    """Answers with what it was asked, once it may."""

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
    """As Ray's handles: calls run elsewhere, and a dead actor raises in all of them."""

    def __init__(self, clerk: Clerk) -> None:
        self.clerk = clerk
        self.heard: list[int] = []
        self.death: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.hear, self.answers = self, self.Answers(self)

    def remote(self, letters: list[Any]) -> None:
        self.heard.append(len(letters))
        asyncio.get_running_loop().create_task(self.clerk.hear(letters))

    class Answers:
        def __init__(self, handle: "Handle") -> None:
            self.handle = handle

        async def remote(self) -> Any:
            asked = asyncio.ensure_future(self.handle.clerk.answers())
            done, _ = await asyncio.wait([asked, self.handle.death], return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()


def make() -> tuple[Clerk, Handle, Line, list[str]]:
    clerk = Clerk()
    handle = Handle(clerk)
    losses: list[str] = []
    return clerk, handle, Line(handle, lambda why: EngineLost(f"gone: {why}"), losses.append), losses


def test_what_is_asked_at_once_goes_in_one_message_and_each_answer_comes_when_it_is_ready() -> None:
    async def main() -> None:
        clerk, handle, line, _ = make()
        slow = asyncio.create_task(line.ask("wait"))
        quick = [asyncio.create_task(line.ask(f"a{number}")) for number in range(50)]
        assert await asyncio.gather(*quick) == [f"A{number}" for number in range(50)]
        assert handle.heard == [51]
        assert not slow.done(), "the slow one holds up nobody"
        clerk.may.set()
        assert await slow == "WAIT"
        with pytest.raises(EnvError, match="it failed"):
            await line.ask("fail")
        line.hang_up()

    asyncio.run(main())


def test_a_cancelled_call_is_cancelled_where_it_runs() -> None:
    async def main() -> None:
        clerk, _, line, _ = make()
        task = asyncio.create_task(line.ask("wait"))
        await line.ask("a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await line.ask("b")
        assert clerk.cancelled == ["wait"]
        line.hang_up()

    asyncio.run(main())


def test_when_the_actor_dies_all_who_wait_and_all_who_come_later_are_told() -> None:
    async def main() -> None:
        _, handle, line, losses = make()
        tasks = [asyncio.create_task(line.ask("wait")) for _ in range(3)]
        await line.ask("a")
        handle.death.set_exception(RuntimeError("The actor died because its node did."))
        for task in tasks:
            with pytest.raises(EngineLost, match="gone: its node did"):
                await task
        with pytest.raises(EngineLost):
            await line.ask("a")
        line.tell("a")
        assert losses == ["its node did"], "once"

    asyncio.run(main())


def test_hanging_up_is_no_loss() -> None:
    async def main() -> None:
        _, _, line, losses = make()
        task = asyncio.create_task(line.ask("wait"))
        await line.ask("a")
        line.hang_up("closed")
        with pytest.raises(EngineLost, match="gone: closed"):
            await task
        assert losses == []

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
def test_errors_keep_their_kind_and_their_words(error: Exception, kind: type[RollgymError]) -> None:
    again = remade(trouble(error))
    assert type(again) is kind
    assert str(error) in str(again)
    assert again.failure is not None
    assert again.failure.type == type(error).__name__


def test_a_lost_lease_keeps_who_is_to_blame() -> None:
    lost = LeaseLost("too long", reason="deadline", guilty=True, culprits=("a", "b"), output="last words")
    again = remade(trouble(lost))
    assert isinstance(again, LeaseLost)
    assert (again.reason, again.guilty, again.culprits) == ("deadline", True, ("a", "b"))
    assert again.failure is not None
    assert again.failure.traceback == "last words"
