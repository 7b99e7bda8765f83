"""Math: rewards, attempts, the expert, and replies that earn nothing."""

from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.core.seeding import derive_rng
from rollgym.envs.math.env import MathEnv
from rollgym.envs.math.expert import MathExpert
from rollgym.envs.math.problems import Problem

ENV_ID = "rollgym/Math-v0"


def posed(monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> MathEnv:
    problem = Problem(text="17 + 25", answer="42", kind="addition", level=1, values={"a": 17, "b": 25})
    monkeypatch.setattr(MathEnv, "_pose", lambda self, task: problem)
    env = MathEnv(**kwargs)
    env.reset(seed=0)
    return env


def test_gymnasium_accepts_it() -> None:
    check_env(make(ENV_ID).unwrapped)


def test_the_right_answer_ends_the_episode_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    env = posed(monkeypatch)
    assert env.reset()[0] == "17 + 25"
    observation, reward, terminated, truncated, info = env.step("17 + 25 is 42.\nAnswer: 42")
    assert (observation, reward, terminated, truncated) == ("Correct.", 1.0, True, False)
    assert (info["success"], info["answer"], info["answer_found"]) == (True, "42", "answer line")
    assert info["judge"] == "exact"


def test_a_wrong_answer_earns_nothing_and_further_attempts_repeat_the_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = posed(monkeypatch, attempts=2)
    observation, reward, terminated, _, info = env.step("41")
    assert (observation, reward, terminated) == ("Wrong.\n17 + 25", 0.0, False)
    assert (info["valid"], info["attempts_left"]) == (True, 1)
    observation, reward, terminated, _, info = env.step("hm")
    assert (observation, reward, terminated) == ("There is no answer.", 0.0, True)
    assert (info["valid"], info["answer_found"]) == (False, "nothing")


@pytest.mark.parametrize(
    "reply",
    ["", "Answer:", "\\boxed{}", "17 + 25", "Answer: 17 + 25", "\\boxed{17 + 25}", "17 + 25\n17 + 25"]
    + [
        "\n".join(map(str, range(100))),
        "Answer: 41 or 42",
        "\\boxed{41}\\boxed{42}",
        "Answer: 41\nAnswer: 42",
    ],
)
def test_empty_format_only_echoed_and_listed_answers_earn_nothing(
    reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, reward, terminated, _, info = posed(monkeypatch).step(reply)
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    assert info["valid"] == ("17 + 25" in info["answer"] or "or" in info["answer"])


@pytest.mark.parametrize("level", [None, 1, 2, 3, 4, 5])
def test_the_expert_solves_every_task(level: int | None) -> None:
    env = MathEnv(level=level)
    expert = MathExpert(AgentSetup(env_id=ENV_ID))
    for task in range(60):
        observation, info = env.reset(options={"task": task, "split": "test"})
        assert level in (None, info["level"])
        assert env.step(expert.choose(observation, info))[4]["success"]


def test_random_numbers_are_hardly_ever_right() -> None:
    env = MathEnv()
    wins = 0
    for task in range(300):
        observation, info = env.reset(options={"task": task, "split": "test"})
        wins += env.step(env.random_action(observation, info, derive_rng("test", task)))[4]["success"]
    assert wins <= 6


def test_the_task_fixes_the_problem() -> None:
    env = MathEnv()
    for task in range(20):
        first = env.reset(seed=1, options={"task": task, "split": "dev"})
        assert env.reset(seed=2, options={"task": task, "split": "dev"}) == first


@pytest.mark.parametrize("kwargs", [{"level": 0}, {"level": 6}, {"attempts": 0}, {"judge": "sympy"}])
def test_bad_options_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        MathEnv(**kwargs)


def test_kinds_restrict_the_problems_of_a_level_or_of_all() -> None:
    def drawn(**kwargs: Any) -> set[str]:
        env = make(ENV_ID, **kwargs)
        return {env.reset(seed=0, options={"task": task, "split": "test"})[1]["kind"] for task in range(30)}

    assert drawn(level=1, kinds=["addition", "subtraction"]) == {"addition", "subtraction"}
    assert drawn(kinds=["addition", "ages"]) == {"addition", "ages"}


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        (["ages"], r"There is no kind of level 1 called 'ages'"),
        ("addition", "must be a list of names"),
        ([], "must be a list"),
    ],
)
def test_wrong_kinds_are_named(kinds: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make(ENV_ID, level=1, kinds=kinds)
