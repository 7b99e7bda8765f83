"""The demonstrations of shipped configs for language models, which only slow runs train on."""

import asyncio

import pytest

pytest.importorskip("torch")

from rollgym.config.loader import load
from rollgym.core.errors import RollgymError
from rollgym.pool.inline import InlinePool
from rollgym.sandbox.namespaces import open_namespaces
from rollgym.sandbox.types import SandboxSettings
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.config_files import find_config
from rollgym.trainer.imitation.warm_start import Demonstration, play

SHIPPED = ("frozen-lake", "guess", "sokoban", "countdown", "terminal", "webshop")


@pytest.mark.parametrize("name", [f"smollm-{name}" for name in SHIPPED])
def test_most_demonstrations_succeed_and_their_replies_are_short(name: str) -> None:
    if name == "smollm-terminal":
        try:
            open_namespaces(SandboxSettings()).close()
        except RollgymError as error:
            pytest.skip(f"the namespaces sandbox does not work here: {error}")
    config = load(TrainConfig, find_config(name))
    assert config.warm_start is not None
    settings = config.warm_start.model_copy(update={"episodes": 20})

    async def main() -> list[Demonstration]:
        pool = InlinePool()
        try:
            return await play(settings, config, pool)
        finally:
            await pool.close()

    episodes = [demo.episode for demo in asyncio.run(main())]
    assert len(episodes) == 20
    assert not any(episode.outcome.failed for episode in episodes)
    assert sum(bool(episode.success) for episode in episodes) > 10
    actions = [turn.action for episode in episodes for turn in episode.turns]
    assert max(map(len, actions)) <= 6 * config.agent.max_tokens, "about four letters per token"
