"""The chat agent against an endpoint that behaves."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from rollgym.core.agent import Briefing
from rollgym.core.types import EpisodeSpec, Usage


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_a_move_holds_the_action_the_reply_and_the_usage(endpoint: Any, answer: Any, play: Any) -> None:
    usage = {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1050}
    endpoint.answers = [answer("I go up. <answer>Up</answer>", usage)]
    agent = endpoint.agent(price_in=2, price_out=10.0)
    (move,) = play(agent, "a map")
    assert move.action == "Up"
    assert move.response == "I go up. <answer>Up</answer>"
    assert move.finish_reason == "stop"
    assert move.usage == Usage(prompt_tokens=1000, completion_tokens=50, cost=0.0025)
    assert agent.totals() == {
        "requests": 1,
        "retries": 0,
        "prompt_tokens": 1000,
        "completion_tokens": 50,
        "cost": 0.0025,
        "format_misses": 0,
        "dropped_turns": 0,
    }


def test_the_request_holds_what_was_asked_for(endpoint: Any, play: Any) -> None:
    agent = endpoint.agent(
        model=4.1, temperature=0, top_p=0.5, max_tokens=64, extra_body={"top_k": 20, "chat": {"x": [1]}}
    )
    play(agent, "a map", sampling_seed=77)
    (body,) = endpoint.bodies
    system, user = body.pop("messages")
    assert body == {
        "model": "4.1",
        "temperature": 0,
        "top_p": 0.5,
        "max_tokens": 64,
        "seed": 77,
        "top_k": 20,
        "chat": {"x": [1]},
    }
    assert system["role"] == "system"
    assert system["content"].startswith("Walk to the goal.")
    assert "<answer>" in system["content"]
    assert user == {"role": "user", "content": "a map"}
    assert endpoint.paths == ["/v1/chat/completions"]


def test_nothing_is_sent_that_was_not_asked_for(endpoint: Any, play: Any) -> None:
    play(endpoint.agent(seed=False), "a map")
    assert set(endpoint.bodies[0]) == {"model", "messages"}
    play(endpoint.agent(seed=5), "a map")
    assert endpoint.bodies[1]["seed"] == 5


@pytest.mark.parametrize(
    ("history", "sent"),
    [
        ("full", ["o1", "r1", "o2", "r2", "o3", "r3", "o4"]),
        ("last:2", ["o2", "r2", "o3", "r3", "o4"]),
        ("none", ["o4"]),
    ],
)
def test_history(endpoint: Any, answer: Any, play: Any, history: str, sent: list[str]) -> None:
    endpoint.answers = [answer(text) for text in ("r1", "r2", "r3", "r4")]
    play(endpoint.agent(history=history), "o1", "o2", "o3", "o4")
    assert contents(endpoint.bodies[-1])[1:] == sent


def test_without_a_system_message_the_instructions_lead(endpoint: Any, play: Any) -> None:
    play(endpoint.agent(system=False, history="last:1", parser="raw"), "o1", "o2", "o3")
    assert [message["role"] for message in endpoint.bodies[-1]["messages"]] == ["user", "assistant", "user"]
    assert contents(endpoint.bodies[-1])[0].startswith("Walk to the goal.")
    assert contents(endpoint.bodies[-1])[0].endswith("\n\no2")


def test_a_template_and_a_parser_can_be_chosen(endpoint: Any, answer: Any, play: Any, tmp_path: Any) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("MINE {instructions} {format}")
    endpoint.answers = [answer(r"thus \boxed{Left}")]
    (move,) = play(endpoint.agent(template=str(path), parser="boxed"), "o1")
    assert move.action == "Left"
    assert contents(endpoint.bodies[0])[0].startswith("MINE Walk to the goal. Give your action in \\boxed{}")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("policy", "sent"),
    [("strip", "<answer>Up</answer>"), ("keep", "<think>\nhm\n</think>\n\n<answer>Up</answer>")],
)
def test_reasoning_in_its_own_field(
    endpoint: Any, answer: Any, play: Any, policy: str, sent: str, field: str
) -> None:
    endpoint.answers = [answer("<answer>Up</answer>", **{field: "hm"})]
    first, _ = play(endpoint.agent(reasoning=policy), "o1", "o2")
    assert first.action == "Up"
    assert first.response == "<think>\nhm\n</think>\n\n<answer>Up</answer>"
    assert contents(endpoint.bodies[1])[2] == sent


def test_reasoning_in_the_text_is_kept_or_stripped(endpoint: Any, answer: Any, play: Any) -> None:
    reply = "<think>or <answer>Down</answer>?</think><answer>Up</answer>"
    for policy, sent in (("keep", reply), ("strip", "<answer>Up</answer>")):
        endpoint.answers = [answer(reply)]
        assert play(endpoint.agent(reasoning=policy), "o1", "o2")[0].action == "Up"
        assert contents(endpoint.bodies[-1])[2] == sent


def test_a_reply_in_no_form_is_the_action_and_is_counted(endpoint: Any, answer: Any, play: Any) -> None:
    endpoint.answers = [answer("<think>hm</think> go up "), answer("")]
    agent = endpoint.agent()
    moves = play(agent, "o1", "o2", "o3")
    assert [move.action for move in moves] == ["go up", "", "Up"]
    assert agent.totals()["format_misses"] == 2


def test_a_model_that_thinks_until_it_is_cut_off_made_an_empty_move(
    endpoint: Any, answer: Any, play: Any
) -> None:
    cut = answer(None, reasoning_content="so many ways")
    cut["choices"][0]["finish_reason"] = "length"
    silent = answer(None)
    silent["choices"][0]["finish_reason"] = "length"
    endpoint.answers = [cut, silent, answer(None, refusal="I will not.")]
    agent = endpoint.agent()
    moves = play(agent, "o1", "o2", "o3")
    assert [move.action for move in moves] == ["", "", "I will not."]
    assert moves[0].finish_reason == "length"
    assert agent.totals()["format_misses"] == 3
    assert agent.totals()["retries"] == 0


def test_text_that_utf8_cannot_hold_goes_both_ways(endpoint: Any, answer: Any, play: Any) -> None:
    endpoint.answers = [answer("<answer>\ud800 ü</answer>")]
    (move,) = play(endpoint.agent(), "a \udfff map")
    move.action.encode()
    assert move.action.endswith("ü")
    assert contents(endpoint.bodies[0])[1].endswith(" map")


def test_very_long_actions_are_cut_to_what_an_environment_takes(
    endpoint: Any, answer: Any, play: Any
) -> None:
    endpoint.answers = [answer("x" * 100_000)]
    (move,) = play(endpoint.agent(parser="raw"), "o1")
    assert len(move.action) == 32_768
    assert move.response is not None
    assert len(move.response) == 100_000


def test_many_episodes_at_once_keep_to_themselves(endpoint: Any) -> None:
    agent = endpoint.agent()

    async def one(number: int) -> None:
        spec = EpisodeSpec(episode_id=f"e{number}", env_id="test/Env-v0", sampling_seed=number)
        player = agent.player(Briefing(spec=spec, instructions=""))
        for turn in range(3):
            await player.act(f"{number}/{turn}", {})

    async def run() -> None:
        await asyncio.gather(*(one(number) for number in range(20)))
        await agent.close()

    asyncio.run(run())
    assert agent.totals()["requests"] == len(endpoint.bodies) == 60
    for body in endpoint.bodies:
        seen = [text for text in contents(body)[1:] if "/" in text and "<" not in text]
        assert {text.split("/")[0] for text in seen} == {str(body["seed"])}


def test_all_players_share_the_rate_limit(endpoint: Any, play: Any) -> None:
    agent = endpoint.agent(requests_per_minute=60, tokens_per_minute=100_000)
    waits = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    agent.endpoint._request_limit._clock = lambda: 0.0
    agent.endpoint._request_limit._sleep = note
    agent.endpoint._token_limit._sleep = note
    play(agent, "o1", "o2", "o3", "o4")
    assert waits[:2] == [1, 2]


def test_tokens_are_paid_as_the_endpoint_counts_them(endpoint: Any, answer: Any, play: Any) -> None:
    endpoint.answers = [answer(usage={"prompt_tokens": 500, "completion_tokens": 100})]
    agent = endpoint.agent(tokens_per_minute=60)
    agent.endpoint._token_limit._clock = lambda: 0.0
    play(agent, "o1")
    # One token a second, and a second's burst: 600 tokens are paid for at second 599.
    assert agent.endpoint._token_limit._refilled_at == pytest.approx(599)


def test_importing_the_package_and_the_agent_loads_no_http_client() -> None:
    code = "import sys, rollgym, rollgym.agents.chat.agent; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
