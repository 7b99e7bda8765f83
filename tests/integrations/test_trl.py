"""The parts that TRL's GRPOTrainer takes, without TRL; `tests/adapters/real` trains with it."""

import inspect

import pytest

import rollgym
from rollgym.core.errors import UnknownName, UsageError
from rollgym.integrations import trl


def public_methods(factory):
    """The methods that TRL finds, as it looks for them."""
    functions = inspect.getmembers(factory, predicate=inspect.isfunction)
    return [name for name, _ in functions if not name.startswith("_")]


def test_a_text_environment_has_one_tool_and_plays_as_gymnasium_does():
    factory = trl.environment_factory("rollgym/FrozenLake-v0", split="test")
    assert public_methods(factory) == ["act", "reset"]
    env, plain = factory(), rollgym.make("rollgym/FrozenLake-v0")
    first = env.reset(prompt=[{"role": "user", "content": "Play."}], task=3, split="test", seed=1)
    assert first == "\n\n" + plain.reset(seed=1, options={"task": 3, "split": "test"})[0]
    total, over = 0.0, False
    for turn in range(60):
        action = ("Right", "Down")[turn % 2]
        observation, reward, terminated, truncated, _ = plain.step(action)
        total, over = total + reward, terminated or truncated
        assert env.act(action).startswith(observation)
        if over:
            break
    assert over
    assert env.act("Right") == "The episode is over."
    assert trl.reward_funcs()[0](environments=[env]) == [total]


def test_the_prompt_has_the_instructions_once():
    env = trl.environment_factory("rollgym/FrozenLake-v0")()
    instructions = env._instructions
    assert instructions in env.reset(prompt=[{"role": "user", "content": ""}], task=1, split="train")
    assert instructions in env.reset()
    assert instructions not in env.reset(prompt=[{"role": "user", "content": instructions}])


def test_tools_become_methods_with_signatures_and_documentation():
    factory = trl.environment_factory("rollgym/ServiceDesk-v0")
    assert "find_customer" in public_methods(factory)
    assert "act" not in public_methods(factory)
    env = factory()
    env.reset(task=0, split="train", seed=0)
    signature = inspect.signature(env.cancel_order)
    assert [(name, p.annotation) for name, p in signature.parameters.items()] == [("order", str)]
    assert "Args:\n    order:" in env.cancel_order.__doc__
    by_name, by_position = env.cancel_order(order="none"), None
    env.reset(task=0, split="train", seed=0)
    by_position = env.cancel_order("none")
    assert by_name == by_position


def test_success_can_be_a_second_reward():
    env = trl.environment_factory("rollgym/FrozenLake-v0")()
    env.reset(task=0, split="train", seed=0)
    assert [reward(environments=[env]) for reward in trl.reward_funcs(success_weight=0.5)] == [[0.0], [0.0]]
    env._success = True
    assert trl.reward_funcs(success_weight=0.5)[1](environments=[env]) == [0.5]


def test_an_environment_that_fails_has_no_reward(monkeypatch):
    env = trl.environment_factory("rollgym/FrozenLake-v0")()
    env.reset(task=0, split="train", seed=0)

    def fail(action):
        raise RuntimeError("broken")

    monkeypatch.setattr(env._env, "step", fail)
    with pytest.raises(RuntimeError, match="broken"):
        env.act("Right")
    assert trl.reward_funcs(success_weight=1.0)[0](environments=[env]) == [None]
    assert trl.reward_funcs(success_weight=1.0)[1](environments=[env]) == [None]


def test_wrong_names_are_refused_at_once():
    with pytest.raises(UnknownName, match="Did you mean rollgym/FrozenLake-v0"):
        trl.environment_factory("rollgym/FrozenLak-v0")
    with pytest.raises(UnknownName, match="split"):
        trl.environment_factory("rollgym/FrozenLake-v0", split="trian")


def test_a_dataset_needs_its_package_or_has_a_row_per_task(monkeypatch):
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    rows = trl.dataset("rollgym/FrozenLake-v0", size=5, split="test", seed=2)
    tasks = rollgym.make("rollgym/FrozenLake-v0").unwrapped.tasks.order("test", 2)
    assert [row["task"] for row in rows] == [next(tasks) for _ in range(5)]
    assert {row["split"] for row in rows} == {"test"}
    assert len({row["seed"] for row in rows}) == 5
    with pytest.raises(UsageError, match="split 'test' has 1000 tasks"):
        trl.dataset("rollgym/FrozenLake-v0", size=5000, split="test")
