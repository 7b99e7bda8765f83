"""An update that is followed while it is sent."""

import asyncio
import pickle
import threading

import pytest

from rollgym.core.errors import RunError
from rollgym.engines.weight_sync.chain import KeptPart, Link
from rollgym.engines.weight_sync.wire import Sent


def test_several_follow_the_buckets_as_another_thread_publishes_them() -> None:
    link = Link()
    read = [threading.Event() for _ in range(3)]

    def send() -> None:
        for event in read:
            link.publish([KeptPart([])], Sent(10, 5, 1))
            assert event.wait(20), "the bucket was not read before the next one was there"
        link.end()

    async def follow(first: bool) -> int:
        count = 0
        async for _ in link.follow():
            if first:
                read[count].set()
            count += 1
        return count

    async def main() -> list[int]:
        return list(await asyncio.gather(follow(True), follow(False), follow(False)))

    thread = threading.Thread(target=send)
    thread.start()
    assert asyncio.run(main()) == [3, 3, 3]
    thread.join()
    assert link.sent == Sent(30, 15, 3)
    again = pickle.loads(pickle.dumps(link))  # noqa: S301
    assert (again.stamp, len(again.buckets), again.sent) == (link.stamp, 3, link.sent)
    again.wait()


def test_the_error_of_the_ranks_reaches_those_that_follow() -> None:
    link = Link("base")
    link.publish([], Sent())
    link.end(RunError("rank 1 is lost"))

    async def main() -> None:
        async for _ in link.follow():
            pass

    with pytest.raises(RunError, match="rank 1 is lost"):
        asyncio.run(main())
    with pytest.raises(RunError, match="rank 1 is lost"):
        pickle.dumps(link)
