"""Credit per role, against numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest
from role_episodes import FIRST, SECOND, game, grouped, turn, zero_sum_group

from rollgym.core.roles import role_groups
from rollgym.core.types import Group, Outcome
from rollgym.trainer.advantages import AdvantageConfig, Advantages, Trajectory, find_estimator
from rollgym.trainer.data.sequences import token_episode
from rollgym.trainer.reward_shaping import shape_rewards


def trajectories(group: Group, player: str | None = None, **critic: dict[str, Any]) -> list[Trajectory]:
    shaped = shape_rewards(role_groups([group], player))
    return [
        each.trajectory(
            token_episode(each.episode).tokens_per_turn,
            **{name: values[each.episode.spec.episode_id] for name, values in critic.items()},
        )
        for each in shaped
    ]


def credit(name: str, group: Group, player: str | None = None, **settings: Any) -> dict[str, list[float]]:
    own = trajectories(group, player)
    return by_name(own, find_estimator(name)(own, AdvantageConfig(**settings)))


def by_name(own: list[Trajectory], result: Advantages) -> dict[str, list[float]]:
    return {t.name: a.round(6).tolist() for t, a in zip(own, result.advantages, strict=True)}


def test_grpo_compares_each_role_with_itself() -> None:
    # Returns of the first player 1, 1, -1: mean 1/3, deviations 2/3, 2/3, -4/3, standard deviation
    # sqrt((4/9 + 4/9 + 16/9) / 3) = sqrt(8/9). The second player has the negatives. Over both roles together
    # the mean would be 0 and all advantages 1 or -1.
    up, down = round((2 / 3) / np.sqrt(8 / 9), 6), round((4 / 3) / np.sqrt(8 / 9), 6)
    assert (up, down) == (0.707107, 1.414214)
    assert credit("grpo", zero_sum_group()) == {
        f"g/0/{FIRST}": [up] * 3,
        f"g/1/{FIRST}": [up] * 4,
        f"g/2/{FIRST}": [-down],
        f"g/0/{SECOND}": [-up],
        f"g/1/{SECOND}": [-up] * 2,
        f"g/2/{SECOND}": [down] * 3,
    }


def test_each_trajectory_counts_once_whatever_its_length() -> None:
    """Rule 11: the advantages of one role in a zero-sum group add up to 0 over trajectories."""
    result = credit("dr_grpo", zero_sum_group())
    # 1 - 1/3 and -1 - 1/3; by tokens (3, 4 and 1) the mean would be 3/4.
    assert [result[f"g/{n}/{FIRST}"][0] for n in range(3)] == pytest.approx([2 / 3, 2 / 3, -4 / 3])
    assert [result[f"g/{n}/{SECOND}"][0] for n in range(3)] == pytest.approx([-2 / 3, -2 / 3, 4 / 3])


def test_gae_runs_over_the_turns_of_one_role() -> None:
    group = grouped(game(0, [turn(FIRST, 2), turn(SECOND, 1), turn(FIRST, 1, first=1, second=-1)]))
    values = {f"g/0/{FIRST}": [0.2, 0.9, 0.4], f"g/0/{SECOND}": [0.1]}
    own = trajectories(group, values=values)
    result = find_estimator("gae")(own, AdvantageConfig(gamma=0.5, lam=0.5))
    # First player, by turn: deltas 0 + 0.5 * 0.4 - 0.2 = 0 and 1 - 0.4 = 0.6; 0 + 0.25 * 0.6 = 0.15.
    # Second player: its only turn, with the loss that followed: -1 - 0.1.
    assert by_name(own, result) == {f"g/0/{FIRST}": [0.15, 0.15, 0.6], f"g/0/{SECOND}": [-1.1]}
    assert result.returns is not None
    assert [r.round(6).tolist() for r in result.returns] == [[0.35, 0.35, 1.0], [-1.0]]


def test_gae_bootstraps_each_role_of_a_truncated_episode() -> None:
    episode = game(0, [turn(FIRST, 1, first=0.5), turn(SECOND, 1)], outcome=Outcome.TURN_LIMIT, success=False)
    values = {f"g/0/{FIRST}": [0.0], f"g/0/{SECOND}": [0.0]}
    last = {f"g/0/{FIRST}": 2.0, f"g/0/{SECOND}": -3.0}
    own = trajectories(grouped(episode), values=values, last_value=last)
    result = find_estimator("gae")(own, AdvantageConfig(gamma=0.5))
    assert by_name(own, result) == {f"g/0/{FIRST}": [1.5], f"g/0/{SECOND}": [-1.5]}


def test_gigpo_compares_turns_with_equal_observations_of_one_role_only() -> None:
    # All turns of all games show the same text, so only role and group keep them apart.
    group = grouped(
        game(0, [turn(FIRST), turn(SECOND), turn(FIRST, first=1, second=-1)]),
        game(1, [turn(FIRST), turn(SECOND, first=-1, second=1)]),
    )
    # First player, by episode: 1 - 0 and -1 - 0. By turn, with gamma 0.5: returns 0.5, 1 and -1, mean 1/6.
    # Second player, by episode -1 and 1; by turn returns -1 and 1, mean 0.
    assert credit("gigpo", group, gamma=0.5, normalize_std=False) == {
        f"g/0/{FIRST}": [round(1 + 0.5 - 1 / 6, 6), round(1 + 1 - 1 / 6, 6)],
        f"g/1/{FIRST}": [round(-1 - 1 - 1 / 6, 6)],
        f"g/0/{SECOND}": [-2.0],
        f"g/1/{SECOND}": [2.0],
    }


@pytest.mark.parametrize("estimator", ["grpo", "gigpo", "grpo_turns", "rloo", "reinforce_pp"])
def test_turns_of_an_opponent_change_no_advantage(estimator: str) -> None:
    against = {FIRST: "policy", SECOND: "past"}

    def games(opponent_turns: int) -> Group:
        others = [turn(SECOND, 0) for _ in range(opponent_turns)]
        return grouped(
            game(0, [turn(FIRST, 2), *others, turn(FIRST, 1, first=1, second=-1)], players=against),
            game(1, [turn(FIRST, 1), *others, turn(SECOND, 0, first=-1, second=1)], players=against),
        )

    results = [credit(estimator, games(count), "policy") for count in (1, 5)]
    assert results[0] == results[1]
    assert list(results[0]) == [f"g/0/{FIRST}", f"g/1/{FIRST}"]
    assert results[0][f"g/0/{FIRST}"][0] > 0 > results[0][f"g/1/{FIRST}"][0]


def test_the_players_may_differ_by_episode_of_a_mixture() -> None:
    """The same policy in the other role is compared with that role."""
    mirrored = {FIRST: "past", SECOND: "policy"}
    group = grouped(
        game(0, [turn(FIRST, 0), turn(SECOND, 2, first=-1, second=1)], players=mirrored),
        game(1, [turn(FIRST, 0), turn(SECOND, 1), turn(FIRST, 0, first=1, second=-1)], players=mirrored),
    )
    assert credit("grpo", group, "policy") == {f"g/0/{SECOND}": [1.0, 1.0], f"g/1/{SECOND}": [-1.0]}
