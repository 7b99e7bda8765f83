"""The rule about roles: with all roles played by agents, every turn names its role and its rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rollgym.checks.report import RuleFailed
from rollgym.checks.rollout import Env, EnvUnderTest, Start, Transition, short, transitions
from rollgym.core.env import text_interface
from rollgym.core.role_env import ALL_ROLES, RoleEnv, roles_of
from rollgym.core.roles import ROLE, ROLE_REWARDS, ROLE_SUCCESS

_EPISODES = 5
_TURNS = 200


def roles(subject: EnvUnderTest) -> str:
    """Agents can play all roles of an environment that has several."""
    if not isinstance(subject.interface, RoleEnv):
        return "it has one agent."
    names: set[str] = set()
    acted: set[str] = set()
    turns = 0
    with subject.env(**ALL_ROLES) as env:
        declared = _declared(env)
        low, high = subject.interface.reward_range
        for start in subject.starts(_EPISODES):
            episode = list(transitions(env, start, subject.player(start.seed), _TURNS))
            names |= set(declared)
            acted |= {str(now.info.get(ROLE)) for now in episode[:-1]}
            turns += len(episode) - 1
            for now in episode:
                _require_role(now, declared, start)
            for now in episode[1:]:
                _require_rewards(now, declared, (low, high), start)
    idle = sorted(names - acted)
    if idle:
        raise RuleFailed(
            f"the role {idle[0]!r} never acted in {_EPISODES} episodes; set to_move in respond()."
        )
    return f"{', '.join(declared)} acted in {turns} turns, each with its role and the rewards of all."


def _declared(env: Env) -> Sequence[str]:
    specs = roles_of(text_interface(env))
    names = [spec.name for spec in specs]
    if len(set(names)) < 2 or len(set(names)) != len(names):
        raise RuleFailed(f"with others=None its roles are {names}; it must have two or more different ones.")
    for spec in specs:
        if len(spec.instructions.split()) < 3:
            raise RuleFailed(f"the role {spec.name!r} has no instructions; return them from role_spec().")
    return names


def _require_role(now: Transition, names: Sequence[str], start: Start) -> None:
    role = now.info.get(ROLE)
    if role not in names:
        raise RuleFailed(
            f"info[{ROLE!r}] is {short(role)} on {start} at turn {now.turn}, not one of {names}."
        )


def _require_rewards(
    now: Transition, names: Sequence[str], bounds: tuple[float, float], start: Start
) -> None:
    where = f"on {start} at turn {now.turn}"
    for key in (ROLE_REWARDS, ROLE_SUCCESS):
        given: Any = now.info.get(key)
        if not isinstance(given, dict) or set(given) != set(names):
            raise RuleFailed(f"info[{key!r}] is {short(given)} {where}; it must hold all of {names}.")
    for role, reward in now.info[ROLE_REWARDS].items():
        if not math.isfinite(reward) or not bounds[0] <= reward <= bounds[1]:
            raise RuleFailed(f"the reward of {role!r} is {reward} {where}; reward_range is {bounds}.")
    if now.reward != now.info[ROLE_REWARDS][names[0]]:
        raise RuleFailed(
            f"the reward {where} is {now.reward}; it must be that of the first role, {names[0]!r}."
        )
