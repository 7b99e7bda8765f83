"""Episodes of several roles in the runner: one player per role, its own conversation, seeds and errors."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rollgym import StepResult, Task
from rollgym.core.agent import Agent, Briefing, FunctionAgent, Player
from rollgym.core.role_env import RoleEnv
from rollgym.core.roles import TeamAgent, role_trajectory
from rollgym.core.types import Episode, EpisodeSpec, Limits, Outcome, RoleSpec
from rollgym.pool.inline import InlinePool
from rollgym.rollout.episode_runner import run_episode


class Talk(RoleEnv):
    """Two roles talk, and see what the other said; the role that says `win` wins."""

    role_names = ("ann", "bob")
    others_known = ("silent",)
    instructions = "Talk."

    def begin(self, task: Task) -> str:
        return "start"

    def respond(self, action: str) -> StepResult:
        won, self.to_move = self.to_move, self.next_role()
        if action == "raise":
            raise RuntimeError("broken")
        over = action == "win"
        return StepResult(
            f"heard {action}",
            terminated=over,
            rewards={role: (1.0 if role == won else -1.0) * over for role in self.role_names},
            successes={role: over and role == won for role in self.role_names},
        )


class Unruly(Talk):
    def respond(self, action: str) -> StepResult:
        result = super().respond(action)
        self.to_move = "eve"
        return result


class Chatty(Talk):
    def role_spec(self, role: str) -> RoleSpec:
        return replace(super().role_spec(role), free_text=role == "bob")


SPEC = EpisodeSpec(episode_id="e", env_id=f"{__name__}:Talk", env_kwargs={"others": None}, sampling_seed=3)


class Recorder(Agent):
    """Says its words in order, one list per role, and keeps what each player saw."""

    def __init__(self, **words: list[str]) -> None:
        self.words = words
        self.seen: dict[str, list[str]] = {}
        self.briefings: dict[str, Briefing] = {}
        self.left: list[str] = []

    def player(self, briefing: Briefing) -> "RecordingPlayer":
        self.briefings[briefing.role] = briefing
        return RecordingPlayer(self, briefing.role)

    async def close(self) -> None:
        return


class RecordingPlayer(Player):
    def __init__(self, agent: Recorder, role: str) -> None:
        self.agent, self.role, self.words = agent, role, iter(agent.words[role])

    async def act(self, observation: str, info: Mapping[str, Any]) -> str:
        self.agent.seen.setdefault(self.role, []).append(observation)
        word = next(self.words)
        if word == "fail":
            raise RuntimeError("no idea")
        return word

    async def leave(self) -> None:
        self.agent.left.append(self.role)

    def final_prompt(self, observation: str) -> tuple[tuple[int, ...], bool]:
        return (len(self.role), len(observation)), self.role == "bob"


@pytest.fixture(autouse=True)
def known_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pool find the environments of this file."""
    import sys

    monkeypatch.setitem(sys.modules, "role_talk", sys.modules[__name__])


def run(agent: Agent, spec: EpisodeSpec = SPEC, env: str = "Talk") -> Episode:
    async def play() -> Episode:
        pool = InlinePool()
        try:
            return await run_episode(replace(spec, env_id=f"role_talk:{env}"), pool, agent)
        finally:
            await pool.close()

    return asyncio.run(play())


def test_each_role_has_a_player_that_sees_its_own_observations() -> None:
    agent = Recorder(ann=["hi", "bye"], bob=["yes", "win"])
    episode = run(agent)
    assert agent.seen == {"ann": ["start", "heard yes"], "bob": ["heard hi", "heard bye"]}
    assert [turn.role for turn in episode.turns] == ["ann", "bob", "ann", "bob"]
    assert episode.turns[-1].rewards == {"ann": -1.0, "bob": 1.0}
    assert (episode.outcome, episode.success, episode.total_reward) == (Outcome.TERMINATED, False, -1.0)
    assert sorted(agent.left) == ["ann", "bob"]


def test_reward_and_success_are_those_of_the_specs_role() -> None:
    episode = run(Recorder(ann=["hi"], bob=["win"]), replace(SPEC, role="bob"))
    assert (episode.success, episode.total_reward, episode.turns[-1].reward) == (True, 1.0, 1.0)
    assert role_trajectory(episode, "ann").success is False


def test_seeds_differ_by_role_and_repeat() -> None:
    seeds = []
    for _ in range(2):
        agent = Recorder(ann=["hi"], bob=["win"])
        run(agent)
        seeds.append({role: b.spec.sampling_seed for role, b in agent.briefings.items()})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 2
    assert agent.briefings["ann"].spec.episode_id == "e"


def test_a_team_plays_with_one_agent_per_role() -> None:
    ann, bob = Recorder(ann=["hi"]), Recorder(bob=["win"])
    spec = replace(SPEC, players={"ann": "x", "bob": "y"}, role="ann")
    episode = run(TeamAgent({"x": ann, "y": bob}, default="x"), spec)
    assert [turn.action for turn in episode.turns] == ["hi", "win"]
    assert (set(ann.briefings), set(bob.briefings)) == ({"ann"}, {"bob"})


def test_a_limit_records_the_final_prompt_of_the_next_role() -> None:
    agent = Recorder(ann=["a", "b"], bob=["c", "d"])
    episode = run(agent, replace(SPEC, limits=Limits(turns=3)))
    assert (episode.outcome, episode.final_ids, episode.final_row) == (Outcome.TURN_LIMIT, (3, 7), True)
    assert role_trajectory(episode, "bob").final_ids == (3, 7)
    assert role_trajectory(episode, "ann").final_ids == ()
    first = run(Recorder(ann=["a"], bob=[]), replace(SPEC, limits=Limits(turns=1)))
    assert first.final_ids == ()  # the next role has no conversation yet


@pytest.mark.parametrize(("ann", "bob", "by_agent"), [("hi", "fail", False), ("fail", "x", True)])
def test_an_opponents_error_is_not_a_failure_of_the_agent(ann: str, bob: str, by_agent: bool) -> None:
    team = TeamAgent({"x": Recorder(ann=[ann]), "y": Recorder(bob=[bob])}, default="x")
    episode = run(team, replace(SPEC, players={"ann": "x", "bob": "y"}, role="ann"))
    assert episode.error is not None
    assert "no idea" in episode.error.message
    assert (episode.error.by_agent, episode.excluded) == (by_agent, not by_agent)


def test_an_action_that_breaks_the_environment_counts_for_who_made_it() -> None:
    team = TeamAgent({"x": Recorder(ann=["hi"]), "y": Recorder(bob=["raise"])}, default="x")
    players = {"ann": "x", "bob": "y"}
    assert run(team, replace(SPEC, players=players, role="ann")).excluded
    assert not run(team, replace(SPEC, players=players, role="bob")).excluded


def test_an_environment_must_name_one_of_its_roles() -> None:
    episode = run(Recorder(ann=["hi"], bob=[]), env="Unruly")
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error is not None
    assert "info['role'] is 'eve', which is not a role" in episode.error.message


def test_players_of_unknown_roles_are_refused() -> None:
    agent = FunctionAgent(lambda observation, info: "win")
    episode = run(agent, replace(SPEC, players={"eve": "x"}))
    assert episode.error is not None
    assert "has no role 'eve' (roles: ann, bob)" in episode.error.message
    single = run(agent, replace(SPEC, env_kwargs={}, players={"ann": "x"}))
    assert single.error is not None
    assert "others=null" in single.error.message


class Waits(FunctionAgent):
    """Takes these seconds for its actions, then never acts again."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(lambda observation, info: self.wait())
        self.seconds = list(seconds)

    async def wait(self) -> str:
        await (asyncio.sleep(self.seconds.pop(0)) if self.seconds else asyncio.Event().wait())
        return "hi"


@pytest.mark.parametrize(
    ("ann", "bob", "outcome"),
    [
        ([0.0], [], Outcome.ENGINE_ERROR),  # the opponent hangs
        ([], [], Outcome.TIME_LIMIT),  # the agent hangs
        ([0.0], [0.75], Outcome.ENGINE_ERROR),  # the agent hangs after the opponent used most of the time
        ([0.75], [], Outcome.TIME_LIMIT),  # and the other way around
    ],
)
def test_a_time_limit_counts_for_the_agent_unless_opponents_used_it_up(
    ann: list[float], bob: list[float], outcome: Outcome
) -> None:
    team = TeamAgent({"x": Waits(*ann), "y": Waits(*bob)}, default="x")
    spec = replace(SPEC, players={"ann": "x", "bob": "y"}, role="ann", limits=Limits(seconds=1.0))
    episode = run(team, spec)
    assert (episode.outcome, episode.excluded) == (outcome, outcome is Outcome.ENGINE_ERROR)
    if episode.error is not None:
        assert not episode.error.by_agent
        assert "The time limit of 1 seconds passed" in episode.error.message
        assert episode.error.message.endswith("were spent waiting for bob (y).")


def test_a_time_limit_without_opponents_is_one() -> None:
    assert run(Waits(), replace(SPEC, limits=Limits(seconds=0.05))).outcome is Outcome.TIME_LIMIT
    both = replace(SPEC, players={"ann": "x", "bob": "x"}, role="ann", limits=Limits(seconds=0.05))
    assert run(TeamAgent({"x": Waits()}, default="x"), both).outcome is Outcome.TIME_LIMIT


def test_a_briefing_says_whether_the_role_writes_free_text() -> None:
    agent = Recorder(ann=["hi"], bob=["win"])
    run(agent, env="Chatty")
    assert {role: briefing.free_text for role, briefing in agent.briefings.items()} == {
        "ann": False,
        "bob": True,
    }
