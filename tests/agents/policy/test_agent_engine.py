"""The token agent with a real model: made on the spot, tiny, with random weights."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollgym.core.agent import AgentSetup, make_agent  # noqa: E402
from rollgym.core.env import text_interface  # noqa: E402
from rollgym.core.registry import make  # noqa: E402
from rollgym.core.types import Episode, EpisodeSpec, Limits, Outcome, Seconds  # noqa: E402
from rollgym.pool.inline import InlinePool  # noqa: E402
from rollgym.pool.local import LocalPool  # noqa: E402
from rollgym.rollout.config import SchedulerConfig  # noqa: E402
from rollgym.rollout.episode_runner import run_episode  # noqa: E402
from rollgym.rollout.group_state import GroupPolicy  # noqa: E402
from rollgym.rollout.scheduler import Scheduler  # noqa: E402
from rollgym.rollout.task_sampler import EnvSource, TaskSampler  # noqa: E402
from rollgym.trainer.builtin_policy.model import make_policy  # noqa: E402

ENV = "rollgym/FrozenLake-v0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_policy([ENV], tmp_path_factory.mktemp("policy") / "tiny", size="tiny", context=512).path


def play(model: Path, count: int = 1, **options: Any) -> tuple[list[Episode], dict[str, Any]]:
    """Episodes that are played at once, and the agent's totals."""

    async def run() -> tuple[list[Episode], dict[str, Any]]:
        settings = {"model": str(model), "max_tokens": 6, "device": "cpu", **options}
        agent: Any = make_agent("lm", AgentSetup(env_id=ENV), **settings)
        pool = InlinePool()
        specs = [
            EpisodeSpec(
                episode_id=f"e{i}", env_id=ENV, task=i, sampling_seed=i, limits=Limits(turns=4, seconds=60)
            )
            for i in range(count)
        ]
        try:
            episodes = await asyncio.gather(*(run_episode(spec, pool, agent) for spec in specs))
        finally:
            await agent.close()
            await pool.close()
        return list(episodes), agent.totals()

    return asyncio.run(run())


def test_a_model_plays_episodes_that_can_be_trained_on(model: Path) -> None:
    episodes, totals = play(model, count=3)
    assert all(not episode.outcome.failed for episode in episodes), [e.error for e in episodes]
    for turn in (turn for episode in episodes for turn in episode.turns):
        assert turn.prompt_ids
        assert 1 <= len(turn.action_ids) <= 6
        assert all(logprob <= 0 for logprob in turn.logprobs)
        assert len(turn.logprobs) == len(turn.action_ids)
        assert turn.policy_version == 0
    assert totals["requests"] == sum(episode.length for episode in episodes)


@pytest.mark.parametrize(("options", "dtype"), [({}, "float32"), ({"dtype": "bfloat16"}, "bfloat16")])
def test_the_dtype_that_was_computed_in_is_recorded(model: Path, options: dict[str, str], dtype: str) -> None:
    agent: Any = make_agent("lm", AgentSetup(env_id=ENV), model=str(model), device="cpu", **options)
    assert "dtype" not in agent.describe()
    assert agent.engine.dtype == dtype  # a small model is float32 unless asked for
    assert agent.describe()["dtype"] == dtype
    asyncio.run(agent.close())
    assert agent.describe()["dtype"] == dtype


def test_what_is_sampled_depends_on_the_seed_and_not_on_company(model: Path) -> None:
    def ids(episode: Episode) -> list[tuple[int, ...]]:
        return [turn.action_ids for turn in episode.turns]

    together, _ = play(model, count=3)
    alone, _ = play(model, count=1)
    assert ids(together[0]) == ids(alone[0])
    assert ids(together[0]) != ids(together[1])


def test_a_context_that_is_too_small_ends_the_episode_as_token_limit(model: Path) -> None:
    (episode,), totals = play(model, context_length=20)
    assert episode.outcome is Outcome.TOKEN_LIMIT
    assert episode.turns == ()
    assert totals["context_full"] == 1


def test_a_folder_without_weights_fails_the_episode_with_its_name(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (episode,), _ = play(tmp_path)
    assert episode.outcome is Outcome.ENGINE_ERROR
    assert episode.error is not None
    assert episode.error.message.startswith(f"The model in {tmp_path} cannot be loaded: ")


def rollout(model: Path, in_flight: int, workers: int) -> list[Any]:
    """What a scheduler makes of the model: everything in its episodes but the times."""

    async def run() -> list[Any]:
        agent: Any = make_agent("lm", AgentSetup(env_id=ENV), model=str(model), max_tokens=6, device="cpu")
        pool = LocalPool(workers=workers) if workers else InlinePool()
        tasks = text_interface(make(ENV)).tasks
        source = EnvSource(env_id=ENV, tasks=tasks, limits=Limits(turns=4, seconds=300))
        config = SchedulerConfig(max_in_flight=in_flight, groups=GroupPolicy(size=3))
        try:
            async with Scheduler(TaskSampler([source], seed=5), pool, agent, config) as scheduler:
                groups = await scheduler.take(6)
        finally:
            await agent.close()
            await pool.close()
        return [
            (episode.spec, episode.outcome, [replace(turn, seconds=Seconds()) for turn in episode.turns])
            for group in groups
            for episode in group.episodes
        ]

    return asyncio.run(run())


def test_the_same_seed_gives_the_same_episodes_with_1_and_8_in_flight(model: Path) -> None:
    alone = rollout(model, in_flight=1, workers=0)
    assert len(alone) == 18
    assert rollout(model, in_flight=8, workers=2) == alone
