"""Environments with tools: schemas from type hints, calls as JSON, invalid calls as invalid actions."""

import asyncio
import json
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_envs import Safe, Switch

import rollgym
from rollgym import StepResult, ToolCall, ToolEnv, ToolSpec, tool
from rollgym.core.agent import Briefing
from rollgym.core.errors import UsageError
from rollgym.core.tools import BadCall, read_calls


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def play(env, *calls):
    action = json.dumps(calls[0] if len(calls) == 1 else list(calls))
    observation, reward, terminated, truncated, info = env.step(action)
    return StepResult(observation, reward, terminated, truncated, info["success"], info["valid"], info)


@pytest.fixture
def safe():
    env = Safe()
    env.reset(seed=0, options={"task": 3})
    return env


def test_hints_and_docstrings_become_schemas():
    turn, pull, note = Safe().tools
    assert turn == ToolSpec(
        name="turn",
        description="Turn the dial.",
        parameters={
            "type": "object",
            "properties": {
                "direction": {
                    "type": "string",
                    "enum": ["left", "right"],
                    "description": "Right counts up, left counts down.",
                },
                "steps": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 9,
                    "default": 1,
                    "description": "How far.",
                },
            },
            "required": ["direction"],
            "additionalProperties": False,
        },
    )
    assert pull.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert note.name == "note"
    assert "title" not in json.dumps(note.parameters)


def test_a_call_is_an_action(safe):
    result = play(safe, call("turn", direction="right", steps=4))
    assert result.observation == "The dial shows 4."
    assert (result.reward, result.terminated, result.valid, result.success) == (0.0, False, True, False)
    assert result.info["messages"] == [
        {"role": "tool", "content": "The dial shows 4.", "tool_call_id": "call_0", "name": "turn"}
    ]


def test_several_calls_of_a_turn_are_executed_in_order_and_their_rewards_add_up(safe):
    safe.code = 3
    result = play(safe, call("note", text="a"), call("turn", direction="right", steps=3), call("pull"))
    assert result.observation == "note:\nNoted: a []\n\nturn:\nThe dial shows 3.\n\npull:\nIt opens."
    assert result.reward == 0.75
    assert result.terminated
    assert result.success
    assert result.info["notes"] == 1
    assert result.info["pulled"]
    assert [message["tool_call_id"] for message in result.info["messages"]] == ["call_0", "call_1", "call_2"]


def test_calls_after_the_end_are_not_executed(safe):
    safe.code = 1
    result = play(safe, call("pull"), call("turn", direction="right"))
    assert result.observation == "pull:\nIt stays closed." or result.observation == "It stays closed."
    assert safe.turns == 0
    assert len(result.info["messages"]) == 1
    assert not result.success


def test_ids_of_the_agent_are_kept(safe):
    result = play(safe, {**call("turn", direction="left"), "id": "abc"})
    assert result.info["messages"][0]["tool_call_id"] == "abc"


def test_arguments_arrive_with_their_types(safe):
    result = play(safe, call("note", text="b", point={"x": 2}, tags=["c"]))
    assert result.observation == "Noted at 2,0: b ['c']"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("go left", "That is not a tool call"),
        ("", "That is not a tool call"),
        ("[" * 5000, "That is not a tool call"),
        ('{"name": "turn", "arguments": {"steps": NaN}}', "That is not a tool call"),
        ("[]", "The list of tool calls is empty"),
        ("3", "needs the name of a tool"),
        ("[[]]", "needs the name of a tool"),
        ('{"name": 3}', "needs the name of a tool"),
        ('{"name": ""}', "needs the name of a tool"),
        ('{"name": "turn", "arguments": "left"}', "must be a JSON object"),
        ('{"name": "turn", "arguments": {}}', "direction: Field required"),
        (
            '{"name": "turn", "arguments": {"direction": "up"}}',
            "direction: Input should be 'left' or 'right'",
        ),
        ('{"name": "turn", "arguments": {"direction": "left", "steps": "3"}}', "steps: Input should be"),
        ('{"name": "turn", "arguments": {"direction": "left", "steps": true}}', "steps: Input should be"),
        ('{"name": "turn", "arguments": {"direction": "left", "steps": 10}}', "less than or equal to 9"),
        ('{"name": "turn", "arguments": {"direction": "left", "far": 1}}', "far: Extra inputs"),
        ('{"name": "note", "arguments": {"text": "\\ud800"}}', "arguments of note"),
        ('{"name": "trun", "arguments": {}}', "Did you mean turn?"),
        ('{"name": "__init__", "arguments": {}}', "There is no tool called '__init__'"),
        ('{"name": "write_note", "arguments": {"text": "a"}}', "There is no tool called"),
        (json.dumps([call("pull")] * 17), "16 tool calls at most, not 17"),
    ],
)
def test_an_invalid_call_is_an_invalid_action(safe, action, message):
    observation, reward, terminated, truncated, info = safe.step(action)
    assert message in observation
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
    (first, *_) = info["messages"]
    assert message in first["content"] or first["content"].startswith(
        "No valid tool call. The tools are: turn"
    )
    assert safe.turns == 0


def test_one_invalid_call_keeps_the_others_of_its_turn_from_running(safe):
    result = play(safe, call("turn", direction="right"), call("turn", direction="up"))
    assert not result.valid
    assert safe.dial == 0
    assert [message["role"] for message in result.info["messages"]] == ["tool", "tool"]
    assert "Not executed" in result.info["messages"][0]["content"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
calls = st.fixed_dictionaries(
    {"name": st.sampled_from(["turn", "note", "pull", "tur"]) | json_values},
    optional={
        "arguments": json_values
        | st.dictionaries(
            st.sampled_from(["direction", "steps", "text", "point", "tags"]),
            json_values | st.just("left"),
            max_size=3,
        ),
        "id": json_values,
    },
)


@settings(max_examples=300, deadline=None)
@given(action=st.text(max_size=40) | (json_values | calls | st.lists(calls, max_size=3)).map(json.dumps))
def test_no_action_raises(action):
    env = Safe()
    env.reset(seed=0)
    observation, reward, _, _, info = env.step(action)
    assert observation
    assert isinstance(info["valid"], bool)
    assert all(message["role"] in ("tool", "user") for message in info["messages"])
    json.dumps(info)


def test_a_code_fence_around_a_call_is_accepted():
    assert read_calls('```json\n{"name": "pull"}\n```') == (ToolCall(name="pull"),)
    with pytest.raises(BadCall):
        read_calls('Here: {"name": "pull"}')


def test_random_calls_are_valid():
    rng = np.random.default_rng(0)
    names = set()
    for seed in range(200):
        env = Safe()
        observation, info = env.reset(seed=seed)
        action = env.random_action(observation, info, rng)
        names.add(json.loads(action)["name"])
        assert env.step(action)[4]["valid"], action
    assert names == {"turn", "pull", "note"}


def test_few_calls_are_listed():
    env = Switch()
    _, info = env.reset(seed=0)
    assert info["actions"] == [ToolCall(name="press", arguments={"button": n}).to_json() for n in range(4)]
    assert "actions" not in Safe().reset(seed=0)[1]


def test_gymnasium_accepts_it():
    gym.register("test/Safe-v0", Safe, max_episode_steps=5)
    try:
        env = gym.make("test/Safe-v0")
        check_env(env.unwrapped, skip_render_check=True)
        env.reset(seed=0)
        for _ in range(5):
            _, _, _, truncated, _ = env.step("nonsense")
        assert truncated
    finally:
        del gym.registry["test/Safe-v0"]


@pytest.mark.parametrize("env", ["tool_envs:Safe", "tool_envs:Switch"])
def test_rollgym_check_accepts_it(env):
    report = rollgym.check(env, quick=True)
    assert report.ok, report


def test_an_override_of_a_tool_is_a_tool():
    class Loud(Safe):
        def turn(self, direction: str) -> str:
            """Turn the dial loudly."""
            return "CLICK"

        write_note = None

    env = Loud()
    assert [spec.name for spec in env.tools] == ["turn", "pull"]
    assert env.tools[0].description == "Turn the dial loudly."
    env.reset(seed=0)
    assert env.step('{"name": "turn", "arguments": {"direction": "up"}}')[0] == "CLICK"


def test_tools_that_are_not_methods():
    class Remote(ToolEnv):
        def __init__(self):
            super().__init__()
            self.tools = (ToolSpec(name="echo", parameters={"properties": {"text": {"type": "string"}}}),)

        def begin(self, task):
            return "Say something."

        def call_tool(self, call):
            return f"{call.name}: {call.arguments}"

    env = Remote()
    env.reset(seed=0)
    assert env.step('{"name": "echo", "arguments": {"text": "a"}}')[0] == "echo: {'text': 'a'}"
    assert not env.step('{"name": "other"}')[4]["valid"]
    assert json.loads(env.random_action("", {}, np.random.default_rng(0)))["name"] == "echo"


def test_a_tool_does_not_replace_a_method_of_environments():
    cls = type("Broken", (ToolEnv,), {"close": tool(lambda self: "closed")})
    cls.close._rollgym_tool = "close"
    with pytest.raises(UsageError, match=r"Broken.close replaces a method of environments"):
        cls()


def no_hint(self, a): ...


def star(self, *a: int): ...


async def later(self, a: int): ...


def odd(self, a: type(np)): ...


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (no_hint, "needs a type hint"),
        (star, "declare each argument by its name"),
        (later, "without async"),
        (odd, "has no JSON schema"),
    ],
)
def test_a_tool_without_a_schema_is_refused(method, message):
    cls = type("Broken", (ToolEnv,), {"act": tool(name="act")(method)})
    with pytest.raises(UsageError, match=message):
        cls()


class Listener:
    """Records what it is briefed with, and plays one call."""

    def __init__(self, setup):
        self.briefings = []

    def player(self, briefing: Briefing):
        self.briefings.append(briefing)
        return self

    async def act(self, observation, info):
        return '{"name": "pull", "arguments": {}}'

    async def close(self):
        pass


@pytest.mark.parametrize("workers", [0, 1])
def test_tools_reach_agents_through_the_pool(workers):
    from rollgym.core.types import EpisodeSpec
    from rollgym.pool.inline import InlinePool
    from rollgym.pool.local import LocalPool
    from rollgym.rollout.episode_runner import EpisodeRunner

    async def run():
        pool = LocalPool(workers, modules=["tool_envs"]) if workers else InlinePool(["tool_envs"])
        agent = Listener(None)
        try:
            spec = EpisodeSpec(episode_id="e", env_id="tool_envs:Safe", task=0)
            episode = await EpisodeRunner(spec, pool, agent).run()
        finally:
            await pool.close()
        return agent.briefings, episode

    (briefing,), episode = asyncio.run(run())
    assert episode.error is None
    assert briefing.tools == Safe().tools
    assert episode.turns[0].info["messages"][0]["name"] == "pull"


def test_import_rollgym_imports_no_pydantic():
    code = "import sys, rollgym; rollgym.ToolEnv; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
