"""Training in environments with roles: the policy in some roles, opponents in the others.

An opponent is any agent, or a past version of the policy (``past``): a second engine with frozen weights,
which get those of the policy every ``past.every`` steps. Turns of opponents are recorded without tokens, so
nothing can train on them: for the policy they are a part of its observations.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollgym.core.agent import Agent, AgentAction, AgentSetup, Briefing, Player, as_player, make_agent
from rollgym.core.errors import RunError, UsageError, boundary
from rollgym.core.roles import TeamAgent
from rollgym.engines.base import Engine, WeightSource
from rollgym.rewards.resolve import check_reachable
from rollgym.trainer.config import PAST, POLICY, TrainConfig, role_players
from rollgym.utils.async_runner import run_to_end


def make_team(config: TrainConfig, policy: Agent, past: Agent | None) -> TeamAgent | None:
    """Return the agents of all roles; ``None`` for a run whose environments have one agent each.

    Args:
        config: The run's settings.
        policy: The policy that is trained. The team does not close it.
        past: The past version of the policy, if a role has it.
    """
    if not any(env.roles for env in config.envs):
        return None
    agents = {name: agent for _, name, agent in _opponents(config)}
    if past is not None:
        agents[PAST] = past
    opponents = {name: OpponentAgent(agent) for name, agent in agents.items()}
    return TeamAgent({POLICY: _Borrowed(policy), **opponents}, default=POLICY)


def check_opponents(config: TrainConfig) -> None:
    """Make every opponent once, and connect to the endpoints among them.

    Raises:
        UsageError: An agent or one of its options is wrong, or nothing listens at an endpoint's address.
    """
    for key, _, agent in _opponents(config):
        url = agent.describe().get("base_url")
        try:
            if isinstance(url, str):
                check_reachable(url, "the endpoint")
        except UsageError as error:
            raise UsageError(f"{key}: {error}") from None
        finally:
            run_to_end(agent.close)


def _opponents(config: TrainConfig) -> Iterator[tuple[str, str, Agent]]:
    """Make the agents in ``envs.roles``, each with its key in the config and its name in records."""
    for number, (env, players) in enumerate(zip(config.envs, role_players(config), strict=True)):
        setup = AgentSetup(env_id=env.id, env_kwargs=env.train_kwargs)
        for role, name in players.items():
            if name in (POLICY, PAST):
                continue
            key = f"envs.{number}.roles.{role}"
            try:
                agent = make_agent(env.roles[role], setup, **env.role_options.get(role, {}))
            except UsageError as error:
                raise UsageError(f"{key}: {error}") from None
            yield key, name, agent


class OpponentAgent(Agent):
    """An agent whose turns are recorded without token ids and log-probs, so that nothing trains on them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.default_concurrency = agent.default_concurrency
        self.notes = agent.notes

    def player(self, briefing: Briefing) -> Player:
        """Return a player that drops the tokens of its actions."""
        return _OpponentPlayer(as_player(self._agent.player(briefing)))

    async def close(self) -> None:
        """Close the agent."""
        await self._agent.close()

    def describe(self) -> dict[str, Any]:
        """Return the agent's settings."""
        return self._agent.describe()

    def totals(self) -> dict[str, Any]:
        """Return the agent's counts."""
        return self._agent.totals()


class _OpponentPlayer(Player):
    def __init__(self, player: Player) -> None:
        self._player = player

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction | str:
        action = await self._player.act(observation, info)
        if isinstance(action, str):
            return action
        return replace(
            action,
            prompt_ids=(),
            action_ids=(),
            logprobs=(),
            new_row=False,
            policy_version=None,
            version_spans=(),
        )

    async def leave(self) -> None:
        await self._player.leave()


class _Borrowed(Agent):
    """The policy in a team that does not close it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.default_concurrency = agent.default_concurrency

    def player(self, briefing: Briefing) -> Player:
        return self._agent.player(briefing)

    async def close(self) -> None:
        return


class PastPolicy:
    """A past version of the policy: its engine, and its weights in a folder of the run.

    Checkpoints contain that folder, so that a resumed run continues against the same opponent.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self._loaded = 0

    def export(self, export: Callable[[Path], None]) -> None:
        """Write the current policy into the folder, in place of the version before."""
        part = self._part()
        export(part)
        self._replace(part)

    def save(self, checkpoint: Path) -> None:
        """Copy the weights into a checkpoint."""
        shutil.copytree(self.folder, checkpoint / PAST)

    def restore(self, checkpoint: Path) -> None:
        """Copy the weights of a checkpoint into the folder."""
        part = self._part()
        with boundary(RunError, f"The checkpoint {checkpoint} has no past version of the policy"):
            shutil.copytree(checkpoint / PAST, part)
        self._replace(part)

    async def load(self) -> None:
        """Use the weights in the folder."""
        self._loaded += 1
        await self.engine.update_weights(self._loaded, WeightSource(path=self.folder))

    def _part(self) -> Path:
        part = self.folder.with_name(f".{self.folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        return part

    def _replace(self, part: Path) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        part.rename(self.folder)
