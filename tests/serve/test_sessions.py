"""Which conversation a request belongs to, and how conversations end."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import ResultsError, UsageError
from rollgym.core.types import Episode, Outcome
from rollgym.io.run_dir import RunFolder, read_run
from rollgym.serve import RecordingServer, ServeOptions
from rollgym.testing import ScriptedEngine
from rollgym.trainer.data.sequences import token_episode

Serving = Callable[..., Any]
TEXT, NEXT = "@ F F F\nF H F H", "F @ F F\nF H F H"


def play(serving: Serving, conversation: Callable[[Any], Any], **options: Any) -> list[Episode]:
    async def run() -> list[Episode]:
        async with serving(**options) as place:
            finished = place.server.episodes()
            await conversation(place)
        return [episode async for episode in finished]

    return asyncio.run(run())


async def converse(place: Any, name: str, turns: int, way: str) -> None:
    """A client with unique messages, which checks that only they come back."""
    said: list[str] = []
    headers = {"x-rollgym-session": name} if way == "header" else {}
    path = f"/session/{name}/v1" if way == "path" else "/v1"
    session = ""
    for number in range(turns):
        said.append(f"{name} {number} {TEXT}")
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        body = {"model": "policy", "messages": messages, "max_tokens": 4}
        answer = await place.http.post(f"{path}/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert session in ("", answer.headers["x-rollgym-session"])
        session = answer.headers["x-rollgym-session"]
        said.append(answer.json()["choices"][0]["message"]["content"])
    await place.end(session, reward=float(turns))


@pytest.mark.parametrize("way", ["path", "header", "nameless"])
def test_twenty_clients_at_once_do_not_mix(serving: Serving, way: str) -> None:
    async def conversation(place: Any) -> None:
        await asyncio.gather(*(converse(place, f"c{i}", 2 + i % 3, way) for i in range(20)))

    episodes = play(serving, conversation)
    assert len(episodes) == 20
    for episode in episodes:
        name = episode.turns[0].observation.split()[0]
        assert [turn.observation for turn in episode.turns] == [
            f"{name} {number} {TEXT}" for number in range(episode.length)
        ]
        assert episode.length == 2 + int(name[1:]) % 3 == episode.total_reward
        assert not any(turn.new_row for turn in episode.turns)
        assert len(token_episode(episode).sequences) == 1
    assert len({episode.turns[0].observation for episode in episodes}) == 20


def test_nameless_clients_with_the_very_same_conversation_stay_apart(serving: Serving) -> None:
    async def conversation(place: Any) -> None:
        first = [await place.ask([TEXT], temperature=0) for _ in range(3)]
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in first]
        assert len(set(texts)) == 1
        second = [await place.ask([TEXT, texts[0], NEXT], temperature=0) for _ in range(3)]
        names = [[answer.headers["x-rollgym-session"] for answer in answers] for answers in (first, second)]
        assert len(set(names[0])) == 3
        assert sorted(names[0]) == sorted(names[1])

    for episode in play(serving, conversation):
        assert [turn.observation for turn in episode.turns] == [TEXT, NEXT]
        assert not any(turn.new_row for turn in episode.turns)


def test_a_nameless_client_that_rewrites_what_came_last_stays_in_its_session(serving: Serving) -> None:
    async def conversation(place: Any) -> None:
        first = await place.say([TEXT])
        await place.say([TEXT, first, NEXT])
        await place.say([TEXT, first, "another question"])

    (episode,) = play(serving, conversation)
    assert [turn.new_row for turn in episode.turns] == [False, False, True]


def test_parallel_requests_in_one_session_are_separate_rows(serving: Serving) -> None:
    async def conversation(place: Any) -> None:
        first = await place.say([TEXT], "one")
        await asyncio.gather(*(place.say([TEXT, first, f"{NEXT} {i}"], "one") for i in range(3)))
        await place.end("one")

    (episode,) = play(serving, conversation)
    assert [turn.new_row for turn in episode.turns] == [False, False, True, True]
    assert [len(row.action_positions) > 0 for row in token_episode(episode).sequences] == [True] * 3


def test_a_session_can_be_opened_for_a_task(serving: Serving) -> None:
    task = {"id": "t-7", "env_id": "rollgym/Sokoban-v0", "task": 7, "split": "dev", "env_seed": 3}
    more = {"group_id": "g", "member": 2, "metadata": {"who": "me"}, "sampling_seed": 9, "max_turns": 1}

    async def conversation(place: Any) -> None:
        opened = (await place.http.post("/session", json=task | more)).json()
        assert opened["base_url"] == f"{place.server.url}/session/t-7/v1"
        await place.say([TEXT], opened["id"])
        over = await place.ask([TEXT], "t-7")
        assert (over.status_code, over.json()["error"]["code"]) == (400, "turn_limit")
        standing = (await place.http.get("/session/t-7")).json()
        assert standing == {"id": "t-7", "open": True, "turns": 1, "reward": 0.0, "success": None}
        await place.end("t-7")
        assert (await place.ask([TEXT], "t-7")).status_code == 410
        assert (await place.http.post("/session/t-7/end", json={})).status_code == 410
        assert (await place.http.post("/session", json={"id": "t-7"})).status_code == 409

    (episode,) = play(serving, conversation)
    spec = episode.spec
    assert (spec.episode_id, spec.env_id, spec.task, spec.split) == ("t-7", "rollgym/Sokoban-v0", 7, "dev")
    assert (spec.env_seed, spec.group_id, spec.member, spec.sampling_seed) == (3, "g", 2, 9)
    assert episode.reset_info == {"who": "me"}
    assert episode.outcome is Outcome.TURN_LIMIT


def test_rewards_go_to_the_turn_they_follow(serving: Serving) -> None:
    async def conversation(place: Any) -> None:
        reward = place.http.post
        early = await reward("/session/none/reward", json={"reward": 1})
        assert early.status_code == 404
        first = await place.say([TEXT], "one")
        await reward("/session/one/reward", json={"reward": 0.25})
        await reward("/session/one/reward", json={"reward": 0.25, "success": False})
        await place.say([TEXT, first, NEXT], "one")
        assert (await reward("/session/one/reward", content=b'{"reward": 1e999}')).status_code in (400, 415)
        done = (await reward("/session/one/reward", json={"reward": 2, "success": True, "done": True})).json()
        assert (done["open"], done["outcome"], done["reward"], done["success"]) == (
            False,
            "terminated",
            2.5,
            True,
        )

    (episode,) = play(serving, conversation)
    assert [turn.reward for turn in episode.turns] == [0.5, 2.0]
    assert [turn.terminated for turn in episode.turns] == [False, True]
    assert episode.success is True


def test_every_end_has_its_outcome(serving: Serving) -> None:
    async def conversation(place: Any) -> None:
        for name in ("plain", "cut", "full", "idle", "rewarded", "ctrl-c"):
            await place.say([TEXT], name)
        await place.http.post("/session", json={"id": "unused"})
        await place.end("plain")
        await place.end("cut", truncated=True)
        assert (await place.ask(["F " * 400], "full")).status_code == 400
        await place.end("full")
        await place.end("unused")
        await place.http.post("/session/rewarded/reward", json={"reward": 1.0})
        for name in ("idle", "rewarded"):
            place.server.sessions.open[name].last_active -= 1000
        while len(place.server.sessions.open) > 1:
            await asyncio.sleep(0.01)

    found = {episode.spec.episode_id: episode.outcome.value for episode in play(serving, conversation)}
    assert found == {
        "plain": "terminated",
        "cut": "truncated",
        "full": "token_limit",
        "idle": "time_limit",
        "rewarded": "terminated",
        "unused": "cancelled",
        "ctrl-c": "cancelled",
    }


def test_a_session_that_ends_while_its_reply_is_drawn_says_so(serving: Serving) -> None:
    async def conversation(place: Any) -> None:
        begun, never = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            begun.set()
            await never.wait()

        await place.say([TEXT], "one")
        place.spy.before = wait
        asking = asyncio.create_task(place.ask([NEXT], "one"))
        await begun.wait()
        await place.end("one")
        assert (await asking).status_code == 410
        assert place.spy.cancelled == 1

    (episode,) = play(serving, conversation)
    assert episode.length == 1


def test_closing_answers_those_who_wait_and_writes_everything(serving: Serving, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {"schema": 1})
    statuses: list[int] = []

    async def run() -> None:
        begun, never = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            begun.set()
            await never.wait()

        async with serving(folder=folder) as place:
            await place.say([TEXT], "one")
            place.spy.before = wait
            asking = asyncio.create_task(place.ask([NEXT], "one"))
            await begun.wait()
            await place.server.close()
            statuses.append((await asking).status_code)
            await place.server.close()

    asyncio.run(run())
    assert statuses == [410]
    _, (episode,) = read_run(tmp_path / "run")
    assert (episode.outcome, episode.length) == (Outcome.CANCELLED, 1)
    assert '"cancelled": 1' in (tmp_path / "run" / "summary.json").read_text()


def test_a_run_that_goes_on_does_not_take_a_name_twice(serving: Serving, tmp_path: Path) -> None:
    about = {"schema": 1, "kind": "serve"}

    async def once(place: Any) -> None:
        await place.say([TEXT], "one")
        await place.end("one")

    async def again(place: Any) -> None:
        assert (await place.ask([TEXT], "one")).status_code == 410
        await place.say([TEXT], "two")

    play(serving, once, folder=RunFolder.create(tmp_path / "run", about))
    play(serving, again, folder=RunFolder.resume(tmp_path / "run", about, ("kind",)))
    _, episodes = read_run(tmp_path / "run")
    assert [episode.spec.episode_id for episode in episodes] == ["one", "two"]
    (tmp_path / "run" / "episodes.jsonl").write_text("nonsense\n")
    with pytest.raises(ResultsError):
        read_run(tmp_path / "run")


def test_what_a_session_has_computed_is_forgotten_with_it(serving: Serving, tokenizer: Any) -> None:
    engine = ScriptedEngine(lambda request: [request.sampling.stop_ids[0]])

    async def conversation(place: Any) -> None:
        await place.say([TEXT], "one")
        await place.end("one")

    play(serving, conversation, inner=engine)
    assert engine.forgotten == ["one"]


def test_a_port_in_use_is_one_sentence(serving: Serving, tokenizer: Any) -> None:
    async def conversation(place: Any) -> None:
        port = int(place.server.url.rsplit(":", 1)[1])
        second = RecordingServer(place.spy, tokenizer, ServeOptions(port=port))
        with pytest.raises(UsageError, match=f"listen on 127.0.0.1, port {port}: Address already"):
            await second.start()
        await second.close()

    play(serving, conversation)


def test_episodes_do_not_gather_for_a_reader_that_has_left(serving: Serving) -> None:
    async def conversation(place: Any) -> None:
        reader = place.server.episodes()
        before = len(place.server._listeners)
        await place.say([TEXT], "one")
        await place.end("one")
        assert (await anext(reader)).spec.episode_id == "one"
        await reader.aclose()
        assert len(place.server._listeners) == before - 1

    assert len(play(serving, conversation)) == 1
