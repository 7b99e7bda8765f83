"""Durations of groups, and waves of slow ones."""

import pytest

from rollgym.rollout.pacing import LEAST_GROUPS, MAX_DEFERRED_UPDATES, GroupTimes, Waves
from rollgym.rollout.task_sampler import GroupTask


def task(number: int, index: int | None = None, source: int = 0) -> GroupTask:
    return GroupTask(number=number, source=source, task=index, env_seed=0, group_id=f"g{number:06d}")


def played(times: GroupTimes, groups: int, seconds: float = 1.0, first: int = 0, source: int = 0) -> None:
    for number in range(first, first + groups):
        times.started(task(number, number, source), 0.0)
        times.stopped(number, seconds, complete=True)
        times.closed(number, taken=True)


def test_a_task_that_was_slow_is_expected_to_be_slow_again() -> None:
    times = GroupTimes()
    played(times, LEAST_GROUPS)
    times.started(task(90, 7), 10.0)
    times.stopped(90, 14.0, complete=True)
    assert times.expects_slow(task(91, 7))
    assert not times.expects_slow(task(92, 8)), "a task that is not known takes the median of its source"
    times.started(task(93, 7), 20.0)
    times.stopped(93, 21.0, complete=True)
    assert not times.expects_slow(task(94, 7)), "the last group of the task counts"


def test_a_slow_source_is_known_by_its_median() -> None:
    times = GroupTimes()
    played(times, 3 * LEAST_GROUPS)
    played(times, LEAST_GROUPS - 1, 10.0, first=100, source=1)
    assert not times.expects_slow(task(200, None, source=1)), "too few groups to tell"
    played(times, 1, 10.0, first=150, source=1)
    assert times.expects_slow(task(200, None, source=1))
    assert not times.expects_slow(task(201, None, source=0))


def test_nothing_is_slow_before_there_is_something_to_compare_with() -> None:
    times = GroupTimes()
    played(times, LEAST_GROUPS - 2)
    times.started(task(50, 1), 0.0)
    times.stopped(50, 100.0, complete=True)
    assert not times.expects_slow(task(51, 1))
    assert times.metrics(0.0) == {"slow_started_frac": 0.0, "slow_trained_frac": 0.0}


def test_groups_that_starve_show_in_the_metrics() -> None:
    """Eighteen fast groups are trained on; two slow ones are stopped and started again."""
    times = GroupTimes()
    played(times, 18)
    for number in (18, 19):
        times.started(task(number, number), 0.0)
    assert times.metrics(2.0) == {"slow_started_frac": 0.0, "slow_trained_frac": 0.0}, "not slow yet"
    assert times.metrics(5.0) == {"slow_started_frac": pytest.approx(0.1), "slow_trained_frac": 0.0}
    for number in (18, 19):
        times.stopped(number, 5.0, complete=False)
        times.started(task(number, number), 6.0)
    assert times.metrics(6.5)["slow_started_frac"] == pytest.approx(0.1), "the longest attempt counts"
    times.stopped(18, 12.0, complete=True)
    times.closed(18, taken=True)
    shares = times.metrics(12.0)
    assert shares["slow_trained_frac"] == pytest.approx(1 / 19)
    assert shares["slow_started_frac"] == pytest.approx(2 / 20)


def test_a_wave_starts_when_it_is_full_or_has_waited_long_enough() -> None:
    waves = Waves(2, lambda group: group.number % 2 == 1)
    assert [waves.defer(task(number), 0) for number in range(4)] == [False, True, False, True]
    assert waves.waiting() == [1, 3]
    assert [waves.next(0) for _ in range(3)] == [1, 3, None]
    assert waves.defer(task(5), 4)
    assert waves.next(4 + MAX_DEFERRED_UPDATES - 1) is None
    assert waves.next(4 + MAX_DEFERRED_UPDATES) == 5
    assert waves.waiting() == []
