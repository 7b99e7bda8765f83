"""Answers: how they are read out of a reply, and when they are right."""

from fractions import Fraction

import pytest

from rollgym.core.errors import MissingExtra
from rollgym.envs.answers import boxes, read_answer
from rollgym.envs.math import judge as judge_module
from rollgym.envs.math.judge import Judge, read_number


def number(line: str) -> bool:
    return read_number(line) is not None


@pytest.mark.parametrize(
    ("reply", "text", "found"),
    [
        ("42", "42", "last line"),
        ("It is 6 * 7.\n42", "42", "last line"),
        ("Answer: 42", "42", "answer line"),
        ("**Final answer:** 42.", "42", "answer line"),
        ("answer: 41 is too small\nThe end", "41 is too small", "answer line"),
        ("so \\boxed{42} it is", "42", "boxed"),
        ("\\boxed{\\frac{3}{4}}", "\\frac{3}{4}", "boxed"),
        ("\\boxed{7}\nAnswer: 7", "7", "boxed"),
        ("Answer: \\boxed{7}", "7", "boxed"),
        ("\\boxed{7}\nAnswer: 9", "", "several"),
        ("\\boxed{7} and again \\boxed{7}", "", "several"),
        ("Answer: 7\nAnswer: 7", "", "several"),
        ("42\n42", "", "several"),
        ("", "", "nothing"),
        ("Answer:", "", "nothing"),
        ("\\boxed{}", "", "nothing"),
        ("\\boxed{42", "", "nothing"),
        ("I do not know", "", "nothing"),
        ("6 * 7", "", "nothing"),
        ("41\n42", "", "several"),
        ("Answer: 41\nAnswer: 42", "", "several"),
        ("\\boxed{41} \\boxed{42}", "", "several"),
    ],
)
def test_the_rules_find_one_answer_or_none(reply: str, text: str, found: str) -> None:
    answer = read_answer(reply, number)
    assert (answer.text, answer.found) == (text, found)
    assert answer.given == bool(text)


def test_boxes_keep_their_braces() -> None:
    assert boxes("\\boxed{a{b}c} x \\boxed {d}") == ["a{b}c", "d"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-7", -7),
        ("−7", -7),
        ("+7", 7),
        ("1,200", 1200),
        ("1{,}200", 1200),
        ("12 500", 12500),
        ("3.50", Fraction(7, 2)),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("\\dfrac34", Fraction(3, 4)),
        ("$42", 42),
        ("42 coins", 42),
        ("42 km per hour", 42),
        ("x = 42", 42),
        ("42\\text{ cm}", 42),
        ("`42`.", 42),
    ],
)
def test_numbers_are_read_exactly(text: str, value: Fraction | int) -> None:
    assert read_number(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "3 + 4", "3 * 4", "6*7", "41 or 42", "41, 42", "41 42", "1/0", "2^3", "4 2/0", "NaN", "1e3"]
    + ["forty-two", "42 43 44", "9" * 600, "1,2,3", "41 42 43"],
)
def test_everything_else_is_not_a_number(text: str) -> None:
    assert read_number(text) is None


def test_the_exact_judge_compares_values_not_texts() -> None:
    judge = Judge("exact")
    assert judge.right("0.75", "3/4")
    assert judge.right("6/8", "3/4")
    assert not judge.right("0.7500001", "3/4")
    assert not judge.right("3 + 4", "7")
    assert judge.used_for("7") == "exact"


def test_an_expected_expression_needs_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(what: str, extra: str) -> None:
        raise MissingExtra(what, extra)

    monkeypatch.setattr(judge_module, "require", missing)
    assert Judge("auto").used_for("3/4") == "exact"
    with pytest.raises(MissingExtra, match=r"\[math\]"):
        Judge("auto").used_for("2\\sqrt{3}")
    with pytest.raises(MissingExtra, match=r"\[math\]"):
        Judge("math_verify")


def test_math_verify_judges_expressions() -> None:
    pytest.importorskip("math_verify")
    judge = Judge("auto", seconds=20)
    try:
        assert judge.used_for("2\\sqrt{3}") == "math_verify"
        assert judge.right("\\sqrt{12}", "2\\sqrt{3}")
        assert judge.right("(x+1)^2", "x^2+2x+1")
        assert not judge.right("\\sqrt{11}", "2\\sqrt{3}")
        assert not judge.right("", "2\\sqrt{3}")
        # A number is judged as a number: arithmetic is not an answer.
        assert not judge.right("3 + 4", "7")
    finally:
        judge.close()


def test_math_verify_is_killed_where_it_takes_too_long() -> None:
    pytest.importorskip("math_verify")
    verifier = judge_module.Verifier(seconds=2)
    try:
        assert not verifier.equal("x", "(" * 490)
        assert verifier.equal("x+1", "1+x")
    finally:
        verifier.close()
