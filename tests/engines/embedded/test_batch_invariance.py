"""Batch invariance: log-probs of the plain model, and the same bits for any batch composition."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_models import gather, make_engine, make_model, plain_logprobs, prompt, request

from rollgym.engines.base import Generation, WeightSource
from rollgym.engines.embedded.attention import ReductionRule
from rollgym.engines.embedded.batch_invariance import make_batch_invariant
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.engines.embedded.model import Model

TEMPERATURES = (1.0, 0.7, 1.6)
Played = list[tuple[list[int], Generation]]


async def play(engine: EmbeddedEngine, number: int, turns: int = 3) -> Played:
    """One conversation: the whole prompt and the reply of each turn."""
    history: list[int] = []
    played = []
    for turn in range(turns):
        history += prompt(1000 * number + turn, 3 + (7 * number + 13 * turn) % 40)
        one = request(
            f"{number}-{turn}",
            history,
            f"episode {number}",
            max_tokens=3 + (5 * number + 3 * turn) % 17,
            seed=number,
            temperature=TEMPERATURES[number % 3],
            stop_ids=(5, 11) if number % 4 == 0 else (),
        )
        reply = await engine.generate(one)
        played.append((list(history), reply))
        history += reply.token_ids
    await engine.forget(f"episode {number}")
    return played


async def play_all(engine: EmbeddedEngine, count: int, at_once: int) -> list[Played]:
    """Many conversations, so many at once; they join and leave as they please."""
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> Played:
        async with gate:
            return await play(engine, number)

    return list(await asyncio.gather(*(one(n) for n in range(count))))


def gap(models: dict[int, Any], number: int, history: Sequence[int], reply: Generation) -> float:
    """The greatest difference from the plain forward of the weights each token was drawn with."""
    ids = [*history, *reply.token_ids]
    plain = {
        version: plain_logprobs(models[version], ids, len(history), TEMPERATURES[number % 3])
        for version, _ in reply.version_spans
    }
    versions = [version for version, count in reply.version_spans for _ in range(count)]
    return max(abs(plain[v][n] - reply.logprobs[n]) for n, v in enumerate(versions))


def play_with_a_swap(kind: str, count: int) -> tuple[float, list[Played]]:
    """Tight memory and changes of weights; returns the greatest gap and what was played.

    The weights change until the conversations end: a single change may find no reply in flight.
    """
    both = [make_model(kind), make_model(kind, seed=1)]
    models = dict(enumerate(both * 50))
    engine = make_engine(both[0], max_batch=9, cache_tokens=1536, prefill_chunk=32)

    async def main() -> list[Played]:
        playing = asyncio.ensure_future(play_all(engine, count, 16))
        for version in range(1, len(models)):
            before = (await engine.stats()).passes
            while not playing.done() and (await engine.stats()).passes < before + count:
                await asyncio.sleep(0.001)
            if playing.done():
                break
            await engine.update_weights(version, WeightSource(tensors=models[version].state_dict()))
        played = await playing
        stats = await engine.stats()
        assert stats.evicted_sessions > 0
        await engine.close()
        return played

    played = asyncio.run(main())
    gaps = [
        gap(models, number, history, reply) for number, turns in enumerate(played) for history, reply in turns
    ]
    return max(gaps), played


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3", "gpt2"])
def test_log_probs_are_those_of_the_plain_forward(kind: str) -> None:
    worst, played = play_with_a_swap(kind, 24)
    assert worst < 2e-5
    spans = [reply.version_spans for turns in played for _, reply in turns]
    assert any(len(span) > 1 for span in spans), "no reply was in flight during a weight update"
    assert {0, 1} <= {version for span in spans for version, _ in span}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_log_probs_are_those_of_the_plain_forward_over_a_thousand_episodes(kind: str) -> None:
    assert play_with_a_swap(kind, 1000)[0] < 1e-4


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_same_seeds_give_the_same_bits_with_1_8_and_33_in_flight(kind: str) -> None:
    model = make_model(kind)

    def bits(at_once: int, **options: Any) -> list[list[tuple[Any, Any]]]:
        async def main() -> list[Played]:
            engine = make_engine(model, **options)
            played = await play_all(engine, 36, at_once)
            await engine.close()
            return played

        played = asyncio.run(main())
        return [[(reply.token_ids, reply.logprobs) for _, reply in turns] for turns in played]

    alone = bits(1)
    assert bits(8) == alone
    assert bits(33) == alone
    # Evicted sessions, replies set back in the middle and prompts in small pieces change nothing either.
    assert bits(33, cache_tokens=768, prefill_chunk=5) == alone
    assert bits(33, cache_tokens=1024, max_batch=5, prefill_chunk=300) == alone


def test_long_prompts_give_the_same_bits_in_one_piece_and_in_turns() -> None:
    model = make_model(context=1200)
    ids = prompt(0, 1100)

    async def main() -> None:
        engine = make_engine(model, prefill_chunk=2000)
        whole = await engine.generate(request("whole", ids, max_tokens=20))
        for name, chunk in (("turns", 2000), ("pieces", 7)):
            other = make_engine(model, prefill_chunk=chunk)
            for cut in (150, 200, 383, 385, 600, 1000):
                await other.generate(request(name, ids[:cut], name, max_tokens=3, seed=cut))
            again = await other.generate(request(name, ids, name, max_tokens=20))
            assert (again.token_ids, again.logprobs) == (whole.token_ids, whole.logprobs)
            await other.close()
        await engine.close()

    asyncio.run(main())


class Moody:
    """A decoder whose logits depend on how many rows are computed together."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder

    def __call__(self, rows: Any, wanted: Any) -> torch.Tensor:
        return self.decoder(rows, wanted) + 1e-3 * len(rows.ids)  # type: ignore[no-any-return]


def test_without_a_working_rule_tokens_are_computed_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    cpu, source = torch.device("cpu"), make_model(context=160)
    model = Model(source, device=cpu, dtype=torch.float32)
    model._decoder = Moody(model._decoder)
    make_batch_invariant(model, most_rows=100)
    assert model.one_token_at_a_time
    assert "one token at a time" in caplog.text


def test_one_by_one_gives_the_same_log_probs() -> None:
    source = make_model()
    requests = [request(str(n), prompt(n, 20 + n), seed=n) for n in range(5)]

    async def main(single: bool) -> list[Generation]:
        engine = make_engine(source)
        if single:
            engine._model.rule, engine._model.one_token_at_a_time = ReductionRule(rows=1, queries=1), True
        replies = await gather(engine, requests)
        await engine.close()
        return replies

    for one, other in zip(asyncio.run(main(True)), asyncio.run(main(False)), strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_without_determinism_log_probs_are_as_exact() -> None:
    model = make_model()

    async def main() -> None:
        engine = make_engine(model, deterministic=False, prefill_chunk=16)
        for number, turns in enumerate(await play_all(engine, 12, 5)):
            for history, reply in turns:
                assert gap({0: model}, number, history, reply) < 2e-5
        await engine.close()

    asyncio.run(main())


def test_unknown_architectures_run_through_their_module_and_known_ones_do_not() -> None:
    engines = {kind: make_engine(make_model(kind)) for kind in ("qwen2", "llama", "qwen3", "gpt2")}
    assert {kind: engine.fused for kind, engine in engines.items()} == {
        "qwen2": True,
        "llama": True,
        "qwen3": True,
        "gpt2": False,
    }
    for engine in engines.values():
        asyncio.run(engine.close())


def test_a_rule_pads_lengths_out_of_its_gap() -> None:
    rule = ReductionRule(gap=(192, 384))
    asked = (1, 16, 17, 192, 193, 383, 384, 385, 512, 513, 705, 900, 1024)
    assert [rule.length(n) for n in asked] == [16, 16, 32, 192, 384, 384, 384, 400, 512, 528, 896, 912, 1024]
    assert replace(rule, gap=(0, 512)).length(513) == 1024
    assert ReductionRule().length(300) == 304
