"""Episodes of several roles: who plays which role, and the trajectory of each role.

An episode of several roles is one sequence of turns. `role_trajectory` is the same episode as one role lived
it: an ordinary episode of one agent, so that rewards, tokens, advantages and reports need no other code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollgym.core.agent import Agent, Briefing, Player
from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, Group, Outcome, RoleSpec, Turn

ROLE, ROLE_REWARDS, ROLE_SUCCESS = "role", "role_rewards", "role_success"
"""Keys of ``info``: the role that acts next, and the rewards and successes by role."""


def role_names(episode: Episode) -> tuple[str, ...]:
    """Return the names of an episode's roles; none for an episode of one agent."""
    return tuple(role.name for role in episode.roles)


def main_role(episode: Episode) -> str:
    """Return the role whose reward and success are those of the episode; "" in an episode of one agent."""
    return episode.spec.role or next(iter(role_names(episode)), "")


def role_return(episode: Episode, role: str) -> float:
    """Return the sum of a role's rewards, undiscounted; also of those before its first turn."""
    return math.fsum(turn.rewards.get(role, 0.0) for turn in episode.turns)


def role_success(episode: Episode, role: str) -> bool | None:
    """Return whether a role succeeded; the episode's own success where success is not by role."""
    if episode.success is None or role == main_role(episode):
        return episode.success
    successes = (episode.turns[-1].info if episode.turns else {}).get(ROLE_SUCCESS)
    success = successes.get(role) if isinstance(successes, Mapping) else None
    return episode.success if success is None else bool(success)


def role_trajectory(episode: Episode, role: str) -> Episode:
    """Return the episode as one role lived it: its own turns only, each with all that followed for it.

    A turn's reward is the sum of the role's rewards from its action to its next one, also after turns of
    others. Rewards before its first turn are added to that turn: no action of the role caused them, so they
    shift the return of all its actions alike. The ids of episode and group get the role as a suffix, so that
    groups compare the trajectories of one role.

    Raises:
        UsageError: The episode has no such role.

    Example:
        >>> rollgym.role_trajectory(episode, "player_2").total_reward
        -1.0
    """
    spec = next((spec for spec in episode.roles if spec.name == role), None)
    if spec is None:
        names = ", ".join(role_names(episode)) or "none"
        raise UsageError(f"Episode {episode.spec.episode_id} has no role {role!r}; its roles: {names}.")
    own = [number for number, turn in enumerate(episode.turns) if turn.role == role]
    turns = episode.turns
    nexts = [*own[1:], len(turns)]
    starts = [0, *own[1:]]
    lived = [
        _lived(turns[number], turns[start:after], turns[after - 1], role)
        for number, start, after in zip(own, starts, nexts, strict=True)
    ]
    acts_next = _acts_next(episode) == role
    return replace(
        episode,
        spec=replace(
            episode.spec,
            episode_id=f"{episode.spec.episode_id}/{role}",
            group_id=f"{episode.spec.group_id}/{role}",
            role=role,
        ),
        outcome=_outcome(episode, lived),
        turns=tuple(lived),
        instructions=spec.instructions,
        tools=spec.tools,
        reset_info=turns[own[0] - 1].info if own and own[0] else episode.reset_info,
        final_observation=episode.final_observation if acts_next else "",
        final_ids=episode.final_ids if acts_next else (),
        final_row=episode.final_row and acts_next,
        success=role_success(episode, role),
        roles=(),
    )


def _lived(own: Turn, until_next: Sequence[Turn], last: Turn, role: str) -> Turn:
    """A role's turn with its rewards until its next turn, and the ``info`` that it sees then."""
    reward = math.fsum(turn.rewards.get(role, 0.0) for turn in until_next)
    info = last.info if last is own else {**last.info, "valid": own.info.get("valid", True)}
    return replace(
        own, reward=reward, rewards={}, terminated=last.terminated, truncated=last.truncated, info=info
    )


def _outcome(episode: Episode, lived: Sequence[Turn]) -> Outcome:
    # A role that never acted has no turn that could have ended the episode.
    ended = episode.outcome in (Outcome.TERMINATED, Outcome.TRUNCATED)
    return Outcome.TURN_LIMIT if ended and not lived else episode.outcome


def _acts_next(episode: Episode) -> str:
    info = episode.turns[-1].info if episode.turns else episode.reset_info
    return str(info.get(ROLE, ""))


def own_trajectory(episode: Episode) -> Episode:
    """Return the trajectory of the episode's own role; an episode of one agent is one already."""
    return role_trajectory(episode, main_role(episode)) if episode.roles else episode


def role_groups(groups: Sequence[Group], player: str | None = None) -> list[Group]:
    """Return groups of trajectories by role; groups of one-agent episodes stay as they are.

    Args:
        groups: Groups of episodes.
        player: Only roles that this player has (`EpisodeSpec.players`). Default: all.

    A role that did not act in an episode has no trajectory there: nothing that it did can be compared.
    """
    return [part for group in groups for part in _by_role(group, player)]


def _by_role(group: Group, player: str | None) -> list[Group]:
    if not any(episode.roles for episode in group.episodes):
        return [group]
    parts: dict[str, list[Episode]] = {}
    for episode in group.episodes:
        for role in roles_of_player(episode, player):
            if any(turn.role == role for turn in episode.turns):
                parts.setdefault(role, []).append(role_trajectory(episode, role))
    return [
        Group(group_id=f"{group.group_id}/{role}", size=group.size, episodes=tuple(own))
        for role, own in parts.items()
    ]


def roles_of_player(episode: Episode, player: str | None) -> list[str]:
    """Return the roles that a player has in an episode; all for ``None``, or if one agent plays them all."""
    players = episode.spec.players
    return [role for role in role_names(episode) if player is None or players.get(role, player) == player]


def by_turns(
    episode: Episode, parts: Mapping[str, Sequence[float]]
) -> list[float]:  # [action tokens of all turns]
    """Join values over the action tokens of each role's trajectory to one list, in the order of play.

    ``parts`` has the values of each trajectory by its episode id; an episode of one agent has one part.
    """
    name = episode.spec.episode_id
    if not episode.roles:
        return list(parts.get(name, ()))
    positions = dict.fromkeys(role_names(episode), 0)
    joined: list[float] = []
    for turn in episode.turns:
        start, count = positions[turn.role], len(turn.action_ids)
        joined.extend(parts.get(f"{name}/{turn.role}", ())[start : start + count])
        positions[turn.role] = start + count
    return joined


class TeamAgent(Agent):
    """One agent for each role of an episode; each role's player sees only that role's observations.

    The roles are given to agents by name: ``spec.players`` has the name of the agent of each role.

    Args:
        agents: Agents by the names used in `EpisodeSpec.players`; all are closed with the team.
        default: Name of the agent of episodes and roles for which ``spec.players`` names none.

    Example:
        >>> team = TeamAgent({"lm": policy, "expert": expert}, default="lm")
    """

    def __init__(self, agents: Mapping[str, Agent], default: str) -> None:
        self.agents = dict(agents)
        self.default = default
        self.default_concurrency = self.agents[default].default_concurrency
        self.notes = [
            note if name == default else f"{name}: {note}"
            for name, agent in self.agents.items()
            for note in agent.notes
        ]

    def player(self, briefing: Briefing) -> Player:
        """Return a player of the agent that has the role."""
        return self.agents[briefing.spec.players.get(briefing.role, self.default)].player(briefing)

    async def close(self) -> None:
        """Close all agents, also after one fails to."""
        errors: list[Exception] = []
        for agent in self.agents.values():
            try:
                await agent.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def describe(self) -> dict[str, Any]:
        """Return the settings of the default agent, and those of the others by name."""
        return self._combined(lambda agent: agent.describe())

    def totals(self) -> dict[str, Any]:
        """Return the counts of the default agent, and those of the others by name."""
        return self._combined(lambda agent: agent.totals())

    def _combined(self, read: Callable[[Agent], dict[str, Any]]) -> dict[str, Any]:
        others = {name: read(agent) for name, agent in self.agents.items() if name != self.default}
        return {**read(self.agents[self.default]), "others": others}


def find_role(roles: Sequence[RoleSpec], name: object) -> RoleSpec | None:
    """Return the role with this name, or ``None``."""
    return next((role for role in roles if role.name == name), None)
