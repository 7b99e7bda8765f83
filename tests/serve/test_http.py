"""The endpoint as OpenAI's clients see it, and as clients that mean it no good do."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from rollgym.core.errors import AgentError, UsageError
from rollgym.serve import ServeOptions
from rollgym.testing import ScriptedEngine

Serving = Callable[..., Any]
TEXT = "@ F F F\nF H F H"
GOOD = {"model": "policy", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}


def with_server(serving: Serving, work: Callable[[Any], Any], **options: Any) -> Any:
    async def run() -> Any:
        async with serving(**options) as place:
            return await work(place)

    return asyncio.run(run())


def events(text: str) -> list[Any]:
    """What a stream says."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_has_the_shape_that_clients_expect(serving: Serving) -> None:
    async def work(place: Any) -> None:
        answer = await place.ask([TEXT], logprobs=True)
        body = answer.json()
        (choice,) = body["choices"]
        (_, made), (request, _) = place.spy.made[0], place.spy.made[0]
        assert (body["object"], body["model"]) == ("chat.completion", "policy")
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == made.finish_reason
        assert body["usage"] == {
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(made.token_ids),
            "total_tokens": len(request.prompt_ids) + len(made.token_ids),
        }
        assert [token["logprob"] for token in choice["logprobs"]["content"]] == list(made.logprobs)
        assert answer.headers["x-rollgym-session"] in place.server.sessions.open
        assert (await place.http.get("/health")).json() == {"status": "ok"}
        (card,) = (await place.http.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("policy", 256)
        assert (await place.http.get("/session/x/v1/models/policy")).json()["id"] == "policy"

    with_server(serving, work)


def test_a_stream_says_what_a_whole_answer_says(serving: Serving) -> None:
    async def work(place: Any) -> None:
        plain = (await place.ask([TEXT], "plain", seed=5, max_tokens=40, logprobs=True)).json()
        asked = {"seed": 5, "max_tokens": 40, "logprobs": True, "stream": True}
        answer = await place.ask([TEXT], "stream", **asked, stream_options={"include_usage": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = events(answer.text)
        choices = [event["choices"][0] for event in told if event["choices"]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == plain["choices"][0]["message"]["content"]
        assert len(choices) > 3
        assert [choice["logprobs"] for choice in choices if choice["logprobs"]] == [
            plain["choices"][0]["logprobs"]
        ]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
            plain["choices"][0]["finish_reason"]
        ]
        assert told[-1]["usage"] == plain["usage"]
        one, two = (place.server.sessions.open[name].turns[0] for name in ("plain", "stream"))
        assert one.action_ids == two.action_ids

    with_server(serving, work)


ASKED = {"temperature": 0.0, "top_p": 0.1, "top_k": 1, "min_p": 0.5, "seed": 7}


def test_sampling_that_a_request_asks_for_is_used(serving: Serving) -> None:
    async def work(place: Any) -> None:
        answer = await place.ask([TEXT], "a", **ASKED)
        assert "x-rollgym-ignored" not in answer.headers
        used = place.spy.made[0][0].sampling
        assert {name: getattr(used, name) for name in ASKED} == ASKED

    with_server(serving, work)


def test_with_fixed_sampling_the_servers_own_is_used(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """Training data must come from the run's sampling distribution, and episodes of a group must differ."""

    async def work(place: Any) -> None:
        one, two, three = [await place.ask([TEXT], name, **ASKED, max_tokens=30) for name in "abc"]
        plain = await place.ask([TEXT], "d", temperature=0.7, top_p=1, top_k=0, min_p=0)
        used = [request.sampling for request, _ in place.spy.made]
        assert {(one.temperature, one.top_p, one.top_k, one.min_p) for one in used} == {(0.7, 1.0, 0, 0.0)}
        assert len({one.seed for one in used}) == 4
        assert len({one.json()["choices"][0]["message"]["content"] for one in (one, two, three)}) == 3
        assert one.headers["x-rollgym-ignored"] == "temperature, top_p, top_k, min_p, seed"
        assert "x-rollgym-ignored" not in plain.headers

    with_server(serving, work, temperature=0.7, fixed_sampling=True)
    said = [record.message for record in caplog.records if "ignored" in record.message]
    assert len(said) == 1
    assert said[0].startswith("Requests set temperature, top_p, top_k, min_p, seed, which is ignored:")


def test_fixed_sampling_needs_a_temperature() -> None:
    for cold in (None, 0.0):
        with pytest.raises(UsageError, match="fixed_sampling requires temperature above 0"):
            ServeOptions(fixed_sampling=True, temperature=cold)


def test_a_stop_text_ends_the_reply_and_what_was_sampled_up_to_it_is_kept(serving: Serving) -> None:
    async def work(place: Any) -> None:
        whole = await place.say([TEXT], "whole", seed=3, max_tokens=120)
        stop = whole[len(whole) // 2 :][:3]
        cut = await place.ask([TEXT], "cut", seed=3, max_tokens=120, stop=[stop, "never said"])
        text = cut.json()["choices"][0]["message"]["content"]
        assert text == whole[: whole.index(stop)]
        assert cut.json()["choices"][0]["finish_reason"] == "stop"
        full, short = (place.server.sessions.open[name].turns[0] for name in ("whole", "cut"))
        count = len(short.action_ids)
        assert short.action_ids == full.action_ids[:count]
        assert short.logprobs == full.logprobs[:count]
        assert stop in (short.response or "")
        decode = place.server.sessions.open["cut"]._context.template.codec.decode
        assert stop not in decode(short.action_ids[:-1], special=False)
        none = await place.say([TEXT], "none", seed=3, max_tokens=120, stop="never said")
        assert none == whole
        assert place.server.sessions.open["none"].turns[0].action_ids == full.action_ids
        await place.say([TEXT, text, TEXT], "cut")
        assert not place.server.sessions.open["cut"].turns[1].new_row

    with_server(serving, work)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "last message must have the role user or tool, not None"),
    ({"messages": "hello"}, "Expected `array`"),
    ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "answers a tool call"),
    ({"messages": [{"role": "clown", "content": "x"}]}, "has role 'clown'"),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "must have the role user or tool, not assistant",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is supported"),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
        "put it first",
    ),
    ({"n": 17}, "n must be from 1 to 16"),
    ({"n": 0}, "n must be from 1 to 16"),
    ({"temperature": -1}, "temperature must be from 0 to 2"),
    ({"temperature": "hot"}, "$.temperature"),
    ({"top_p": 0}, "top_p must be above 0"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"stop": [""]}, "empty text"),
    ({"stop": ["x"] * 17}, "at most 16"),
    ({"tools": [{"type": "function"}]}, "tools[0] must have the type function and a function"),
    ({"grammar": "x"}, "'grammar' is not a field that this endpoint knows"),
    ({"logit_bias": {"1": 2}}, "logit_bias is not supported"),
    ({"tool_choice": "required"}, "tool_choice needs tools"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"logprobs": True, "top_logprobs": 3}, "top_logprobs is not supported"),
    ({"messages": [{"role": "user", "content": "x " * 400}]}, "leaves no room for a reply"),
]


def test_a_bad_request_is_refused_with_a_sentence(serving: Serving) -> None:
    async def work(place: Any) -> None:
        for change, said in BAD:
            answer = await place.http.post("/v1/chat/completions", json=GOOD | change)
            assert answer.status_code == 400, change
            assert said in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert place.spy.made == []

    with_server(serving, work)


def test_other_refusals_have_their_status(serving: Serving) -> None:
    async def work(place: Any) -> None:
        post, get = place.http.post, place.http.get
        chat = "/v1/chat/completions"
        answers = {
            404: [
                await post(chat, json=GOOD | {"model": "gpt-4"}),
                await get("/v2/models"),
                await get("/v1/models/other"),
                await post("/session/missing/end", json={}),
                await get("/session/missing"),
            ],
            405: [await get(chat), await post("/v1/models", json={})],
            409: [await post("/session", json={"id": "twice"}), await post("/session", json={"id": "twice"})][
                1:
            ],
            413: [await post(chat, json=GOOD | {"user": "x" * 6000})],
            415: [await post(chat, content=json.dumps(GOOD), headers={"content-type": "text/plain"})],
            400: [
                await post("/session", json={"id": "../up"}),
                await post("/session", json={"task": -1}),
                await post("/session", json={"unknown": 1}),
                await post("/session/twice/reward", json={"reward": "much"}),
                await post(chat, json=GOOD, headers={"x-rollgym-session": "a b"}),
                await post(chat, json=GOOD, headers={"host": "evil.example"}),
                await post(chat, content=b"{", headers={"content-type": "application/json"}),
                await post(chat, content=b"\xff", headers={"content-type": "application/json"}),
                await post(chat, content=b"[" * 4000, headers={"content-type": "application/json"}),
            ],
        }
        for status, found in answers.items():
            assert [answer.status_code for answer in found] == [status] * len(found)
            for answer in found:
                assert answer.json()["error"]["message"].endswith((".", "?"))

    with_server(serving, work, max_body=5000)


def test_a_key_is_asked_for_where_there_is_one(serving: Serving) -> None:
    async def work(place: Any) -> None:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            answer = await place.http.post("/v1/chat/completions", json=GOOD, headers=header)
            assert answer.status_code == 401
        right = {"authorization": "Bearer secret"}
        assert (await place.http.post("/v1/chat/completions", json=GOOD, headers=right)).status_code == 200
        assert (await place.http.get("/health")).status_code == 200
        assert (await place.http.get("/v1/models")).status_code == 401

    with_server(serving, work, api_key="secret")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_other_addresses_than_ones_own_need_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="--api-key-env"):
        ServeOptions(host=host)
    assert ServeOptions(host=host, api_key="k").local is False


def test_too_many_at_once_are_refused_with_429(serving: Serving) -> None:
    async def work(place: Any) -> None:
        go = asyncio.Event()
        place.spy.before = go.wait
        waiting = [asyncio.create_task(place.ask([TEXT], name)) for name in ("a", "b")]
        while len(place.server.sessions.open) < 2:
            await asyncio.sleep(0.01)
        full = await place.ask([TEXT], "a")
        assert full.status_code == 429
        assert full.headers["retry-after"] == "1"
        go.set()
        assert [(await one).status_code for one in waiting] == [200, 200]
        assert (await place.ask([TEXT], "a")).status_code == 200
        assert (await place.ask([TEXT], "c")).status_code == 200
        crowded = await place.ask([TEXT], "d")
        assert (crowded.status_code, crowded.json()["error"]["type"]) == (429, "rate_limit_error")

    with_server(serving, work, max_requests=2, max_sessions=3)


def test_a_client_that_hangs_up_stops_its_reply_and_leaves_no_turn(serving: Serving) -> None:
    async def work(place: Any) -> None:
        begun, never = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            begun.set()
            await never.wait()

        place.spy.before = wait
        for stream in (False, True):
            begun.clear()
            asking = asyncio.create_task(place.ask([TEXT], "one", stream=stream))
            await begun.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            while place.spy.cancelled < 1 + stream:
                await asyncio.sleep(0.01)
        place.spy.before = None
        session = place.server.sessions.open["one"]
        assert session.turns == []
        await place.say([TEXT], "one")
        assert len(session.turns) == 1

    with_server(serving, work)


def test_an_engine_that_fails_is_a_503_and_a_bug_a_500_without_a_traceback(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(place: Any) -> None:
        async def fail() -> None:
            raise AgentError("The engine is away.")

        async def bug() -> None:
            raise KeyError("secret detail")

        place.spy.before = fail
        down = await place.ask([TEXT], "one")
        assert (down.status_code, down.json()["error"]["message"]) == (503, "The engine is away.")
        place.spy.before = bug
        broken = await place.ask([TEXT], "one")
        assert broken.status_code == 500
        assert "secret" not in broken.text
        assert "Traceback" not in broken.text
        place.spy.before = None
        assert (await place.ask([TEXT], "one")).status_code == 200

    with_server(serving, work)
    assert "secret detail" in caplog.text


def test_a_scripted_engine_serves_too(serving: Serving, tokenizer: Any) -> None:
    ids = tokenizer.encode("Down", add_special_tokens=False)

    async def work(place: Any) -> None:
        assert (await place.say([TEXT])).strip() == "Down"

    with_server(serving, work, inner=ScriptedEngine(lambda request: [*ids, request.sampling.stop_ids[0]]))
