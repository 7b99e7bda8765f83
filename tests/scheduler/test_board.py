"""The board, worked through by hand: what is handed out, what is taken, and what is passed over."""

from typing import Any

import pytest
from hand import ended

from rollgym.errors import UsageError
from rollgym.scheduler.board import GroupBoard
from rollgym.scheduler.config import SchedulerConfig
from rollgym.scheduler.groups import GroupPolicy
from rollgym.scheduler.stream import Source, TaskStream
from rollgym.types import EpisodeSpec, Outcome


class Table:
    """A board, and somebody who plays what it hands out."""

    def __init__(self, groups: int, size: int = 1, start: int = 0, **config: Any) -> None:
        settings = SchedulerConfig(groups=GroupPolicy(size=size, refills=0), max_ahead=groups, **config)
        self.board = GroupBoard(TaskStream([Source(env_id="env")]), settings, start)
        self.specs: dict[int, list[EpisodeSpec]] = {}
        for _ in range(groups):
            self.hand_out()

    def hand_out(self) -> int:
        specs = self.board.hand_out()
        number = int(specs[0].group_id[1:])
        self.specs[number] = specs
        return number

    def end(self, *numbers: int, rewards: tuple[float, ...] = (0.0, 1.0, 2.0), **how: Any) -> None:
        for number in numbers:
            for spec in self.specs[number]:
                self.board.open[number].finish(ended(spec, reward=rewards[spec.member], **how))

    def take(self) -> int | None:
        group = self.board.choose()
        if group is None:
            return None
        self.board.give(1)
        return int(group.group_id[1:])

    def passed(self) -> list[tuple[int, str]]:
        return [(int(passed.group_id[1:]), passed.why) for passed in self.board.passed_over()]


def test_order_strict_waits_for_the_first_ticket() -> None:
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


def test_nobody_is_overtaken_more_often_than_allowed() -> None:
    table = Table(6, order="ready", max_overtakes=2)
    table.end(3, 4, 5)
    assert [table.take() for _ in range(3)] == [3, 4, None], "0, 1 and 2 were overtaken twice"
    table.end(0)
    assert [table.take() for _ in range(2)] == [0, None]
    table.end(2)
    assert table.take() is None, "1 holds up 2 and 5"
    table.end(1)
    assert [table.take() for _ in range(3)] == [1, 2, 5]


def test_an_overtake_of_one_is_no_overtake_of_those_behind() -> None:
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


def test_a_dropped_group_is_passed_over_in_its_turn() -> None:
    table = Table(3)
    table.end(0, outcome=Outcome.ENV_ERROR)
    table.end(1)
    assert (table.take(), table.passed()) == (1, [(0, "dropped")])
    assert table.passed() == [], "each is told once"
    assert table.board.counts == {"handed_out": 3, "dropped": 1, "taken": 1}


def test_groups_without_a_signal_are_skipped_but_not_more_than_so_many_in_a_row() -> None:
    table = Table(9, size=2, skip_equal_returns=True, max_skipped=2)
    table.end(0, 1, 2, 3, 5, 6, 7, 8, rewards=(1.0, 1.0))
    table.end(4)
    assert [table.take() for _ in range(3)] == [2, 4, 7]
    assert table.passed() == [(n, "skipped") for n in (0, 1, 3, 5, 6)]
    assert table.take() is None
    assert table.passed() == [(8, "skipped")]


@pytest.mark.parametrize(("rewards", "taken"), [((1.0, 1.0 + 1e-9), None), ((1.0, 1.001), 0)])
def test_equal_is_equal_within_a_tolerance(rewards: tuple[float, float], taken: int | None) -> None:
    table = Table(1, size=2, skip_equal_returns=True)
    table.end(0, rewards=rewards)
    assert table.take() == taken


def test_groups_of_one_are_never_without_a_signal_and_nothing_is_skipped_unasked() -> None:
    table = Table(1, skip_equal_returns=True)
    table.end(0)
    assert table.take() == 0
    table = Table(1, size=2)
    table.end(0, rewards=(1.0, 1.0))
    assert table.take() == 0


@pytest.mark.parametrize(("version", "taken"), [(3, 0), (4, 0), (5, None)])
def test_the_oldest_token_of_any_member_decides_how_old_a_group_is(version: int, taken: int | None) -> None:
    table = Table(1, size=2, max_staleness=2)
    first, second = table.specs[0]
    table.board.open[0].finish(ended(first, versions=[4, 4]))
    table.board.open[0].finish(ended(second, versions=[None, 2, 3]))
    table.board.version = version
    assert table.take() == taken


def test_without_versions_or_a_limit_nothing_is_too_old() -> None:
    for config in ({"max_staleness": 0}, {}):
        table = Table(1, **config)
        table.end(0, versions=[None] if config else [0])
        table.board.version = 9
        assert table.take() == 0


def test_a_group_that_is_too_old_is_played_again_before_anything_new_with_new_ids() -> None:
    table = Table(3, max_staleness=0)
    table.end(0, 1, versions=[0])
    table.board.version = 1
    assert (table.take(), table.passed()) == (None, [(0, "stale"), (1, "stale")])
    before = [table.specs[n][0] for n in (0, 1)]
    assert table.board.tickets_to_play() == [0, 1, 2]
    assert [table.hand_out(), table.hand_out(), table.hand_out()] == [0, 1, 3]
    after = [table.specs[n][0] for n in (0, 1)]
    assert {s.episode_id for s in before}.isdisjoint(s.episode_id for s in after)
    assert [s.sampling_seed for s in before] == [s.sampling_seed for s in after]
    table.end(0, versions=[1])
    assert table.take() == 0
    assert table.board.counts == {"handed_out": 6, "stale": 2, "taken": 1}


def test_a_group_may_be_too_old_more_than_once() -> None:
    table = Table(1, max_staleness=0)
    names = set()
    for version in range(4):
        names.add(table.specs[0][0].episode_id)
        table.end(0, versions=[version])
        table.board.version = version + 1
        assert table.take() is None
        table.hand_out()
    assert len(names) == 4


def test_no_more_groups_are_ahead_than_allowed() -> None:
    table = Table(2)
    assert not table.board.may_hand_out()
    table.end(0, 1)
    assert not table.board.may_hand_out(), "ready ones count"
    table.take()
    assert table.board.may_hand_out()


def test_groups_that_are_held_count_until_they_are_released() -> None:
    table = Table(3)
    table.board.holding = True
    table.end(0, 1)
    assert table.board.choose() is not None
    assert not table.board.may_hand_out(), "one is in hand"
    assert table.board.choose() is not None
    assert len(table.board.give(2)) == 2
    assert (table.board.unreleased, table.board.may_hand_out()) == (2, False)
    table.board.release(1)
    assert table.board.may_hand_out()
    table.board.release(5)
    assert table.board.unreleased == 0, "more than there are cannot be released"


def test_groups_in_hand_can_become_too_old_too() -> None:
    table = Table(2, max_staleness=0)
    table.end(0, 1, versions=[0])
    assert table.board.choose() is not None
    assert table.board.fresh_in_hand() == 1
    assert table.board.tickets_to_play() == [0, 1], "nobody has it yet"
    table.board.version = 1
    assert table.board.fresh_in_hand() == 0
    assert table.passed() == [(0, "stale")]
    assert table.board.give(1) == []
    assert table.hand_out() == 0
    assert table.specs[0][0].episode_id == "g000000-0-retry1"
    assert table.board.counts == {"handed_out": 3, "stale": 1, "taken": 0}


def test_a_run_can_begin_with_any_ticket_and_with_some_to_play_again() -> None:
    table = Table(1, start=40)
    assert list(table.specs) == [40]
    table.board.play_again([31, 7], {31: 2})
    assert [table.hand_out() for _ in range(3)] == [7, 31, 41]
    assert table.specs[7][0].episode_id == "g000007-0"
    assert table.specs[31][0].episode_id == "g000031-0-retry2"
    assert table.board.tickets_to_play() == [7, 31, 40, 41]


def test_those_that_were_overtaken_are_known() -> None:
    table = Table(4, order="ready")
    assert table.board.overtaken() == []
    table.end(2)
    table.take()
    assert [state.ticket.number for state in table.board.overtaken()] == [0, 1]


def test_as_many_groups_are_ahead_as_keep_every_place_busy() -> None:
    assert SchedulerConfig(max_in_flight=10, groups=GroupPolicy(size=3, extra=1)).ahead == 7
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
def test_senseless_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(config))):
        SchedulerConfig(**config)
