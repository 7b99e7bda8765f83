"""Environments with roles: the form with all roles, and the form with one agent."""

import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from rollgym.core.env import StepResult
from rollgym.core.errors import UsageError
from rollgym.core.role_env import RoleEnv, ScriptedRole, roles_of
from rollgym.core.tasks import Task
from rollgym.core.types import RoleSpec


class Relay(RoleEnv):
    """Three roles add to a list; every action pays the next role 1, and `end` ends the episode."""

    role_names = ("a", "b", "c")
    others_known = ("plus", "ender")
    instructions = "Say a word."

    def role_spec(self, role: str) -> RoleSpec:
        return RoleSpec(name=role, instructions=f"You are {role}.")

    def begin(self, task: Task) -> str:
        self.said: list[str] = []
        self.to_move = "b" if task.index == 1 else "a"
        if task.index == 2:
            self.own_role = "c"
        return f"{self.to_move} starts"

    def respond(self, action: str) -> StepResult:
        if action == "bad":
            return StepResult("no", valid=False)
        self.said.append(f"{self.to_move}:{action}")
        over = action == "end"
        self.to_move = self.next_role()
        return StepResult(
            f"{self.to_move} reads {self.said[-1]}",
            terminated=over,
            success=over,
            rewards={self.to_move: 1.0},
            info={"by": self.said[-1][0]},
        )

    def facts(self) -> dict[str, int]:
        return {"count": len(self.said)}

    def scripted(self, role: str, name: str, rng: np.random.Generator) -> ScriptedRole:
        return lambda observation, info: "end" if name == "ender" else f"+{info['count']}"


def test_every_action_is_of_the_role_to_move() -> None:
    env = Relay(others=None)
    observation, info = env.reset(options={"task": 1})
    assert (observation, info["role"]) == ("b starts", "b")
    observation, reward, _, _, info = env.step("x")
    assert (observation, info["role"], reward) == ("c reads b:x", "c", 0.0)
    assert info["role_rewards"] == {"a": 0.0, "b": 0.0, "c": 1.0}
    _, reward, _, _, info = env.step("y")
    assert (info["role"], reward) == ("a", 1.0)  # the first role's
    _, _, over, _, info = env.step("end")
    assert (over, info["role_success"]) == (True, {"a": True, "b": True, "c": True})
    with pytest.raises(ResetNeeded):
        env.step("x")


def test_with_one_agent_scripted_roles_act_in_between() -> None:
    env = Relay()
    assert env.others == "plus"
    assert env.reset(options={"task": 0})[0] == "a starts"
    observation, reward, over, _, info = env.step("x")
    assert env.said == ["a:x", "b:+1", "c:+2"]
    # Of the rewards of three actions the agent's own one counts.
    assert (observation, reward, over, info["count"], info["by"]) == ("a reads c:+2", 1.0, False, 3, "c")
    assert "role" not in info
    assert roles_of(env) == ()


def test_an_invalid_action_stays_the_agents_and_is_reported() -> None:
    env = Relay()
    env.reset(options={"task": 0})
    observation, _, _, _, info = env.step("bad")
    assert (observation, info["valid"], env.said) == ("no", False, [])


def test_scripted_roles_may_act_first() -> None:
    env = Relay()
    observation, info = env.reset(options={"task": 1})
    assert env.said == ["b:+0", "c:+1"]
    assert (observation, info["count"]) == ("a reads c:+1", 2)
    observation, _ = env.reset(options={"task": 2})
    assert (env.own_role, observation) == ("c", "c reads b:+1")
    assert env.reset(options={"task": 0})[0] == "a starts"  # back to the first role


def test_a_scripted_role_can_end_the_episode() -> None:
    env = Relay(others="ender")
    env.reset(options={"task": 0})
    observation, reward, over, _, info = env.step("x")
    assert (over, reward, info["success"]) == (True, 0.0, True)


def test_roles_have_their_own_instructions() -> None:
    assert [spec.instructions for spec in roles_of(Relay(others=None))] == [
        "You are a.",
        "You are b.",
        "You are c.",
    ]


def test_an_unknown_scripted_player_is_named() -> None:
    with pytest.raises(UsageError, match=r"plus, ender, null \(all roles\)"):
        Relay(others="plis")
