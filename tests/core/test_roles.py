"""Episodes of several roles: the trajectory of each role, groups by role, teams, the episode line."""

import asyncio

import pytest
from role_episodes import FIRST, SECOND, game, grouped, turn, zero_sum_group

from rollgym.core.agent import Agent, Briefing, FunctionAgent
from rollgym.core.errors import UsageError
from rollgym.core.roles import (
    TeamAgent,
    by_turns,
    main_role,
    own_trajectory,
    role_groups,
    role_return,
    role_success,
    role_trajectory,
)
from rollgym.core.serialization import decode_episode, encode_episode
from rollgym.core.types import Episode, EpisodeSpec, Outcome, RoleSpec, Turn


def test_a_trajectory_has_the_roles_own_turns_and_all_its_rewards() -> None:
    episode = game(
        0,
        [
            turn(FIRST, first=0.5),
            turn(SECOND, first=0.25, second=3),
            turn(SECOND, first=0.125),
            turn(FIRST, first=1, second=-1),
        ],
    )
    first, second = role_trajectory(episode, FIRST), role_trajectory(episode, SECOND)
    # 0.5 for its own move and 0.25 + 0.125 while the other moved; then 1.
    assert [each.reward for each in first.turns] == [0.875, 1.0]
    # The loss at the end follows from its last move.
    assert [each.reward for each in second.turns] == [3.0, -1.0]
    assert [each.terminated for each in first.turns] == [False, True]
    assert [each.terminated for each in second.turns] == [False, True]
    assert (first.total_reward, second.total_reward) == (1.875, 2.0)
    assert (role_return(episode, FIRST), role_return(episode, SECOND)) == (1.875, 2.0)
    assert (first.instructions, second.instructions) == ("You are first.", "Second.")
    assert (first.success, second.success) == (True, False)
    assert first.roles == ()


def test_rewards_before_a_roles_first_turn_count_to_that_turn() -> None:
    episode = game(0, [turn(FIRST, second=2), turn(SECOND, second=1), turn(FIRST, first=1)])
    assert [each.reward for each in role_trajectory(episode, SECOND).turns] == [3.0]
    assert role_return(episode, SECOND) == 3.0


def test_a_role_sees_the_info_before_its_own_next_turn() -> None:
    episode = game(0, [turn(FIRST), turn(SECOND), turn(FIRST), turn(SECOND, first=1)])
    second = role_trajectory(episode, SECOND)
    assert second.reset_info["number"] == 0
    assert [each.info["number"] for each in second.turns] == [2, 3]
    assert role_trajectory(episode, FIRST).reset_info == {}


def test_valid_is_of_the_roles_own_action() -> None:
    turns = [turn(FIRST), turn(SECOND, first=1)]
    turns[0].info["valid"] = False
    assert role_trajectory(game(0, turns), FIRST).turns[0].info["valid"] is False


def test_only_the_next_role_has_a_final_prompt() -> None:
    episode = game(
        0,
        [turn(FIRST), turn(SECOND)],
        outcome=Outcome.TURN_LIMIT,
        final_ids=(7, 8),
        final_row=True,
        final_observation="your move",
    )
    first, second = role_trajectory(episode, FIRST), role_trajectory(episode, SECOND)
    assert (first.final_ids, first.final_row, first.final_observation) == ((7, 8), True, "your move")
    assert (second.final_ids, second.final_row, second.final_observation) == ((), False, "")
    assert first.outcome is second.outcome is Outcome.TURN_LIMIT


def test_groups_are_by_role_and_by_player() -> None:
    group = zero_sum_group()
    parts = role_groups([group])
    assert [part.group_id for part in parts] == [f"g/{FIRST}", f"g/{SECOND}"]
    assert [e.spec.episode_id for e in parts[1].episodes] == [f"g/{n}/{SECOND}" for n in range(3)]
    against = {FIRST: "policy", SECOND: "past"}
    one = grouped(*(game(n, [turn(FIRST), turn(SECOND, 0, first=1)], players=against) for n in range(2)))
    assert [part.group_id for part in role_groups([one], "policy")] == [f"g/{FIRST}"]
    assert [part.group_id for part in role_groups([one], "past")] == [f"g/{SECOND}"]


def test_a_role_that_did_not_act_has_no_trajectory() -> None:
    group = grouped(
        game(0, [turn(FIRST, first=1, second=-1)]), game(1, [turn(FIRST), turn(SECOND, first=-1, second=1)])
    )
    sizes = {part.group_id: len(part.episodes) for part in role_groups([group], "policy")}
    assert sizes == {f"g/{FIRST}": 2, f"g/{SECOND}": 1}


def test_groups_of_one_agent_stay_as_they_are() -> None:
    spec = EpisodeSpec(episode_id="a", env_id="e", group_id="g")
    group = grouped(Episode(spec=spec, outcome=Outcome.CANCELLED))
    assert role_groups([group], "policy") == [group]
    assert own_trajectory(group.episodes[0]) is group.episodes[0]


def test_the_episodes_role_is_the_one_in_the_spec() -> None:
    played = game(0, [turn(FIRST), turn(SECOND, first=-1, second=1)], players={FIRST: "x", SECOND: "policy"})
    assert main_role(played) == SECOND
    assert own_trajectory(played).spec.episode_id == f"g/0/{SECOND}"
    assert (role_success(played, FIRST), role_success(played, SECOND)) == (False, True)


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(UsageError, match="no role 'judge'; its roles: player_1, player_2"):
        role_trajectory(game(0, [turn(FIRST)]), "judge")


def test_token_values_join_in_the_order_of_play() -> None:
    episode = game(0, [turn(FIRST, 2), turn(SECOND, 1), turn(FIRST, 1, first=1)])
    values = {f"g/0/{FIRST}": [1.0, 2.0, 3.0], f"g/0/{SECOND}": [9.0]}
    assert by_turns(episode, values) == [1.0, 2.0, 9.0, 3.0]


def test_the_line_of_an_episode_keeps_roles_and_reads_lines_without_them() -> None:
    episode = game(0, [turn(FIRST, first=1, second=-1)])
    assert decode_episode(encode_episode(episode)) == episode
    line = b'{"schema":1,"spec":{"episode_id":"a","env_id":"e"},"outcome":"cancelled"}'
    old = decode_episode(line)
    assert (old.roles, old.spec.players, old.spec.role) == ((), {}, "")


def test_rewards_of_roles_are_finite() -> None:
    with pytest.raises(ValueError, match="nan of player_2"):
        Turn(observation="", action="", rewards={SECOND: float("nan")})
    with pytest.raises(ValueError, match="a role needs a name"):
        RoleSpec(name="")


class Closing(FunctionAgent):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(lambda observation, info: "")
        self.closed, self.error = False, error

    async def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


def test_a_team_gives_each_role_the_player_of_its_agent() -> None:
    agents: dict[str, Agent] = {"a": Closing(), "b": Closing()}
    team = TeamAgent(agents, default="a")
    spec = EpisodeSpec(episode_id="e", env_id="e", players={FIRST: "a", SECOND: "b"})
    assert team.player(Briefing(spec=spec, instructions="", role=SECOND)) is agents["b"]
    assert team.player(Briefing(spec=spec, instructions="", role=FIRST)) is agents["a"]
    single = EpisodeSpec(episode_id="e", env_id="e")
    assert team.player(Briefing(spec=single, instructions="")) is agents["a"]


def test_a_team_closes_all_agents_also_after_an_error() -> None:
    first, second = Closing(RuntimeError("stuck")), Closing()
    with pytest.raises(RuntimeError, match="stuck"):
        asyncio.run(TeamAgent({"a": first, "b": second}, default="a").close())
    assert second.closed
