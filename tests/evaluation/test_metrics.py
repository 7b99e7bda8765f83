"""A summary's numbers can be checked by hand, and failures are counted without getting a score."""

import json
from dataclasses import replace

import pytest

from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome, Turn, Usage
from rollgym.evaluation.metrics import (
    content_hash,
    exclusion_note,
    first_observation,
    many_excluded,
    summarize,
)

MANIFEST = {
    "env": {"id": "a/B-v0", "version": "v0", "kwargs": {"size": 3}},
    "agent": {"name": "random", "options": {"k": 1}},
    "split": "test",
    "seed": 7,
    "episodes": 4,
    "per_task": 1,
    "success_means": "it worked",
    "task_set": {"name": "B", "hash": "abc"},
    "versions": {"rollgym": "0.1.0"},
}


def played(name, rewards, success, *, group=None, usage=None, valid=True, seconds=1.0):
    """An episode that terminated after one turn per reward; its group is the name's first letter."""
    last = len(rewards) - 1
    turns = tuple(
        Turn(
            observation=f"{name} {i}",
            action="a",
            reward=r,
            terminated=i == last,
            usage=usage,
            info={"valid": valid},
        )
        for i, r in enumerate(rewards)
    )
    group = name[0] if group is None else group
    spec = EpisodeSpec(episode_id=name, env_id="a/B-v0", group_id=group)
    return Episode(spec=spec, outcome=Outcome.TERMINATED, turns=turns, success=success, seconds=seconds)


def failed(name, message="boom", outcome=Outcome.ENV_ERROR):
    spec = EpisodeSpec(episode_id=name, env_id="a/B-v0", group_id=name[0])
    return Episode(spec=spec, outcome=outcome, error=Failure(type="E", message=message))


def crashed(name, rewards=()):
    """An episode whose agent made the environment raise."""
    spec = EpisodeSpec(episode_id=name, env_id="a/B-v0", group_id=name[0])
    turns = tuple(Turn(observation="", action="a", reward=r) for r in rewards)
    error = Failure(type="E", message="boom", by_agent=True)
    return Episode(
        spec=spec, outcome=Outcome.ENV_ERROR, turns=turns, error=error, reset_info={"success": False}
    )


FOUR = [
    played("a", [0.0, 1.0], True, seconds=4.0),
    played("b", [0.5], False),
    played("c", [0.0, 0.0, 0.0], False),
    failed("d"),
]


def test_rates_means_and_counts_by_hand():
    found = summarize(MANIFEST, FOUR)
    assert (found["episodes"], found["scored"], found["failed"], found["complete"]) == (4, 3, 1, True)
    assert found["success_rate"] == pytest.approx(1 / 3)
    assert found["success_ci"] == pytest.approx([0.061492, 0.792340], abs=1e-6)
    assert found["success_ci_method"] == "wilson"
    assert found["mean_return"] == pytest.approx(0.5)
    assert found["return_ci"] == [0.0, 1.0]
    assert found["length"]["mean"] == 2.0
    assert found["length"]["max"] == 3.0
    assert found["seconds"] == pytest.approx({"mean": 2.0, "p50": 1.0, "p90": 3.4, "p99": 3.94, "max": 4.0})
    assert found["outcomes"] == {"terminated": 3, "env_error": 1}
    assert found["pass_at_k"] == {"1": pytest.approx(1 / 3)}


def test_what_was_asked_for_is_repeated():
    found = summarize(MANIFEST, FOUR)
    assert (found["env"], found["env_version"], found["env_kwargs"]) == ("a/B-v0", "v0", {"size": 3})
    assert (found["agent"], found["agent_options"]) == ("random", {"k": 1})
    assert (found["split"], found["seed"], found["requested"], found["per_task"]) == ("test", 7, 4, 1)
    assert (found["success_means"], found["task_set"]["hash"]) == ("it worked", "abc")
    assert found["versions"] == {"rollgym": "0.1.0"}


def test_a_summary_is_json_and_does_not_depend_on_the_order_episodes_ended_in():
    found = summarize(MANIFEST, FOUR)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert summarize(MANIFEST, FOUR[::-1]) == found


def test_an_unfinished_run_is_marked():
    found = summarize(MANIFEST, FOUR[:2])
    assert (found["complete"], found["episodes"], found["requested"]) == (False, 2, 4)


def test_without_any_score_all_numbers_are_none():
    for episodes in ([], [failed("a"), failed("b")]):
        found = summarize(MANIFEST, episodes)
        for key in ("success_rate", "success_ci", "success_ci_method", "mean_return", "return_ci"):
            assert found[key] is None
        assert (found["pass_at_k"], found["length"], found["seconds"], found["scored"]) == ({}, {}, {}, 0)
        assert found["valid_actions"] is None


def test_an_environment_without_success_still_has_returns():
    found = summarize(MANIFEST, [played("a", [1.0], None), played("b", [3.0], None)])
    assert (found["success_rate"], found["pass_at_k"], found["mean_return"]) == (None, {}, 2.0)


def test_episodes_that_report_no_success_do_not_count_as_lost():
    mixed = [played("a0", [0.0], None), played("a1", [0.0], True), played("b0", [0.0], True)]
    found = summarize(MANIFEST, mixed)
    assert found["success_rate"] == 1.0
    assert found["pass_at_k"] == {"1": 1.0}


def test_episodes_that_share_a_task_get_pass_at_k_and_an_interval_over_tasks():
    wins = {"a": [1, 0, 0, 0], "b": [1, 1, 1, 1], "c": [0, 0, 0, 0]}
    episodes = [
        played(f"{task}{i}", [float(win)], bool(win)) for task, ws in wins.items() for i, win in enumerate(ws)
    ]
    found = summarize(MANIFEST | {"per_task": 4, "episodes": 12}, episodes)
    assert found["success_rate"] == pytest.approx(5 / 12)
    # Task a: one of four tries wins, so 1 try holds it with 1/4, 2 with 1/2, 4 surely.
    assert found["pass_at_k"] == pytest.approx({"1": 5 / 12, "2": 1.5 / 3, "4": 2 / 3})
    assert found["success_ci_method"] == "bootstrap over tasks"
    # All three picks of one resample fall on task c (or b) with chance 1/27 > 2.5 %.
    assert found["success_ci"] == [0.0, 1.0]
    assert found["return_ci"] == [0.0, 1.0]


def test_pass_at_k_goes_as_far_as_the_smallest_group_that_is_left():
    episodes = [played(f"a{i}", [0.0], i == 0) for i in range(4)]
    episodes += [played(f"b{i}", [0.0], False) for i in range(3)] + [failed("b3")]
    found = summarize(MANIFEST, episodes)
    assert found["pass_at_k"] == pytest.approx({"1": 1 / 8, "2": 1 / 4, "3": 3 / 8})


def test_episodes_of_no_group_stand_alone():
    found = summarize(MANIFEST, [played(name, [0.0], True, group="") for name in ("a", "b", "c")])
    assert found["success_ci_method"] == "wilson"


def test_valid_actions_are_counted_over_turns():
    found = summarize(MANIFEST, [played("a", [0.0] * 3, True), played("b", [0.0], True, valid=False)])
    assert found["valid_actions"] == 0.75


def test_tokens_and_cost_add_up_and_failed_episodes_cost_too():
    usage = Usage(prompt_tokens=10, completion_tokens=3, cost=0.25)
    spent = played("a", [0.0, 0.0], True, usage=usage)
    turn = Turn(observation="", action="", usage=usage)
    lost = Episode(spec=EpisodeSpec(episode_id="b", env_id="a"), outcome=Outcome.ENGINE_ERROR, turns=(turn,))
    assert summarize(MANIFEST, [spent, lost])["usage"] == {
        "prompt_tokens": 30,
        "completion_tokens": 9,
        "cost": 0.75,
    }
    assert summarize(MANIFEST, FOUR)["usage"] == {}


def test_errors_are_counted_by_message_most_frequent_first_and_at_most_five():
    rare = [failed(f"r{i}", f"rare {i}") for i in range(6)]
    often = [failed(f"o{i}", "often", Outcome.WORKER_LOST) for i in range(2)]
    found = summarize(MANIFEST, rare + often)["errors"]
    assert found[0] == {"outcome": "worker_lost", "message": "often", "count": 2}
    assert [error["message"] for error in found[1:]] == ["rare 0", "rare 1", "rare 2", "rare 3"]


def test_a_limit_is_a_score_and_no_failure():
    spec = EpisodeSpec(episode_id="a", env_id="a/B-v0")
    slow = Episode(spec=spec, outcome=Outcome.TIME_LIMIT, success=False)
    found = summarize(MANIFEST, [slow])
    assert (found["failed"], found["success_rate"], found["outcomes"]) == (0, 0.0, {"time_limit": 1})


def test_the_content_hash_is_about_first_observations_and_seeds_only():
    base = content_hash(FOUR)
    assert content_hash(FOUR[::-1]) == base
    assert content_hash([played("a", [0.0, 9.0], False), *FOUR[1:]]) == base
    assert content_hash(FOUR[:3]) != base
    other_seed = EpisodeSpec(episode_id="a", env_id="a/B-v0", env_seed=1)
    turned = Episode(spec=other_seed, outcome=Outcome.TERMINATED, turns=FOUR[0].turns)
    assert content_hash([turned, *FOUR[1:]]) != base


def test_the_first_observation_is_known_without_any_action():
    spec = EpisodeSpec(episode_id="a", env_id="a/B-v0")
    idle = Episode(spec=spec, outcome=Outcome.TIME_LIMIT, final_observation="look")
    assert first_observation(idle) == "look"
    assert first_observation(FOUR[0]) == "a 0"


def test_an_agent_cannot_raise_its_success_by_crashing_what_judges_it():
    honest = [played(f"{n:02}", [float(n < 8)], n < 8, group="") for n in range(30)]
    crashing = [*honest[:8], *(crashed(f"{n:02}") for n in range(8, 30))]
    one, other = summarize(MANIFEST, honest), summarize(MANIFEST, crashing)
    assert other["success_rate"] == one["success_rate"] == pytest.approx(8 / 30)
    assert other["mean_return"] == one["mean_return"]
    assert (other["failed"], other["excluded"], other["scored"]) == (22, 0, 30)
    assert other["many_excluded"] is False


def test_rewards_before_a_crash_count_and_pass_at_k_does_too():
    found = summarize(MANIFEST, [played("a1", [1.0], True), crashed("a2", [0.5, 0.25])])
    assert found["mean_return"] == pytest.approx((1.0 + 0.75) / 2)
    assert found["pass_at_k"] == {"1": 0.5, "2": 1.0}


def test_excluded_episodes_are_counted_and_success_over_all_is_there_too():
    found = summarize(
        MANIFEST, [played("a", [1.0], True), played("b", [0.0], False), failed("c"), failed("d")]
    )
    assert (found["failed"], found["excluded"], found["scored"]) == (2, 2, 2)
    assert (found["success_rate"], found["success_all"]) == (0.5, 0.25)
    assert exclusion_note(found) == (
        "2 of 4 episodes ended by infrastructure errors and are excluded from the score. "
        "Success is 0.500 without them and 0.250 with them as failures."
    )
    assert exclusion_note(summarize(MANIFEST, [played("a", [1.0], True)])) is None


@pytest.mark.parametrize(
    ("excluded", "episodes", "many"),
    [(0, 10, False), (1, 10, True), (1, 50, False), (3, 150, False), (4, 1_000, True), (0, 0, False)],
)
def test_more_than_a_few_excluded_mark_a_summary(excluded, episodes, many):
    assert many_excluded(excluded, episodes) is many


def test_a_crash_is_not_a_failure_if_success_is_undefined():
    undefined = crashed("b")
    undefined = replace(undefined, reset_info={"success": None})
    found = summarize(MANIFEST, [played("a", [1.0], None), undefined])
    assert (found["success_rate"], found["success_all"], found["excluded"]) == (None, None, 0)
