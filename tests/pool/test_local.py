"""Worker processes: what crosses the boundary, and what happens when one dies."""

import asyncio

import pytest

from rollgym.core.errors import EnvError, UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.pool.base import EnvPool
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool
from rollgym.pool.protocol import MAX_MESSAGE, End, Unpacker, decode_requests, encode, frame, take


def spec(env: str = "faulty:Counting", task: int = 5, **kwargs: object) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id="e", env_id=env, env_kwargs=dict(kwargs), task=task, split="test", env_seed=11
    )


async def play(pool: EnvPool, spec: EpisodeSpec, actions: list[str]) -> list[object]:
    session = await pool.open(spec)
    try:
        start = await session.reset()
        assert start.instructions == "Say yes or no, three times."
        seen: list[object] = [(start.observation, start.info)]
        for action in actions:
            step = await session.step(action)
            seen.append((step.observation, step.reward, step.terminated, step.truncated, step.info))
        return seen
    finally:
        await session.close()


def test_a_worker_plays_the_same_episode_as_this_process() -> None:
    async def both() -> tuple[list[object], list[object]]:
        local, inline = LocalPool(1), InlinePool()
        try:
            actions = ["yes", "no ö √", "yes"]
            return await play(local, spec(), actions), await play(inline, spec(), actions)
        finally:
            await local.close()
            await inline.close()

    there, here = asyncio.run(both())
    assert there == here
    assert here[0] == ("task 5 luck 133801", {"success": False, "valid": True, "task": 5, "split": "test"})


def test_an_exception_keeps_its_type_message_and_traceback_and_spares_the_worker() -> None:
    async def go() -> tuple[EnvError, list[object]]:
        pool = LocalPool(1)
        try:
            with pytest.raises(EnvError) as caught:
                await play(pool, spec("faulty:RaisesInStep"), ["yes", "yes"])
            return caught.value, await play(pool, spec(), ["yes"])
        finally:
            await pool.close()

    error, after = asyncio.run(go())
    assert error.failure is not None
    assert error.failure.type == "ZeroDivisionError"
    assert "faulty:RaisesInStep raised in step()" in str(error)
    assert "one too many" in error.failure.traceback
    assert len(after) == 2


def test_what_an_environment_prints_does_not_disturb_the_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    async def go() -> list[object]:
        pool = LocalPool(1)
        try:
            return await play(pool, spec("faulty:PrintsGarbage"), ["yes", "yes", "yes"])
        finally:
            await pool.close()

    assert len(asyncio.run(go())) == 4
    out, err = capfd.readouterr()
    assert out == ""
    assert "garbage on stdout" in err


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(UsageError, match="workers must be at least 1, got 0"):
        LocalPool(0)


def test_messages_survive_any_cutting_of_the_stream() -> None:
    sent = [End(1, True), End(2, False), End(3, True), End(4, True)]
    messages = [encode(message) for message in sent]
    stream = frame(messages[:1]) + frame(messages[1:3]) + frame(messages[3:])
    for size in (1, 2, 3, 5, 7, 1000, len(frame(messages[:1])), len(stream)):
        unpacker = Unpacker()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        bodies = [body for piece in pieces for body in unpacker.feed(piece)]
        assert [message for body in bodies for message in decode_requests(body)] == sent


def test_a_frame_beyond_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the limit of"):
        Unpacker().feed(b"\xff\xff\xff\xff")


def test_a_frame_takes_what_fits_and_leaves_the_rest() -> None:
    big = bytes(MAX_MESSAGE // 2 + 1)
    outbox = [b"small", big, big, b"last"]
    assert take(outbox) == [b"small", big, big]
    assert outbox == [b"last"]
    assert take(outbox) == [b"last"]
    assert take(outbox) == []
