"""Rewards of single environments in a training run."""

from pathlib import Path
from typing import Any

from training import SMALL, lines

from rollgym.config.loader import load
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.config_files import find_config
from rollgym.trainer.trusted import code_of


def test_a_run_adds_an_environments_reward_to_its_episodes_only(train_here: Any) -> None:
    reward = {"kind": "function", "target": "judges:length", "name": "own"}
    folder: Path = train_here(
        "run", envs=[{"id": "lessons:Yes", "rewards": [reward]}, {"id": "lessons:No"}], stop={"steps": 1}
    )
    named = {"lessons:Yes": {"environment", "own"}, "lessons:No": set()}
    for line in lines(folder / "episodes.jsonl"):
        rewards = line["turns"][-1]["info"].get("rewards", {})
        assert set(rewards) == named[line["spec"]["env_id"]]


def test_code_of_an_environments_reward_is_listed() -> None:
    reward = {"kind": "function", "target": "judges:length"}
    config = load(TrainConfig, {**SMALL, "envs": [{"id": "rollgym/Bandit-v0", "rewards": [reward]}]})
    assert "envs.0.rewards.0.target judges:length" in code_of(config)


def test_the_endpoint_of_a_judge_is_listed() -> None:
    judge = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}
    config = load(TrainConfig, {**SMALL, "envs": [{"id": "rollgym/Judge-v0", "kwargs": {"judge": judge}}]})
    assert "envs.0.kwargs.judge.base_url http://127.0.0.1:1/v1" in code_of(config)


def test_demonstrating_agents_are_listed_unless_they_are_rollgyms() -> None:
    agents = {"agent": "mine:Expert", "mistakes": 0.5, "mistakes_agent": "rollgymx.envs.mine:Other"}
    listed = code_of(load(TrainConfig, {**SMALL, "warm_start": agents}))
    assert set(listed) >= {
        "warm_start.agent mine:Expert",
        "warm_start.mistakes_agent rollgymx.envs.mine:Other",
    }
    shipped = load(TrainConfig, find_config("smollm-frozen-lake"))
    assert shipped.warm_start is not None
    assert ":" in shipped.warm_start.mistakes_agent
    assert code_of(shipped) == []
