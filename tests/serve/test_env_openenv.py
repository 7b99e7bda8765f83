"""An environment as an OpenEnv server: its protocol, sessions, limits and records."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("websockets", reason="the extra [openenv] is not installed: no websockets")

import rollgym
from rollgym.core.errors import UsageError, WorkerLost
from rollgym.core.types import Episode, Outcome
from rollgym.evaluation.replay import replay
from rollgym.serve.env_openenv import EnvOpenEnvServer
from rollgym.serve.env_player import ServedEnv
from rollgym.utils.http_server import listening, web_server

LAKE = ServedEnv(env_id="rollgym/FrozenLake-v0", split="test", seed=3)


class Running:
    """A server in a thread, which can be stopped at any moment."""

    def __init__(
        self,
        served: ServedEnv = LAKE,
        api_key: str | None = None,
        request_seconds: float = 30.0,
        **options: Any,
    ) -> None:
        self._request_seconds = request_seconds
        self.episodes: list[Episode] = []
        self.server = EnvOpenEnvServer(served, self.episodes.append, **options)
        self._key = api_key
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    async def _main(self) -> None:
        with listening("127.0.0.1", 0) as opened:
            self.url = f"http://127.0.0.1:{opened.getsockname()[1]}"
            async with self.server.http_app(api_key=self._key) as app:
                self._web = web_server(
                    app, signals=False, websockets=True, request_seconds=self._request_seconds
                )
                task = asyncio.ensure_future(self._web.serve([opened]))
                while not self._web.started:
                    await asyncio.sleep(0.01)
                self._started.set()
                await task

    def stop(self) -> None:
        self._web.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    server = Running(max_sessions=2)
    yield server
    server.stop()


@contextlib.contextmanager
def session(server: Running) -> Iterator[Any]:
    from websockets.sync.client import connect

    with connect(server.url.replace("http", "ws") + "/ws", proxy=None) as socket:
        yield socket


def call(socket: Any, kind: str, **data: Any) -> dict[str, Any]:
    socket.send(json.dumps({"type": kind, "data": data}))
    answer: dict[str, Any] = json.loads(socket.recv(timeout=20))
    return answer


def test_a_session_plays_an_episode_with_rewards_that_is_recorded_and_replays(running: Running) -> None:
    with session(running) as socket:
        start = call(socket, "reset", seed=7)["data"]
        assert start["observation"]["text"]
        assert call(socket, "reset", seed=7)["data"] == start
        for count in range(1, 60):
            answer = call(socket, "step", text="Right" if count % 2 else "Down")["data"]
            if answer["done"]:
                break
            assert call(socket, "state")["data"]["step_count"] == count
        assert answer["done"]
        assert answer["metadata"]["success"] is (answer["reward"] == 1.0)
    running.stop()
    cancelled, episode = running.episodes
    assert cancelled.outcome is Outcome.CANCELLED
    assert len(episode.turns) == count
    assert replay([episode])[0].same


def test_a_task_can_be_asked_for(running: Running) -> None:
    env = rollgym.make("rollgym/FrozenLake-v0")
    expected = env.reset(seed=0, options={"task": 5, "split": "dev"})[0]
    with session(running) as socket:
        data = call(socket, "reset", seed=0, task=5, split="dev")["data"]
    assert data["observation"]["text"] == expected
    assert (data["metadata"]["task"], data["metadata"]["split"]) == (5, "dev")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[]", "VALIDATION_ERROR"),
        ('{"type": "dance"}', "UNKNOWN_TYPE"),
        ('{"type": "step", "data": {"move": 1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"text": 5}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"text": "Right"}}', "EXECUTION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"split": "none"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"task": 10000000}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": []}', "VALIDATION_ERROR"),
    ],
)
def test_a_wrong_message_is_an_error_and_the_session_goes_on(
    running: Running, message: str, code: str
) -> None:
    with session(running) as socket:
        socket.send(message)
        assert json.loads(socket.recv(timeout=20))["data"]["code"] == code
        assert call(socket, "reset")["type"] == "observation"


def test_a_session_outlives_the_deadline_of_a_request() -> None:
    server = Running(request_seconds=0.5)
    with session(server) as socket:
        start = call(socket, "reset", seed=1)["data"]
        time.sleep(1.5)
        assert call(socket, "reset", seed=1)["data"] == start
    server.stop()


def test_a_session_beyond_the_capacity_is_refused_until_another_ends(running: Running) -> None:
    with session(running) as first:
        with session(running) as second:
            call(first, "reset")
            call(second, "reset")
            with session(running) as third:
                assert json.loads(third.recv(timeout=20))["data"]["code"] == "CAPACITY_REACHED"
            second.send('{"type": "close"}')
            with pytest.raises(Exception, match="received"):
                second.recv(timeout=20)
        for _ in range(100):
            with session(running) as fourth, contextlib.suppress(KeyError):
                if call(fourth, "reset")["type"] == "observation":
                    return
        pytest.fail("the place of the closed session stayed taken")


def test_sessions_do_not_disturb_each_other(running: Running) -> None:
    with session(running) as first, session(running) as second:
        start = call(first, "reset", seed=1)["data"]["observation"]["text"]
        other = call(second, "reset", seed=2)["data"]["observation"]["text"]
        assert start != other
        call(second, "step", text="Down")
        assert call(first, "state")["data"]["step_count"] == 0


def test_an_idle_session_ends_its_episode_as_time_limit() -> None:
    server = Running(idle_seconds=0.3)
    with session(server) as socket:
        call(socket, "reset")
        with pytest.raises(Exception, match="received"):
            socket.recv(timeout=20)
    server.stop()
    assert [episode.outcome for episode in server.episodes] == [Outcome.TIME_LIMIT]


def test_http_has_one_shared_session_and_describes_the_environment(running: Running) -> None:
    def get(path: str) -> Any:
        return httpx.get(running.url + path).json()

    def post(path: str, body: Any) -> httpx.Response:
        return httpx.post(running.url + path, json=body)

    assert get("/health") == {"status": "healthy"}
    assert get("/metadata")["name"] == "FrozenLake-v0"
    assert get("/schema")["action"]["required"] == ["text"]
    assert {"/reset", "/step", "/state"} <= set(get("/openapi.json")["paths"])
    assert post("/step", {"action": {"text": "Right"}}).status_code == 500
    assert post("/reset", {"seed": 1}).json()["done"] is False
    assert post("/step", {"action": {"text": "Right"}}).json()["reward"] == 0.0
    assert get("/state")["step_count"] == 1
    assert post("/step", {"text": "Right"}).status_code == 422
    assert post("/mcp", {}).json()["jsonrpc"] == "2.0"


def test_the_task_api_lists_splits_and_tasks_that_reset_takes(running: Running) -> None:
    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(running.url + path, json=body)

    assert httpx.get(f"{running.url}/list_environments").json() == ["FrozenLake-v0"]
    splits = httpx.get(f"{running.url}/FrozenLake-v0/splits").json()
    assert {"name": "test", "num_tasks": 1000} in splits
    assert post("/FrozenLake-v0/num_tasks", split="dev").json() == {"num_tasks": 1000}
    assert post("/FrozenLake-v0/task", split="dev", index=3).json() == {"task": {"split": "dev", "task": 3}}
    assert len(post("/FrozenLake-v0/task_range", split="dev", start=2, stop=4).json()["tasks"]) == 2
    assert post("/FrozenLake-v0/tasks", split="train").status_code == 422
    assert post("/FrozenLake-v0/task", split="dev", index=-1).status_code == 422
    assert post("/FrozenLake-v0/num_tasks", split="none").status_code == 404
    assert httpx.get(f"{running.url}/Other/splits").status_code == 404


def test_a_token_is_required_of_every_request_and_other_sites_are_refused() -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    server = Running(api_key="secret")
    assert httpx.get(f"{server.url}/health").status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert httpx.get(f"{server.url}/health", headers=headers).status_code == 200
    elsewhere = {**headers, "Origin": "http://evil.example"}
    assert httpx.get(f"{server.url}/health", headers=elsewhere).status_code == 403
    with pytest.raises(InvalidStatus), connect(server.url.replace("http", "ws") + "/ws", proxy=None):
        pass
    with connect(server.url.replace("http", "ws") + "/ws", additional_headers=headers, proxy=None) as socket:
        assert call(socket, "reset")["type"] == "observation"
    server.stop()


def test_wrong_arguments_are_refused_before_a_server_starts() -> None:
    with pytest.raises(UsageError, match="max-sessions"):
        EnvOpenEnvServer(LAKE, max_sessions=0)
    with pytest.raises(UsageError, match="no environment"):
        EnvOpenEnvServer(ServedEnv(env_id="rollgym/FrozenLak-v0"))


# The adapter `openenv:ADDRESS`, against this server.


def test_the_adapter_plays_a_served_environment_the_same_twice(running: Running, tmp_path: Any) -> None:
    runs = [
        rollgym.evaluate(f"openenv:{running.url}", "random", episodes=8, concurrency=1, out=tmp_path / folder)
        for folder in ("a", "b")
    ]
    first, second = (
        [[(t.observation, t.action, t.reward) for t in e.turns] for e in run.episodes] for run in runs
    )
    assert first == second
    assert {str(episode.outcome) for episode in runs[0].episodes} <= {"terminated", "truncated"}
    assert all(episode.success is not None for episode in runs[0].episodes)


def test_splits_share_no_first_observation(running: Running) -> None:
    env = rollgym.make(f"openenv:{running.url}")
    starts = {
        split: {env.reset(seed=0, options={"task": task, "split": split})[0] for task in range(15)}
        for split in ("train", "dev", "test")
    }
    env.close()
    assert not starts["train"] & starts["test"]
    assert not starts["dev"] & starts["test"]


def test_a_server_that_vanishes_is_worker_lost_and_costs_only_its_episodes(tmp_path: Any) -> None:
    server, turns = Running(), 0

    def agent(observation: str, info: Any) -> str:
        nonlocal turns
        turns += 1
        if turns == 12:
            server.stop()
        return "Left"

    results = rollgym.evaluate(
        f"openenv:{server.url}",
        agent,
        episodes=3,
        concurrency=1,
        env_kwargs={"max_turns": 5, "disjoint": False},
        out=tmp_path / "run",
    )
    outcomes = [str(episode.outcome) for episode in results.episodes]
    assert outcomes[:2] == ["truncated", "truncated"]
    assert outcomes[2] == "worker_lost"
    errors = [episode.error.message for episode in results.episodes if episode.error is not None]
    assert len(errors) == 1
    # A lost episode is tried again before it is given up.
    assert "closed the connection" in errors[0] or "No OpenEnv server answers" in errors[0]


def test_another_kind_of_server_is_refused(tmp_path: Any) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(UsageError, match="is not an OpenEnv server"):
            rollgym.make(f"openenv:http://127.0.0.1:{other.server_address[1]}")
        other.shutdown()


def test_an_address_without_a_server_is_one_sentence() -> None:
    with pytest.raises(WorkerLost, match="No OpenEnv server answers at ws://127.0.0.1:1"):
        rollgym.make("openenv:ws://127.0.0.1:1")
    with pytest.raises(UsageError, match="not the address of an OpenEnv server"):
        rollgym.make("openenv:hello")


@pytest.mark.parametrize("option", ["success_reward", "timeout"])
def test_options_of_the_wrong_type_are_refused_before_a_connection_is_made(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} must be a number, not 'x'"):
        rollgym.make("openenv:ws://127.0.0.1:1", **{option: "x"})
