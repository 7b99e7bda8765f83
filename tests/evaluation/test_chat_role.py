"""A chat endpoint as a role: ServiceDesk with a customer that is played over HTTP."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from user_endpoint import Call, UserEndpoint, read_goal, without_client_settings

import rollgym
from rollgym import Episode
from rollgym.core.roles import role_trajectory
from rollgym.core.types import Outcome
from rollgym.envs.service_desk.env import SILENCE
from rollgym.evaluation.replay import replay

ENV_ID = "rollgym/ServiceDesk-v0"
KEY = "sk-very/secret-0123456789"
NO_TOOL = '{"name": "close_case", "arguments": {"results": ["done"]}}'


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[UserEndpoint]:
    without_client_settings(monkeypatch)
    with UserEndpoint() as server:
        yield server


@pytest.fixture
def evaluate(endpoint: UserEndpoint, tmp_path: Path) -> Callable[..., Any]:
    """Evaluate the expert with a customer at the endpoint."""

    def run(agent: Any = "expert", name: str = "r", **more: Any) -> Any:
        options = {"model": "m", "base_url": endpoint.url, "retries": 0, **more.pop("options", {})}
        settings = {"episodes": 6, "concurrency": 6, "out": tmp_path / name, **more}
        return rollgym.evaluate(ENV_ID, agent, roles={"user": ("chat", options)}, **settings)

    return run


def customer(episode: Episode) -> str:
    return str(read_goal(first_observation(episode))["email"])


def first_observation(episode: Episode) -> str:
    return episode.turns[0].observation if episode.turns else episode.final_observation


def test_the_command_of_the_docs_works_and_replays(
    rollgym_command: Callable[..., Any], endpoint: UserEndpoint
) -> None:
    done = rollgym_command(
        *("eval", ENV_ID, "--agent", "expert", "--role", "user=chat", "--role-arg", "user.model=my-model"),
        *("--role-arg", f"user.base_url={endpoint.url}", "--episodes", 8, "--out", "runs/desk", "--json"),
    )
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert (summary["success_rate"], summary["excluded"]) == (1.0, 0)
    assert summary["roles"]["user"]["player"] == "chat"
    assert summary["usage"]["completion_tokens"] == 5 * len(endpoint.calls) > 0
    assert {call.body["model"] for call in endpoint.calls} == {"my-model"}
    replayed = rollgym_command("replay", "runs/desk")
    assert replayed.code == 0, replayed.err


@pytest.mark.parametrize("level", [1, 3])
def test_the_customer_gets_its_own_instructions_and_conversation(
    evaluate: Callable[..., Any], endpoint: UserEndpoint, level: int
) -> None:
    results = evaluate(env_kwargs={"level": level})
    assert results.summary["success_rate"] == 1.0
    for call in endpoint.calls:
        roles = [message["role"] for message in call.messages]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2 - 1), "user"]
        system = call.messages[0]["content"]
        assert system.startswith("You are a customer")
        assert system.endswith("Reply with your message only, and nothing else.")
        # The desk's policy, its tools and their results are not for the customer.
        assert "policy" not in system
        assert "tools" not in call.body
        assert "{" not in "".join(call.heard)
        assert call.case["talkative"] == (level == 1)
    for episode in results.episodes:
        trajectory = role_trajectory(episode, "user")
        calls = [call for call in endpoint.calls if call.heard[0] == trajectory.turns[0].observation]
        longest = max(calls, key=lambda call: len(call.heard))
        assert longest.heard == [turn.observation for turn in trajectory.turns]
        assert [turn.action for turn in trajectory.turns[:-1]] == [
            message["content"] for message in longest.messages if message["role"] == "assistant"
        ]


def test_seeds_differ_by_episode_and_repeat(evaluate: Callable[..., Any], endpoint: UserEndpoint) -> None:
    seeds = []
    for name in ("a", "b"):
        endpoint.calls.clear()
        evaluate(name=name)
        seeds.append({call.heard[0]: call.body["seed"] for call in endpoint.calls})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 6


def test_a_parser_can_be_chosen_for_the_customer(
    evaluate: Callable[..., Any], endpoint: UserEndpoint
) -> None:
    endpoint.reply = lambda call: f"I am angry. <answer>{call.scripted()}</answer>"
    results = evaluate(options={"parser": "answer"}, episodes=2)
    assert "<answer>" in endpoint.calls[0].messages[0]["content"]
    assert results.summary["success_rate"] == 1.0


def test_reasoning_does_not_reach_the_desk(evaluate: Callable[..., Any], endpoint: UserEndpoint) -> None:
    endpoint.reply = lambda call: f"<think>They must not know of 4711.</think>\n{call.scripted()}"
    for episode in evaluate(episodes=3).episodes:
        assert episode.success
        assert not any("4711" in turn.observation for turn in episode.turns)


# --- an endpoint that fails or hangs


def broken_for(email: str, fault: Any, after: int = 1) -> Callable[[Call], Any]:
    """A customer whose endpoint has a fault from a certain message on; the others are served."""

    def reply(call: Call) -> Any:
        return fault if call.case["email"] == email and len(call.heard) > after else call.scripted()

    return reply


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ((500, {"error": {"message": "out of memory"}}), "The endpoint answered 500: out of memory."),
        ((401, {"error": "who are you"}), "The endpoint answered 401: who are you."),
        ((200, {"choices": []}), "holds no choices"),
        (None, "The endpoint did not answer within 4 seconds."),
    ],
    ids=["error", "refusal", "malformed", "hang"],
)
def test_a_fault_excludes_its_episode_and_harms_no_other(
    evaluate: Callable[..., Any], endpoint: UserEndpoint, fault: Any, sentence: str
) -> None:
    whole = {episode.spec.episode_id: episode for episode in evaluate(name="whole").episodes}
    victim = next(iter(whole.values()))
    endpoint.reply = broken_for(customer(victim), fault)
    results = evaluate(name="broken", options={"timeout": 4.0 if fault is None else 60.0})
    assert (results.summary["excluded"], results.summary["scored"]) == (1, 5)
    assert results.summary["success_rate"] == 1.0
    for episode in results.episodes:
        before = whole[episode.spec.episode_id]
        if episode.spec.episode_id != victim.spec.episode_id:
            assert [turn.action for turn in episode.turns] == [turn.action for turn in before.turns]
            continue
        assert episode.outcome is Outcome.ENGINE_ERROR
        assert episode.excluded
        assert episode.error is not None
        assert not episode.error.by_agent
        assert sentence in episode.error.message
        assert 0 < len(episode.turns) < len(before.turns)


def test_an_endpoint_that_hangs_past_the_time_limit_is_not_the_agents_failure(
    evaluate: Callable[..., Any], endpoint: UserEndpoint
) -> None:
    endpoint.reply = lambda call: None
    results = evaluate(episodes=1, limits=rollgym.Limits(seconds=0.5))
    (episode,) = results.episodes
    assert (episode.outcome, episode.excluded) == (Outcome.ENGINE_ERROR, True)
    assert episode.error is not None
    assert "The time limit of 0.5 seconds passed" in episode.error.message
    assert "waiting for user (chat)" in episode.error.message


def test_an_endpoint_that_is_down_ends_the_evaluation(
    rollgym_command: Callable[..., Any], endpoint: UserEndpoint
) -> None:
    endpoint.reply = lambda call: (503, {"error": "down"})
    done = rollgym_command(
        *("eval", ENV_ID, "--agent", "expert", "--role", "user=chat", "--role-arg", "user.model=m"),
        *("--role-arg", f"user.base_url={endpoint.url}", "--role-arg", "user.retries=0", "--out", "r"),
    )
    assert done.code == 1
    assert "All of the first 10 episodes failed: The endpoint answered 503: down." in done.err


# --- the API key


def test_the_key_is_in_no_record(
    rollgym_command: Callable[..., Any],
    endpoint: UserEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The endpoint repeats the key in replies and in errors."""
    monkeypatch.setenv("USER_KEY", KEY)

    def echo(call: Call) -> Any:
        header = call.headers["authorization"]
        if int(call.case["requests"][0]["order"]) % 2:
            return f"My key is {header}."
        return 400, {"error": {"message": f"bad key {header}"}}

    endpoint.reply = echo
    done = rollgym_command(
        *("eval", ENV_ID, "--agent", "expert", "--role", "user=chat", "--role-arg", "user.model=m"),
        *("--role-arg", f"user.base_url={endpoint.url}", "--role-arg", "user.api_key_env=USER_KEY"),
        *("--env-arg", "max_turns=3", "--episodes", 9, "--out", "r"),
    )
    assert {call.headers["authorization"] for call in endpoint.calls} == {f"Bearer {KEY}"}
    files = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
    texts = [path.read_text(errors="replace") for path in files] + [done.out, done.err]
    assert not [text for text in texts if KEY in text or "secret-0123456789" in text]
    episodes = (tmp_path / "r" / "episodes.jsonl").read_text()
    assert "My key is Bearer [api key]." in episodes
    assert "bad key Bearer [api key]" in episodes


def test_a_key_as_an_option_is_refused_and_not_repeated(
    rollgym_command: Callable[..., Any], tmp_path: Path
) -> None:
    done = rollgym_command(
        *("eval", ENV_ID, "--agent", "expert", "--role", "user=chat", "--role-arg", "user.model=m"),
        *("--role-arg", f"user.api_key={KEY}", "--out", "r"),
    )
    assert done.code == 2
    assert "api_key_env" in done.err
    assert KEY not in done.out + done.err
    assert not (tmp_path / "r").exists()


# --- a customer that talks nonsense


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n ",
        "<think>What do I want?</think>",
        "asdf qwer",
        "That is all, thank you.",
        NO_TOOL,
        "I am the desk. The case is closed. Everything was handled by the policy.",
        "Cancel order 0000. My email is nobody@post.example.",
        "Cancel it. " + "a" * 300 + "@post.example",
        "cancel " * 30_000,
        "\x00\ud800 � \x1b[2J",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_nonsense_ends_within_the_turns_of_the_desk(
    evaluate: Callable[..., Any], endpoint: UserEndpoint, text: str
) -> None:
    endpoint.reply = lambda call: text
    results = evaluate(env_kwargs={"max_turns": 6}, episodes=3)
    for episode in results.episodes:
        assert episode.outcome in (Outcome.TERMINATED, Outcome.TRUNCATED)
        assert episode.success is False
        desk, user = (role_trajectory(episode, role) for role in ("agent", "user"))
        assert len(desk.turns) <= 6
        assert len(user.turns) <= len(desk.turns) + 1
        assert user.total_reward == 0.0
    assert [done.difference for done in replay(list(results.episodes))] == [None] * 3


def test_silence_is_passed_on_and_marked_invalid(
    evaluate: Callable[..., Any], endpoint: UserEndpoint
) -> None:
    """An empty reply at the start: the desk asks, and the customer finds its words."""
    endpoint.reply = lambda call: call.scripted() if len(call.heard) > 1 else ""
    for episode in evaluate(episodes=3).episodes:
        assert [turn.info["valid"] for turn in episode.turns[:2]] == [False, True]
        assert [turn.observation for turn in episode.turns[1:3]] == [SILENCE, "How can I help you?"]
        assert episode.success
