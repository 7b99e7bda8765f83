"""Environments with several roles, such as two players, or an agent and a user: the base class `RoleEnv`.

The roles act in turn, in any order that the environment chooses. Such an environment has two forms:

- **One agent** (the default): the agent plays one role and scripted players inside the environment play the
  others, so it is an ordinary Gymnasium environment.
- **All roles** (``others=None``): every action is that of the role in ``info["role"]``, and every
  observation is for the role that acts next. ``info["role_rewards"]`` and ``info["role_success"]`` are by
  role; the reward that `step` returns is that of the first role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded

from rollgym.core.env import MAX_ACTION_CHARS, StepResult, TextEnv
from rollgym.core.errors import UnknownName
from rollgym.core.serialization import clean_text, jsonable
from rollgym.core.tool_env import ToolEnv
from rollgym.core.types import RoleSpec

__all__ = ["ALL_ROLES", "RoleEnv", "ScriptedRole", "roles_of"]

ALL_ROLES: Mapping[str, Any] = {"others": None}
"""Argument of an environment with roles for the form in which agents play all of them."""
ScriptedRole = Callable[[str, Mapping[str, Any]], str]
"""Chooses the action of a role from its observation and ``info``."""
MAX_OTHER_TURNS = 10_000
"""Turns of scripted roles in a row after which an environment counts as endless."""


class RoleEnv(ToolEnv):
    """Base class of environments with several roles; override `begin`, `respond` and `scripted`.

    Set ``self.to_move`` in `begin` and `respond` to the role that acts next, and address the observation to
    it: with what the other roles did since its last turn. Give rewards by role, ``StepResult(...,
    rewards={"player_1": 1.0, "player_2": -1.0})``.

    Actions are plain text unless the class has tools; `role_spec` sets instructions and tools by role. A role
    without tools plays text: override `respond` for it, as `ToolEnv` explains.

    Args:
        others: Who plays the other roles inside the environment: one of ``others_known``; ``None`` for the
            form with all roles.
        render_mode: Gymnasium's argument of that name.

    Example:
        >>> class Last(RoleEnv):
        ...     role_names = ("player_1", "player_2")
        ...     others_known = ("timid",)
        ...     instructions = "Take 1 or 2 of the matches. Who takes the last one wins. Answer `1` or `2`."
        ...     def begin(self, task):
        ...         self.left = int(task.rng().integers(4, 20))
        ...         return f"{self.left} matches are left."
        ...     def respond(self, action):
        ...         self.left -= 2 if action.strip() == "2" and self.left > 1 else 1
        ...         if not self.left:
        ...             won = self.to_move
        ...             rewards = {role: 1.0 if role == won else -1.0 for role in self.role_names}
        ...             wins = {role: role == won for role in self.role_names}
        ...             return StepResult("It is over.", terminated=True, rewards=rewards, successes=wins)
        ...         self.to_move = self.next_role()
        ...         return StepResult(f"{self.left} matches are left.")
        ...     def scripted(self, role, name, rng):
        ...         return lambda observation, info: "1"
    """

    role_names: tuple[str, ...] = ()
    """The roles; the first is the one that an agent plays in the form with one agent."""
    others_known: tuple[str, ...] = ()
    """Names of scripted players, for ``others``; the first is the default."""

    def __init__(self, *, others: str | None = "", render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        if others == "":
            others = self.others_known[0]
        if others is not None and others not in self.others_known:
            choices = ", ".join([*self.others_known, "null (all roles)"])
            raise UnknownName("player for others", str(others), self.others_known, f"Choose from: {choices}.")
        self.others = others
        self.to_move = self.role_names[0]
        self.own_role = self.role_names[0]
        """The agent's role in the form with one agent; `begin` may set another one for its task."""
        self.roles = () if others is not None else tuple(map(self.role_spec, self.role_names))
        self._scripted_roles: dict[str, ScriptedRole] = {}

    roles: tuple[RoleSpec, ...] = ()
    """The roles that agents play; empty in the form with one agent."""

    # Methods of a custom environment, besides `begin` and `respond`.

    def role_spec(self, role: str) -> RoleSpec:
        """Return the instructions and tools of a role; by default those of the environment."""
        return RoleSpec(name=role, instructions=self.instructions, tools=self.tools)

    def scripted(self, role: str, name: str, rng: np.random.Generator) -> ScriptedRole:
        """Return a scripted player of a role; ``name`` is the value of ``others``."""
        raise NotImplementedError(f"{type(self).__name__} must define scripted(role, name, rng)")

    def next_role(self) -> str:
        """Return the role after the one that acts now, in the order of ``role_names``."""
        names = self.role_names
        return names[(names.index(self.to_move) + 1) % len(names)]

    # Gymnasium's contract.

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode; scripted roles that act first do so at once."""
        self.to_move = self.own_role = self.role_names[0]
        self._scripted_roles = {}
        observation, info = TextEnv.reset(self, seed=seed, options=options)
        start = _others_play(self, StepResult(observation))
        self._observation = clean_text(start.observation)
        # The facts of the first role to move may be secret to the agent, and scripted roles change the state.
        info = {name: info[name] for name in ("success", "valid", "task", "split")} | jsonable(self.facts())
        if self.roles:
            info["role"] = self.to_move
        return self._observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one action of the role to move; raises `ResetNeeded` once the episode is over."""
        if not self._running:
            raise ResetNeeded("The episode is over or was not started: call reset() before step().")
        text = action if isinstance(action, str) else str(action)
        result = _others_play(self, self.respond(clean_text(text[:MAX_ACTION_CHARS])))
        self._observation = clean_text(result.observation)
        self._running = not (result.terminated or result.truncated)
        rewards = {role: float(result.rewards.get(role, 0.0)) for role in self.role_names}
        successes = {role: bool(result.successes.get(role, result.success)) for role in self.role_names}
        role = self.role_names[0] if self.roles else self.own_role
        info = {
            "success": successes[role],
            "valid": bool(result.valid),
            **jsonable(self.facts()),
            **jsonable(result.info),
        }
        if self.roles:
            info |= {"role": self.to_move, "role_rewards": rewards, "role_success": successes}
        return self._observation, rewards[role], bool(result.terminated), bool(result.truncated), info


# Functions and not methods: an environment's private methods may have any name.


def _others_play(env: RoleEnv, result: StepResult) -> StepResult:
    """Let scripted roles act until it is the agent's turn; with all roles played by agents, do nothing.

    The result has the rewards of all these actions, and whether the agent's own action was valid.
    """
    if env.roles or env.others is None:
        return result
    rewards, valid, info = dict(result.rewards), result.valid, dict(result.info)
    for _ in range(MAX_OTHER_TURNS):
        if result.terminated or result.truncated or env.to_move == env.own_role:
            return StepResult(
                result.observation,
                terminated=result.terminated,
                truncated=result.truncated,
                success=result.success,
                valid=valid,
                info=info,
                rewards=rewards,
                successes=result.successes,
            )
        role = env.to_move
        if role not in env._scripted_roles:
            env._scripted_roles[role] = env.scripted(role, env.others, env.np_random)
        action = env._scripted_roles[role](result.observation, jsonable(env.facts()))
        result = env.respond(clean_text(action))
        info = dict(result.info)
        for name, reward in result.rewards.items():
            rewards[name] = rewards.get(name, 0.0) + float(reward)
    raise RuntimeError(f"scripted roles acted {MAX_OTHER_TURNS} times in a row")


def roles_of(interface: object) -> tuple[RoleSpec, ...]:
    """Return the roles of an environment or adapter; none for one that a single agent plays."""
    roles = getattr(interface, "roles", ())
    return tuple(role for role in roles if isinstance(role, RoleSpec)) if isinstance(roles, tuple) else ()
