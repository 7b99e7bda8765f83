"""The tool forms of environments: the same game as in text, by calls."""

import json

import gymnasium as gym
import pytest

import rollgym
from rollgym.core.errors import UsageError

FORMS = {
    "rollgym/Sokoban-v0": ["move"],
    "rollgym/FrozenLake-v0": ["move"],
    "rollgym/WebShop-v0": ["search", "click"],
    "rollgym/Code-v0": ["run_python", "submit"],
}
EVERY = pytest.mark.parametrize("env_id", sorted(FORMS))


def call(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


def start(env_id, **kwargs):
    env = rollgym.make(env_id, tools=True, **kwargs)
    observation, info = env.reset(seed=1, options={"task": 3, "split": "test"})
    return env, observation, info


@EVERY
def test_tools_and_instructions(env_id):
    env, _, info = start(env_id)
    assert [spec.name for spec in env.unwrapped.tools] == FORMS[env_id]
    assert all(f"`{name}`" in env.unwrapped.instructions for name in FORMS[env_id])
    for action in info.get("actions", []):
        assert json.loads(action)["name"] in FORMS[env_id]
    text = rollgym.make(env_id)
    assert text.unwrapped.tools == ()
    assert text.unwrapped.instructions != env.unwrapped.instructions
    for made in (env, text):
        made.close()


@EVERY
def test_it_keeps_the_contract(env_id):
    report = rollgym.check(env_id, kwargs={"tools": True}, quick=True)
    assert report.ok, {r.rule: r.detail for r in report.results if r.status == "failed"}
    assert {r.status for r in report.results} == {"passed"}


@EVERY
def test_an_expert_earns_the_same_by_calls_as_in_text(env_id):
    scores = []
    for kwargs in ({}, {"tools": True}):
        results = rollgym.evaluate(env_id, "expert", episodes=5, env_kwargs=kwargs)
        episodes = sorted(results.episodes, key=lambda episode: episode.spec.episode_id)
        scores.append([(e.success, e.total_reward, e.length, e.final_observation) for e in episodes])
        assert all(e.error is None for e in episodes)
    assert scores[0] == scores[1]
    assert any(success for success, *_ in scores[0])


@EVERY
def test_text_is_an_invalid_action_that_costs_a_turn(env_id):
    env, _, info = start(env_id)
    observation, reward, terminated, _, after = env.step("Up")
    assert not after["valid"]
    assert "That is not a tool call" in observation
    assert (
        after["messages"][0]["content"].startswith("No valid tool call")
        or "No valid tool call" in (after["messages"][0]["content"])
    )
    for key in ("turns_left", "steps_left"):
        if key in info:
            assert after[key] == info[key] - 1
    env.close()


def test_gymnasium_makes_the_tool_form():
    env = gym.make("rollgym/FrozenLake-v0", tools=True)
    env.reset(seed=0)
    assert env.step(call("move", direction="left"))[4]["valid"]
    env.close()


def test_frozen_lake_takes_one_move_per_turn():
    env, _, _ = start("rollgym/FrozenLake-v0")
    text = rollgym.make("rollgym/FrozenLake-v0")
    text.reset(seed=1, options={"task": 3, "split": "test"})
    assert env.step(call("move", direction="right"))[:4] == text.step("Right")[:4]
    two = f"[{call('move', direction='right')}, {call('move', direction='left')}]"
    observation, *_, info = env.step(two)
    assert "A turn may have 1 tool call at most, not 2." in observation
    assert not info["valid"]


def test_sokoban_takes_several_moves_per_turn():
    env, _, _ = start("rollgym/Sokoban-v0", actions_per_turn=3, max_steps=4)
    moves = [call("move", direction=d) for d in ("up", "down", "left")]
    *_, info = env.step(f"[{', '.join(moves)}]")
    assert info["steps_left"] == 1
    assert len(info["messages"]) == 3
    _, reward, terminated, truncated, info = env.step("nonsense")
    assert (reward, terminated, truncated, info["valid"]) == (pytest.approx(-0.1), False, True, False)


def test_the_shop_counts_calls_as_turns():
    env, _, info = start("rollgym/WebShop-v0", max_turns=2)
    _, _, _, truncated, info = env.step(call("search", words="red ] shirt\nlarge"))
    assert (truncated, info["valid"], info["page"]) == (False, True, "results")
    observation, _, _, truncated, info = env.step(call("buy"))
    assert (truncated, info["valid"]) == (True, False)
    assert "There is no tool called 'buy'" in observation


def test_the_compact_view_has_no_tool_form():
    with pytest.raises(UsageError, match="requires another observation than compact"):
        rollgym.make("rollgym/WebShop-v0", tools=True, observation="compact")


def test_code_with_fences_inside_is_run_as_it_is():
    env, _, _ = start("rollgym/Code-v0")
    observation, *_, info = env.step(call("run_python", code="print('```')\nprint('submit')"))
    assert info["valid"]
    assert "```\nsubmit" in observation
    observation, *_, info = env.step(call("submit"))
    assert "There is nothing to submit" in observation
    assert not info["valid"]
    env.close()
