"""The rule about roles: what it finds in the form in which agents play all of them."""

from typing import Any

import numpy as np
import pytest

from rollgym import RoleEnv, RoleSpec, StepResult, Task
from rollgym.checks import Status, check
from rollgym.core.role_env import ScriptedRole


class Fair(RoleEnv):
    """Two roles say a digit each; the larger one wins."""

    role_names = ("left", "right")
    others_known = ("zero",)
    instructions = "Say a digit. Answer with one digit, such as `7`."
    reward_range = (-1.0, 1.0)

    def begin(self, task: Task) -> str:
        self.digits: list[int] = []
        return f"Round {task.index}."

    def respond(self, action: str) -> StepResult:
        self.digits.append(int(action) if action.isdecimal() and len(action) == 1 else 0)
        self.to_move = self.next_role()
        if len(self.digits) < 2:
            return StepResult("Your digit?")
        sign = float(np.sign(self.digits[0] - self.digits[1]))
        return StepResult("It is over.", terminated=True, rewards={"left": sign, "right": -sign})

    def facts(self) -> dict[str, Any]:
        return {"actions": [str(digit) for digit in range(10)]}

    def scripted(self, role: str, name: str, rng: np.random.Generator) -> ScriptedRole:
        return lambda observation, info: "0"


class Alone(Fair):
    def respond(self, action: str) -> StepResult:
        result = super().respond(action)
        self.to_move = "left"
        return result


class Lost(Fair):
    def respond(self, action: str) -> StepResult:
        result = super().respond(action)
        if result.terminated and not self.others:
            self.to_move = "middle"
        return result


class Greedy(Fair):
    reward_range = (-0.5, 0.5)


class Silent(Fair):
    def role_spec(self, role: str) -> RoleSpec:
        return RoleSpec(name=role)


class Twins(Fair):
    def role_spec(self, role: str) -> RoleSpec:
        return RoleSpec(name="left", instructions=self.instructions)


def test_an_environment_that_keeps_the_rule_passes() -> None:
    (result,) = check(Fair, rules=["roles"]).results
    assert result.status is Status.PASSED
    assert result.detail == "left, right acted in 10 turns, each with its role and the rewards of all."


@pytest.mark.parametrize(
    ("env", "detail"),
    [
        (Alone, "the role 'right' never acted"),
        (Lost, "info['role'] is 'middle'"),
        (Greedy, "reward_range is (-0.5, 0.5)"),
        (Silent, "the role 'left' has no instructions"),
        (Twins, "two or more different ones"),
    ],
)
def test_what_breaks_the_rule_is_named(env: type[Fair], detail: str) -> None:
    (result,) = check(env, rules=["roles"]).results
    assert result.status is Status.FAILED
    assert detail in result.detail
