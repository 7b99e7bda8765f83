"""Math with written working: the expert's steps, and that only the answer counts."""

import re
from typing import Any

import pytest

from rollgym.core.agent import AgentSetup, make_agent
from rollgym.core.env import text_interface
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.envs.math.working import working

KWARGS: dict[str, Any] = {"level": 1, "working": True}


@pytest.mark.parametrize(
    ("kind", "a", "b", "expected"),
    [
        ("addition", 46, 19, "6 + 9 = 15, 4 + 1 + 1 = 6"),
        ("addition", 3, 4, "3 + 4 = 7, 0 + 0 + 0 = 0"),
        ("subtraction", 54, 48, "14 - 8 = 6, 4 - 4 = 0"),
        ("subtraction", 57, 13, "7 - 3 = 4, 5 - 1 = 4"),
        ("missing number", 23, 40, "10 - 3 = 7, 3 - 2 = 1"),
        ("multiplication", 12, 3, "1: 12, 2: 24, 3: 36"),
    ],
)
def test_steps_lead_to_the_answer(kind: str, a: int, b: int, expected: str) -> None:
    assert working(kind, {"a": a, "b": b}) == expected


def test_the_expert_is_right_and_its_steps_are_true() -> None:
    env = make("rollgym/Math-v0", **KWARGS)
    expert: Any = make_agent("expert", AgentSetup(env_id="rollgym/Math-v0", env_kwargs=KWARGS))
    for task in range(100):
        observation, info = env.reset(seed=0, options={"task": task, "split": "train"})
        reply = expert.choose(observation, info)
        steps = re.findall(r"([0-9]+(?: [+-] [0-9]+)+) = ([0-9]+)", reply)
        assert all(_value(left) == int(right) for left, right in steps)
        assert steps or "1: " in reply
        _, reward, _, _, info = env.step(reply)
        assert (reward, info["answer_found"]) == (1.0, "answer line")


def _value(text: str) -> int:
    first, *rest = re.findall(r"[+-]? ?[0-9]+", text)
    return int(first) + sum(int(term.replace(" ", "")) for term in rest)


@pytest.mark.parametrize("steps", ["6 + 9 = 15, 4 + 1 + 1 = 6", "1: 12, 2: 24", "15", "65"])
def test_working_alone_earns_nothing(steps: str) -> None:
    """Neither does the right working before a missing answer."""
    env = make("rollgym/Math-v0", **KWARGS)
    for task in range(20):
        for reply in (f"{steps}\nAnswer:", f"{steps}\nAnswer: ?", f"{steps}, {steps}"):
            _, info = env.reset(seed=0, options={"task": task, "split": "test"})
            own = working(info["kind"], info["values"])
            assert env.step(reply)[1] == 0.0
            env.reset(seed=0, options={"task": task, "split": "test"})
            assert env.step(f"{own}\nAnswer:")[1] == 0.0


def test_the_instructions_ask_for_it() -> None:
    asked, plain = (text_interface(make("rollgym/Math-v0", level=1, working=on)) for on in (True, False))
    assert "steps of your working" in asked.instructions
    assert "working" not in plain.instructions


@pytest.mark.parametrize("level", [None, 2, 5])
def test_other_levels_have_none(level: int | None) -> None:
    with pytest.raises(UsageError, match="working requires level=1"):
        make("rollgym/Math-v0", level=level, working=True)
