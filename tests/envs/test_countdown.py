"""Countdown: exact arithmetic, feedback, puzzles and their solver."""

import ast
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.core.seeding import derive_rng
from rollgym.core.tasks import TaskSet
from rollgym.envs.countdown.arithmetic import BadExpression, evaluate, random_expression
from rollgym.envs.countdown.env import CountdownEnv
from rollgym.envs.countdown.expert import CountdownExpert
from rollgym.envs.countdown.puzzle import Puzzle, random_puzzle, solve

ENV_ID = "rollgym/Countdown-v0"
PUZZLE = Puzzle((3, 7, 8, 25), 74)


def puzzle_env(monkeypatch: pytest.MonkeyPatch, puzzle: Puzzle = PUZZLE, **kwargs: Any) -> CountdownEnv:
    monkeypatch.setattr(TaskSet, "draw", lambda *args, **names: puzzle)
    env = CountdownEnv(count=len(puzzle.numbers), **kwargs)
    env.reset(seed=0)
    return env


def test_gymnasium_accepts_it() -> None:
    check_env(make(ENV_ID).unwrapped)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 3 - 2", 5),
        ("10 - (3 - 2)", 9),
        ("24 / 4 / 2", 3),
        ("2 * 3 + 4 * 5", 26),
        ("8 / 3 * 3", 8),
        ("((((7))))", 7),
        ("6 × 2 ÷ 3 − 1", 3),
        ("3 - 10", -7),
    ],
)
def test_expressions_have_their_usual_value(text: str, value: int) -> None:
    assert evaluate(text)[0] == value


def test_fractions_stay_exact() -> None:
    assert evaluate("1 / 3 + 1 / 6")[0] == Fraction(1, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "()",
        "1 +",
        "+ 1",
        "-1",
        "1 2",
        "(1 + 2",
        "1 + 2)",
        "2 ** 3",
        "2 // 3",
        "5 / 0",
        "5 / (2 - 2)",
        "1.5 + 1",
        "2 ^ 3",
        "abs(3)",
        "__import__('os')",
        "9" * 7 + "x",
        "1_0",
        "²",
        "(" * 61 + "1" + ")" * 61,
        "(" * 60,
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(BadExpression):
        evaluate(text)


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-*/() x", max_size=130))
def test_any_text_has_a_value_or_is_refused(text: str) -> None:
    try:
        value, numbers = evaluate(text)
    except BadExpression:
        return
    assert isinstance(value, Fraction)
    assert numbers


def by_python(node: ast.expr) -> Fraction:
    """The value by Python's own grammar, as a second opinion."""
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return Fraction(node.value)
    assert isinstance(node, ast.BinOp)
    left, right = by_python(node.left), by_python(node.right)
    signs: dict[type, Any] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
    return Fraction(signs[type(node.op)](left, right))


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", " - ", "*", " / "]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(EXPRESSIONS)
def test_values_are_those_of_pythons_grammar(text: str) -> None:
    assume(len(text) <= 120)
    try:
        expected = by_python(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        with pytest.raises(BadExpression, match="divides by zero"):
            evaluate(text)
        return
    assert evaluate(text)[0] == expected


@settings(deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 50), min_size=3, max_size=6))
def test_random_expressions_use_each_number_at_most_once(seed: int, numbers: list[int]) -> None:
    _, used = evaluate(random_expression(numbers, np.random.default_rng(seed)))
    assert len(used) >= 2
    for number in used:
        assert used.count(number) <= numbers.count(number)


def test_an_exact_expression_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    env = puzzle_env(monkeypatch)
    assert env.reset()[0] == "Numbers: 3, 7, 8, 25. Target: 74. Attempts left: 3."
    observation, reward, terminated, truncated, info = env.step("25 * 3 - (8 - 7)")
    assert observation == "Correct! 25 * 3 - (8 - 7) = 74."
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert (info["numbers"], info["target"], info["left"]) == ([3, 7, 8, 25], 74, 2)


def test_a_wrong_value_is_told_and_the_question_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    observation, reward, terminated, _, info = puzzle_env(monkeypatch).step("25 + 7 * 8")
    assert observation == ("25 + 7 * 8 = 81, not 74.\nNumbers: 3, 7, 8, 25. Target: 74. Attempts left: 2.")
    assert (reward, terminated, info["valid"], info["success"]) == (0.0, False, True, False)


def test_a_fraction_is_told_with_its_rounded_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert puzzle_env(monkeypatch).step("25 / 7")[0].startswith("25 / 7 = 25/7 (about 3.57), not 74.")


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("74", "74 is not one of the given numbers."),
        ("25 * 3 - 1", "1 is not one of the given numbers."),
        ("25 + 25 + 8 * 3", "25 is used 2 times but given 1 times."),
        ("25 / (8 - 8)", "It divides by zero."),
        ("the answer is 74", "Use only the numbers, + - * / and brackets."),
        ("25 * 3 = 75", "Use only the numbers, + - * / and brackets."),
        ("(25 * 3", "A bracket is not closed."),
        ("25 *", "A number is missing at the end."),
        ("", "It is empty."),
        ("1+" * 20_000, "It is longer than 120 characters."),
    ],
)
def test_an_improper_expression_uses_an_attempt_and_says_why(
    action: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observation, reward, terminated, _, info = puzzle_env(monkeypatch).step(action)
    assert observation.startswith(f"Not a proper expression. {says}\nNumbers:")
    assert (reward, terminated, info["valid"], info["left"]) == (0.0, False, False, 2)


@pytest.mark.parametrize("action", ["`25*3-(8-7)`", " 25*3-(8-7) = 74\n", "25×3−(8−7)=74"])
def test_quotes_signs_and_the_target_after_it_are_forgiven(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert puzzle_env(monkeypatch).step(action)[4]["success"]


def test_a_number_given_twice_may_be_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert puzzle_env(monkeypatch, Puzzle((6, 6, 2), 38)).step("6 * 6 + 2")[4]["success"]


def test_used_up_attempts_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    env = puzzle_env(monkeypatch, attempts=2)
    assert env.step("nonsense")[2] is False
    observation, reward, terminated, truncated, info = env.step("3 + 7")
    assert observation == "3 + 7 = 10, not 74. No attempts left."
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


def test_partial_reward_is_for_a_proper_last_attempt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def rewards(*actions: str) -> list[float]:
        env = puzzle_env(monkeypatch, attempts=2, partial=True)
        return [env.step(action)[1] for action in actions]

    assert rewards("3 + 7", "3 + 8") == [0.0, 0.1]
    assert rewards("3 + 7", "hm") == [0.0, 0.0]
    assert rewards("3 + 7", "25 * 3 - (8 - 7)") == [0.0, 1.0]


def test_the_solver_finds_what_there_is_and_nothing_else() -> None:
    for numbers, target in (((3, 7, 8, 25), 74), ((1, 1, 1), 3), ((50, 2, 4), 100), ((2, 3, 5, 7, 11), 99)):
        expression = solve(numbers, target)
        assert expression is not None
        value, used = evaluate(expression)
        assert value == target
        assert all(used.count(number) <= numbers.count(number) for number in used)
    assert solve((1, 1, 1), 4) is None


def test_puzzles_need_three_numbers_or_more() -> None:
    for seed in range(100):
        puzzle = random_puzzle(np.random.default_rng(seed), 4)
        assert 10 <= puzzle.target <= 100
        pairs = [(a, b) for i, a in enumerate(puzzle.numbers) for b in puzzle.numbers[:i]]
        assert all(solve(pair, puzzle.target) is None for pair in pairs)
        assert solve(puzzle.numbers, puzzle.target) is not None


@pytest.mark.parametrize(("count", "tasks"), [(3, 20), (4, 50), (6, 10)])
def test_the_expert_solves_every_task_at_once(count: int, tasks: int) -> None:
    env = CountdownEnv(count=count, attempts=1)
    expert = CountdownExpert(AgentSetup(env_id=ENV_ID))
    for task in range(tasks):
        observation, info = env.reset(options={"task": task, "split": "test"})
        assert env.step(expert.choose(observation, info))[4]["success"]


def test_random_expressions_are_proper_and_hardly_ever_right() -> None:
    env = CountdownEnv()
    wins = 0
    for task in range(100):
        rng = derive_rng("test", task)
        observation, info = env.reset(options={"task": task, "split": "test"})
        over = False
        while not over:
            observation, _, over, _, info = env.step(env.random_action(observation, info, rng))
            assert info["valid"]
        wins += info["success"]
    assert wins <= 8


def test_no_numbers_are_in_two_splits_and_the_task_fixes_the_puzzle() -> None:
    env = CountdownEnv(count=3)
    seen: dict[str, set[tuple[int, ...]]] = {}
    for split in ("train", "dev", "test"):
        for task in range(150):
            _, info = env.reset(seed=task, options={"task": task, "split": split})
            assert env.reset(seed=0, options={"task": task, "split": split})[1] == info
            seen.setdefault(split, set()).add(tuple(sorted(info["numbers"])))
    assert not seen["train"] & seen["dev"]
    assert not seen["train"] & seen["test"]
    assert not seen["dev"] & seen["test"]


@pytest.mark.parametrize("kwargs", [{"count": 2}, {"count": 7}, {"attempts": 0}])
def test_bad_options_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CountdownEnv(**kwargs)
