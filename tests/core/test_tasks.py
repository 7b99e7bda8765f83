"""Task sets: numbered tasks, seeded orders without repeats, splits that share no content."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.tasks import DEFAULT_SPLITS, Task, TaskSet

SMALL = TaskSet("Small", {"train": 6, "test": 2})


def test_a_task_set_has_three_splits_by_default():
    assert dict(TaskSet("x").splits) == {"train": 100_000, "dev": 1_000, "test": 1_000}
    assert TaskSet("x").splits is not DEFAULT_SPLITS


@pytest.mark.parametrize("splits", [{}, {"train": 0}, {"train": 5, "test": -1}])
def test_a_task_set_needs_splits_that_are_not_empty(splits):
    with pytest.raises(ValueError, match="at least one split of size >= 1"):
        TaskSet("x", splits)


def test_a_task_knows_its_place():
    assert SMALL.task("test", 1) == Task("Small", "test", 1)


@pytest.mark.parametrize("index", [-1, 2, 10**9])
def test_a_task_outside_its_split_is_refused_with_the_range(index):
    with pytest.raises(UsageError, match=f"Task {index} is out of range: split 'test' has tasks 0 to 1."):
        SMALL.task("test", index)


def test_an_unknown_split_is_refused_with_a_suggestion():
    for ask in (SMALL.size, SMALL.fingerprint, lambda s: SMALL.task(s, 0), lambda s: next(SMALL.order(s, 0))):
        with pytest.raises(UnknownName, match=r"called 'tst'. Did you mean test\? .*: train, test\."):
            ask("tst")


def test_a_tasks_content_is_the_same_whenever_it_is_asked_for():
    task = SMALL.task("train", 3)
    assert task.rng().random(5).tolist() == task.rng().random(5).tolist()


def test_content_depends_on_set_split_and_index():
    tasks = [Task("A", "train", 0), Task("B", "train", 0), Task("A", "test", 0), Task("A", "train", 1)]
    assert len({task.rng().random() for task in tasks}) == 4


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_every_epoch_of_an_order_holds_each_task_once(size, seed):
    stream = TaskSet("x", {"train": size}).order("train", seed)
    for _ in range(3):
        assert sorted(islice(stream, size)) == list(range(size))


def test_an_order_is_endless_seeded_and_new_each_epoch():
    tasks = TaskSet("x", {"train": 50, "test": 50})
    first = list(islice(tasks.order("train", 0), 500))
    assert first == list(islice(tasks.order("train", 0), 500))
    assert first[:50] != first[50:100]
    assert first[:50] != list(range(50))
    assert first[:50] != list(islice(tasks.order("train", 1), 50))
    assert first[:50] != list(islice(tasks.order("test", 0), 50))
    assert all(type(index) is int for index in first)


def test_the_order_is_pinned():
    assert list(islice(SMALL.order("train", 0), 12)) == [0, 4, 5, 2, 3, 1, 3, 1, 4, 0, 2, 5]


def test_the_fingerprint_changes_with_name_split_size_and_the_other_splits():
    prints = [
        SMALL.fingerprint("train"),
        SMALL.fingerprint("test"),
        TaskSet("Other", SMALL.splits).fingerprint("train"),
        TaskSet("Small", {"train": 7, "test": 2}).fingerprint("train"),
        TaskSet("Small", {"train": 6}).fingerprint("train"),
    ]
    assert len(set(prints)) == 5
    assert prints[0] == TaskSet("Small", {"train": 6, "test": 9}).fingerprint("train")


def test_home_gives_a_tenth_to_each_split_but_the_first():
    tasks = TaskSet("x")
    homes = [tasks.home(f"content {i}") for i in range(5000)]
    assert 3850 < homes.count("train") < 4150
    assert 400 < homes.count("dev") < 600
    assert 400 < homes.count("test") < 600
    assert len(homes) == homes.count("train") + homes.count("dev") + homes.count("test")


def test_home_is_the_only_split_where_there_is_one():
    assert {TaskSet("x", {"all": 5}).home(str(i)) for i in range(100)} == {"all"}


def test_home_does_not_depend_on_sizes_or_the_sets_name():
    a, b = TaskSet("a", {"train": 1, "test": 1}), TaskSet("b", {"train": 99, "test": 5})
    assert [a.home(str(i)) for i in range(200)] == [b.home(str(i)) for i in range(200)]


def draw_number(tasks, split, index):
    return tasks.draw(tasks.task(split, index), lambda rng: int(rng.integers(300)), str)


def test_draw_gives_splits_that_share_nothing():
    tasks = TaskSet("Numbers")
    drawn = {split: {draw_number(tasks, split, i) for i in range(300)} for split in tasks.splits}
    assert all(len(numbers) > 5 for numbers in drawn.values())
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["dev"]
    assert not drawn["dev"] & drawn["test"]


def test_draw_is_the_same_for_the_same_task():
    tasks = TaskSet("Numbers")
    assert [draw_number(tasks, "test", i) for i in range(20)] == [
        draw_number(TaskSet("Numbers"), "test", i) for i in range(20)
    ]


def test_draw_gives_up_with_a_sentence_where_a_split_can_have_no_content():
    tasks = TaskSet("Constant")
    elsewhere = next(split for split in tasks.splits if split != tasks.home("same"))
    with pytest.raises(RuntimeError, match=f"Constant: no content for split '{elsewhere}' in 10,000 draws"):
        tasks.draw(tasks.task(elsewhere, 0), lambda rng: "same", str)
