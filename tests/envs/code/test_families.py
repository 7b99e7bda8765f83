"""Generated problems: sound, varied, the same every time, and never in two splits."""

from collections import Counter

import numpy as np
import pytest

from rollgym.core.errors import UsageError
from rollgym.envs.code.compare import values_equal
from rollgym.envs.code.families.base import compiled
from rollgym.envs.code.families.steps import STEPS
from rollgym.envs.code.generate import FAMILIES, LEVELS, TOPICS, choose_families
from rollgym.envs.code.harness import decode, encode
from rollgym.envs.code.judge import judge
from rollgym.envs.code.problems import Generated
from rollgym.envs.code.types import Cases, Problem
from rollgym.sandbox.types import Sandbox


def problem(family: str, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    return FAMILIES[family].problem(FAMILIES[family].choose(rng), rng)


def test_there_are_many_families_of_every_topic_and_level() -> None:
    assert len(FAMILIES) >= 30
    topics = set(TOPICS)
    assert topics == {"strings", "lists", "maths", "parsing", "simulation", "data structures"}
    assert Counter(family.level for family in FAMILIES.values()).keys() == set(LEVELS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_makes_sound_problems(name: str) -> None:
    for seed in range(8):
        generated = problem(name, seed)
        assert "$" not in generated.statement
        assert "$" not in (generated.solution or "")
        assert isinstance(generated.public, Cases)
        assert isinstance(generated.hidden, Cases)
        assert (len(generated.public), len(generated.hidden)) == (3, 12)
        assert len(generated.shown) == 3
        inputs = [repr(case.arguments) for case in (*generated.public.cases, *generated.hidden.cases)]
        assert len(set(inputs)) == 15
        # No constant passes, nor does a table of the examples.
        hidden = {repr(case.expected) for case in generated.hidden.cases}
        assert len(hidden) >= 2


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_matter_and_are_in_the_statement(name: str) -> None:
    problems = [problem(name, seed) for seed in range(30)]
    assert (
        len({generated.statement for generated in problems})
        == len({generated.key for generated in problems})
        > 3
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_gives_the_expected_values_from_fresh_inputs(name: str) -> None:
    generated = problem(name, 99)
    assert generated.solution is not None
    assert isinstance(generated.hidden, Cases)
    function = compiled(generated.solution, generated.name)
    for case in generated.hidden.cases:
        assert values_equal(
            encode(function(*(decode(argument) for argument in case.arguments))), case.expected
        )


def test_references_pass_in_the_sandbox(sandbox: Sandbox) -> None:
    for name in FAMILIES:
        generated = problem(name, 5)
        assert generated.solution is not None
        assert all(
            result.passed for result in judge(sandbox, generated.solution, generated.name, generated.hidden)
        ), name


def test_values_one_can_check_by_hand() -> None:
    def value(family: str, parameters: dict[str, object], *arguments: object) -> object:
        chosen_family = FAMILIES[family]
        return compiled(chosen_family.program(parameters), chosen_family.function)(*arguments)

    assert value("shift letters", {"shift": 1, "other": "space", "mark": "#"}, "az b!") == "ba c#"
    assert value("digits", {"base": 2, "what": "sum", "more": 1}, 7) == 4
    assert value("times of day", {"hours": 2, "minutes": 5, "way": "earlier"}, "01:00") == "22:55"
    assert value("ways to pay", {"a": 1, "b": 5, "c": 7, "most": 8}, 7) == 3
    assert value("waiting line", {"slice": 2, "change": 1, "start": 0}, [3, 1]) == [6, 4]
    assert value("2 steps", {"steps": [["times", 2], ["reverse", 0]]}, [1, 2]) == [4, 2]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_does_something(name: str) -> None:
    names = {"xs": [3, -4, 4, 4, 50, 7, 12]}
    program = f"def change(xs):\n    {STEPS[name].code_for(STEPS[name].choices[-1])}\n    return xs\n"
    assert compiled(program, "change")(list(names["xs"])) != names["xs"]


def test_a_task_is_the_same_every_time_and_splits_share_nothing() -> None:
    first, second = Generated(), Generated()
    keys = {}
    for split in ("train", "dev", "test"):
        tasks = [first.tasks.task(split, index) for index in range(150)]
        problems = [first.problem(task) for task in tasks]
        assert problems[:20] == [second.problem(task) for task in tasks[:20]]
        keys[split] = {generated.key for generated in problems}
        assert len(keys[split]) > 100
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["dev"]
    assert not keys["dev"] & keys["test"]


def test_there_are_thousands() -> None:
    generated = Generated()
    families = choose_families()
    rng = np.random.default_rng(0)
    drawn = {
        repr((f.name, f.choose(rng)))
        for _ in range(5_000)
        for f in [families[int(rng.integers(len(families)))]]
    }
    assert len(drawn) > 2_000
    assert generated.tasks.size("train") == 20_000


def test_difficulty_and_family_choose() -> None:
    for level in LEVELS:
        easy = Generated(difficulty=level)
        assert {easy.problem(easy.tasks.task("train", i)).level for i in range(10)} == {level}
    maths = Generated(family="maths")
    names = {maths.problem(maths.tasks.task("train", i)).family for i in range(20)}
    assert names <= {family.name for family in TOPICS["maths"]}
    assert maths.tasks.name != Generated().tasks.name


@pytest.mark.parametrize(
    ("difficulty", "family", "words"),
    [
        (4, None, "1, 2 or 3"),
        (None, "math", "Did you mean maths"),
        (1, "roads", "no problems of difficulty 1"),
    ],
)
def test_a_wrong_choice_is_explained(difficulty: int | None, family: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Generated(difficulty, family)
