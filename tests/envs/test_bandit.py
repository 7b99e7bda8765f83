"""Bandit: payoffs, the rule of success, the baseline."""

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.core.seeding import derive_rng
from rollgym.core.tasks import TaskSet
from rollgym.envs.bandit.arms import Arm, random_arms
from rollgym.envs.bandit.env import BanditEnv
from rollgym.envs.bandit.expert import BanditExpert

ENV_ID = "rollgym/Bandit-v0"
SURE = (Arm("Amber", 0.0, "bernoulli"), Arm("Birch", 1.0, "bernoulli"))


def with_arms(monkeypatch: pytest.MonkeyPatch, arms: tuple[Arm, ...] = SURE, **kwargs: Any) -> BanditEnv:
    monkeypatch.setattr(TaskSet, "draw", lambda *args, **names: arms)
    env = BanditEnv(arms=len(arms), **kwargs)
    env.reset(seed=0)
    return env


def play(env: BanditEnv, pulls: list[str]) -> list[tuple[str, float, bool, bool, dict[str, Any]]]:
    env.reset(seed=0)
    return [env.step(pull) for pull in pulls]


def successes(who: str, count: int, **kwargs: Any) -> int:
    env = BanditEnv(**kwargs)
    expert = BanditExpert(AgentSetup(env_id=ENV_ID))
    wins = 0
    for task in range(count):
        rng = derive_rng("test", task)
        observation, info = env.reset(seed=task, options={"task": task, "split": "test"})
        over = False
        while not over:
            if who == "expert":
                action = expert.choose(observation, info)
            else:
                action = env.random_action(observation, info, rng)
            observation, _, over, _, info = env.step(action)
            assert info["valid"]
        wins += info["success"]
    return wins


@pytest.mark.parametrize("kwargs", [{}, {"payoff": "gaussian"}, {"mode": "single"}])
def test_gymnasium_accepts_it(kwargs: dict[str, Any]) -> None:
    check_env(make(ENV_ID, **kwargs).unwrapped)


def test_pulls_pay_what_the_machine_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    env = with_arms(monkeypatch, turns=3)
    assert env.reset(seed=0)[0] == "Machines: Amber, Birch. Turns left: 3."
    assert env.step("Birch")[:3] == ("Birch paid 1. Turns left: 2.", 1.0, False)
    assert env.step("amber")[:3] == ("Amber paid 0. Turns left: 1.", 0.0, False)
    observation, reward, terminated, truncated, info = env.step("`BIRCH`")
    assert observation == "Birch paid 1. No turns left. The best was Birch."
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["actions"] == ["Amber", "Birch"]
    assert (info["pulls"], info["totals"], info["left"]) == ([1, 2], [0.0, 2.0], 0)


@pytest.mark.parametrize(
    ("pulls", "success"),
    [
        ("AAABBB", True),
        ("BBBABB", True),
        ("AAAABB", True),
        ("BBBBAA", False),
        ("BBBAAB", False),
        ("AAAB?B", True),
        ("AAAB??", False),
    ],
)
def test_success_is_a_majority_of_the_last_half(
    pulls: str, success: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"A": "Amber", "B": "Birch", "?": "nobody"}
    steps = play(with_arms(monkeypatch, turns=6), [names[letter] for letter in pulls])
    assert steps[-1][2]
    assert steps[-1][4]["success"] is success
    assert not any(step[4]["success"] for step in steps[:-1])


def test_half_of_the_last_half_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    env = with_arms(monkeypatch, turns=4)
    assert play(env, ["Amber", "Amber", "Birch", "Amber"])[-1][4]["success"] is False
    assert play(env, ["Amber", "Amber", "Birch", "Birch"])[-1][4]["success"] is True


@pytest.mark.parametrize("action", ["", "Comet", "Amber Birch", "1", "pull Birch", "x" * 40_000])
def test_a_wrong_name_wastes_the_turn(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    observation, reward, terminated, _, info = with_arms(monkeypatch).step(action)
    assert observation == "There is no such machine. Machines: Amber, Birch. Turns left: 19."
    assert (reward, terminated, info["valid"], info["pulls"]) == (0.0, False, False, [0, 0])


def test_bernoulli_payoffs_are_one_or_zero_around_the_mean() -> None:
    rng = np.random.default_rng(0)
    paid = [Arm("A", 0.3, "bernoulli").pull(rng) for _ in range(2000)]
    assert set(paid) == {0.0, 1.0}
    assert sum(paid) / 2000 == pytest.approx(0.3, abs=0.04)


def test_gaussian_payoffs_lie_around_the_mean() -> None:
    rng = np.random.default_rng(0)
    paid = [Arm("A", 0.3, "gaussian").pull(rng) for _ in range(2000)]
    assert np.mean(paid) == pytest.approx(0.3, abs=0.02)
    assert np.std(paid) == pytest.approx(0.2, abs=0.02)


def test_one_machine_is_clearly_best() -> None:
    for seed in range(50):
        arms = random_arms(np.random.default_rng(seed), 4, "bernoulli")
        means = sorted(arm.mean for arm in arms)
        assert means[-1] >= 0.7
        assert means[-2] <= 0.5
        assert len({arm.name for arm in arms}) == 4


def test_the_best_machine_has_no_favourite_place() -> None:
    positions = []
    for seed in range(200):
        means = [arm.mean for arm in random_arms(np.random.default_rng(seed), 4, "bernoulli")]
        positions.append(means.index(max(means)))
    assert all(30 <= positions.count(position) <= 70 for position in range(4))


def test_the_single_mode_is_one_pull_of_the_risky_or_the_steady_machine() -> None:
    env = BanditEnv(mode="single")
    orders, paid = set(), set()
    for seed in range(20):
        observation, info = env.reset(seed=seed, options={"task": seed})
        orders.add(observation)
        assert sorted(info["actions"]) == ["Comet", "Lantern"]
        _, reward, terminated, _, info = env.step("Comet")
        paid.add(reward)
        assert (terminated, info["success"]) == (True, True)
    assert orders == {"Machines: Comet, Lantern. Turns left: 1.", "Machines: Lantern, Comet. Turns left: 1."}
    assert paid == {0.0, 1.0}
    env.reset(seed=0)
    observation, reward, terminated, _, info = env.step("Lantern")
    assert (reward, terminated, info["success"]) == (0.4, True, False)


def test_the_same_task_and_seed_give_the_same_payoffs() -> None:
    def episode(seed: int) -> list[float]:
        env = BanditEnv(turns=20)
        _, info = env.reset(seed=seed, options={"task": 1})
        return [env.step(info["actions"][turn % 4])[1] for turn in range(20)]

    assert episode(7) == episode(7)
    assert len({tuple(episode(seed)) for seed in range(5)}) > 1


def test_no_set_of_machines_is_in_two_splits() -> None:
    env = BanditEnv()
    seen: dict[str, set[object]] = {}
    for split in ("train", "dev", "test"):
        for task in range(100):
            env.reset(options={"task": task, "split": split})
            seen.setdefault(split, set()).add(env._arms)
    assert not seen["train"] & seen["dev"]
    assert not seen["train"] & seen["test"]
    assert not seen["dev"] & seen["test"]


def test_the_baseline_tries_each_machine_then_the_one_that_paid() -> None:
    expert = BanditExpert(AgentSetup(env_id=ENV_ID))
    names = ["A", "B", "C"]
    assert expert.choose("", {"actions": names, "pulls": [1, 0, 0], "totals": [1.0, 0.0, 0.0]}) == "B"
    assert expert.choose("", {"actions": names, "pulls": [5, 5, 5], "totals": [1.0, 4.0, 2.0]}) == "B"


def test_the_baseline_mostly_succeeds_and_random_hardly_ever() -> None:
    assert successes("expert", 60) >= 40
    assert successes("random", 60) <= 6


@pytest.mark.parametrize(
    "kwargs",
    [
        {"arms": 1},
        {"arms": 11},
        {"turns": 0},
        {"payoff": "levy"},
        {"mode": "double"},
        {"mode": "single", "turns": 5},
    ],
)
def test_bad_options_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BanditEnv(**kwargs)
