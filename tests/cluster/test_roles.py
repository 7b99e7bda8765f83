"""Training with roles on Ray: self-play, scripted opponents and endpoints, as in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from training import Story, fast_versions, write
from user_endpoint import UserEndpoint

from rollgym.trainer.main import run_training

ray: Any = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SELF_PLAY = {"left": "policy", "right": "policy"}
ON_RAY = {"runtime": "ray", "ray": {"num_gpus": 1}}
Run = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    fast_versions(monkeypatch)

    def run(name: str, **changes: Any) -> Path:
        run_training(str(write(tmp_path, **changes)), [], tmp_path / name, plain=True)
        return tmp_path / name

    return run


def duel(roles: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"id": "lessons:Duel", "roles": roles, **more}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[UserEndpoint]:
    for name in ("OPENAI_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = UserEndpoint(lambda call: "no")
    yield server
    server.close()


def test_roles_on_ray_train_as_in_one_process(train: Run, endpoint: UserEndpoint) -> None:
    """Self-play, and both roles against a scripted agent and an endpoint: the same weights, bit for bit."""
    chat = {"right": {"model": "m", "base_url": endpoint.url}}
    changes: dict[str, Any] = {
        "envs": [
            duel(SELF_PLAY),
            duel({"left": "random"}),
            duel({"right": "random"}),
            duel({"right": "chat"}, role_options=chat),
        ],
        "rollout": {"groups": 4, "group_size": 2, "workers": 0},
        "evaluation": {"every": 0, "episodes": 2, "on_start": False},
        "stop": {"steps": 2},
    }
    here, there = Story.of(train("here", **changes)), Story.of(train("there", **changes, **ON_RAY))
    assert there.weights == here.weights
    assert [one["turns"] for one in there.episodes] == [one["turns"] for one in here.episodes]
    assert [one["spec"] for one in there.episodes] == [one["spec"] for one in here.episodes]
    returns = [
        [line[f"role/{role}/return"] for line in run.metrics for role in SELF_PLAY] for run in (here, there)
    ]
    assert returns[0] == returns[1]
    players = {tuple(one["spec"]["players"].values()) for one in there.episodes}
    assert players == {
        ("policy", "policy"),
        ("random #1", "policy"),
        ("policy", "random #2"),
        ("policy", "chat"),
    }
    for episode in there.episodes:
        for turn in episode["turns"]:
            is_policy = episode["spec"]["players"][turn["role"]] == "policy"
            assert bool(turn.get("action_ids")) == is_policy
