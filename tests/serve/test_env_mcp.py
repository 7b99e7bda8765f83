"""An environment as an MCP server, played by the official client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from client_episode import serving_mcp

import rollgym
from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, Outcome
from rollgym.serve.env_mcp import EnvMCPServer
from rollgym.serve.env_player import ServedEnv

mcp = pytest.importorskip("mcp")
LAKE = ServedEnv(env_id="rollgym/FrozenLake-v0", split="test", seed=3)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def named(url: str, name: str) -> Any:
    return mcp.Client(f"{url}/{name}/mcp")


async def text(client: Any, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error is False, result
    return str(result.content[0].text)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_plays_the_same_episode_and_sees_no_reward(mode: str) -> None:
    episodes: list[Episode] = []

    async def main() -> None:
        server = EnvMCPServer(LAKE, episodes.append)
        async with serving_mcp(server) as url, mcp.Client(f"{url}/mcp", mode=mode) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["start_episode", "act"]
            seen = [await text(client, "start_episode")]
            for move in ("Right", "Down", "Right", "Down", "Down", "Right") * 4:
                seen.append(await text(client, "act", action=move))
                if "The episode is over" in seen[-1]:
                    break
            (episode,) = episodes
            env = rollgym.make("rollgym/FrozenLake-v0")
            options = {"task": episode.spec.task, "split": "test"}
            observation, _ = env.reset(seed=episode.spec.env_seed, options=options)
            assert seen[0].endswith(observation)
            for turn, shown in zip(episode.turns, seen[1:], strict=True):
                observation, reward, *_ = env.step(turn.action)
                assert (turn.reward, shown.startswith(observation)) == (reward, True)
                assert set(shown.removeprefix(observation)) <= set(
                    "\n\nThe episode is over. Call start_episode for the next one."
                )
            again = await client.call_tool("act", {"action": "Down"})
            assert again.is_error
            assert "start_episode" in again.content[0].text

    run(main())
    assert len(episodes) == 1


def test_clients_with_names_play_apart_and_are_cancelled_at_the_end() -> None:
    episodes: list[Episode] = []

    async def main() -> None:
        server = EnvMCPServer(LAKE, episodes.append, max_players=2)
        async with serving_mcp(server) as url, named(url, "ann") as ann, named(url, "bob") as bob:
            first, second = await text(ann, "start_episode"), await text(bob, "start_episode")
            assert first != second
            await text(ann, "act", action="left")
            async with named(url, "eve") as eve:
                refused = await eve.call_tool("start_episode", {})
                assert refused.is_error
                assert "2 clients play already" in refused.content[0].text

    run(main())
    assert sorted((episode.outcome, episode.length) for episode in episodes) == [
        (Outcome.CANCELLED, 0),
        (Outcome.CANCELLED, 1),
    ]
    assert len({episode.spec.task for episode in episodes}) == 2


def test_an_idle_client_loses_its_episode() -> None:
    episodes: list[Episode] = []

    async def main() -> None:
        server = EnvMCPServer(LAKE, episodes.append, idle_seconds=0.05)
        async with serving_mcp(server) as url, named(url, "ann") as ann, named(url, "bob") as bob:
            await text(ann, "start_episode")
            await asyncio.sleep(0.1)
            await text(bob, "start_episode")
            assert [episode.outcome for episode in episodes] == [Outcome.TIME_LIMIT]

    run(main())


def test_tools_of_a_tool_environment_are_mcp_tools() -> None:
    episodes: list[Episode] = []
    served = ServedEnv(env_id="tool_envs:Safe")

    async def main() -> None:
        server = EnvMCPServer(served, episodes.append)
        async with serving_mcp(server) as url, mcp.Client(f"{url}/mcp") as client:
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
            own = rollgym.make(served.env_id).unwrapped.tools  # type: ignore[attr-defined]
            assert set(listed) == {"start_episode", *(spec.name for spec in own)}
            for spec in own:
                assert listed[spec.name].input_schema == spec.parameters
            await text(client, "start_episode")
            unknown = await client.call_tool(own[0].name, {"no such argument": 1})
            assert unknown.content[0].text
            nothing = await client.call_tool("fly", {})
            assert nothing.is_error

    run(main())
    assert json.loads(episodes[0].turns[0].action)["arguments"] == {"no such argument": 1}


def test_a_token_is_required_where_one_is_set() -> None:
    import httpx

    async def main() -> None:
        async with serving_mcp(EnvMCPServer(LAKE), api_key="s3cret") as url, httpx.AsyncClient() as client:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                assert (await client.post(f"{url}/mcp", headers=headers, json={})).status_code == 401
            right = {"Authorization": "Bearer s3cret"}
            assert (await client.post(f"{url}/mcp", headers=right, json={})).status_code != 401

    run(main())


def test_web_pages_of_other_sites_are_refused() -> None:
    import httpx

    async def main() -> None:
        async with serving_mcp(EnvMCPServer(LAKE)) as url, httpx.AsyncClient() as client:
            for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
                response = await client.post(f"{url}/mcp", headers=headers, json={})
                assert response.status_code in (403, 421)

    run(main())


@pytest.mark.parametrize("host", ["127.0.0.2", "LOCALHOST"])
def test_a_web_page_is_refused_at_every_address_of_this_machine(host: str) -> None:
    import httpx

    async def main() -> None:
        server = EnvMCPServer(LAKE)
        async with server.http_app(host=host) as app:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8001") as client:
                rebound = {"Host": "evil.example:8001", "Origin": "http://evil.example:8001"}
                assert (await client.post("/mcp", headers=rebound, json={})).status_code == 421
                head = {"Accept": "application/json, text/event-stream"}
                ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
                assert (await client.post("/mcp", headers=head, json=ping)).status_code < 401

    run(main())


def test_many_clients_play_at_once_and_their_records_are_written_one_by_one() -> None:
    """More than the threads of asyncio, of which some may wait in slow environments."""
    count, together, recording = 34, threading.Barrier(34), threading.Lock()
    episodes: list[Episode] = []

    class Slow(ServedEnv):
        def make(self) -> Any:
            env = LAKE.make()
            step = env.step

            def slow_step(action: str) -> Any:
                together.wait(30)
                return step(action)

            env.step = slow_step  # type: ignore[method-assign]
            return env

    def record(episode: Episode) -> None:
        assert recording.acquire(blocking=False)
        episodes.append(episode)
        time.sleep(0.001)
        recording.release()

    async def main() -> None:
        server = EnvMCPServer(Slow(env_id=LAKE.env_id, split="test"), record)

        async def play(name: str) -> None:
            async with named(url, name) as client:
                await text(client, "start_episode")
                await text(client, "act", action="left")
                await text(client, "start_episode")

        async with serving_mcp(server) as url:
            await asyncio.gather(*(play(f"c{number}") for number in range(count)))

    run(main())
    assert len(episodes) == 2 * count
    assert len({episode.spec.episode_id for episode in episodes}) == 2 * count


def test_threads_share_the_order_of_tasks() -> None:
    specs, seen = LAKE.specs(), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            for future in [threads.submit(lambda: [next(specs) for _ in range(200)]) for _ in range(8)]:
                seen += future.result()
    finally:
        sys.setswitchinterval(interval)
    assert len({spec.episode_id for spec in seen}) == 1600


def test_an_environment_that_takes_long_to_make_holds_up_no_one_else() -> None:
    made, wait = threading.Event(), threading.Event()

    class Slow(ServedEnv):
        def make(self) -> Any:
            if made.is_set() and not wait.is_set():
                made.clear()
                assert wait.wait(30)
            return LAKE.make()

    async def main() -> None:
        server = EnvMCPServer(Slow(env_id=LAKE.env_id, split="test"))
        made.set()
        async with serving_mcp(server) as url, named(url, "ann") as ann, named(url, "bob") as bob:
            first = asyncio.create_task(text(ann, "start_episode"))
            while made.is_set():
                await asyncio.sleep(0.01)
            await text(bob, "start_episode")
            assert not first.done()
            wait.set()
            await first

    run(main())


def test_a_wrong_environment_is_an_error_at_the_start() -> None:
    with pytest.raises(UsageError, match="Sokobann"):
        EnvMCPServer(ServedEnv(env_id="rollgym/Sokobann-v0"))


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rollgym", "serve-env", "rollgym/FrozenLake-v0", *words]


def test_stdio_records_episodes(tmp_path: Path) -> None:
    async def main() -> None:
        words = command("--mcp", "--stdio", "--out", str(tmp_path / "run"))
        environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        parameters = mcp.StdioServerParameters(command=words[0], args=words[1:], env=environment)
        with open(os.devnull, "w") as errors:
            async with mcp.Client(mcp.stdio_client(parameters, errlog=errors)) as client:
                await text(client, "start_episode")
                await text(client, "act", action="Down")

    run(main())
    (episode,) = rollgym.load_run(tmp_path / "run").episodes
    assert (episode.outcome, episode.length) == (Outcome.CANCELLED, 1)


def test_ctrl_c_ends_the_http_server_and_keeps_the_record(tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    words = command("--mcp", "--port", str(port), "--out", str(tmp_path / "run"))

    def restore() -> None:  # a shell starts background jobs with SIGINT ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)

    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, preexec_fn=restore)
    assert process.stderr is not None
    assert f"http://127.0.0.1:{port}/mcp" in process.stderr.readline()

    async def main() -> None:
        async with mcp.Client(f"http://127.0.0.1:{port}/mcp") as client:
            await text(client, "start_episode")

    run(main())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "1 episodes were played" in errors
    assert "Traceback" not in errors
    assert [episode.outcome for episode in rollgym.load_run(tmp_path / "run").episodes] == ["cancelled"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "Choose one protocol: --mcp or --openenv"),
        (("--mcp", "--openenv"), "Choose one protocol"),
        (("--openenv", "--stdio"), "--stdio requires --mcp"),
        (("--openenv", "--max-sessions", "0"), "--max-sessions must be at least 1"),
        (("--mcp", "--host", "0.0.0.0"), "give --api-key-env"),
        (("--mcp", "--api-key-env", "NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE is empty or not set"),
        (("--mcp", "--split", "tset"), "tset"),
    ],
)
def test_mistakes_on_the_command_line(words: tuple[str, ...], error: str) -> None:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert error in done.stderr
    assert "Traceback" not in done.stderr
