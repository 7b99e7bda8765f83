"""The group buffer, step by step: started, taken and discarded groups."""

from typing import Any

import pytest
from hand import ended

from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec, Outcome
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.group_buffer import GroupBuffer
from rollgym.rollout.group_state import GroupPolicy, GroupState
from rollgym.rollout.task_sampler import EnvSource, TaskSampler


class Table:
    """A group buffer, and a player of its episodes."""

    def __init__(self, groups: int, size: int = 1, start: int = 0, **config: Any) -> None:
        settings = SchedulerConfig(
            groups=GroupPolicy(size=size, max_retries_per_group=0), max_ahead=groups, **config
        )
        self.buffer = GroupBuffer(TaskSampler([EnvSource(env_id="env")]), settings, start)
        self.specs: dict[int, list[EpisodeSpec]] = {}
        for _ in range(groups):
            self.start_group()

    def start_group(self) -> int:
        specs = self.buffer.start_group()
        number = int(specs[0].group_id[1:])
        self.specs[number] = specs
        return number

    def state(self, number: int) -> GroupState:
        return self.buffer.open[f"g{number:06d}"]

    def end(self, *numbers: int, rewards: tuple[float, ...] = (0.0, 1.0, 2.0), **how: Any) -> None:
        for number in numbers:
            for spec in self.specs[number]:
                self.state(number).finish(ended(spec, reward=rewards[spec.member], **how))

    def take(self) -> int | None:
        group = self.buffer.choose()
        if group is None:
            return None
        self.buffer.pop_chosen(1)
        return int(group.group_id[1:])

    def discarded(self) -> list[tuple[int, str]]:
        return [(int(discarded.group_id[1:]), discarded.reason) for discarded in self.buffer.pop_discarded()]


def test_order_strict_waits_for_the_first_group() -> None:
    table = Table(3)
    table.end(1, 2)
    assert table.take() is None
    table.end(0)
    assert [table.take() for _ in range(4)] == [0, 1, 2, None]


def test_order_ready_takes_the_earliest_that_is_ready() -> None:
    table = Table(5, order="ready")
    table.end(4, 2)
    assert [table.take() for _ in range(3)] == [2, 4, None]
    table.end(3, 0)
    assert [table.take() for _ in range(3)] == [0, 3, None]


def test_no_group_is_overtaken_more_often_than_allowed() -> None:
    table = Table(6, order="ready", max_overtakes=2)
    table.end(3, 4, 5)
    assert [table.take() for _ in range(3)] == [3, 4, None], "0, 1 and 2 were overtaken twice"
    table.end(0)
    assert [table.take() for _ in range(2)] == [0, None]
    table.end(2)
    assert table.take() is None, "1 holds up 2 and 5"
    table.end(1)
    assert [table.take() for _ in range(3)] == [1, 2, 5]


def test_an_overtake_counts_only_for_earlier_groups() -> None:
    table = Table(4, order="ready", max_overtakes=1)
    table.end(1)
    assert table.take() == 1
    table.end(3)
    assert table.take() is None, "0 was overtaken once"
    table.end(0)
    assert [table.take() for _ in range(2)] == [0, 3], "2 was not"
    assert table.take() is None


def test_overtakes_of_those_in_front_are_remembered() -> None:
    table = Table(5, order="ready", max_overtakes=1)
    table.end(2)
    assert table.take() == 2
    table.end(0)
    assert table.take() == 0
    table.end(4)
    assert table.take() is None, "1 was overtaken by 2, and still is"


def test_no_overtakes_at_all_is_strict() -> None:
    table = Table(3, order="ready", max_overtakes=0)
    table.end(1, 2)
    assert table.take() is None


def test_a_dropped_group_is_discarded_in_order() -> None:
    table = Table(3)
    table.end(0, outcome=Outcome.ENV_ERROR)
    table.end(1)
    assert (table.take(), table.discarded()) == (1, [(0, "dropped")])
    assert table.discarded() == [], "each is reported once"
    assert table.buffer.counts == {"started": 3, "dropped": 1, "taken": 1}


def test_zero_variance_groups_are_filtered_up_to_a_limit() -> None:
    table = Table(9, size=2, filter_zero_variance=True, max_skipped=2)
    table.end(0, 1, 2, 3, 5, 6, 7, 8, rewards=(1.0, 1.0))
    table.end(4)
    assert [table.take() for _ in range(3)] == [2, 4, 7]
    assert table.discarded() == [(n, "filtered") for n in (0, 1, 3, 5, 6)]
    assert table.take() is None
    assert table.discarded() == [(8, "filtered")]


@pytest.mark.parametrize(("rewards", "taken"), [((1.0, 1.0 + 1e-9), None), ((1.0, 1.001), 0)])
def test_equal_is_equal_within_a_tolerance(rewards: tuple[float, float], taken: int | None) -> None:
    table = Table(1, size=2, filter_zero_variance=True)
    table.end(0, rewards=rewards)
    assert table.take() == taken


def test_groups_of_one_are_not_filtered_and_filtering_is_off_by_default() -> None:
    table = Table(1, filter_zero_variance=True)
    table.end(0)
    assert table.take() == 0
    table = Table(1, size=2)
    table.end(0, rewards=(1.0, 1.0))
    assert table.take() == 0


@pytest.mark.parametrize(("version", "taken"), [(3, 0), (4, 0), (5, None)])
def test_the_oldest_token_of_any_member_decides_how_old_a_group_is(version: int, taken: int | None) -> None:
    table = Table(1, size=2, max_staleness=2)
    first, second = table.specs[0]
    table.state(0).finish(ended(first, versions=[4, 4]))
    table.state(0).finish(ended(second, versions=[None, 2, 3]))
    table.buffer.version = version
    assert table.take() == taken


def test_without_versions_or_a_limit_nothing_is_too_old() -> None:
    for config in ({"max_staleness": 0}, {}):
        table = Table(1, **config)
        table.end(0, versions=[None] if config else [0])
        table.buffer.version = 9
        assert table.take() == 0


def test_a_group_that_is_too_old_is_played_again_before_anything_new_with_new_ids() -> None:
    table = Table(3, max_staleness=0)
    table.end(0, 1, versions=[0])
    table.buffer.version = 1
    assert (table.take(), table.discarded()) == (None, [(0, "stale"), (1, "stale")])
    before = [table.specs[n][0] for n in (0, 1)]
    assert table.buffer.unfinished_groups() == [0, 1, 2]
    assert [table.start_group(), table.start_group(), table.start_group()] == [0, 1, 3]
    after = [table.specs[n][0] for n in (0, 1)]
    assert {s.episode_id for s in before}.isdisjoint(s.episode_id for s in after)
    assert [s.sampling_seed for s in before] == [s.sampling_seed for s in after]
    table.end(0, versions=[1])
    assert table.take() == 0
    assert table.buffer.counts == {"started": 6, "stale": 2, "taken": 1}


def test_a_group_may_be_too_old_more_than_once() -> None:
    table = Table(1, max_staleness=0)
    names = set()
    for version in range(4):
        names.add(table.specs[0][0].episode_id)
        table.end(0, versions=[version])
        table.buffer.version = version + 1
        assert table.take() is None
        table.start_group()
    assert len(names) == 4


def test_no_more_groups_are_ahead_than_allowed() -> None:
    table = Table(2)
    assert not table.buffer.can_start_group()
    table.end(0, 1)
    assert not table.buffer.can_start_group(), "ready ones count"
    table.take()
    assert table.buffer.can_start_group()


def test_held_groups_count_until_they_are_released() -> None:
    table = Table(3)
    table.buffer.hold_slots = True
    table.end(0, 1)
    assert table.buffer.choose() is not None
    assert not table.buffer.can_start_group(), "one is chosen"
    assert table.buffer.choose() is not None
    assert len(table.buffer.pop_chosen(2)) == 2
    assert (table.buffer.unreleased, table.buffer.can_start_group()) == (2, False)
    table.buffer.release(1)
    assert table.buffer.can_start_group()
    table.buffer.release(5)
    assert table.buffer.unreleased == 0, "more than there are cannot be released"


def test_chosen_groups_can_become_too_old() -> None:
    table = Table(2, max_staleness=0)
    table.end(0, 1, versions=[0])
    assert table.buffer.choose() is not None
    assert table.buffer.count_chosen() == 1
    assert table.buffer.unfinished_groups() == [0, 1], "it is not handed over yet"
    table.buffer.version = 1
    assert table.buffer.count_chosen() == 0
    assert table.discarded() == [(0, "stale")]
    assert table.buffer.pop_chosen(1) == []
    assert table.start_group() == 0
    assert table.specs[0][0].episode_id == "g000000-0-retry1"
    assert table.buffer.counts == {"started": 3, "stale": 1, "taken": 0}


def test_a_run_can_begin_with_any_group_and_with_requeued_ones() -> None:
    table = Table(1, start=40)
    assert list(table.specs) == [40]
    table.buffer.requeue([31, 7], {31: 2})
    assert [table.start_group() for _ in range(3)] == [7, 31, 41]
    assert table.specs[7][0].episode_id == "g000007-0"
    assert table.specs[31][0].episode_id == "g000031-0-retry2"
    assert table.buffer.unfinished_groups() == [7, 31, 40, 41]


def test_overtaken_groups_are_listed() -> None:
    table = Table(4, order="ready")
    assert table.buffer.overtaken() == []
    table.end(2)
    table.take()
    assert [state.task.number for state in table.buffer.overtaken()] == [0, 1]


def test_enough_groups_are_ahead_to_fill_max_in_flight() -> None:
    assert SchedulerConfig(max_in_flight=10, groups=GroupPolicy(size=3, oversample=1)).ahead == 7
    assert SchedulerConfig(max_in_flight=10, max_ahead=2).ahead == 2


@pytest.mark.parametrize(
    "config",
    [
        {"max_in_flight": 0},
        {"max_ahead": 0},
        {"max_overtakes": -1},
        {"max_staleness": -1},
        {"max_skipped": -1},
        {"give_up_after": 0},
        {"evaluation_share": 0.0},
        {"evaluation_share": 1.1},
        {"stall_seconds": 0.0},
    ],
)
def test_invalid_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(config))):
        SchedulerConfig(**config)
