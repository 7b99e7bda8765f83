"""Engine and learner: the same numbers for the same tokens, before and after the weights change."""

import asyncio
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import VOCABULARY, make_learner, tiny  # noqa: E402

from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn  # noqa: E402
from rollgym.engines.base import GenerateRequest, Sampling  # noqa: E402
from rollgym.engines.embedded.engine import EmbeddedEngine  # noqa: E402
from rollgym.trainer.data.batch import Batch, make_batch  # noqa: E402
from rollgym.trainer.data.sequences import token_episode  # noqa: E402
from rollgym.trainer.learner.config import LoraSettings  # noqa: E402

EPISODES, TURNS = 12, 3
STOP = (7, 11)


async def play(engine: EmbeddedEngine, number: int, temperature: float, seed: int) -> Episode:
    """A conversation of several turns; some replies end themselves, some are cut off."""
    rng = np.random.default_rng([seed, number])
    ids: list[int] = []
    turns = []
    for turn in range(TURNS):
        added = rng.integers(0, VOCABULARY, 2 + (5 * number + 3 * turn) % 17).tolist()
        ids += added
        sampling = Sampling(
            max_tokens=1 + (number + turn) % 9, temperature=temperature, stop_ids=STOP, seed=number
        )
        request = GenerateRequest(
            request_id=f"{seed}/{number}/{turn}",
            prompt_ids=tuple(ids),
            sampling=sampling,
            session=f"{seed}/{number}",
        )
        made = await engine.generate(request)
        ids += made.token_ids
        turns.append(
            Turn(
                observation="",
                action="",
                prompt_ids=tuple(added),
                action_ids=made.token_ids,
                logprobs=made.logprobs,
            )
        )
    spec = EpisodeSpec(episode_id=f"e{number}", env_id="test/Env-v0")
    return Episode(spec=spec, outcome=Outcome.TURN_LIMIT, turns=tuple(turns))


async def rollout(engine: EmbeddedEngine, temperature: float, seed: int) -> Batch:
    episodes = await asyncio.gather(*(play(engine, n, temperature, seed) for n in range(EPISODES)))
    tokens = [token_episode(one) for one in episodes]
    rng = np.random.default_rng(seed)
    return make_batch(tokens, advantages=[rng.normal(size=one.num_tokens) for one in tokens])


def gap(batch: Batch, learner: Any) -> float:
    return float(np.abs(learner.logprobs(batch) - batch.arrays["behavior"]).max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)], ids=["whole", "lora"])
def test_engine_and_learner_agree_about_what_was_sampled(temperature: float, layout: str, lora: Any) -> None:
    """Rule 21: fp32, 36 replies of many turns, and again after each of two updates."""
    model = tiny()
    learner = make_learner(model, layout=layout, lora=lora, options={"temperature": temperature})
    engine = EmbeddedEngine(model, threads=1, device="cpu")

    async def main() -> None:
        try:
            for version in range(3):
                batch = await rollout(engine, temperature, version)
                found = gap(batch, learner)
                assert found < 1e-4
                metrics = learner.update(batch)
                assert metrics["train_rollout_logprob_diff_max"] == pytest.approx(found)
                assert gap(batch, learner) > 1e-2, "the update changed nothing"
                await engine.update_weights(version + 1, learner.weights())
                assert engine.version == version + 1
        finally:
            await engine.close()

    asyncio.run(main())


def test_another_temperature_would_show() -> None:
    """Rule 20: log-probs of another distribution than the one that was drawn from are wrong."""
    model = tiny()
    engine = EmbeddedEngine(model, threads=1, device="cpu")

    async def main() -> Batch:
        try:
            return await rollout(engine, 0.7, 0)
        finally:
            await engine.close()

    batch = asyncio.run(main())
    assert gap(batch, make_learner(model, options={"temperature": 0.7})) < 1e-4
    assert gap(batch, make_learner(model)) > 0.1
