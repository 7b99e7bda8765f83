"""What open sessions have recorded survives a killed server."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from dialect_wire import ask
from scripted_replies import Scripted

from rollgym.core.errors import ResultsError, RunError
from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.core.types import Outcome
from rollgym.io.run_dir import RunFolder, read_run
from rollgym.serve import RecordingServer
from rollgym.serve.session_log import OPEN_SESSIONS, FileSessionLog
from rollgym.testing import ScriptedEngine
from rollgym.trainer.data.sequences import token_episode

Serving = Callable[..., Any]
TEXT, NEXT = "@ F F F\nF H F H", "F @ F F\nF H F H"
ABOUT = {"schema": 1, "kind": "serve"}


def serve_until_killed(
    serving: Serving, folder: RunFolder, work: Callable[[Any], Any], **options: Any
) -> None:
    async def run() -> None:
        async with serving(folder=folder, **options) as place:
            await work(place)
            # As after a kill, nothing more is written: neither episodes nor the end of open sessions.
            place.server.sessions.open.clear()
            place.server.folder = None
        folder.close()

    asyncio.run(run())


def resumed(serving: Serving, path: Path, work: Callable[[Any], Any], **options: Any) -> None:
    async def run() -> None:
        async with serving(folder=RunFolder.resume(path, ABOUT, ("kind",)), **options) as place:
            await work(place)

    asyncio.run(run())


def test_open_sessions_continue_with_their_turns_rewards_and_task(serving: Serving, tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    async def before(place: Any) -> None:
        await place.http.post("/session", json={"id": "task", "task": 7, "metadata": {"who": "me"}})
        system = {"role": "system", "content": "Walk."}
        await place.say([system, {"role": "user", "content": TEXT}], "named")
        await place.http.post("/session/named/reward", json={"reward": 0.25, "success": False})
        kept["text"] = await place.say([TEXT])  # found by its content
        kept["turn"] = place.server.sessions.open["named"].turns[0]
        await place.say([TEXT], "done")
        await place.end("done", reward=1)

    async def after(place: Any) -> None:
        assert len(place.server.sessions.open) == 3
        standing = (await place.http.get("/session/named")).json()
        assert (standing["turns"], standing["reward"], standing["success"]) == (1, 0.25, False)
        await place.say([TEXT], "task")
        await place.say([NEXT], "named")
        again = await place.ask([TEXT, kept["text"], NEXT])
        assert again.headers["x-rollgym-session"].startswith("s-")
        assert len(place.server.sessions.open) == 3
        assert (await place.ask([TEXT], "done")).status_code == 410
        for name in list(place.server.sessions.open):
            await place.end(name)

    serve_until_killed(serving, RunFolder.create(tmp_path / "run", ABOUT), before)
    resumed(serving, tmp_path / "run", after)
    _, episodes = read_run(tmp_path / "run")
    by_name = {episode.spec.episode_id: episode for episode in episodes}
    assert len(by_name) == len(episodes) == 4
    named = by_name["named"]
    assert named.turns[0].action_ids == kept["turn"].action_ids
    assert named.turns[0].logprobs == kept["turn"].logprobs
    assert [turn.reward for turn in named.turns] == [0.25, 0.0]
    assert [turn.new_row for turn in named.turns] == [False, True]
    assert named.instructions == "Walk."
    assert (by_name["task"].spec.task, by_name["task"].reset_info) == (7, {"who": "me"})
    (nameless,) = [episode for name, episode in by_name.items() if name.startswith("s-")]
    assert [turn.observation for turn in nameless.turns] == [TEXT, NEXT]
    assert len(token_episode(nameless).sequences) == 2
    assert list((tmp_path / "run" / OPEN_SESSIONS).iterdir()) == []


def test_a_cut_off_line_is_dropped_and_a_wrong_one_is_named(
    serving: Serving, tokenizer: Any, tmp_path: Path
) -> None:
    async def before(place: Any) -> None:
        await place.say([TEXT], "one")

    async def after(place: Any) -> None:
        assert len(place.server.sessions.open["one"].turns) == 1
        await place.end("one")

    serve_until_killed(serving, RunFolder.create(tmp_path / "run", ABOUT), before)
    path = tmp_path / "run" / OPEN_SESSIONS / "one.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type": "turn", "turn": {"obs')
    path.with_name("torn.jsonl").write_bytes(b'{"type": "beg')
    resumed(serving, tmp_path / "run", after)
    _, (episode,) = read_run(tmp_path / "run")
    assert episode.length == 1
    path.write_bytes(whole)  # killed between writing the episode and removing the file
    path.with_name("zbad.jsonl").write_text(json.dumps({"type": "circus"}) + "\n")
    folder = RunFolder.resume(tmp_path / "run", ABOUT, ("kind",))
    with pytest.raises(ResultsError, match=r"zbad\.jsonl, line 1"):
        RecordingServer(ScriptedEngine([1]), tokenizer, folder=folder)
    folder.close()
    assert not path.exists()


def test_results_of_tools_and_ids_of_calls_survive(serving: Serving, tmp_path: Path) -> None:
    move = ToolSpec(name="move", description="Move the player.")
    said = [Message(role="user", content="Go.")]
    scripted = Scripted("qwen2.5 tools", [[ToolCall(name="move", arguments={"n": n})] for n in range(4)])
    tokens = {"inner": scripted.engine, "tokens": scripted.template}

    async def turn(place: Any) -> None:
        reply = await ask(place.http, "chat", "one", said, [move])
        (call,) = reply.tool_calls
        said.extend([reply, Message(role="tool", content=f"At {call.arguments}.", tool_call_id=call.id)])

    async def before(place: Any) -> None:
        # A request that fails takes a number, and so an id, that no turn has.
        body = {"model": "policy", "messages": [{"role": "user", "content": "x " * 200_000}]}
        assert (await place.http.post("/session/one/v1/chat/completions", json=body)).status_code == 400
        await turn(place)
        await turn(place)

    async def after(place: Any) -> None:
        await turn(place)
        await place.end("one")

    serve_until_killed(serving, RunFolder.create(tmp_path / "run", ABOUT), before, **tokens)
    resumed(serving, tmp_path / "run", after, **tokens)
    _, (episode,) = read_run(tmp_path / "run")
    results = [turn.info["messages"][0]["content"] for turn in episode.turns[:-1]]
    assert results == ["At {'n': 0}.", "At {'n': 1}."]
    assert [turn.new_row for turn in episode.turns] == [False, False, True]
    ids = [turn.message["tool_calls"][0]["id"] for turn in episode.turns if turn.message]
    assert len(set(ids)) == len(ids) == 3


def test_a_turn_and_a_reward_that_cannot_be_written_do_not_count(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(log: FileSessionLog, session: Any, *rest: Any) -> None:
        raise RunError("Cannot write one.jsonl: No space left on device.")

    async def run() -> None:
        async with serving(folder=RunFolder.create(tmp_path / "run", ABOUT)) as place:
            await place.say([TEXT], "one")
            with monkeypatch.context() as patch:
                patch.setattr(FileSessionLog, "add_turn", full)
                patch.setattr(FileSessionLog, "add_reward", full)
                refused = await place.ask([NEXT], "one")
                assert (refused.status_code, "No space" in refused.text) == (503, True)
                refused = await place.http.post("/session/one/reward", json={"reward": 1.0})
                assert refused.status_code == 503
            await place.http.post("/session/one/reward", json={"reward": 1.0})  # the client tries again
            await place.end("one")

    asyncio.run(run())
    _, (episode,) = read_run(tmp_path / "run")
    assert [(turn.observation, turn.reward) for turn in episode.turns] == [(TEXT, 1.0)]


def test_a_session_that_cannot_be_written_does_not_keep_others_from_ending(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = RunFolder.append

    def broken(folder: RunFolder, episode: Any) -> None:
        if episode.spec.episode_id in ("a", "c"):
            raise RunError("Cannot write episodes.jsonl: No space left on device.")
        append(folder, episode)

    monkeypatch.setattr(RunFolder, "append", broken)

    async def run() -> None:
        async with serving(folder=RunFolder.create(tmp_path / "run", ABOUT), idle_seconds=0.2) as place:
            for name in ("a", "b"):
                await place.say([TEXT], name)
            async with asyncio.timeout(30):
                while place.server.sessions.open:
                    await asyncio.sleep(0.02)
            place.server.sessions.begin("c")
            place.server.sessions.begin("d")
        assert place.server.folder._file.closed

    with pytest.raises(RunError, match="No space"):
        asyncio.run(run())
    _, episodes = read_run(tmp_path / "run")
    assert [(e.spec.episode_id, e.outcome) for e in episodes] == [
        ("b", Outcome.TIME_LIMIT),
        ("d", Outcome.CANCELLED),
    ]
    # With --resume they continue.
    assert sorted(path.stem for path in (tmp_path / "run" / OPEN_SESSIONS).iterdir()) == ["a", "c"]


def start(model: Path, folder: Path, *more: str) -> tuple[subprocess.Popen[str], str]:
    words = ["serve", str(model), "--port", "0", "--out", "run", *more, "--agent-arg", "device=cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rollgym", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    found = re.search(r"at (http://127.0.0.1:\d+)/v1", process.stdout.readline())
    assert found
    return process, found[1]


def test_nothing_is_lost_when_the_command_is_killed_and_resumed(model: Path, tmp_path: Path) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
    answered = 0
    for round_ in range(2):
        process, url = start(model, tmp_path, *(["--resume"] if round_ else []))
        try:
            for name in ("a", "b"):
                path = f"{url}/session/{name}/v1/chat/completions"
                answered += httpx.post(path, json=body, timeout=60).status_code == 200
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
    process, url = start(model, tmp_path, "--resume")
    assert httpx.post(f"{url}/session/a/end", json={"reward": 1.0}).status_code == 200
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    _, episodes = read_run(tmp_path / "run")
    outcomes = {episode.spec.episode_id: episode.outcome for episode in episodes}
    assert outcomes == {"a": Outcome.TERMINATED, "b": Outcome.CANCELLED}
    assert sum(episode.length for episode in episodes) == answered == 4


@pytest.mark.slow
def test_every_reply_that_a_client_got_under_load_is_recorded(model: Path, tmp_path: Path) -> None:
    """Killed among the requests of 64 clients; they go on with the next process, which is killed too."""
    got: dict[str, list[str]] = {f"s{number}": [] for number in range(64)}

    async def client(http: httpx.AsyncClient, name: str, target: int, enough: asyncio.Event) -> None:
        while not enough.is_set():
            body = {
                "model": "policy",
                "messages": [{"role": "user", "content": f"{len(got[name])} {TEXT}"}],
                "max_tokens": 8,
                "temperature": 1.0,
            }
            try:
                answer = await http.post(f"/session/{name}/v1/chat/completions", json=body)
            except httpx.TransportError:
                return
            assert answer.status_code == 200, answer.text
            got[name].append(answer.json()["choices"][0]["message"]["content"])
            if sum(map(len, got.values())) >= target:
                enough.set()

    async def load(url: str, process: subprocess.Popen[str], target: int) -> None:
        enough = asyncio.Event()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            clients = [asyncio.create_task(client(http, name, target, enough)) for name in got]
            await asyncio.wait_for(enough.wait(), 120)
            process.send_signal(signal.SIGKILL)
            await asyncio.gather(*clients)

    for round_, target in enumerate((100, 220)):
        process, url = start(model, tmp_path, *(["--resume"] if round_ else []))
        try:
            asyncio.run(load(url, process, target))
        finally:
            process.kill()
            process.communicate(timeout=60)
    process, url = start(model, tmp_path, "--resume")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    _, episodes = read_run(tmp_path / "run")
    recorded = {episode.spec.episode_id: episode for episode in episodes}
    assert sum(map(len, got.values())) >= 220
    lost = 0
    for name, texts in got.items():
        turns = iter(recorded[name].turns if texts else ())
        # A turn may have been recorded whose reply did not reach the client.
        lost += sum(all(turn.action != text for turn in turns) for text in texts)
    assert lost == 0
