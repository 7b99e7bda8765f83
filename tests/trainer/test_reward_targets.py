"""Reward targets are checked before a run makes a policy, a folder or a process."""

import socket
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from local_http import LocalServer

from rollgym.core.errors import UsageError
from rollgym.rewards.resolve import resolve_rewards
from rollgym.rewards.settings import RewardSettings

Refused = Any


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.fixture
def refused(train_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Train with one reward; returns the error message after checking that nothing was made."""
    from rollgym.trainer import runtime as setup

    made: list[str] = []
    monkeypatch.setattr(setup, "prepare_model", lambda *args: made.append("policy"))
    monkeypatch.setattr(setup, "LocalPool", lambda *args, **more: made.append("workers"))

    def run(**reward: Any) -> str:
        with pytest.raises(UsageError) as caught:
            train_here("run", rewards=[reward])
        assert not made
        assert not (tmp_path / "run").exists()
        said = str(caught.value)
        assert "\n" not in said
        return said

    return run


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module:f", "module 'no_such_module' was not found"),
        ("judges:lenght", "There is no object in judges called 'lenght'. Did you mean length?"),
        ("judges:A_NUMBER", "judges:A_NUMBER is not callable (type int): name a function"),
        ("judges:free_of_arguments", "cannot be called with one Episode (TypeError: too many positional"),
        ("broken_reward:f", "importing it failed with ZeroDivisionError"),
        ("__main__:f", "cannot be imported by a worker"),
    ],
)
def test_a_function_is_imported_first(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, said: str
) -> None:
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    sentence = refused(kind="function", target=target)
    assert sentence.startswith("rewards.0 (")
    assert said in sentence


def test_a_service_is_connected_to_first(refused: Refused) -> None:
    port = free_port()
    said = refused(kind="http", url=f"http://127.0.0.1:{port}/score")
    assert f"rewards.0 (http): 127.0.0.1:{port} cannot be reached" in said
    assert "start the reward service first, or correct the address" in said


def test_a_missing_key_is_found_first(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    said = refused(kind="http", url="http://127.0.0.1:9/", header_env={"Authorization": "NO_SUCH_KEY"})
    assert said == (
        "rewards.0 (http): The environment variable that header_env['Authorization'] names is not set."
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "no/such/folder"}, "judge no/such/folder: folder not found"),
        ({"template": "How was it?"}, "has no {transcript} mark"),
        ({"pattern": "("}, "The judge's pattern '('"),
    ],
)
def test_a_judge_is_checked_first(refused: Refused, options: dict[str, str], said: str) -> None:
    assert said in refused(kind="judge", **options)


def test_a_judge_needs_a_model_folder(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(kind="judge", model=str(tmp_path / "empty"))
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "does not hold a tokenizer" in refused(kind="judge", model=str(tmp_path / "empty"))


def test_two_rewards_of_one_name_are_found_first(train_here: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Two rewards are called 'length': give each a different name"):
        train_here("run", rewards=[{"kind": "function", "target": "judges:length"}] * 2)
    assert not (tmp_path / "run").exists()


def test_an_unreachable_engine_is_found_first(train_here: Any, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UsageError, match=r"engine.url: 127.0.0.1:\d+ cannot be reached .*start the SGLang"):
        train_here("run", engine={"kind": "sglang", "url": url})
    assert not (tmp_path / "run").exists()


def test_validation_imports_and_connects_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from training import SMALL

    from rollgym.config.loader import load
    from rollgym.trainer.config import TrainConfig

    monkeypatch.setattr(socket, "socket", None)
    rewards = [
        {"kind": "function", "target": "no_such_module:f"},
        {"kind": "http", "url": "http://127.0.0.1:9/", "header_env": {"A": "NO_SUCH_KEY"}},
    ]
    assert len(load(TrainConfig, {**SMALL, "rewards": rewards}).rewards) == 2


def test_whatever_answers_is_reachable() -> None:
    server = LocalServer(BaseHTTPRequestHandler)  # which answers 501
    try:
        resolve_rewards(
            [
                RewardSettings(kind="http", url=server.url),
                RewardSettings(kind="judge"),
                RewardSettings(kind="function", target="judges:length"),
            ]
        )
    finally:
        server.close()
