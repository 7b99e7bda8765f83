"""The embedded engine: requests that finish, fail, or are aborted."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import torch
from torch_models import VOCABULARY, gather, make_engine, make_model, prompt, request

from rollgym.core.errors import AgentError
from rollgym.engines.base import BadRequest, Engine
from rollgym.engines.embedded.engine import EmbeddedEngine

CONTEXT = 512


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(context=CONTEXT)


@pytest.fixture
def engine(model: Any) -> Iterator[EmbeddedEngine]:
    engine = make_engine(model)
    yield engine
    asyncio.run(engine.close())


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def until(engine: EmbeddedEngine, **wanted: int) -> None:
    """Wait until the engine's counts reach these."""
    while True:
        stats = await engine.stats()
        if all(getattr(stats, name) >= count for name, count in wanted.items()):
            return
        await asyncio.sleep(0.001)


def test_it_is_an_engine(engine: EmbeddedEngine) -> None:
    typed: Engine = engine
    assert typed.version == 0
    assert typed.context_length == CONTEXT
    assert engine.vocabulary == VOCABULARY
    assert engine.deterministic


def test_importing_the_engines_imports_no_torch() -> None:
    code = "import sys, rollgym, rollgym.engines; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ((), "no prompt ids"),
        ((1, VOCABULARY), f"id {VOCABULARY}"),
        ((1, -1), "id -1"),
        ((1, 2.0), "id 2.0"),
        ((True,), "id True"),
        (("a",), "id 'a'"),
        ((1,) * CONTEXT, "no room for a reply"),
    ],
)
def test_bad_requests_do_not_reach_the_model(engine: EmbeddedEngine, ids: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        run(engine.generate(request("bad", ids)))
    assert run(engine.stats()).passes == 0


def test_a_reply_ends_where_the_context_does(engine: EmbeddedEngine) -> None:
    reply = run(engine.generate(request("long", prompt(0, CONTEXT - 4), max_tokens=100)))
    assert reply.finish_reason == "length"
    assert len(reply.token_ids) == 4


def test_a_stop_id_ends_the_reply_and_is_part_of_it(engine: EmbeddedEngine) -> None:
    free = run(engine.generate(request("free", prompt(0, 9), max_tokens=30)))
    assert free.finish_reason == "length"
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    reply = run(
        engine.generate(request("stop", prompt(0, 9), max_tokens=30, stop_ids=(stop, VOCABULARY + 7)))
    )
    assert reply.finish_reason == "stop"
    assert reply.token_ids == free.token_ids[: first + 1]
    assert reply.logprobs == free.logprobs[: first + 1]


def test_the_seed_decides(engine: EmbeddedEngine) -> None:
    async def main() -> list[Any]:
        return await gather(engine, [request(str(n), prompt(0, 9), seed=n // 2) for n in range(6)])

    replies = [reply.token_ids for reply in run(main())]
    assert replies[::2] == replies[1::2]
    assert len(set(replies)) == 3


def test_a_turn_costs_only_its_new_tokens(engine: EmbeddedEngine) -> None:
    async def main() -> None:
        history = prompt(0, 50)
        first = await engine.generate(request("1", history, "one", max_tokens=10))
        assert (await engine.stats()).computed_tokens == 50 + 9
        history += [*first.token_ids, *prompt(1, 5)]
        await engine.generate(request("2", history, "one", max_tokens=1))
        # The last token sampled had not been computed yet.
        assert (await engine.stats()).computed_tokens == 50 + 9 + 1 + 5
        await engine.forget("one")
        # What an ended session has computed is there for others, down to the state that a reply starts from.
        await engine.generate(request("3", history, "one", max_tokens=1))
        stats = await engine.stats()
        assert (stats.computed_tokens, stats.reused_tokens) == (65, 1)
        assert stats.prefix_hit_tokens == 59 + len(history)

    run(main())


def test_a_session_that_rewrites_its_history_is_computed_from_where_it_differs(
    engine: EmbeddedEngine, model: Any
) -> None:
    async def main() -> None:
        other = make_engine(model)
        ids, changed = prompt(0, 40), prompt(0, 40)
        changed[30] = (changed[30] + 1) % VOCABULARY
        fresh = await other.generate(request("fresh", changed))
        await other.close()
        await engine.generate(request("a", ids, "one", max_tokens=1))
        before = (await engine.stats()).computed_tokens
        again = await engine.generate(request("b", changed, "one"))
        assert (await engine.stats()).computed_tokens - before == 10 + 11
        assert (again.token_ids, again.logprobs) == (fresh.token_ids, fresh.logprobs)
        # A shorter prompt than what is kept, and the same prompt again.
        assert (await engine.generate(request("c", ids[:20], "one"))).token_ids
        assert (await engine.generate(request("d", ids[:20], "one"))).token_ids

    run(main())


def test_a_session_can_have_two_requests_at_once(engine: EmbeddedEngine) -> None:
    async def main() -> None:
        ids = prompt(0, 30)
        one, other = await gather(engine, [request("1", ids, "one"), request("2", ids, "one")])
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)

    run(main())


def test_an_aborted_reply_returns_what_it_has(engine: EmbeddedEngine) -> None:
    async def main() -> None:
        reply = asyncio.ensure_future(engine.generate(request("x", prompt(0, 9), max_tokens=400)))
        await until(engine, passes=5)
        await engine.abort(["x", "nobody"])
        partial = await reply
        whole = await engine.generate(request("whole", prompt(0, 9), max_tokens=400))
        assert partial.finish_reason == "aborted"
        assert 0 < len(partial.token_ids) < 400
        assert partial.token_ids == whole.token_ids[: len(partial.token_ids)]
        assert partial.version_spans == ((0, len(partial.token_ids)),)
        assert (await engine.stats()).running == 0

    run(main())


def test_a_waiting_reply_can_be_aborted(model: Any) -> None:
    engine = make_engine(model, max_batch=1)

    async def main() -> None:
        long = asyncio.ensure_future(engine.generate(request("long", prompt(0, 9), max_tokens=300)))
        waits = asyncio.ensure_future(engine.generate(request("waits", prompt(1, 9))))
        await until(engine, running=1, waiting=1)
        await engine.abort(["waits"])
        assert (await waits).token_ids == ()
        assert (await waits).finish_reason == "aborted"
        assert len((await long).token_ids) == 300
        await engine.close()

    run(main())


def test_a_cancelled_call_stops_generating(engine: EmbeddedEngine) -> None:
    async def main() -> None:
        call = asyncio.ensure_future(engine.generate(request("x", prompt(0, 9), max_tokens=500)))
        await until(engine, running=1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.passes < 500

    run(main())


def test_nothing_is_generated_while_paused(engine: EmbeddedEngine) -> None:
    async def main() -> None:
        calls = [
            asyncio.ensure_future(engine.generate(request(str(n), prompt(n, 9), max_tokens=300)))
            for n in range(2)
        ]
        await until(engine, passes=5)
        await engine.pause()
        passes = (await engine.stats()).passes
        late = asyncio.ensure_future(engine.generate(request("late", prompt(2, 9))))
        await asyncio.sleep(0.05)
        assert (await engine.stats()).passes == passes
        await engine.abort(["1"])
        assert (await calls[1]).finish_reason == "aborted"
        assert not late.done()
        await engine.resume()
        assert len((await calls[0]).token_ids) == 300
        assert len((await late).token_ids) == 12

    run(main())


def test_the_event_loop_runs_while_the_model_computes(engine: EmbeddedEngine) -> None:
    async def main() -> None:
        call = asyncio.ensure_future(engine.generate(request("x", prompt(0, 9), max_tokens=200)))
        turns = 0
        while not call.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 20

    run(main())


def test_a_failing_model_fails_the_replies_of_that_pass_only(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, broken = engine._model.states, threading.Event()

    def breaks(*args: Any) -> torch.Tensor:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("out of memory")
        return works(*args)

    async def main() -> None:
        await engine.generate(request("before", prompt(0, 9), "kept"))
        broken.set()
        replies = await asyncio.gather(
            *(engine.generate(request(str(n), prompt(n, 9))) for n in range(3)), return_exceptions=True
        )
        failed = [reply for reply in replies if isinstance(reply, AgentError)]
        assert failed
        assert "out of memory" in str(failed[0])
        assert len((await engine.generate(request("after", prompt(0, 12), "kept"))).token_ids) == 12

    monkeypatch.setattr(engine._model, "states", breaks)
    run(main())


def test_a_closed_engine_fails_pending_and_later_requests(model: Any) -> None:
    engine = make_engine(model, max_batch=1)

    async def main() -> None:
        calls = [
            asyncio.ensure_future(engine.generate(request(str(n), prompt(n, 9), max_tokens=400)))
            for n in range(3)
        ]
        await until(engine, running=1, waiting=2)
        await engine.close()
        await engine.close()
        for call in calls:
            with pytest.raises(AgentError, match="closed"):
                await call
        with pytest.raises(AgentError, match="closed"):
            await engine.generate(request("late", prompt(0, 9)))

    run(main())


def test_one_engine_serves_several_event_loops(engine: EmbeddedEngine) -> None:
    replies = [run(engine.generate(request("x", prompt(0, 9)))).token_ids for _ in range(2)]
    assert replies[0] == replies[1]
