import asyncio
import io
import os
from typing import Any

import pytest

from rollgym.core.agent import AgentSetup, Briefing, make_agent
from rollgym.core.errors import AgentError, UsageError
from rollgym.core.types import EpisodeSpec

SETUP = AgentSetup(env_id="test/Env-v0")


def seat(typed: str) -> tuple[Any, io.StringIO]:
    output = io.StringIO()
    return make_agent("human", SETUP, input=io.StringIO(typed), output=output), output


def test_the_player_sees_the_state_and_types_an_action(play: Any) -> None:
    agent, output = seat("Up\n  Down \n")
    moves = play(agent, "first", "second", info={"actions": ["Up", "Down"]})
    assert [move.action for move in moves] == ["Up", "Down"]
    text = output.getvalue()
    assert text.count("Walk to the goal.") == 1
    assert text.index("Walk to the goal.") < text.index("first") < text.index("second")
    assert text.count("Actions: Up, Down\n> ") == 2


def test_without_a_list_of_actions_none_is_shown(play: Any) -> None:
    agent, output = seat("Up\n")
    play(agent, "first")
    assert "Actions" not in output.getvalue()


def test_a_blank_line_asks_again(play: Any) -> None:
    agent, output = seat("\n  \nUp\n")
    assert play(agent, "first")[0].action == "Up"
    assert output.getvalue().endswith("> > > ")


@pytest.mark.parametrize("typed", ["", "quit\n", " QUIT \n", "\n"])
def test_the_player_can_leave(play: Any, typed: str) -> None:
    agent, _ = seat(typed)
    with pytest.raises(AgentError, match="^the player left$"):
        play(agent, "first")


def test_the_loop_goes_on_while_the_player_thinks() -> None:
    read_end, write_end = os.pipe()
    ticks = 0

    async def run(stream: Any) -> str:
        nonlocal ticks
        agent: Any = make_agent("human", SETUP, input=stream, output=io.StringIO())
        spec = EpisodeSpec(episode_id="e1", env_id="test/Env-v0")
        player = agent.player(Briefing(spec=spec, instructions=""))
        move = asyncio.create_task(player.act("first", {}))
        for _ in range(5):
            await asyncio.sleep(0.001)
            ticks += 1
        assert not move.done()
        os.write(write_end, "Süd\nnext line\n".encode())
        first: str = await move
        return first + "|" + str(await player.act("second", {}))

    with open(read_end, encoding="utf-8") as stream:
        assert asyncio.run(run(stream)) == "Süd|next line"
    os.close(write_end)
    assert ticks == 5


def test_input_must_be_a_stream() -> None:
    with pytest.raises(UsageError, match="input must be an open text stream, not 'keys'"):
        make_agent("human", SETUP, input="keys")
