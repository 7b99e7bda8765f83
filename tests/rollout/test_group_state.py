"""One group, step by step: started, retried, kept and cancelled members."""

from typing import Any

import pytest
from hand import ended

from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec, Outcome
from rollgym.rollout.group_state import GroupPolicy, GroupState, GroupStatus
from rollgym.rollout.task_sampler import EnvSource, TaskSampler

SAMPLER = TaskSampler([EnvSource(env_id="env")], seed=1)


def begin(attempt: int = 0, **policy: Any) -> tuple[GroupState, list[EpisodeSpec]]:
    state = GroupState(SAMPLER, SAMPLER.group_task(3), GroupPolicy(**policy), attempt)
    return state, state.start()


def ids(specs: list[EpisodeSpec]) -> list[str]:
    return [spec.episode_id for spec in specs]


def test_a_group_is_ready_when_its_last_member_ends_in_whatever_order() -> None:
    state, specs = begin(size=3)
    assert ids(specs) == ["g000003-0", "g000003-1", "g000003-2"]
    for index in (2, 0):
        action = state.finish(ended(specs[index]))
        assert (action.start, action.cancel, state.status) == ([], [], GroupStatus.OPEN)
    state.finish(ended(specs[1]))
    assert state.status is GroupStatus.READY
    group = state.group()
    assert [episode.spec.member for episode in group.episodes] == [0, 1, 2]
    assert group.complete


def test_oversampled_members_are_cancelled_once_the_group_is_full() -> None:
    state, specs = begin(size=2, oversample=2)
    assert len(specs) == 4
    assert state.finish(ended(specs[3])).cancel == []
    action = state.finish(ended(specs[1]))
    assert action.cancel == ["g000003-0", "g000003-2"]
    assert state.status is GroupStatus.READY
    late = state.finish(ended(specs[0]))
    assert (late.start, late.cancel) == ([], [])
    assert [episode.spec.member for episode in state.group().episodes] == [1, 3]


@pytest.mark.parametrize("outcome", [Outcome.WORKER_LOST, Outcome.ENGINE_ERROR, Outcome.TIME_LIMIT])
def test_where_infrastructure_failed_the_same_episode_is_retried(outcome: Outcome) -> None:
    state, specs = begin(size=2)
    [again] = state.finish(ended(specs[1], outcome)).start
    assert again.episode_id == "g000003-1-retry1"
    assert (again.env_seed, again.sampling_seed, again.member) == (
        specs[1].env_seed,
        specs[1].sampling_seed,
        1,
    )


def test_where_the_episode_itself_failed_the_retry_has_a_new_sampling_seed() -> None:
    state, specs = begin(size=2)
    [again] = state.finish(ended(specs[1], Outcome.ENV_ERROR)).start
    assert again.env_seed == specs[1].env_seed
    assert again.sampling_seed not in {spec.sampling_seed for spec in specs}
    [third] = state.finish(ended(again, Outcome.WORKER_LOST)).start
    assert (third.episode_id, third.sampling_seed) == ("g000003-1-retry2", again.sampling_seed)


def test_siblings_of_a_failed_member_are_kept() -> None:
    state, specs = begin(size=3)
    good = [ended(specs[0], reward=1.0), ended(specs[2], reward=2.0)]
    state.finish(good[0])
    [again] = state.finish(ended(specs[1], Outcome.ENV_ERROR)).start
    state.finish(good[1])
    assert state.status is GroupStatus.OPEN
    state.finish(ended(again, reward=3.0))
    assert [episode.total_reward for episode in state.group().episodes] == [1.0, 3.0, 2.0]


def test_the_retry_budget_is_per_group() -> None:
    state, specs = begin(size=3, max_retries_per_group=2)
    assert state.finish(ended(specs[0], Outcome.WORKER_LOST)).start
    assert state.finish(ended(specs[1], Outcome.WORKER_LOST)).start
    assert state.finish(ended(specs[2], Outcome.WORKER_LOST)).start == []
    assert state.status is GroupStatus.OPEN, "two retries still run"


def test_infrastructure_losses_do_not_use_up_retries() -> None:
    """A dead engine takes all members of a group at once, and more than once."""
    state, specs = begin(size=8)
    for _ in range(3):
        specs = [
            again
            for spec in specs
            for again in state.finish(ended(spec, Outcome.ENGINE_ERROR, lost=True)).start
        ]
        assert len(specs) == 8
    assert (state.budget.retries_left, state.budget.infra_retries_left) == (2, 64 - 24)
    assert state.finish(ended(specs[0], Outcome.ENV_ERROR)).start, "its own failures have their budget still"
    assert (state.budget.retries_left, state.budget.infra_retries_left) == (1, 64 - 24)


def test_infrastructure_losses_have_a_separate_bound() -> None:
    state, specs = begin(size=2, max_retries_per_group=2, max_infra_retries=1, incomplete_groups="drop")
    [again] = state.finish(ended(specs[0], Outcome.WORKER_LOST, lost=True)).start
    action = state.finish(ended(specs[1], Outcome.WORKER_LOST, lost=True))
    assert (action.start, state.budget.retries_left) == ([], 2)
    state.finish(ended(again))
    assert state.status is GroupStatus.DROPPED


@pytest.mark.parametrize(
    ("policy", "good", "status"),
    [
        ({"incomplete_groups": "keep"}, 3, "ready"),
        ({"incomplete_groups": "keep"}, 2, "ready"),
        ({"incomplete_groups": "keep"}, 1, "dropped"),
        ({"incomplete_groups": "keep", "least": 1}, 1, "ready"),
        ({"incomplete_groups": "keep", "least": 3}, 2, "dropped"),
        ({"incomplete_groups": "keep"}, 0, "dropped"),
        ({"incomplete_groups": "drop"}, 3, "dropped"),
        ({"incomplete_groups": "drop"}, 4, "ready"),
    ],
)
def test_incomplete_groups_are_kept_or_dropped(policy: dict[str, Any], good: int, status: str) -> None:
    state, specs = begin(size=4, max_retries_per_group=0, **policy)
    for spec in specs:
        assert state.status is GroupStatus.OPEN
        state.finish(ended(spec, Outcome.TERMINATED if spec.member < good else Outcome.ENV_ERROR))
    assert state.status.value == status


def test_a_group_of_one_needs_one_member() -> None:
    state, specs = begin(size=1, max_retries_per_group=0)
    state.finish(ended(specs[0]))
    assert state.status is GroupStatus.READY


def test_oversampled_members_replace_failed_ones() -> None:
    state, specs = begin(size=2, oversample=1, max_retries_per_group=0)
    state.finish(ended(specs[0], Outcome.ENV_ERROR))
    state.finish(ended(specs[1]))
    state.finish(ended(specs[2]))
    assert state.status is GroupStatus.READY
    assert state.group().complete


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_handled(outcome: Outcome) -> None:
    state, specs = begin(size=1, max_retries_per_group=1, oversample=1)
    action = state.finish(ended(specs[0], outcome))
    assert len(state.members) == outcome.trainable
    retried = outcome.failed and outcome is not Outcome.CANCELLED
    assert len(action.start) == (retried or outcome is Outcome.TIME_LIMIT)


def test_a_policy_names_only_what_differs() -> None:
    state, specs = begin(size=2, on_outcome={Outcome.ENV_ERROR: "drop", Outcome.TOKEN_LIMIT: "retry"})
    assert state.finish(ended(specs[0], Outcome.ENV_ERROR)).start == []
    assert len(state.finish(ended(specs[1], Outcome.TOKEN_LIMIT)).start) == 1
    state, specs = begin(size=1, on_outcome={Outcome.ENV_ERROR: "drop"})
    state.finish(ended(specs[0]))
    assert state.status is GroupStatus.READY


def test_a_group_played_again_has_new_ids_and_the_same_seeds() -> None:
    seen: set[str] = set()
    attempt = 0
    for _ in range(3):
        state, specs = begin(attempt, size=1, max_retries_per_group=2)
        assert specs[0].sampling_seed == begin(size=1)[1][0].sampling_seed
        played = [specs[0]]
        while state.status is GroupStatus.OPEN:
            played += state.finish(ended(played[-1], Outcome.WORKER_LOST)).start
        assert len(played) == 3
        assert seen.isdisjoint(ids(played))
        seen.update(ids(played))
        attempt = state.next_attempt


def test_an_episode_that_is_reported_twice_counts_once() -> None:
    state, specs = begin(size=2)
    state.finish(ended(specs[0]))
    state.finish(ended(specs[0]))
    assert len(state.members) == 1
    assert state.status is GroupStatus.OPEN


def test_an_episode_of_another_group_changes_nothing() -> None:
    state, _ = begin(size=1)
    stranger = SAMPLER.spec(SAMPLER.group_task(4), 0, 0, 0)
    assert state.finish(ended(stranger)).start == []
    assert state.members == []


@pytest.mark.parametrize(
    "policy",
    [
        {"size": 0},
        {"oversample": -1},
        {"max_retries_per_group": -1},
        {"max_infra_retries": -1},
        {"least": 2},
        {"on_outcome": {Outcome.ENV_ERROR: "train"}},
    ],
)
def test_invalid_policies_are_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        GroupPolicy(**policy)
