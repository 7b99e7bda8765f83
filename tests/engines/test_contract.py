"""The contract of engines: the same tests over the embedded engine and real SGLang and vLLM servers.

Servers run with `make test-sglang` and `make test-vllm`; they are skipped without a virtual environment.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_models import plain_logprobs

from rollgym.core.errors import AgentError, EngineLost, UsageError
from rollgym.engines import sglang, vllm
from rollgym.engines.base import BadRequest, Engine, GenerateRequest, Generation, Sampling, WeightSource
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.engines.embedded.model import read_module
from rollgym.engines.servers.engine import ServerEngine

pytestmark = pytest.mark.timeout(900)
PROMPT = (7, 8, 9, 10)
DELAYS = (0.3, 0.1, 0.6, 0.05, 1.0, 0.02, 2.0, 0.01)
"""Seconds after which replies are in flight; one of them fits this machine."""
Model = Callable[[int], Path]
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(
    scope="module",
    params=[
        "embedded",
        pytest.param("sglang", marks=pytest.mark.slow),
        pytest.param("vllm", marks=pytest.mark.slow),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(
    kind: str, server_options: Callable[[str], Any], real_model: Model, runner: asyncio.Runner
) -> Iterator[Engine]:
    engine: Engine
    if kind == "embedded":
        engine = EmbeddedEngine(real_model(0), threads=1)
    else:
        launch = {"sglang": sglang.launch, "vllm": vllm.launch}[kind]
        engine = launch(real_model(0), server_options(kind))
    yield engine
    runner.run(engine.close())
    if isinstance(engine, ServerEngine):
        assert engine.server is not None
        assert not engine.server.alive


@pytest.fixture
def run(engine: Engine, runner: asyncio.Runner) -> Run:
    return lambda work: runner.run(asyncio.wait_for(work, 600))


def ask(name: str = "r", prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerateRequest:
    settings = Sampling(**{"max_tokens": 24, **sampling})
    return GenerateRequest(request_id=name, prompt_ids=prompt, sampling=settings, session=name)


def differences(folder: Path, made: Generation, temperature: float = 1.0) -> list[float]:
    """The difference of each log-prob to that of a plain float32 forward, as the learner's."""
    plain = plain_logprobs(read_module(folder), PROMPT + made.token_ids, len(PROMPT), temperature)
    return [abs(a - b) for a, b in zip(plain, made.logprobs, strict=True)]


def gap(folder: Path, made: Generation, temperature: float = 1.0) -> float:
    return max(differences(folder, made, temperature))


def tensors(folder: Path) -> WeightSource:
    return WeightSource(tensors=dict(read_module(folder).named_parameters()))


async def to(engine: Engine, weights: WeightSource) -> int:
    """Update to the next version."""
    await engine.update_weights(engine.version + 1, weights)
    return engine.version


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_learner(
    engine: Engine, run: Run, real_model: Model, temperature: float
) -> None:
    run(to(engine, tensors(real_model(0))))
    made = run(engine.generate(ask(temperature=temperature)))
    assert len(made.token_ids) == 24
    assert made.finish_reason == "length"
    assert made.version_spans == ((engine.version, 24),)
    found = gap(real_model(0), made, temperature)
    print(f"largest gap at temperature {temperature}: {found:.2e}")
    assert found < 1e-4


def test_greedy_takes_the_most_likely_token_with_log_prob_zero(
    engine: Engine, run: Run, real_model: Model
) -> None:
    run(to(engine, tensors(real_model(0))))
    made = run(engine.generate(ask(temperature=0.0)))
    assert made.logprobs == (0.0,) * 24
    model: Any = read_module(real_model(0))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + made.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(made.token_ids)


def test_a_stop_id_ends_a_reply_and_is_part_of_it(engine: Engine, run: Run, real_model: Model) -> None:
    run(to(engine, tensors(real_model(0))))
    first = run(engine.generate(ask(temperature=0.0)))
    stop = first.token_ids[5]
    made = run(engine.generate(ask(temperature=0.0, stop_ids=(stop,))))
    assert made.finish_reason == "stop"
    assert made.token_ids == first.token_ids[: first.token_ids.index(stop) + 1]


def test_many_replies_at_once_are_each_right(engine: Engine, run: Run, real_model: Model) -> None:
    run(to(engine, tensors(real_model(0))))

    async def many() -> list[Generation]:
        asked = (engine.generate(ask(f"m{seed}", seed=seed)) for seed in range(24))
        return list(await asyncio.gather(*asked))

    made = run(many())
    assert max(gap(real_model(0), one) for one in made) < 1e-4
    assert len({one.token_ids for one in made}) > 1


def test_filters_are_part_of_the_reported_distribution(
    kind: str, engine: Engine, run: Run, real_model: Model
) -> None:
    run(to(engine, tensors(real_model(0))))
    if kind == "sglang":
        with pytest.raises(BadRequest, match="uses top_p, top_k or min_p"):
            run(engine.generate(ask(top_k=3)))
        return
    made = run(engine.generate(ask(top_k=3)))
    model: Any = read_module(real_model(0))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + made.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    best = logits.float().topk(3)
    for row, token, value in zip(range(24), made.token_ids, made.logprobs, strict=True):
        place = best.indices[row].tolist().index(token)
        assert value == pytest.approx(best.values[row].log_softmax(-1)[place].item(), abs=1e-4)
    for filters in ({"top_p": 0.5}, {"min_p": 0.3}):
        assert run(engine.generate(ask(**filters))).finish_reason == "length"


def test_a_seed_repeats_a_reply(kind: str, engine: Engine, run: Run, real_model: Model) -> None:
    if kind == "sglang":
        pytest.skip("SGLang honors seeds on a GPU only")
    run(to(engine, tensors(real_model(0))))

    async def beside() -> Generation:
        made, *_ = await asyncio.gather(*(engine.generate(ask(f"s{seed}", seed=seed)) for seed in (5, 6, 7)))
        return made

    alone = run(engine.generate(ask(seed=5)))
    assert run(beside()).token_ids == alone.token_ids
    assert run(engine.generate(ask(seed=6))).token_ids != alone.token_ids


def test_a_prompt_that_was_computed_is_found_in_the_cache(
    engine: Engine, run: Run, real_model: Model
) -> None:
    run(to(engine, tensors(real_model(0))))
    prompt = tuple(5 + 7 * place % 50 for place in range(160))

    async def hits() -> int:
        before = (await engine.stats()).prefix_hit_tokens
        await engine.generate(ask("again", prompt, max_tokens=2))
        return (await engine.stats()).prefix_hit_tokens - before

    assert run(hits()) == 0, "new weights drop what the old ones computed"
    assert run(hits()) >= 128


def test_weights_come_as_tensors_in_buckets_or_from_a_folder(
    engine: Engine, run: Run, real_model: Model
) -> None:
    run(to(engine, tensors(real_model(0))))
    assert gap(real_model(1), run(engine.generate(ask()))) > 0.1
    named = list(read_module(real_model(2)).named_parameters())
    sources = {
        1: tensors(real_model(1)),
        2: WeightSource(buckets=lambda: (named[at : at + 3] for at in range(0, len(named), 3))),
        0: WeightSource(path=real_model(0)),
    }
    for seed, source in sources.items():
        version = run(to(engine, source))
        made = run(engine.generate(ask()))
        assert made.version_spans == ((version, 24),)
        assert gap(real_model(seed), made) < 1e-4


def test_in_flight_replies_continue_with_new_weights(engine: Engine, run: Run, real_model: Model) -> None:
    async def change(delay: float) -> list[Generation]:
        replies = [asyncio.create_task(engine.generate(ask(f"w{i}", max_tokens=200))) for i in range(4)]
        await asyncio.sleep(delay)
        await to(engine, tensors(real_model(1)))
        return list(await asyncio.gather(*replies))

    for delay in DELAYS:
        old = run(to(engine, tensors(real_model(0))))
        found = run(change(delay))
        if all(len(made.version_spans) > 1 for made in found):
            break
    for made in found:
        assert len(made.token_ids) == 200
        counts = dict(made.version_spans)
        assert set(counts) == {old, old + 1}
        split = counts[old]
        assert max(differences(real_model(0), made)[:split]) < 1e-4
        assert max(differences(real_model(1), made)[split:]) < 1e-4


def test_abort_cancel_and_pause(engine: Engine, run: Run) -> None:
    async def play() -> None:
        for delay in DELAYS:
            # Another seed each time: what an engine has computed once, it may have at once the next time.
            seed = int(1000 * delay)
            reply = asyncio.create_task(engine.generate(ask("gone", max_tokens=240, seed=seed)))
            other = asyncio.create_task(engine.generate(ask("gone-on", max_tokens=60, seed=seed)))
            await asyncio.sleep(delay)
            await engine.abort(["gone", "nobody"])
            made = await reply
            if 0 < len(made.token_ids) < 240:
                break
            await other
        assert made.finish_reason == "aborted"
        assert 0 < len(made.token_ids) < 240
        assert (await other).finish_reason == "length"
        cancelled = asyncio.create_task(engine.generate(ask("cut", max_tokens=240, seed=7)))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(ask("held")))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await engine.resume()
        assert (await waiting).finish_reason == "length"

    run(play())


def test_sleep_and_wake_up_keep_replies_and_weights(engine: Engine, run: Run, real_model: Model) -> None:
    run(to(engine, tensors(real_model(0))))

    async def play() -> None:
        reply = asyncio.create_task(engine.generate(ask("long", max_tokens=200)))
        await asyncio.sleep(0.1)
        await engine.sleep(["kv_cache"])
        await engine.sleep()
        await to(engine, tensors(real_model(1)))
        waiting = asyncio.create_task(engine.generate(ask("held")))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await engine.wake_up()
        assert len((await reply).token_ids) == 200
        assert gap(real_model(1), await waiting) < 1e-4
        await engine.sleep()
        if isinstance(engine, EmbeddedEngine):  # keeps no second copy of its weights: its owner sends them
            with pytest.raises(AgentError, match="released"):
                await engine.wake_up()
            await to(engine, tensors(real_model(1)))
        await engine.wake_up()

    run(play())
    assert gap(real_model(1), run(engine.generate(ask()))) < 1e-4


def test_wrong_weights_are_rejected_and_the_old_ones_stay(
    engine: Engine, run: Run, real_model: Model, tmp_path: Path
) -> None:
    version = run(to(engine, tensors(real_model(0))))
    good = dict(read_module(real_model(1)).named_parameters())
    name = next(iter(good))
    for bad in ({**good, "more": good[name]}, {name: good[name]}, {**good, name: good[name][:-1]}):
        with pytest.raises(UsageError):
            run(engine.update_weights(version + 1, WeightSource(tensors=bad)))
    with pytest.raises(UsageError):
        run(engine.update_weights(version + 1, WeightSource(path=tmp_path / "none")))
    assert engine.version == version
    assert gap(real_model(0), run(engine.generate(ask()))) < 1e-4


def test_requests_that_cannot_be_served_are_rejected(engine: Engine, run: Run) -> None:
    vocabulary: int = engine.vocabulary  # type: ignore[attr-defined]
    for ids in ((), (vocabulary,), (5,) * engine.context_length):
        with pytest.raises(BadRequest):
            run(engine.generate(ask("bad", ids)))
    made = run(engine.generate(ask("long", (5,) * (engine.context_length - 1))))
    assert len(made.token_ids) == 1
    assert made.finish_reason == "length"


def test_a_killed_server_restarts_with_the_last_weights(engine: Engine, run: Run, real_model: Model) -> None:
    if not isinstance(engine, ServerEngine):
        pytest.skip("the embedded engine has no process to lose")
    server = engine.server
    assert server is not None
    live = read_module(real_model(1))
    version = run(to(engine, WeightSource(tensors=dict(live.named_parameters()))))
    with torch.no_grad():
        for parameter in live.parameters():  # as a learner goes on with its own
            parameter.add_(1.0)

    async def kill() -> None:
        # Many: a quick machine is done with a single one before it can be killed.
        asked = [engine.generate(ask(f"lost {i}", max_tokens=240)) for i in range(64)]
        replies = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.2)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        ended = {type(one) for one in await replies}
        assert EngineLost in ended
        assert ended <= {EngineLost, Generation}

    run(kill())
    made = run(engine.generate(ask()))
    assert server.starts == 2
    assert made.version_spans == ((version, 24),)
    assert gap(real_model(1), made) < 1e-4
