"""The task sampler: a group task depends on its number and the seed alone."""

import math
from collections import Counter
from itertools import islice

import pytest

from rollgym.core.errors import UsageError
from rollgym.core.tasks import TaskSet
from rollgym.core.types import Limits
from rollgym.rollout.task_sampler import EnvSource, TaskSampler

TASKS = TaskSet("maze", {"train": 5, "test": 3})


def mixture(*weights: float, seed: int = 0) -> TaskSampler:
    return TaskSampler([EnvSource(env_id=f"env{n}", weight=w) for n, w in enumerate(weights)], seed=seed)


def test_group_tasks_do_not_depend_on_earlier_requests() -> None:
    asked_in_order = [mixture(1, 2, seed=7).group_task(n) for n in range(20)]
    jumped = mixture(1, 2, seed=7)
    assert jumped.group_task(19) == asked_in_order[19]
    assert [jumped.group_task(n) for n in range(20)] == asked_in_order
    assert [task.number for task in asked_in_order] == list(range(20))
    assert asked_in_order[12].group_id == "g000012"


def test_another_seed_gives_other_seeds_to_the_same_groups() -> None:
    one, two = mixture(1, seed=1), mixture(1, seed=2)
    assert {one.group_task(n).env_seed for n in range(50)}.isdisjoint(
        two.group_task(n).env_seed for n in range(50)
    )
    assert len({one.group_task(n).env_seed for n in range(50)}) == 50


def test_shares_of_a_mixture_are_exact_and_never_in_bursts() -> None:
    sampler = mixture(1, 2, 3)
    sources = [sampler.group_task(n).source for n in range(600)]
    assert Counter(sources) == {0: 100, 1: 200, 2: 300}
    for start in range(0, 600, 6):
        assert Counter(sources[start : start + 6]) == {0: 1, 1: 2, 2: 3}
    assert sources[:6] == [2, 1, 0, 2, 1, 2]


def test_tasks_come_in_a_seeded_order_all_of_them_before_any_again() -> None:
    sampler = TaskSampler([EnvSource(env_id="maze", tasks=TASKS)], seed=3)
    tasks = [sampler.group_task(n).task for n in range(15)]
    for epoch in range(3):
        assert sorted(tasks[5 * epoch : 5 * epoch + 5], key=int) == [0, 1, 2, 3, 4]
    again = TaskSampler([EnvSource(env_id="maze", tasks=TASKS)], seed=3)
    assert [again.group_task(n).task for n in range(15)] == tasks
    orders = {
        tuple(TaskSampler([EnvSource(env_id="m", tasks=TASKS)], seed=s).group_task(n).task for n in range(5))
        for s in range(9)
    }
    assert len(orders) > 1


def test_two_sources_with_the_same_tasks_walk_through_them_in_their_own_order() -> None:
    big = TaskSet("big", {"train": 1000})
    sampler = TaskSampler([EnvSource(env_id="a", tasks=big), EnvSource(env_id="b", tasks=big)])
    walks: dict[int, list[int | None]] = {0: [], 1: []}
    for number in range(40):
        walks[sampler.group_task(number).source].append(sampler.group_task(number).task)
    assert walks[0] != walks[1]


def test_a_spec_holds_everything_that_decides_how_its_episode_starts() -> None:
    limits = Limits(turns=9)
    source = EnvSource(
        env_id="maze", tasks=TASKS, split="test", env_kwargs={"size": 4}, env_version="v2", limits=limits
    )
    sampler = TaskSampler([source], seed=5)
    task = sampler.group_task(1)
    spec = sampler.spec(task, member=2, attempt=0, sampling_attempt=0)
    assert (spec.episode_id, spec.group_id, spec.member) == ("g000001-2", "g000001", 2)
    assert (spec.env_id, spec.env_kwargs, spec.env_version) == ("maze", {"size": 4}, "v2")
    assert (spec.split, spec.task, spec.limits) == ("test", task.task, limits)
    assert spec.env_seed == task.env_seed
    spec.env_kwargs["size"] = 5
    assert sampler.spec(task, 2, 0, 0).env_kwargs == {"size": 4}, "specs share nothing"


def test_members_share_the_start_and_differ_in_sampling() -> None:
    sampler = mixture(1, seed=5)
    specs = [sampler.spec(sampler.group_task(n), member, 0, 0) for n in range(10) for member in range(4)]
    assert len({spec.sampling_seed for spec in specs}) == 40
    assert len({spec.env_seed for spec in specs}) == 10
    assert specs[0].task is None
    assert specs[0].split == ""


def test_a_second_attempt_has_a_new_id_and_the_same_sampling_unless_asked() -> None:
    sampler = mixture(1, seed=5)
    first = sampler.spec(sampler.group_task(0), 1, 0, 0)
    second = sampler.spec(sampler.group_task(0), 1, 3, 0)
    other = sampler.spec(sampler.group_task(0), 1, 4, 1)
    assert [s.episode_id for s in (first, second, other)] == [
        "g000000-1",
        "g000000-1-retry3",
        "g000000-1-retry4",
    ]
    assert first.sampling_seed == second.sampling_seed != other.sampling_seed
    assert first.env_seed == second.env_seed == other.env_seed


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_invalid_weights_are_refused(weight: float) -> None:
    with pytest.raises(UsageError, match="must be positive and finite"):
        EnvSource(env_id="env", weight=weight)


def test_a_sampler_without_sources_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one environment"):
        TaskSampler([])


def test_a_sampler_follows_the_order_of_its_task_set() -> None:
    """So that a list of tasks written down elsewhere can be found again."""
    from rollgym.core.seeding import derive_seed

    sampler = TaskSampler([EnvSource(env_id="maze", tasks=TASKS)], seed=3)
    order = list(islice(TASKS.order("train", derive_seed("stream order", 3, 0)), 8))
    assert [sampler.group_task(n).task for n in range(8)] == order


def test_new_weights_count_from_their_group_on_and_give_the_same_groups_again() -> None:
    sampler = mixture(1, 1)
    before = [sampler.group_task(n) for n in range(10)]
    sampler.reweigh(10, [3, 1])
    after = [sampler.group_task(n).source for n in range(10, 50)]
    assert Counter(after) == {0: 30, 1: 10}
    assert [sampler.group_task(n) for n in range(10)] == before
    sampler.reweigh(50, [0, 1])
    assert {sampler.group_task(n).source for n in range(52, 60)} == {1}
    sources = [EnvSource(env_id=f"env{n}") for n in range(2)]
    again = TaskSampler(sources, reweighed=[(10, [3, 1]), (50, [0, 1])])
    assert [again.group_task(n) for n in range(60)] == [sampler.group_task(n) for n in range(60)]


def test_weights_of_groups_that_have_a_task_cannot_change() -> None:
    sampler = mixture(1, 1)
    sampler.group_task(4)
    with pytest.raises(ValueError, match="group 4 has a task already"):
        sampler.reweigh(4, [1, 2])
    for weights in ([1], [0, 0], [1, -1], [1, math.nan]):
        with pytest.raises(ValueError, match="weight"):
            sampler.reweigh(5, weights)
