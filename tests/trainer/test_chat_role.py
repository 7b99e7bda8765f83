"""Training against a chat endpoint: ServiceDesk with a customer over HTTP, faults, and the API key."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from training import lines
from user_endpoint import Call, UserEndpoint, without_client_settings

from rollgym.core.errors import RunError, UsageError
from rollgym.core.roles import role_trajectory
from rollgym.evaluation.replay import Settings, replay
from rollgym.evaluation.run_results import load_run

Run = Callable[..., Path]
DESK = "rollgym/ServiceDesk-v0"
KEY = "sk-very/secret-0123456789"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[UserEndpoint]:
    without_client_settings(monkeypatch)
    with UserEndpoint(lambda call: "no") as server:
        yield server


def duel(endpoint: UserEndpoint, role: str = "right", **options: Any) -> dict[str, Any]:
    chat = {"model": "m", "base_url": endpoint.url, "retries": 0, **options}
    return {"id": "lessons:Duel", "roles": {role: "chat"}, "role_options": {role: chat}}


def test_the_policy_trains_with_a_customer_at_an_endpoint(
    train_here: Run, endpoint: UserEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps; only the policy's tokens are recorded and trained on, and the key is in no file."""
    monkeypatch.setenv("USER_KEY", KEY)
    endpoint.reply = lambda call: f"{call.scripted()} My key is {call.headers['authorization']}."
    chat = {"model": "m", "base_url": endpoint.url, "api_key_env": "USER_KEY"}
    folder = train_here(
        envs=[
            {
                "id": DESK,
                "kwargs": {"level": 1, "max_turns": 3},
                "roles": {"user": "chat"},
                "role_options": {"user": chat},
            }
        ],
        model={"size": "tiny", "context": 1024},
        agent={"history": "full", "max_tokens": 8},
        evaluation={"every": 0, "episodes": 2, "on_start": False},
        stop={"steps": 3},
        tracking={"tensorboard": False, "tokens_every": 1},
    )
    episodes = list(load_run(folder).episodes)
    assert len(episodes) == 3 * 2 * 4
    for line, episode in zip(lines(folder / "episodes.jsonl"), episodes, strict=True):
        assert episode.spec.players == {"agent": "policy", "user": "chat"}
        assert (episode.spec.role, episode.turns[0].role) == ("agent", "user")
        assert {turn.role for turn in episode.turns if turn.action_ids} == {"agent"}
        user = [turn for turn in episode.turns if turn.role == "user"]
        assert not any(turn.prompt_ids or turn.logprobs or turn.version_spans for turn in user)
        assert all(turn.usage is not None and turn.usage.completion_tokens == 5 for turn in user)
        own = role_trajectory(episode, "agent").turns
        assert len(line["tokens"]["advantages"]) == sum(len(turn.action_ids) for turn in own) > 0
        # The endpoint was asked with the customer's observations alone.
        asked = [call.heard for call in endpoint.calls if call.heard[0] == user[0].observation]
        assert [turn.observation for turn in user] in asked
    assert [done.difference for done in replay(episodes, Settings(scored=True))] == [None] * len(episodes)
    metrics = lines(folder / "metrics.jsonl")
    assert all("role/user/return" in line and line["episodes_missing"] == 0 for line in metrics)
    assert {call.headers["authorization"] for call in endpoint.calls} == {f"Bearer {KEY}"}
    assert "My key is Bearer [api key]." in json.dumps(lines(folder / "episodes.jsonl"))
    assert KEY not in json.dumps(lines(folder / "episodes.jsonl"))
    for path in folder.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


# --- an endpoint that fails


def test_a_failing_endpoint_costs_retries_and_no_episode(train_here: Run, endpoint: UserEndpoint) -> None:
    """Every seventh request fails: these episodes are played again, and the others are as without it."""
    whole = train_here("whole", envs=[duel(endpoint)])
    failed: list[Call] = []

    def sometimes(call: Call) -> Any:
        if len(endpoint.calls) % 7:
            return "no"
        failed.append(call)
        return 500, {"error": "busy"}

    endpoint.calls.clear()
    endpoint.reply = sometimes
    folder = train_here("failing", envs=[duel(endpoint)], rollout={"max_retries_per_group": 20})
    assert failed
    assert all(line["episodes_missing"] == 0 for line in lines(folder / "metrics.jsonl"))
    before, after = (list(load_run(run).episodes) for run in (whole, folder))
    actions = [[[turn.action for turn in e.turns] for e in episodes] for episodes in (before, after)]
    assert actions[0] == actions[1]
    assert (whole / "final" / "model.safetensors").read_bytes() == (
        folder / "final" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((500, {"error": "down"}), "engine_error .last error: The endpoint answered 500: down."),
        (None, "engine_error .last error: The time limit of 0.3 seconds passed.*waiting for left .chat."),
    ],
    ids=["down", "hangs"],
)
def test_an_endpoint_that_never_answers_ends_the_run_with_the_reason(
    train_here: Run, endpoint: UserEndpoint, reply: Any, reason: str
) -> None:
    endpoint.reply = lambda call: reply
    env = {**duel(endpoint, "left"), "limits": {"seconds": 0.3 if reply is None else 600}}
    with pytest.raises(RunError, match=rf"groups in a row could not be filled: \d+ x {reason}"):
        train_here(envs=[env], rollout={"max_retries_per_group": 0}, evaluation={"on_start": False})


def test_a_run_resumes_with_another_address(train_here: Run, endpoint: UserEndpoint) -> None:
    folder = train_here(envs=[duel(endpoint)], stop={"steps": 2})
    calls, other = len(endpoint.calls), UserEndpoint(lambda call: "no")
    try:
        train_here(envs=[duel(other, timeout=30.0)], stop={"steps": 3}, resume=True)
        assert len(lines(folder / "metrics.jsonl")) == 3
        assert len(endpoint.calls) == calls
        assert len(other.calls) >= 2 * 4 * 2
        with pytest.raises(UsageError, match=r"envs\.0\.role_options\.right\.model"):
            train_here(envs=[duel(other, model="n")], stop={"steps": 3}, resume=True)
    finally:
        other.close()


# --- settings


BAD: list[tuple[dict[str, Any], str]] = [
    ({"base_url": "http://127.0.0.1:9/v1"}, "envs.0.roles.right: 127.0.0.1:9 cannot be reached .*endpoint"),
    ({"model": ""}, "envs.0.roles.right: No model given"),
    ({"modle": "m"}, "envs.0.roles.right: There is no option of agent 'chat' called 'modle'"),
    ({"api_key": KEY}, "envs.0.roles.right: The chat agent takes no option 'api_key'.*api_key_env"),
    ({"extra_body": {"user": KEY}, "api_key_env": "USER_KEY"}, "An option contains the API key"),
]


@pytest.mark.parametrize(("options", "reason"), BAD, ids=[next(iter(options)) for options, _ in BAD])
def test_a_wrong_option_is_refused_before_anything_is_written(
    train_here: Run,
    endpoint: UserEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setenv("USER_KEY", KEY)
    with pytest.raises(UsageError, match=reason) as caught:
        train_here(envs=[duel(endpoint, **options)])
    assert KEY not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
