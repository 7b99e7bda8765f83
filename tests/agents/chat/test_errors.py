"""The chat agent against an endpoint that misbehaves."""

import asyncio
import socket
from email.utils import formatdate
from typing import Any

import numpy as np
import pytest

from rollgym.agents.chat.endpoint import FIRST_WAIT, MAX_WAIT
from rollgym.agents.chat.openai_protocol import retry_after, server_message
from rollgym.core.errors import AgentError, UsageError
from rollgym.core.types import Usage
from rollgym.utils.retry import RetryPolicy

OVERFLOW = (400, {}, {"error": {"message": "too long", "code": "context_length_exceeded"}})


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 529])
def test_transient_errors_are_retried(endpoint: Any, play: Any, status: int) -> None:
    endpoint.answers = [(status, {}, {"error": "busy"})] * 2
    agent = endpoint.agent()
    (move,) = play(agent, "o1")
    assert move.action == "Up"
    assert agent.totals()["requests"] == 3
    assert agent.totals()["retries"] == 2
    assert 0.25 <= agent.waits[0] <= 0.5 <= agent.waits[1] <= 1.0


def test_the_waits_depend_on_the_seed_alone(endpoint: Any, play: Any) -> None:
    waits = []
    for seed in (1, 1, 2):
        endpoint.answers = [(500, {}, {})]
        agent = endpoint.agent()
        play(agent, "o1", sampling_seed=seed)
        waits.append(agent.waits)
    assert waits[0] == waits[1] != waits[2]


@pytest.mark.parametrize(("value", "wait"), [("0", 0.0), ("2.5", 2.5), ("86400", MAX_WAIT)])
def test_the_endpoint_may_say_how_long_to_wait(endpoint: Any, play: Any, value: str, wait: float) -> None:
    endpoint.answers = [(429, {"Retry-After": value}, {})]
    agent = endpoint.agent()
    play(agent, "o1")
    assert agent.waits == [wait]


def test_retry_after_as_a_date_or_nonsense() -> None:
    assert retry_after(formatdate(0, usegmt=True)) == 0.0
    assert (retry_after(formatdate(4e9, usegmt=True)) or 0) > 3000
    assert [retry_after(value) for value in (None, "", "soon", "nan", "inf")] == [None] * 5
    assert retry_after("-5") == 0.0


def test_waits_double_up_to_a_bound() -> None:
    rng = np.random.default_rng(0)
    policy = RetryPolicy(retries=0, first_wait=FIRST_WAIT, max_wait=MAX_WAIT)
    assert 1.0 <= policy.backoff(2, rng) <= 2.0
    assert 30.0 <= policy.backoff(10_000, rng) <= 60.0


def test_persistent_errors_end_the_episode(endpoint: Any, play: Any) -> None:
    endpoint.answers = [(500, {}, {"error": {"message": "out of\nmemory."}})] * 3
    agent = endpoint.agent(retries=2)
    with pytest.raises(AgentError, match=r"^The endpoint answered 500: out of memory \(3 attempts\)\.$"):
        play(agent, "o1")
    assert len(endpoint.bodies) == 3
    assert len(agent.waits) == 2


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422])
def test_final_errors_are_not_retried(endpoint: Any, play: Any, status: int) -> None:
    endpoint.answers = [(status, {"Location": endpoint.url}, {"error": {"message": "no such model"}})]
    with pytest.raises(AgentError, match=rf"^The endpoint answered {status}: no such model\.$"):
        play(endpoint.agent(), "o1")
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"<html>hello</html>", "is not a JSON object"),
        (b"\xff\xfe\x00", "is not a JSON object"),
        (b"", "is not a JSON object"),
        (b"[" * 100_000, "is not a JSON object"),
        ([1], "is not a JSON object"),
        ({}, "holds no choices"),
        ({"choices": []}, "holds no choices"),
        ({"choices": [None]}, "holds no choices"),
        ({"choices": [{"message": "text"}]}, "holds no choices"),
        ({"error": {"message": "overloaded"}}, "holds no choices: overloaded"),
        ({"choices": [{"message": {"content": None}}]}, "no text .content is NoneType"),
        ({"choices": [{"message": {"content": 5}, "finish_reason": 3}]}, "no text .content is int"),
    ],
)
def test_malformed_responses_are_retried_and_then_reported(
    endpoint: Any, play: Any, body: Any, sentence: str
) -> None:
    endpoint.answers = [body]
    assert play(endpoint.agent(), "o1")[0].action == "Up"
    endpoint.answers = [body] * 2
    with pytest.raises(AgentError, match=sentence + r".*\(2 attempts\)\.$"):
        play(endpoint.agent(retries=1), "o1")


def test_odd_fields_beside_a_good_reply_do_no_harm(endpoint: Any, answer: Any, play: Any) -> None:
    odd = answer()
    odd["choices"][0]["finish_reason"] = ["stop"]
    endpoint.answers = [odd | {"usage": wrong} for wrong in (None, [], {"prompt_tokens": "7"}, -1)]
    endpoint.answers += [odd | {"usage": {"prompt_tokens": -7}}, odd | {"usage": {"prompt_tokens": True}}]
    agent = endpoint.agent()
    for move in play(agent, *"abcdef"):
        assert (move.action, move.finish_reason, move.usage) == ("Up", None, None)
    assert agent.totals()["prompt_tokens"] == 0


def test_failed_attempts_count_towards_usage(endpoint: Any, answer: Any, play: Any) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 1}
    endpoint.answers = [answer(None, usage), answer("<answer>Up</answer>", usage)]
    agent = endpoint.agent()
    (move,) = play(agent, "o1")
    assert move.usage == Usage(prompt_tokens=20, completion_tokens=2)
    assert agent.totals()["prompt_tokens"] == 20


def test_a_slow_endpoint_times_out(endpoint: Any, play: Any) -> None:
    endpoint.delay = 0.3
    with pytest.raises(AgentError, match=r"did not answer within 0\.05 seconds \(2 attempts\)"):
        play(endpoint.agent(timeout=0.05, retries=1), "o1")


def test_an_unreachable_endpoint_is_reported(endpoint: Any, play: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(AgentError, match=rf"The endpoint {url} cannot be reached: .* \(2 attempts\)"):
            play(endpoint.agent(base_url=url, retries=1), "o1")


def test_a_cancelled_move_ends_at_once(endpoint: Any) -> None:
    endpoint.delay = 0.2
    agent = endpoint.agent()

    async def run() -> None:
        request = {"model": "m", "messages": []}
        asking = asyncio.create_task(agent.endpoint.complete(request, np.random.default_rng(0)))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await agent.close()

    asyncio.run(run())
    assert agent.totals()["retries"] == 0


def texts(body: dict[str, Any]) -> list[str]:
    return [m["content"] for m in body["messages"] if m["role"] == "user"]


def test_a_full_context_drops_the_older_half_of_the_turns(endpoint: Any, answer: Any, play: Any) -> None:
    endpoint.answers = [answer("r")] * 4 + [OVERFLOW, OVERFLOW, answer("r"), answer("r")]
    agent = endpoint.agent()
    play(agent, "o1", "o2", "o3", "o4", "o5", "o6")
    sent = [texts(body) for body in endpoint.bodies[4:]]
    assert sent == [["o1", "o2", "o3", "o4", "o5"], ["o3", "o4", "o5"], ["o4", "o5"], ["o4", "o5", "o6"]]
    assert all(body["messages"][0]["role"] == "system" for body in endpoint.bodies)
    assert agent.totals()["dropped_turns"] == 3
    assert agent.totals()["retries"] == 0


@pytest.mark.parametrize(
    "error",
    [
        OVERFLOW,
        (
            400,
            {},
            {
                "object": "error",
                "message": "This model's maximum context length is 4096 tokens.",
                "code": 400,
            },
        ),
        (400, {}, {"error": {"type": "exceed_context_size_error", "message": "the request is too big"}}),
        (422, {}, {"detail": "The input is longer than the model's context length (512 tokens)"}),
        (413, {}, b"payload too large"),
    ],
)
def test_a_context_that_one_observation_fills_is_an_error(endpoint: Any, play: Any, error: Any) -> None:
    endpoint.answers = [error]
    with pytest.raises(AgentError, match="does not fit the model's context, with no earlier turns"):
        play(endpoint.agent(), "o1")
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "a\nb"}}, "a b"),
        ({"error": "plain"}, "plain"),
        ([{"error": {"message": "in a list"}}], "in a list"),
        ({"detail": [{"msg": "field required"}]}, "field required"),
        ({"other": 1}, ""),
        ("a \x1b[31mred\x00 page", "a ?[31mred? page"),
        (None, ""),
        (7, ""),
        ("x" * 500, "x" * 199 + "…"),
    ],
)
def test_server_messages_are_put_on_one_line(body: Any, message: str) -> None:
    assert server_message(body) == message


def test_a_model_name_is_required(endpoint: Any) -> None:
    with pytest.raises(UsageError, match="model=NAME"):
        endpoint.agent(model="")
