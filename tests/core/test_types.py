"""The values that flow through rollgym refuse to exist unless they are valid."""

import dataclasses
import math

import pytest

from rollgym.core.types import Episode, EpisodeSpec, Failure, Group, Limits, Outcome, Seconds, Turn, Usage

PLAIN = Turn(observation="see", action="do")
END = Turn(observation="see", action="do", terminated=True)
CUT = Turn(observation="see", action="do", truncated=True)
BOTH = Turn(observation="see", action="do", terminated=True, truncated=True)
FAILED = ["env_error", "worker_lost", "engine_error", "cancelled"]


def spec(member=0, **changes):
    return EpisodeSpec(**{"episode_id": f"e{member}", "env_id": "a/B-v0", "member": member} | changes)


def episode(outcome="turn_limit", turns=(), **changes):
    return Episode(**{"spec": spec(), "outcome": Outcome(outcome), "turns": turns} | changes)


@pytest.mark.parametrize(
    ("outcome", "failed", "trainable", "cut_short"),
    [
        ("terminated", False, True, False),
        ("truncated", False, True, True),
        ("turn_limit", False, True, True),
        ("token_limit", False, True, True),
        ("time_limit", False, False, True),
        ("env_error", True, False, False),
        ("worker_lost", True, False, False),
        ("engine_error", True, False, False),
        ("cancelled", True, False, False),
    ],
)
def test_each_outcome_says_whether_it_failed_may_train_or_was_cut_short(
    outcome, failed, trainable, cut_short
):
    kind = Outcome(outcome)
    assert (kind.failed, kind.trainable, kind.cut_short) == (failed, trainable, cut_short)


def test_the_outcomes_are_the_nine_of_the_architecture_in_its_order():
    first_four = ["terminated", "truncated", "turn_limit", "token_limit"]
    assert [str(kind) for kind in Outcome] == [*first_four, "time_limit", *FAILED]
    assert [str(kind) for kind in Outcome if kind.trainable] == first_four


@pytest.mark.parametrize("name", ["turns", "tokens", "seconds"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_limit_must_be_positive_and_finite(name, value):
    with pytest.raises(ValueError, match=f"limits.{name} must be positive and finite, not"):
        Limits(**{name: value})


def test_no_limit_is_a_limit():
    assert Limits() == Limits(turns=None, tokens=None, seconds=None)
    assert Limits(turns=1, tokens=1, seconds=0.001).seconds == 0.001


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("episode_id", "", "episode_id must not be empty"),
        ("env_id", "", "env_id must not be empty"),
        ("task", -1, "task must be >= 0, not -1"),
        ("env_seed", -2, "env_seed must be >= 0, not -2"),
        ("sampling_seed", -3, "sampling_seed must be >= 0, not -3"),
        ("member", -4, "member must be >= 0, not -4"),
    ],
)
def test_a_spec_refuses_empty_names_and_negative_numbers(field, value, message):
    with pytest.raises(ValueError, match=message):
        EpisodeSpec(**{"episode_id": "e", "env_id": "a/B-v0", field: value})


def test_values_cannot_be_changed():
    for value, field in [(spec(), "task"), (PLAIN, "reward"), (episode(), "success"), (Limits(), "turns")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, 1)


def test_two_values_share_no_mutable_default():
    assert spec().env_kwargs is not spec().env_kwargs
    assert Turn(observation="", action="").info is not Turn(observation="", action="").info


def test_seconds_add_up():
    assert Seconds(queue=1.0, generate=2.0, step=4.0).total == 7.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_json_cannot_hold_are_refused(bad):
    with pytest.raises(ValueError, match="a reward must be finite"):
        Turn(observation="", action="", reward=bad)
    with pytest.raises(ValueError, match="a log-prob must be finite"):
        Turn(observation="", action="", action_ids=(1, 2), logprobs=(-0.5, bad))
    with pytest.raises(ValueError, match="seconds must be finite"):
        Seconds(step=bad)
    with pytest.raises(ValueError, match="a cost must be finite"):
        Usage(cost=bad)
    for name in ("started", "seconds"):
        with pytest.raises(ValueError, match="times must be finite"):
            episode(**{name: bad})


def test_a_turn_has_one_log_prob_per_action_token_or_none_at_all():
    Turn(observation="", action="", action_ids=(1, 2), logprobs=(-1.0, -2.0))
    Turn(observation="", action="", action_ids=(1, 2))
    with pytest.raises(ValueError, match="2 action_ids but 1 logprobs"):
        Turn(observation="", action="", action_ids=(1, 2), logprobs=(-1.0,))
    with pytest.raises(ValueError, match="0 action_ids but 1 logprobs"):
        Turn(observation="", action="", logprobs=(-1.0,))


def test_version_spans_cover_every_action_token_or_are_not_given():
    Turn(observation="", action="", action_ids=(1, 2, 3), version_spans=((4, 2), (5, 1)))
    with pytest.raises(ValueError, match="version_spans cover 2 of 3 action_ids"):
        Turn(observation="", action="", action_ids=(1, 2, 3), version_spans=((4, 2),))


def test_either_flag_ends_an_episode():
    assert [turn.ends for turn in (PLAIN, END, CUT, BOTH)] == [False, True, True, True]


@pytest.mark.parametrize("early", [END, CUT, BOTH])
def test_only_the_last_turn_may_end_the_episode(early):
    with pytest.raises(ValueError, match="turn 1 ended the episode but is not the last turn"):
        episode("terminated", (PLAIN, early, END))


def test_terminated_needs_a_last_turn_that_terminated():
    assert episode("terminated", (PLAIN, END)).length == 2
    assert episode("terminated", (BOTH,)).length == 1
    for turns in [(), (PLAIN,), (CUT,)]:
        with pytest.raises(ValueError, match="'terminated' needs a last turn with terminated=true"):
            episode("terminated", turns)


def test_truncated_needs_a_last_turn_that_was_truncated_and_not_terminated():
    assert episode("truncated", (PLAIN, CUT)).length == 2
    for turns in [(), (PLAIN,), (END,), (BOTH,)]:
        with pytest.raises(ValueError, match="'truncated' needs a last turn with truncated=true"):
            episode("truncated", turns)


@pytest.mark.parametrize("outcome", FAILED)
@pytest.mark.parametrize("success", [True, False])
def test_a_failed_episode_has_no_success(outcome, success):
    assert episode(outcome).success is None
    with pytest.raises(ValueError, match=rf"a failed episode \({outcome}\) has no success"):
        episode(outcome, success=success)


def test_only_a_failed_episode_has_an_error():
    error = Failure(type="KeyError", message="'x'")
    assert episode("env_error", error=error).error == error
    for outcome in ("turn_limit", "token_limit", "time_limit"):
        with pytest.raises(ValueError, match=f"cannot have the outcome '{outcome}'"):
            episode(outcome, error=error)


def test_an_episode_was_attempted_at_least_once():
    with pytest.raises(ValueError, match="attempts must be >= 1, not 0"):
        episode(attempts=0)


def test_the_return_is_the_exact_sum_of_the_rewards():
    tenths = tuple(dataclasses.replace(PLAIN, reward=0.1) for _ in range(10))
    assert episode(turns=tenths).total_reward == 1.0
    assert (episode().total_reward, episode().length) == (0.0, 0)


def test_a_return_beyond_a_floats_range_is_infinite_and_no_error():
    huge = dataclasses.replace(PLAIN, reward=-1.7e308)
    assert episode(turns=(huge, huge)).total_reward == -math.inf


def of_group(member, **changes):
    return episode(spec=spec(member, group_id="g", env_seed=5, **changes))


def test_a_group_is_complete_when_every_member_is_there_in_any_order():
    assert not Group(group_id="g", size=2).complete
    assert not Group(group_id="g", size=2, episodes=(of_group(1),)).complete
    assert Group(group_id="g", size=2, episodes=(of_group(1), of_group(0))).complete


def test_a_group_has_at_least_one_member():
    with pytest.raises(ValueError, match="at least one member, not 0"):
        Group(group_id="g", size=0)


def test_a_group_holds_no_member_twice_even_under_another_episode_id():
    with pytest.raises(ValueError, match="group g holds a member twice"):
        Group(group_id="g", size=3, episodes=(of_group(0), of_group(0, episode_id="other")))


def test_a_group_holds_no_more_members_than_its_size_whatever_their_numbers():
    with pytest.raises(ValueError, match="group g takes 2 members, not 3"):
        Group(group_id="g", size=2, episodes=(of_group(0), of_group(1), of_group(5)))
    assert Group(group_id="g", size=2, episodes=(of_group(1), of_group(5))).complete


def test_a_group_refuses_episodes_of_another_group():
    with pytest.raises(ValueError, match="episode e0 belongs to group 'h', not 'g'"):
        Group(group_id="g", size=1, episodes=(episode(spec=spec(group_id="h")),))


@pytest.mark.parametrize(
    "change",
    [
        {"env_seed": 6},
        {"task": 1},
        {"split": "test"},
        {"env_id": "a/C-v0"},
        {"env_kwargs": {"size": 9}},
        {"env_version": "v1"},
    ],
)
def test_the_members_of_a_group_start_alike(change):
    other = of_group(1).spec
    with pytest.raises(ValueError, match="members of group g start from different states"):
        Group(
            group_id="g",
            size=2,
            episodes=(of_group(0), episode(spec=dataclasses.replace(other, **change))),
        )


def test_the_members_of_a_group_may_differ_in_sampling_seed():
    pair = (of_group(0, sampling_seed=1), of_group(1, sampling_seed=2))
    assert Group(group_id="g", size=2, episodes=pair).complete
