"""API keys that name a session, and the reward call that they identify."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from rollgym.serve.keys import session_key
from rollgym.testing import ScriptedEngine

Serving = Callable[..., Any]
TEXT = "@ F F F\nF H F H"
BODY = {"model": "policy", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}


def with_server(serving: Serving, work: Callable[[Any], Any], **options: Any) -> list[Any]:
    async def run() -> list[Any]:
        async with serving(**options) as place:
            finished = place.server.episodes()
            await work(place)
        return [episode async for episode in finished]

    return asyncio.run(run())


@pytest.mark.parametrize("server_key", [None, "secret"])
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_a_key_names_the_session_in_every_dialect(
    serving: Serving, server_key: str | None, header: str
) -> None:
    def headers(name: str) -> dict[str, str]:
        key = session_key(name, server_key)
        return {header: f"Bearer {key}" if header == "authorization" else key}

    async def work(place: Any) -> None:
        post = place.http.post
        for name in ("one", "two"):
            chat = await post("/v1/chat/completions", json=BODY, headers=headers(name))
            body = {"model": "policy", "input": TEXT, "max_output_tokens": 4}
            responses = await post("/v1/responses", json=body, headers=headers(name))
            messages = await post("/v1/messages", json=BODY, headers=headers(name))
            assert [answer.headers["x-rollgym-session"] for answer in (chat, responses, messages)] == [
                name
            ] * 3
        rewarded = await post("/rl/reward", json={"reward": 0.5}, headers=headers("one"))
        assert rewarded.json() == {"id": "one", "open": True, "turns": 3, "reward": 0.5, "success": None}
        done = await post(
            "/rl/reward", json={"reward": 1, "success": True, "done": True}, headers=headers("one")
        )
        assert done.json()["outcome"] == "terminated"
        again = await post("/rl/reward", json={"reward": 1}, headers=headers("one"))
        assert again.status_code == 410

    one, two = with_server(serving, work, api_key=server_key)
    assert (one.spec.episode_id, one.total_reward, one.success, one.length) == ("one", 1.5, True, 3)
    assert (two.spec.episode_id, two.total_reward, two.length) == ("two", 0.0, 3)


def test_a_session_key_is_for_its_session_only(serving: Serving) -> None:
    async def work(place: Any) -> None:
        post, admin = place.http.post, {"authorization": "Bearer secret"}
        opened = (await post("/session", json={"id": "mine"}, headers=admin)).json()
        assert opened["api_key"] == session_key("mine", "secret")
        await post("/session", json={"id": "other"}, headers=admin)
        mine = {"authorization": f"Bearer {opened['api_key']}"}
        chat = "v1/chat/completions"
        assert (await post(f"/{chat}", json=BODY, headers=mine)).status_code == 200
        assert (await post(f"/session/mine/{chat}", json=BODY, headers=mine)).status_code == 200
        assert (await place.http.get("/v1/models", headers=mine)).status_code == 200
        refused = [
            await post(f"/session/other/{chat}", json=BODY, headers=mine),
            await post(f"/{chat}", json=BODY, headers=mine | {"x-rollgym-session": "other"}),
            await post("/session/other/reward", json={"reward": 9}, headers=mine),
            await post("/session/other/end", json={}, headers=mine),
            await place.http.get("/session/other", headers=mine),
            await post("/session", json={"id": "third"}, headers=mine),
        ]
        assert [answer.status_code for answer in refused] == [403] * len(refused)
        forged = ["session/other", "session/other/", f"session/other/{opened['api_key'][-32:]}", "session/"]
        for key in forged:
            answer = await post(f"/{chat}", json=BODY, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code in (400, 401), key
        assert place.server.sessions.open["other"].turns == []
        assert sorted(place.server.sessions.open) == ["mine", "other"]

    with_server(serving, work, api_key="secret")


def test_a_reward_without_a_session_is_refused(serving: Serving) -> None:
    async def work(place: Any) -> None:
        answer = await place.http.post("/rl/reward", json={"reward": 1})
        assert answer.status_code == 400
        assert "names no session" in answer.json()["error"]["message"]
        missing = {"authorization": "Bearer session/nobody"}
        assert (await place.http.post("/rl/reward", json={"reward": 1}, headers=missing)).status_code == 404

    with_server(serving, work)


AUX = {"role": "user", "content": "Please write a title for this conversation."}


def test_auxiliary_calls_are_answered_and_not_recorded(serving: Serving) -> None:
    async def work(place: Any) -> None:
        first = await place.say([TEXT], "one")
        title = await place.ask([AUX], "one")
        assert title.status_code == 200
        assert title.headers["x-rollgym-recorded"] == "false"
        system = {"role": "system", "content": "You write a title."}
        summary = await place.ask([system, {"role": "user", "content": TEXT}], "one")
        assert summary.headers["x-rollgym-recorded"] == "false"
        short = await place.ask([TEXT], "one", max_tokens=1)
        assert short.headers["x-rollgym-recorded"] == "false"
        alone = await place.ask([AUX])
        assert alone.status_code == 200
        assert list(place.server.sessions.open) == ["one"]
        plain = await place.ask([TEXT, first, "F"], "one")
        assert "x-rollgym-recorded" not in plain.headers
        await place.end("one")

    (episode,) = with_server(serving, work, auxiliary=re.compile("write a title"), auxiliary_max_tokens=2)
    assert [turn.observation for turn in episode.turns] == [TEXT, "F"]
    assert [turn.new_row for turn in episode.turns] == [False, False]


def test_auxiliary_calls_do_not_change_what_is_sampled_for_others(serving: Serving) -> None:
    async def talk(place: Any, disturbed: bool) -> None:
        first = await place.say([TEXT], "one", max_tokens=20)
        if disturbed:
            await place.ask([AUX], "one")
        await place.say([TEXT, first, "F"], "one", max_tokens=20)
        await place.end("one")

    pattern = re.compile("write a title")
    (quiet,) = with_server(serving, lambda place: talk(place, False), auxiliary=pattern)
    (loud,) = with_server(serving, lambda place: talk(place, True), auxiliary=pattern)
    assert [turn.action_ids for turn in quiet.turns] == [turn.action_ids for turn in loud.turns]


def test_auxiliary_calls_without_a_session_run_side_by_side(serving: Serving) -> None:
    engine = ScriptedEngine([5, 6], delay=0.05)

    async def work(place: Any) -> None:
        answers = await asyncio.gather(*(place.ask([AUX]) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4, answers[-1].text
        assert len({answer.json()["id"] for answer in answers}) == 4
        assert sorted(engine.forgotten) == sorted({request.session for request in engine.requests})
        assert place.server.sessions.open == {}

    assert with_server(serving, work, inner=engine, auxiliary=re.compile("write a title")) == []
    assert len({request.request_id for request in engine.requests}) == 4


def test_an_empty_body_ends_no_session(serving: Serving) -> None:
    async def work(place: Any) -> None:
        await place.say([TEXT], "one")
        head = {"content-type": "application/json"}
        for body in (b"", b" \n"):
            for path in ("/session/one/end", "/session/one/reward"):
                answer = await place.http.post(path, content=body, headers=head)
                assert answer.status_code == 400, (path, body)
        key = {"authorization": "Bearer session/one"}
        assert (await place.http.post("/rl/reward", content=b"", headers=head | key)).status_code == 400
        assert (await place.http.get("/session/one")).json()["open"] is True

    with_server(serving, work)
