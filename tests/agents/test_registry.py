import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollgym.core import agent as registry
from rollgym.core.agent import (
    Agent,
    AgentAction,
    AgentSetup,
    Briefing,
    FunctionAgent,
    as_agent,
    list_agents,
    make_agent,
    register_agent,
)
from rollgym.core.errors import AgentError, UnknownName, UsageError
from rollgym.core.types import EpisodeSpec

SETUP = AgentSetup(env_id="test/Env-v0")

MODULE = """
from rollgym.core.agent import AgentAction, SoloAgent

NUMBER = 5

def up(observation, info):
    return "Up " + observation

async def later(observation, info):
    return AgentAction(action="Later", response="whole reply")

class Counter(SoloAgent):
    def __init__(self, setup, start_at=0):
        super().__init__(setup)
        self.start_at = start_at

    def start(self, briefing):
        self.count = self.start_at

    def choose(self, observation, info):
        self.count += 1
        return str(self.count)

class Lazy(SoloAgent):
    pass

class NoAgent:
    def __init__(self, setup):
        pass

class Broken(SoloAgent):
    def __init__(self, setup):
        raise OSError("no disk")

def anything(setup, **options):
    return Counter(setup, **options)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_test_agents.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.load_agents()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    yield "my_test_agents"
    sys.modules.pop("my_test_agents", None)


def test_the_built_in_agents_are_registered() -> None:
    names = [card.name for card in list_agents()]
    assert names == sorted(names)
    assert {"random", "expert", "human", "scripted", "chat"} <= set(names)
    assert all(card.summary for card in list_agents())


def test_an_unknown_agent_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="no agent called 'randon'. Did you mean random"):
        make_agent("randon", SETUP)


def test_an_unknown_option_names_the_agent() -> None:
    with pytest.raises(UnknownName, match="no option of agent 'scripted' called 'pth'. Did you mean path"):
        make_agent("scripted", SETUP, pth="x")


def test_a_function_is_an_agent(module: str, play: Any) -> None:
    agent = make_agent(f"{module}:up", SETUP)
    assert isinstance(agent, FunctionAgent)
    assert [move.action for move in play(agent, "a", "b")] == ["Up a", "Up b"]


def test_an_async_function_is_an_agent(module: str, play: Any) -> None:
    assert play(make_agent(f"{module}:later", SETUP), "a") == [
        AgentAction(action="Later", response="whole reply")
    ]


def test_a_class_is_an_agent_with_options(module: str, play: Any) -> None:
    agent = make_agent(f"{module}:Counter", SETUP, start_at=4)
    assert [move.action for move in play(agent, "a", "b")] == ["5", "6"]
    assert [move.action for move in play(agent, "a")] == ["5"]


def test_players_of_one_agent_share_no_state(module: str) -> None:
    agent: Any = make_agent(f"{module}:Counter", SETUP)
    briefing = Briefing(spec=EpisodeSpec(episode_id="e", env_id="test/Env-v0"), instructions="")
    first, second = agent.player(briefing), agent.player(briefing)

    async def both() -> list[str]:
        return [await player.act("", {}) for player in (first, first, second)]

    assert asyncio.run(both()) == ["1", "2", "1"]


def test_a_factory_may_take_any_option(module: str, play: Any) -> None:
    agent = make_agent(f"{module}:anything", SETUP, start_at=9)
    assert play(agent, "a")[0].action == "10"


def test_a_registered_name_works_like_the_path(module: str, play: Any) -> None:
    register_agent("counter", f"{module}:Counter", summary="counts")
    assert play(make_agent("counter", SETUP), "a")[0].action == "1"
    with pytest.raises(
        UnknownName, match="no option of agent 'counter' called 'start'. Did you mean start_at"
    ):
        make_agent("counter", SETUP, start=1)


def test_a_class_that_is_not_an_agent_is_rejected(module: str) -> None:
    with pytest.raises(UsageError, match="makes a NoAgent, which is not an agent: it needs player"):
        make_agent(f"{module}:NoAgent", SETUP)


def test_what_cannot_be_found_is_named(module: str) -> None:
    with pytest.raises(UnknownName, match="Did you mean Counter"):
        make_agent(f"{module}:Countr", SETUP)
    with pytest.raises(UsageError, match="agent no_such_module_here: no such module on the Python path"):
        make_agent("no_such_module_here:Agent", SETUP)


def test_a_factory_that_fails_is_named(module: str) -> None:
    with pytest.raises(AgentError, match="cannot be made: OSError: no disk"):
        make_agent(f"{module}:Broken", SETUP)


def test_an_agent_without_choose_says_so(module: str, play: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"Lazy must define choose"):
        play(make_agent(f"{module}:Lazy", SETUP), "a")


def test_an_agent_with_only_the_required_methods_gets_the_defaults() -> None:
    class Player:
        async def act(self, observation: str, info: Any) -> str:
            return "Up"

    class Minimal:
        def player(self, briefing: Any) -> Player:
            return Player()

        async def close(self) -> None:
            pass

    for agent in (as_agent(Minimal()), make_agent(Minimal(), SETUP)):
        assert isinstance(agent, Agent)
        assert (agent.describe(), agent.totals(), agent.default_concurrency, list(agent.notes)) == (
            {},
            {},
            1,
            [],
        )
        player: Any = agent.player(None)  # type: ignore[arg-type]
        assert asyncio.run(player.leave()) is None
        assert player.final_prompt("o") == ((), False)
        assert asyncio.run(player.act("o", {})) == "Up"


def test_optional_methods_of_an_agent_and_its_player_are_used() -> None:
    left = []

    class Player:
        async def act(self, observation: str, info: Any) -> str:
            return "Up"

        async def leave(self) -> None:
            left.append(1)

    class Partial:
        default_concurrency = 7

        def player(self, briefing: Any) -> Player:
            return Player()

        async def close(self) -> None:
            pass

        def describe(self) -> dict[str, Any]:
            return {"agent": "partial"}

    agent = make_agent(Partial(), SETUP)
    assert (agent.describe(), agent.totals(), agent.default_concurrency) == ({"agent": "partial"}, {}, 7)
    asyncio.run(agent.player(None).leave())  # type: ignore[arg-type]
    assert left == [1]
