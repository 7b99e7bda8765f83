"""Generated questions: answers, choices and splits."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from rollgym.core.registry import make
from rollgym.core.tasks import TaskSet
from rollgym.envs.questions.facts import KINDS, LEVELS, random_question

CHECKED: dict[str, tuple[dict[str, Any], str]] = {
    "first word": ({"words": ["river", "anchor", "zebra", "basket"]}, "anchor"),
    "last word": ({"words": ["river", "anchor", "zebra", "basket"]}, "zebra"),
    "largest": ({"numbers": [12, 87, 45, 9]}, "87"),
    "smallest": ({"numbers": [12, 87, 45, 9]}, "9"),
    "weekday": ({"day": 1, "days": 10}, "Friday"),
    "month": ({"month": 10, "months": 3}, "February"),
    "units": ({"unit": "hours", "count": 3, "more": 5}, "185"),
    "order": ({"facts": [["B", "C"], ["A", "B"], ["C", "D"]], "which": "youngest"}, "D"),
    "handover": ({"thing": "key", "holders": ["A", "B", "A", "C"]}, "C"),
    "table": (
        {"columns": ["key", "map"], "rows": {"A": [3, 9], "B": [5, 1]}, "by": 1, "most": True},
        "A",
    ),
    "moves": (
        {
            "thing": "key",
            "places": ["attic", "garden"],
            "steps": [
                ["A", "attic"],
                ["B", "attic"],
                ["B", ""],
                ["A", "garden"],
                ["B", "garden"],
                ["A", "attic"],
            ],
        },
        "garden",
    ),
    "count": ({"start": 10, "changes": [5, -3, 2, -4], "thing": "key"}, "10"),
    "long handover": ({"thing": "key", "holders": list("ABABACAD")}, "D"),
}
"""Answers that were derived by hand."""


def test_every_kind_is_checked_by_hand() -> None:
    assert set(CHECKED) == set(KINDS)


@pytest.mark.parametrize("kind", CHECKED)
def test_a_kind_has_the_answer_derived_by_hand(kind: str) -> None:
    values, answer = CHECKED[kind]
    assert KINDS[kind].answer(values) == answer


@pytest.mark.parametrize("level", LEVELS)
def test_choices_hold_the_answer_once_at_every_position(level: int) -> None:
    positions: Counter[int] = Counter()
    for seed in range(300):
        question = random_question(np.random.default_rng(seed), level, choice=True)
        assert len(question.choices) == len(set(question.choices)) == 4
        assert question.choices.count(question.answer) == 1
        positions[question.choices.index(question.answer)] += 1
    assert min(positions[place] for place in range(4)) > 45


def test_without_choices_the_answer_is_not_stated_as_such() -> None:
    question = random_question(np.random.default_rng(0), 2, choice=False)
    assert question.choices == ()
    assert question.shown == question.text


def test_half_of_mixed_questions_have_choices() -> None:
    questions = [random_question(np.random.default_rng(seed), None, choice=None) for seed in range(400)]
    assert 150 < sum(bool(question.choices) for question in questions) < 250


@pytest.mark.parametrize("level", LEVELS)
def test_no_content_is_in_two_splits(level: int) -> None:
    tasks = TaskSet(f"Questions-{level}")
    seen: dict[str, set[str]] = {}
    for split in tasks.splits:
        for index in range(150):
            question = tasks.draw(
                tasks.task(split, index),
                lambda rng: random_question(rng, level, choice=None),
                lambda question: question.key,
            )
            seen.setdefault(split, set()).add(question.key)
    assert not seen["train"] & (seen["dev"] | seen["test"])
    assert not seen["dev"] & seen["test"]


def test_every_listed_name_is_in_the_vocabulary() -> None:
    """A tokenizer would spell the rare ones, and a small policy would have to learn spelling first."""
    env: Any = make("rollgym/Questions-v0", level=2).unwrapped
    assert {"Dana", "book", "books", "cellar", "September", "kilograms", "grams", "Sunday"} <= set(env.words)
