"""The chat agent in environments with tools: native calls of the endpoint, or prompted ones."""

import asyncio
import json
from typing import Any

import pytest
from tool_envs import Safe

from rollgym.core.errors import AgentError, UsageError
from rollgym.core.types import EpisodeSpec, Limits
from rollgym.pool.inline import InlinePool
from rollgym.rollout.episode_runner import EpisodeRunner


def call(name: str, identifier: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": text}}


def run(agent: Any, turns: int = 9) -> Any:
    async def play() -> Any:
        pool = InlinePool(["tool_envs"])
        try:
            spec = EpisodeSpec(episode_id="e", env_id="tool_envs:Safe", task=1, limits=Limits(turns=turns))
            return await EpisodeRunner(spec, pool, agent).run()
        finally:
            await pool.close()
            await agent.close()

    return asyncio.run(play())


def test_native_calls(endpoint: Any, answer: Any) -> None:
    two = [call("turn", "a1", {"direction": "right"}), call("turn", "a2", {"direction": "left"})]
    endpoint.answers = [answer(None, tool_calls=two), answer("Now.", tool_calls=[call("pull", "b", "")])]
    episode = run(endpoint.agent())
    assert episode.error is None
    assert [turn.info["valid"] for turn in episode.turns] == [True, True]
    first, second = endpoint.bodies
    assert first["tools"] == [spec.to_openai() for spec in Safe().tools]
    assert "Act by calling the tools" in first["messages"][0]["content"]
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "", "tool_calls": two},
        {"role": "tool", "content": "The dial shows 1.", "tool_call_id": "a1", "name": "turn"},
        {"role": "tool", "content": "The dial shows 0.", "tool_call_id": "a2", "name": "turn"},
    ]
    assert [c["function"]["name"] for c in episode.turns[0].message["tool_calls"]] == ["turn", "turn"]
    assert episode.turns[1].message["content"] == "Now."


def test_malformed_arguments_cost_a_turn(endpoint: Any, answer: Any) -> None:
    broken = [call("turn", "a", "{direction")]
    endpoint.answers = [answer(None, tool_calls=broken), answer(None, tool_calls=[call("pull", "b", {})])]
    agent = endpoint.agent()
    episode = run(agent)
    assert [turn.info["valid"] for turn in episode.turns] == [False, True]
    assert agent.totals()["format_misses"] == 1
    note = endpoint.bodies[1]["messages"][-1]
    assert note["role"] == "user"
    assert note["content"].startswith(
        "The tool call is malformed: the arguments of a tool call must be JSON."
    )
    assert "No valid tool call" in note["content"]


def test_arguments_that_break_the_schema_are_answered_as_results(endpoint: Any, answer: Any) -> None:
    wrong = [call("turn", "a", {"direction": "up"})]
    endpoint.answers = [answer(None, tool_calls=wrong), answer(None, tool_calls=[call("pull", "b", {})])]
    episode = run(endpoint.agent())
    assert [turn.info["valid"] for turn in episode.turns] == [False, True]
    result = endpoint.bodies[1]["messages"][-1]
    assert (result["role"], result["tool_call_id"]) == ("tool", "a")
    assert "Input should be 'left' or 'right'" in result["content"]


PULL = '```json\n{"name": "pull", "arguments": {}}\n```'
TURN = '```json\n{"name": "turn", "arguments": {"direction": "right"}}\n```'


def test_prompted_calls(endpoint: Any, answer: Any) -> None:
    endpoint.answers = [answer(f"<think>hm</think>First.\n{TURN}"), answer("What?"), answer(PULL)]
    episode = run(endpoint.agent(tools="prompted"))
    assert episode.error is None
    assert [turn.info["valid"] for turn in episode.turns] == [True, False, True]
    assert all("tools" not in body for body in endpoint.bodies)
    assert '"name": "turn", "description": "Turn the dial."' in endpoint.bodies[0]["messages"][0]["content"]
    messages = endpoint.bodies[1]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == f"First.\n{TURN}"
    assert messages[3]["content"] == "The dial shows 1."
    assert episode.turns[0].message["reasoning_content"] == "hm"


def test_an_endpoint_that_refuses_tools_is_prompted(endpoint: Any, answer: Any) -> None:
    refusal = (400, {}, {"error": {"message": "'tools' is not supported by this model"}})
    endpoint.answers = [refusal, answer(TURN), answer(PULL)]
    agent = endpoint.agent()
    episode = run(agent)
    assert episode.error is None
    assert ["tools" in body for body in endpoint.bodies] == [True, False, False]
    assert agent.native_tools is False


def test_a_refusal_is_an_error_where_native_calls_were_asked_for(endpoint: Any) -> None:
    endpoint.answers = [(400, {}, {"error": {"message": "tools are not supported"}})]
    episode = run(endpoint.agent(tools="native"))
    assert episode.error is not None
    assert "tools are not supported" in episode.error.message


def test_dropped_turns_leave_no_result_without_its_call(endpoint: Any, answer: Any) -> None:
    turn = [answer(None, tool_calls=[call("turn", "a", {"direction": "right"})])]
    endpoint.answers = turn * 3 + [answer(None, tool_calls=[call("pull", "b", {})])]
    episode = run(endpoint.agent(history="last:2"))
    assert episode.error is None
    messages = endpoint.bodies[-1]["messages"]
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert messages[1]["content"] == "The dial shows 1."


def test_options_are_checked(endpoint: Any) -> None:
    with pytest.raises(UsageError, match="tools must be auto, native or prompted, not 'yes'"):
        endpoint.agent(tools="yes")
    with pytest.raises((UsageError, AgentError), match="extra_body must not hold 'tools'"):
        endpoint.agent(extra_body={"tools": []})
