"""Prefix cache: sharing, references, eviction, and the same bits as without it."""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_models import gather, make_engine, make_model, prompt, request

from rollgym.engines.base import EngineStats, Generation, WeightSource
from rollgym.engines.embedded import model as model_module
from rollgym.engines.embedded.batch_invariance import make_batch_invariant
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.engines.embedded.kv_cache import KVBlock
from rollgym.engines.embedded.model import Model
from rollgym.engines.embedded.prefix_cache import Node, PrefixCache, common_prefix
from rollgym.engines.embedded.scheduler import BatchScheduler
from rollgym.engines.embedded.sequence import SequenceState

CPU = torch.device("cpu")


def block(ids: Sequence[int]) -> torch.Tensor:
    """Keys and values that can be told apart: those of a token are its id and its position."""
    rows = torch.tensor([[float(token), float(at)] for at, token in enumerate(ids)]).view(-1, 2)
    return rows.expand(2, 2, 1, len(ids), 2)


def put(cache: PrefixCache, ids: Sequence[int], session: str = "") -> Node:
    """Store a prefix as a session would."""
    whole = block(ids)
    node = cache.insert(ids, len(ids), lambda at: KVBlock(whole[:, :, :, at:]), session=session)
    cache.add_states(ids, {at: torch.tensor([ids[at], at]) for at in range(len(ids)) if (at + len(ids)) % 3})
    if session:
        cache.hold(session, node)
    return node


def check(cache: PrefixCache) -> None:
    """The tree is a radix tree, its counts are right, and every block belongs to its path."""
    paths: dict[int, list[int]] = {}
    for node in cache.nodes():
        assert node.ids
        assert node.block.tokens == len(node.ids)
        before = paths.get(id(node.parent), [])
        paths[id(node)] = [*before, *node.ids]
        assert torch.equal(node.block.kv, block(paths[id(node)])[:, :, :, len(before) :])
        for at, state in node.states.items():
            assert state.tolist() == [node.ids[at], len(before) + at]
        assert all(child.ids[0] == first and child.parent is node for first, child in node.children.items())
        assert all(cache._sessions[session] is node for session in node.sessions)
    assert cache.tokens == sum(len(node.ids) for node in cache.nodes())
    assert sum(len(node.sessions) for node in cache.nodes()) == cache.sessions


def cached(cache: PrefixCache, ids: Sequence[int]) -> int:
    return sum(count for _, count in cache.match(ids, len(ids)))


@pytest.mark.parametrize(
    ("a", "b", "shared"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2, 4, 3], 2), ([2], [1], 0)]
)
def test_common_prefix(a: list[int], b: list[int], shared: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == shared
    assert common_prefix([7] * 100 + a, [7] * 100 + b) == 100 + shared


def test_a_common_prefix_is_stored_once() -> None:
    cache = PrefixCache()
    put(cache, [1, 2, 3, 4], "a")
    put(cache, [1, 2, 5], "b")
    put(cache, [1, 2, 5, 6], "b")
    check(cache)
    assert cache.tokens == 6
    assert cached(cache, [1, 2, 3, 9]) == 3
    assert cached(cache, [1, 2, 5, 6, 7]) == 4
    assert cached(cache, [2]) == 0
    assert cache.sessions == 2


def test_a_state_is_found_after_exactly_its_ids() -> None:
    cache = PrefixCache()
    put(cache, [1, 2, 3, 4, 5])
    put(cache, [1, 2, 7, 8])
    check(cache)
    found = [cache.state(ids) for ids in ([1], [1, 2], [1, 2, 3], [1, 2, 7], [1, 2, 7, 8])]
    assert [None if state is None else state.tolist() for state in found] == [
        [1, 0],
        [2, 1],
        [3, 2],
        None,
        [8, 3],
    ]
    assert [cache.state(ids) for ids in ([2], [1, 2, 9], [1, 2, 7, 8, 8])] == [None] * 3
    cache.evict(10)
    assert cache.state([1, 2]) is None


def test_unreferenced_leaves_are_evicted_before_those_of_sessions() -> None:
    cache = PrefixCache()
    put(cache, [1, 2, 3], "old")
    put(cache, [1, 7])
    put(cache, [5, 5], "new")
    running = put(cache, [6])
    running.running += 1
    assert cache.evict(1) == 1
    assert [cached(cache, ids) for ids in ([1, 7], [1, 2, 3], [5, 5], [6])] == [1, 3, 2, 1]
    assert cache.evict(100, referenced=False) == 0
    cache.match([1, 2, 3], 3)
    assert cache.evict(1) == 2, "the least recently used session"
    assert not cache.has_session("new")
    assert cache.evicted_sessions == 1
    assert cache.evict(100) == 4, "a running sequence's last"
    assert running.parent is None
    check(cache)
    assert cache.tokens == 0


def test_slack_is_taken_from_unreferenced_leaves_only() -> None:
    cache = PrefixCache()
    for first in range(4):
        put(cache, [first] * 10, "held" if first == 3 else "")
    assert cache.evict(5, slack=10) == 20
    assert cache.evict(5, slack=1000) == 10
    assert cache.has_session("held")


def test_released_sessions_leave_their_prefix() -> None:
    cache = PrefixCache()
    put(cache, [1, 2], "a")
    cache.release("a")
    cache.release("unknown")
    assert cache.sessions == 0
    assert cached(cache, [1, 2, 3]) == 2
    cache.clear()
    assert cached(cache, [1, 2, 3]) == cache.tokens == 0


Steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), st.lists(st.integers(0, 2), min_size=1, max_size=9), st.sampled_from("abc-")
        ),
        st.tuples(st.just("evict"), st.integers(1, 12), st.booleans()),
        st.tuples(st.just("release"), st.sampled_from("abc"), st.none()),
        st.tuples(st.just("clear"), st.none(), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(Steps)
def test_the_tree_stays_consistent(steps: list[tuple[str, Any, Any]]) -> None:
    cache, stored = PrefixCache(), dict[str, list[int]]()
    for step, what, more in steps:
        if step == "put":
            put(cache, what, "" if more == "-" else more)
            assert cached(cache, what) == len(what)
            if more != "-":
                stored[more] = what
        elif step == "evict":
            before = cache.tokens
            assert cache.evict(what, referenced=more) == before - cache.tokens
        elif step == "release":
            cache.release(what)
            stored.pop(what, None)
        else:
            cache.clear()
        check(cache)
        stored = {name: ids for name, ids in stored.items() if cache.has_session(name)}
        assert len(stored) == cache.sessions
        assert all(cached(cache, ids) == len(ids) for ids in stored.values())


# The engine: what is shared, and that sharing changes no bit.


def siblings(groups: int, size: int) -> list[list[int]]:
    """Prompts of 100 ids that all have in common, 60 of each group, and none of their own."""
    shared = prompt(0, 100)
    return [shared + prompt(1 + group, 60) for group in range(groups) for _ in range(size)]


@pytest.mark.parametrize("chunk", [1000, 48])
def test_siblings_that_arrive_together_compute_their_prompts_once(chunk: int) -> None:
    prompts = siblings(3, 5)

    async def main() -> tuple[list[Generation], EngineStats]:
        engine = make_engine(make_model(), prefill_chunk=chunk)
        engine._scheduler.worth_waiting = 1
        requests = [request(str(n), ids, str(n), seed=n, max_tokens=4) for n, ids in enumerate(prompts)]
        replies = await gather(engine, requests)
        stats = await engine.stats()
        await engine.close()
        return replies, stats

    replies, stats = asyncio.run(main())
    # A group's prompt is computed by one sibling. The others sample from its state, and compute what they
    # sampled unless somebody else has computed the same before.
    sampled = {
        (*ids, *reply.token_ids[:count])
        for ids, reply in zip(prompts, replies, strict=True)
        for count in (1, 2, 3)
    }
    at_most = 100 + 3 * 60 + 15 * 3
    assert 100 + 3 * 60 + len(sampled) <= stats.computed_tokens <= at_most
    assert stats.reused_tokens >= 3 * 4
    assert stats.prefix_hit_tokens == sum(map(len, prompts)) + 15 * 3 - stats.computed_tokens
    assert [reply.token_ids for reply in replies] == [
        alone(0, tuple(ids), n, 4)[0] for n, ids in enumerate(prompts)
    ]


def test_siblings_share_what_is_running_and_what_has_ended() -> None:
    async def main() -> None:
        engine = make_engine(make_model())
        ids = prompt(0, 80)
        first = asyncio.ensure_future(engine.generate(request("first", ids, "first", max_tokens=300)))
        while (await engine.stats()).passes < 5:
            await asyncio.sleep(0)
        await engine.generate(request("second", ids, "second", seed=1, max_tokens=1))
        assert (await engine.stats()).prefix_hit_tokens == 80
        await first
        await engine.forget("first")
        await engine.forget("second")
        await engine.generate(request("third", [*ids, 1, 2], max_tokens=1))
        stats = await engine.stats()
        assert stats.prefix_hit_tokens == 80 + 80
        assert stats.sessions == 0
        await engine.update_weights(1, WeightSource(tensors=make_model(seed=1).state_dict()))
        await engine.generate(request("fourth", ids, max_tokens=1))
        assert (await engine.stats()).prefix_hit_tokens == 80 + 80
        await engine.close()

    asyncio.run(main())


def test_a_repeated_reply_is_sampled_without_a_pass() -> None:
    async def main() -> None:
        engine = make_engine(make_model())
        ids = prompt(0, 40)
        first = await engine.generate(request("1", ids, "one", seed=5, max_tokens=6))
        before = await engine.stats()
        again = await engine.generate(request("2", ids, "two", seed=5, max_tokens=6))
        after = await engine.stats()
        assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
        assert (after.passes, after.computed_tokens) == (before.passes, before.computed_tokens)
        assert after.reused_tokens - before.reused_tokens == 6
        assert (after.sessions, after.running, after.waiting) == (2, 0, 0)
        await engine.update_weights(1, WeightSource(tensors=make_model(seed=1).state_dict()))
        renewed = await engine.generate(request("3", ids, "two", seed=5, max_tokens=6))
        assert renewed.logprobs != first.logprobs
        assert (await engine.stats()).reused_tokens == after.reused_tokens
        await engine.close()

    asyncio.run(main())


def test_running_siblings_share_their_prompt_again_after_a_weight_update() -> None:
    async def main() -> None:
        engine = make_engine(make_model())
        ids = prompt(0, 200)
        calls = [
            asyncio.ensure_future(engine.generate(request(str(n), ids, seed=n, max_tokens=200)))
            for n in range(6)
        ]
        while (await engine.stats()).passes < 5:
            await asyncio.sleep(0)
        await engine.pause()
        before = await engine.stats()
        await engine.update_weights(1, WeightSource(tensors=make_model(seed=1).state_dict()))
        await engine.resume()
        replies = await asyncio.gather(*calls)
        after = await engine.stats()
        sampled = sum(len(reply.token_ids) for reply in replies)
        assert after.computed_tokens - before.computed_tokens < 200 + sampled + 6
        await engine.close()

    asyncio.run(main())


def test_unreferenced_prefixes_use_a_quarter_of_the_cache() -> None:
    async def main() -> None:
        engine = make_engine(make_model(), cache_tokens=4096)
        for number in range(60):
            await engine.generate(request(str(number), prompt(number, 100), max_tokens=2))
        stats = await engine.stats()
        assert stats.cached_tokens <= 1024 + 1024
        assert stats.evicted_tokens > 0
        await engine.close()

    asyncio.run(main())


@cache
def reference(version: int, packed: bool) -> EmbeddedEngine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "_PACK", 0 if packed else model_module._PACK)
        return make_engine(make_model(seed=version))


@cache
def alone(
    version: int, ids: tuple[int, ...], seed: int, tokens: int, packed: bool = False
) -> tuple[Any, Any]:
    """Ids and log-probs of a reply that an engine with nothing in its cache computes by itself."""

    async def main() -> Generation:
        engine = reference(version, packed)
        await engine._thread.call(lambda scheduler: scheduler.free_cache())
        return await engine.generate(request("alone", ids, seed=seed, max_tokens=tokens))

    reply = asyncio.run(main())
    return reply.token_ids, reply.logprobs


def make_scheduler(packed: bool, **options: int) -> BatchScheduler:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "_PACK", 0 if packed else model_module._PACK)
        model = Model(make_model(), device=CPU, dtype=torch.float32)
    make_batch_invariant(model, most_rows=64)
    assert model.packed == packed
    return BatchScheduler(model, **{"max_batch": 5, "cache_tokens": 1024, "prefill_chunk": 48, **options})


def check_references(scheduler: BatchScheduler) -> None:
    """References are those of running sequences and sessions, and the memory limit holds."""
    nodes = list(scheduler.prefixes.nodes())
    assert scheduler.tokens <= scheduler.cache_tokens
    assert scheduler.prefixes.tokens == sum(len(node.ids) for node in nodes)
    assert all(node.block.tokens == len(node.ids) for node in nodes)
    assert all(0 <= at < len(node.ids) for node in nodes for at in node.states)
    for node in nodes:
        assert node.running == sum(seq.node is node for seq in scheduler.running)
    assert all(seq.node is None and not seq.cached for seq in scheduler.waiting)


TREES = [prompt(90, 250), prompt(91, 40)]
"""Instructions that prompts begin with."""


@st.composite
def requests(draw: Any) -> tuple[Any, ...]:
    start = TREES[draw(st.integers(0, 1))]
    ids = start[: draw(st.integers(1, len(start)))] + prompt(
        draw(st.integers(0, 3)), draw(st.integers(0, 60))
    )
    return "ask", tuple(ids), draw(st.integers(0, 2)), draw(st.integers(1, 6)), draw(st.sampled_from("abcd-"))


Actions = st.lists(
    st.one_of(
        requests(),
        st.tuples(st.just("continue"), st.sampled_from("abcd"), st.integers(0, 40)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("forget"), st.sampled_from("abcd")),
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.integers(1, 400)),
        st.tuples(st.just("free"), st.none()),
        st.tuples(st.just("weights"), st.integers(0, 1)),
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"cache_tokens": 544, "max_batch": 3, "prefill_chunk": 7}])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions=Actions)
def test_sharing_changes_no_bit_and_leaks_nothing(
    packed: bool, options: dict[str, int], actions: list[tuple[Any, ...]]
) -> None:
    """Any sequence of requests, turns, evictions and weight updates: replies of an engine of their own."""
    scheduler = make_scheduler(packed, **options)
    results: list[tuple[SequenceState, list[Any]]] = []
    histories: dict[str, list[int]] = {}

    def ask(ids: Sequence[int], seed: int, tokens: int, session: str) -> None:
        result: list[Any] = []
        name = str(len(results))
        asked = request(name, ids, session, seed=seed, max_tokens=tokens)

        def deliver(reply: Any) -> None:
            result.append(reply)
            histories[session] = [*ids, *reply.token_ids]

        state = SequenceState(asked, tokens, deliver)
        results.append((state, result))
        scheduler.submit(state)

    for kind, *arguments in actions:
        if kind == "ask":
            ids, seed, tokens, session = arguments
            ask(ids, seed, tokens, "" if session == "-" else session)
        elif kind == "continue" and arguments[0] in histories:
            session, more = arguments
            if len(history := histories[session] + prompt(7, more)) < 400:
                ask(history, 1, 3, session)
        elif kind == "step":
            for _ in range(arguments[0]):
                scheduler.step()
                check_references(scheduler)
        elif kind == "forget":
            scheduler.forget(arguments[0])
        elif kind == "abort":
            scheduler.abort(scheduler.find({str(arguments[0])}))
        elif kind == "evict":
            scheduler.prefixes.evict(arguments[0])
        elif kind == "free":
            scheduler.free_cache()
        elif kind == "weights":
            version = scheduler.version + 1
            scheduler.load_weights(version, make_model(seed=version % 2).state_dict())
        check_references(scheduler)
    while not scheduler.idle:
        scheduler.step()
        check_references(scheduler)
    for state, [reply] in results:
        start, prompt_ids = 0, state.request.prompt_ids
        for version, count in reply.version_spans:
            before = (*prompt_ids, *reply.token_ids[:start])
            tokens, logprobs = alone(version % 2, before, state.sampling.seed, count, packed)
            assert tokens == reply.token_ids[start : start + count]
            assert logprobs == reply.logprobs[start : start + count]
            start += count
    for session in "abcd":
        scheduler.forget(session)
    assert not any(node.references for node in scheduler.prefixes.nodes())
    scheduler.prefixes.evict(10**6)
    assert scheduler.prefixes.tokens == 0
