"""The task stream: what is in a ticket depends on its number and the seed alone."""

import math
from collections import Counter
from itertools import islice

import pytest

from rollgym.errors import UsageError
from rollgym.scheduler.stream import Source, TaskStream
from rollgym.tasks import TaskSet
from rollgym.types import Limits

TASKS = TaskSet("maze", {"train": 5, "test": 3})


def mixture(*weights: float, seed: int = 0) -> TaskStream:
    return TaskStream([Source(env_id=f"env{n}", weight=w) for n, w in enumerate(weights)], seed=seed)


def test_tickets_are_numbered_and_do_not_depend_on_who_asked_before() -> None:
    asked_in_order = [mixture(1, 2, seed=7).ticket(n) for n in range(20)]
    jumped = mixture(1, 2, seed=7)
    assert jumped.ticket(19) == asked_in_order[19]
    assert [jumped.ticket(n) for n in range(20)] == asked_in_order
    assert [ticket.number for ticket in asked_in_order] == list(range(20))
    assert asked_in_order[12].group_id == "g000012"


def test_another_seed_gives_other_seeds_to_the_same_places() -> None:
    one, two = mixture(1, seed=1), mixture(1, seed=2)
    assert {one.ticket(n).env_seed for n in range(50)}.isdisjoint(two.ticket(n).env_seed for n in range(50))
    assert len({one.ticket(n).env_seed for n in range(50)}) == 50


def test_shares_of_a_mixture_are_exact_and_never_in_bursts() -> None:
    stream = mixture(1, 2, 3)
    sources = [stream.ticket(n).source for n in range(600)]
    assert Counter(sources) == {0: 100, 1: 200, 2: 300}
    for start in range(0, 600, 6):
        assert Counter(sources[start : start + 6]) == {0: 1, 1: 2, 2: 3}
    assert sources[:6] == [2, 1, 0, 2, 1, 2]


def test_tasks_come_in_a_seeded_order_all_of_them_before_any_again() -> None:
    stream = TaskStream([Source(env_id="maze", tasks=TASKS)], seed=3)
    tasks = [stream.ticket(n).task for n in range(15)]
    for epoch in range(3):
        assert sorted(tasks[5 * epoch : 5 * epoch + 5], key=int) == [0, 1, 2, 3, 4]
    again = TaskStream([Source(env_id="maze", tasks=TASKS)], seed=3)
    assert [again.ticket(n).task for n in range(15)] == tasks
    orders = {
        tuple(TaskStream([Source(env_id="m", tasks=TASKS)], seed=s).ticket(n).task for n in range(5))
        for s in range(9)
    }
    assert len(orders) > 1


def test_two_sources_with_the_same_tasks_walk_through_them_in_their_own_order() -> None:
    big = TaskSet("big", {"train": 1000})
    stream = TaskStream([Source(env_id="a", tasks=big), Source(env_id="b", tasks=big)])
    walks: dict[int, list[int | None]] = {0: [], 1: []}
    for number in range(40):
        walks[stream.ticket(number).source].append(stream.ticket(number).task)
    assert walks[0] != walks[1]


def test_a_spec_holds_everything_that_decides_how_its_episode_starts() -> None:
    limits = Limits(turns=9)
    source = Source(
        env_id="maze", tasks=TASKS, split="test", env_kwargs={"size": 4}, env_version="v2", limits=limits
    )
    stream = TaskStream([source], seed=5)
    ticket = stream.ticket(1)
    spec = stream.spec(ticket, member=2, attempt=0, sampling_attempt=0)
    assert (spec.episode_id, spec.group_id, spec.member) == ("g000001-2", "g000001", 2)
    assert (spec.env_id, spec.env_kwargs, spec.env_version) == ("maze", {"size": 4}, "v2")
    assert (spec.split, spec.task, spec.limits) == ("test", ticket.task, limits)
    assert spec.env_seed == ticket.env_seed
    spec.env_kwargs["size"] = 5
    assert stream.spec(ticket, 2, 0, 0).env_kwargs == {"size": 4}, "specs share nothing"


def test_members_share_the_start_and_differ_in_sampling() -> None:
    stream = mixture(1, seed=5)
    specs = [stream.spec(stream.ticket(n), member, 0, 0) for n in range(10) for member in range(4)]
    assert len({spec.sampling_seed for spec in specs}) == 40
    assert len({spec.env_seed for spec in specs}) == 10
    assert specs[0].task is None
    assert specs[0].split == ""


def test_a_second_attempt_has_a_new_id_and_the_same_sampling_unless_asked() -> None:
    stream = mixture(1, seed=5)
    first = stream.spec(stream.ticket(0), 1, 0, 0)
    second = stream.spec(stream.ticket(0), 1, 3, 0)
    other = stream.spec(stream.ticket(0), 1, 4, 1)
    assert [s.episode_id for s in (first, second, other)] == [
        "g000000-1",
        "g000000-1-retry3",
        "g000000-1-retry4",
    ]
    assert first.sampling_seed == second.sampling_seed != other.sampling_seed
    assert first.env_seed == second.env_seed == other.env_seed


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_senseless_weights_are_refused(weight: float) -> None:
    with pytest.raises(UsageError, match="must be positive and finite"):
        Source(env_id="env", weight=weight)


def test_a_stream_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one environment"):
        TaskStream([])


def test_a_stream_is_the_order_of_its_task_set() -> None:
    """So that a list of tasks written down elsewhere can be found again."""
    from rollgym.seeding import derive_seed

    stream = TaskStream([Source(env_id="maze", tasks=TASKS)], seed=3)
    order = list(islice(TASKS.order("train", derive_seed("stream order", 3, 0)), 8))
    assert [stream.ticket(n).task for n in range(8)] == order
