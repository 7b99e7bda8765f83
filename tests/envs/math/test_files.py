"""Problems from files in the formats of GSM8K and MATH."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import UsageError
from rollgym.envs.math.env import MathEnv
from rollgym.envs.math.files import parse_problem

GSM = {"question": "Two crates hold 12 jars each. How many jars?", "answer": "2 * 12 = 24\n#### 24"}
MATH = {
    "problem": "Compute $\\frac{1}{2}+\\frac{1}{4}$.",
    "solution": "The sum is $\\boxed{\\frac{3}{4}}$.",
    "level": "Level 2",
    "type": "Algebra",
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_both_formats_are_read() -> None:
    assert parse_problem(GSM).answer == "24"
    problem = parse_problem(MATH)
    assert (problem.answer, problem.level) == ("\\frac{3}{4}", 2)
    assert parse_problem({**MATH, "answer": "3/4"}).answer == "3/4"
    assert parse_problem({"question": "How many?", "answer": "24"}).answer == "24"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "How many?", "answer": "#### "}, "no final answer after ####"),
        ({"problem": "x", "solution": "no box"}, "no final answer in"),
        ({"problem": "", "answer": "1"}, "text was expected"),
        ({"prompt": "x"}, "expected question and answer"),
    ],
)
def test_a_row_without_an_answer_is_refused(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_problem(row)


def test_an_episode_of_a_file(tmp_path: Path) -> None:
    files = {"train": write(tmp_path / "a.jsonl", [GSM]), "test": write(tmp_path / "b.jsonl", [MATH])}
    env = MathEnv(files)
    observation, info = env.reset(options={"split": "train", "task": 0})
    assert observation == GSM["question"]
    assert "values" not in info
    assert env.step("24 jars\nAnswer: 24 jars")[4]["success"]
    _, info = env.reset(options={"split": "test", "task": 0})
    assert info["level"] == 2
    assert env.step("\\boxed{0.75}")[1] == 1.0


def test_levels_are_of_generated_problems(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="level and kinds apply to generated problems"):
        MathEnv(write(tmp_path / "a.jsonl", [GSM]), level=2)


def test_expressions_are_judged_by_math_verify(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    row = {"problem": "Simplify $\\sqrt{12}$.", "solution": "\\boxed{2\\sqrt{3}}", "split": "train"}
    env = MathEnv(write(tmp_path / "a.jsonl", [row]))
    try:
        env.reset(options={"split": "train", "task": 0})
        _, reward, _, _, info = env.step("\\boxed{\\sqrt{4}\\sqrt{3}}")
        assert (reward, info["judge"]) == (1.0, "math_verify")
    finally:
        env.close()
