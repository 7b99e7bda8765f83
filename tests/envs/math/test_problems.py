"""Generated problems: values, answers, levels and splits."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from rollgym.core.tasks import TaskSet
from rollgym.envs.math.problems import KINDS, LEVELS, random_problem, solve

CHECKED = {
    "addition": ({"a": 17, "b": 25}, 42),
    "subtraction": ({"a": 30, "b": 12}, 18),
    "multiplication": ({"a": 7, "b": 8}, 56),
    "missing number": ({"a": 9, "b": 30}, 21),
    "two products": ({"a": 2, "b": 3, "c": 4, "d": 5}, 26),
    "bracket": ({"a": 3, "b": 10, "c": 4, "d": 20}, -2),
    "remainder": ({"a": 100, "b": 7}, 2),
    "chain": ({"a": 10, "b": 20, "c": 50, "d": 40, "e": 30}, -10),
    "fractions": ({"a": 1, "b": 2, "c": 1, "d": 3}, Fraction(5, 6)),
    "percentage": ({"a": 80, "b": 25}, 60),
    "shopping": ({"a": 3, "b": 7, "c": 50}, 29),
    "sharing": ({"a": 4, "b": 6, "c": 8}, 3),
    "linear equation": ({"a": 5, "b": 1, "c": 2, "d": 8}, Fraction(7, 3)),
    "ages": ({"a": 30, "b": 10}, 20),
    "average": ({"a": 4, "b": 10, "c": 12}, 20),
    "meeting": ({"a": 60, "b": 5, "c": 15}, 3),
    "system": ({"a": 2, "b": 3, "c": 4, "d": 5, "e": 13, "f": 23}, 2),
    "quadratic": ({"s": 7, "p": 12}, 4),
    "work": ({"a": 6, "b": 12, "c": 2}, 3),
    "series": ({"a": 1, "b": 2, "c": 10}, 100),
    "choices": ({"a": 4, "b": 3, "c": 3, "d": 2}, 18),
}
"""Answers that were computed by hand."""


def test_every_kind_is_checked_by_hand() -> None:
    assert set(CHECKED) == set(KINDS)


@pytest.mark.parametrize("kind", CHECKED)
def test_a_kind_has_the_answer_computed_by_hand(kind: str) -> None:
    values, answer = CHECKED[kind]
    assert solve(kind, values) == str(answer)


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_has_several_kinds_and_its_problems_are_complete(level: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(200):
        problem = random_problem(np.random.default_rng(seed), level)
        assert problem.level == level
        assert problem.values is not None
        assert solve(problem.kind, problem.values) == problem.answer
        assert all(str(value) in problem.text for value in problem.values.values())
        assert "{" not in problem.text
        kinds[problem.kind] += 1
    assert len(kinds) >= 4
    assert min(kinds.values()) >= 15


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_has_thousands_of_problems(level: int) -> None:
    keys = {random_problem(np.random.default_rng(seed), level).key for seed in range(4_000)}
    assert len(keys) > 1_500


def test_no_content_is_in_two_splits() -> None:
    tasks = TaskSet("Math-1")
    seen: dict[str, set[str]] = {}
    for split in tasks.splits:
        for index in range(200):
            problem = tasks.draw(
                tasks.task(split, index), lambda rng: random_problem(rng, 1), lambda problem: problem.key
            )
            seen.setdefault(split, set()).add(problem.key)
    assert not seen["train"] & (seen["dev"] | seen["test"])
    assert not seen["dev"] & seen["test"]


def test_the_order_of_numbers_makes_no_new_content() -> None:
    keys = {(tuple(sorted(values.values())), kind) for kind, (values, _) in CHECKED.items()}
    assert len(keys) == len(CHECKED)
    one, other = (random_problem(np.random.default_rng(0), 1) for _ in range(2))
    assert one.key == other.key
