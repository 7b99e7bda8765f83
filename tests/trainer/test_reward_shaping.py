"""Reward shaping by hand, and a record that adds up."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.types import Episode, EpisodeSpec, Failure, Group, Outcome, Turn
from rollgym.trainer.reward_shaping import RewardShapingConfig, format_check, shape_rewards

LAKE, SUDOKU = "a/Lake-v0", "a/Sudoku-v0"


def episode(rewards, *, group="g", member=0, env=LAKE, outcome="turn_limit", success=False, replies=None):
    replies = replies or ["<answer>go</answer>"] * len(rewards)
    turns = tuple(
        Turn(observation="see", action="go", response=reply, reward=reward)
        for reward, reply in zip(rewards, replies, strict=True)
    )
    spec = EpisodeSpec(episode_id=f"{group}{member}", env_id=env, group_id=group, member=member)
    return Episode(spec=spec, outcome=Outcome(outcome), turns=turns, success=success)


def group(*rewards, name="g", env=LAKE):
    episodes = tuple(episode(r, group=name, member=i, env=env) for i, r in enumerate(rewards))
    return Group(group_id=name, size=len(episodes), episodes=episodes)


def alone(one):
    return Group(group_id=one.spec.group_id, size=1, episodes=(one,))


def rewards(groups, how=None, **changes):
    made = shape_rewards(groups, how or RewardShapingConfig(**changes))
    return [one.rewards.tolist() for one in made]


def totals(groups, **changes):
    return [sum(row) for row in rewards(groups, **changes)]


def test_defaults_change_nothing():
    (one,) = shape_rewards([group([1, -2.5, 0])])
    assert one.rewards.tolist() == one.raw.tolist() == [1, -2.5, 0]
    assert one.record == {}
    assert shape_rewards([]) == []


def test_each_setting_by_hand():
    plain = group([3, -3, 0.5])
    assert rewards([plain], clip=(-1, 2)) == [[2, -1, 0.5]]
    assert rewards([plain], clip=(-math.inf, 2)) == [[2, -3, 0.5]]
    assert rewards([plain], scale=0.5) == [[1.5, -1.5, 0.25]]
    assert rewards([plain], turn_penalty=0.25) == [[2.75, -3.25, 0.25]]


def test_clipping_comes_before_scaling_and_both_before_penalties():
    (one,) = shape_rewards([group([5, 0])], RewardShapingConfig(clip=(-1, 2), scale=3, turn_penalty=1))
    assert one.raw.tolist() == [5, 0]
    assert one.rewards.tolist() == [5, -1]
    assert one.record == {"clip": [-3, 0], "scale": [4, 0], "turn_penalty": [-1, -1]}


def test_the_success_bonus_is_added_to_the_last_turn():
    won, lost = episode([0, 1], success=True), episode([0, 1], group="h")
    assert rewards([alone(won), alone(lost)], success_bonus=2) == [[0, 3], [0, 1]]


def test_a_success_bonus_without_success_reports_is_refused():
    unknown = alone(episode([1], success=None))
    with pytest.raises(UsageError, match="success_bonus"):
        rewards([unknown], success_bonus=1)
    assert rewards([unknown, alone(episode([1], group="h", success=True))], success_bonus=1) == [[1], [2]]
    assert rewards([alone(episode([], success=None))], success_bonus=1) == [[]]


def test_a_reply_in_the_wrong_format_is_penalized():
    replies = ["go", "I think <answer>go</answer>", "<think><answer>go</answer></think> go"]
    one = alone(episode([1, 1, 1], replies=replies))
    how = RewardShapingConfig(format_penalty=0.5)
    (made,) = shape_rewards([one], how, format_missed=format_check("answer"))
    assert made.rewards.tolist() == [0.5, 1, 0.5]
    assert made.record == {"format_penalty": [-0.5, 0, -0.5]}
    (made,) = shape_rewards([one], how, format_missed=lambda turn: turn.action != "go")
    assert made.rewards.tolist() == [1, 1, 1]


def test_invalid_actions_are_penalized():
    one = episode([1, 0, 0])
    turns = [
        replace(t, info=info)
        for t, info in zip(one.turns, ({"valid": True}, {"valid": False}, {}), strict=True)
    ]
    one = replace(one, turns=tuple(turns))
    (made,) = shape_rewards([alone(one)], RewardShapingConfig(invalid_penalty=0.25))
    assert made.rewards.tolist() == [1, -0.25, 0]
    assert made.record == {"invalid_penalty": [0, -0.25, 0]}
    with pytest.raises(UsageError, match="invalid_penalty"):
        rewards([group([1])], invalid_penalty=0.25)
    assert rewards([alone(episode([]))], invalid_penalty=0.25) == [[]]
    with pytest.raises(UsageError, match="invalid_penalty"):
        RewardShapingConfig(invalid_penalty=-1)


def test_a_bare_action_is_checked_as_the_reply():
    missed = format_check("regex:go .*")
    assert not missed(Turn(observation="", action="go on"))
    assert missed(Turn(observation="", action="stop"))
    with pytest.raises(UnknownName, match="answer"):
        format_check("anser")


def test_a_format_penalty_needs_a_format_check():
    """Rule 15: it is not ignored."""
    with pytest.raises(UsageError, match="format_missed"):
        rewards([group([1])], format_penalty=0.5)


@pytest.mark.parametrize("outcome", ["env_error", "worker_lost", "engine_error", "cancelled"])
def test_a_failed_episode_is_refused(outcome):
    """Rule 10: a failure is not a reward of 0."""
    bad = Episode(
        spec=EpisodeSpec(episode_id="e9", env_id=LAKE, group_id="g"),
        outcome=Outcome(outcome),
        error=Failure(type="OSError", message="gone"),
    )
    with pytest.raises(UsageError, match=f"'e9' failed .{outcome}"):
        shape_rewards([group([1], name="h"), alone(bad)])


def test_normalized_totals_have_mean_0_and_std_1():
    made = rewards([group([0, 2], [4, 2, 0])], normalize="group")
    assert made == [[0, -1], [2, 1, -2]]


def test_an_episode_counts_once_in_the_statistics():
    """Rule 11: totals 10 and 0 have the mean 5, though one has five turns."""
    assert totals([group([10], [0] * 5)], normalize="batch") == pytest.approx([1, -1])


def test_normalization_is_by_group_or_environment_id():
    """Rule 12: the order of groups does not matter."""
    a, b, c = group([0], [2], name="a"), group([10], [10], name="b"), group([0], [8], name="c", env=SUDOKU)
    assert totals([a, b, c], normalize="group") == pytest.approx([-1, 1, 0, 0, -1, 1])
    assert totals([c, b, a], normalize="group") == pytest.approx([-1, 1, 0, 0, -1, 1])
    by_env = totals([a, c, b], normalize="env")
    assert by_env[2:4] == pytest.approx([-1, 1])
    lake = np.array([0, 2, 10, 10])
    assert [*by_env[:2], *by_env[4:]] == pytest.approx(((lake - lake.mean()) / lake.std()).tolist())
    everything = np.array([0, 2, 10, 10, 0, 8])
    expected = (everything - everything.mean()) / everything.std()
    assert totals([a, b, c], normalize="batch") == pytest.approx(expected.tolist())


def test_equal_totals_become_0():
    """Rule 12: by tolerance; a group of one is a special case."""
    assert totals([group([0.1, 0.2], [0.3])], normalize="group") == pytest.approx([0, 0], abs=1e-12)
    assert totals([group([7])], normalize="group") == [0]
    close = [group([0], [0.25])]
    assert totals(close, normalize="group") == pytest.approx([-1, 1])
    assert totals(close, normalize="group", tolerance=0.5) == [-0.125, 0.125]


def test_an_episode_without_turns_is_not_counted():
    made = rewards([group([], [0], [2])], normalize="group", turn_penalty=1)
    assert made == [[], [-1], [1]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.floats(-100, 100), max_size=4), min_size=1, max_size=3), max_size=3),
    st.sampled_from(["none", "group", "env", "batch"]),
    st.floats(0.1, 3),
    st.integers(0, 3),
)
def test_the_record_adds_up_and_is_json(batch, normalize, scale, which):
    groups = [group(*rows, name=f"g{i}", env=(LAKE, SUDOKU)[i % 2]) for i, rows in enumerate(batch)]
    how = RewardShapingConfig(
        clip=(-5, 50) if which & 1 else None,
        scale=scale,
        turn_penalty=0.5 if which & 2 else 0.0,
        format_penalty=0.25,
        normalize=normalize,
    )
    made = shape_rewards(groups, how, format_missed=lambda turn: turn.reward < 0)
    assert [one.episode for one in made] == [e for g in groups for e in g.episodes]
    for one in made:
        assert one.raw.tolist() == [turn.reward for turn in one.episode.turns]
        record = json.loads(json.dumps(one.record, allow_nan=False))
        total = one.raw + sum((np.array(amounts) for amounts in record.values()), np.zeros(len(one.raw)))
        assert total.tolist() == pytest.approx(one.rewards.tolist(), abs=1e-6)
        wanted = {"scale", "format_penalty"} - ({"scale"} if scale == 1 else set())
        wanted |= {"clip"} if which & 1 else set()
        wanted |= {"turn_penalty"} if which & 2 else set()
        assert set(record) == wanted | ({"normalize"} if normalize != "none" else set())


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": (1, 1)},
        {"clip": (math.nan, 1)},
        {"scale": 0},
        {"scale": math.inf},
        {"turn_penalty": -1},
        {"format_penalty": math.nan},
        {"success_bonus": math.inf},
        {"normalize": "all"},
        {"tolerance": -1, "normalize": "batch"},
        {"tolerance": 0.5},
    ],
)
def test_invalid_settings_are_refused(changes):
    with pytest.raises(UsageError, match=next(iter(changes))):
        RewardShapingConfig(**changes)


def test_an_extreme_reward_is_refused():
    with pytest.raises(UsageError, match="'g0' has a reward beyond"):
        rewards([group([1e200])])


def test_the_listed_parser_is_refused_with_a_format_penalty() -> None:
    with pytest.raises(UsageError, match="'listed'"):
        format_check("answer|listed")
