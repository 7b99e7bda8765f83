"""Questions with Python as a tool, and programs made of given lines."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.envs.code.expert import PythonToolExpert, SnippetsExpert
from rollgym.envs.code.questions import KINDS, random_question
from rollgym.envs.code.snippets import CODE, NAMES, SnippetsEnv
from rollgym.envs.code.tool_env import PythonToolEnv
from rollgym.sandbox.types import Sandbox

SETUP = AgentSetup(env_id="x")


@pytest.fixture
def tool(sandbox: Sandbox) -> Iterator[PythonToolEnv]:
    tool_env = PythonToolEnv()
    yield tool_env
    tool_env.close()


@pytest.fixture
def snippets(sandbox: Sandbox) -> Iterator[SnippetsEnv]:
    snippets_env = SnippetsEnv()
    yield snippets_env
    snippets_env.close()


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_asks_different_questions_in_full(name: str) -> None:
    kind, rng = KINDS[name], np.random.default_rng(0)
    questions = [kind.question(kind.choose(rng)) for _ in range(10)]
    assert len({question.text for question in questions}) >= 9
    assert len({question.answer for question in questions}) >= 5
    assert not any("$" in question.text for question in questions)


def test_answers_one_can_check_by_hand() -> None:
    def answer(kind: str, **parameters: Any) -> float:
        return KINDS[kind].question(parameters).answer

    assert answer("long sum", a=2, b=3, c=4, d=5, e=1) == -13
    assert answer("sum of multiples", n=10, a=3, b=5) == 33
    assert answer("prime", n=5) == 11
    assert answer("spread", k=1, values=[4, 9, 1]) == 8
    assert answer("stock", stock={"bell": [2, 5], "drum": [3, 50]}, price=10) == 150
    assert answer("common divisor", a=12, b=18, c=30) == 6


def test_the_expert_answers_every_question(tool: PythonToolEnv) -> None:
    for index in range(20):
        observation, info = tool.reset(seed=0, options={"task": index, "split": "test"})
        assert info["sandbox"]["level"]
        block = PythonToolExpert(SETUP).choose(observation, info)
        observation, reward, terminated, _, info = tool.step(block)
        assert (reward, terminated) == (0.0, False)
        _, reward, terminated, _, info = tool.step(PythonToolExpert(SETUP).choose(observation, info))
        assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_the_session_lasts_and_the_answer_ends_it(tool: PythonToolEnv) -> None:
    tool.reset(seed=0)
    tool.step("```python\nx = 20\n```")
    assert tool.step("```python\nprint(x + 1)\n```")[0] == "stdout:\n21\nTurns left: 4."
    observation, reward, terminated, truncated, info = tool.step("I think the answer: -1")
    assert not info["valid"]
    observation, reward, terminated, truncated, info = tool.step("answer: -1")
    assert (observation, reward, terminated, truncated, info["success"]) == (
        "Wrong.",
        0.0,
        True,
        False,
        False,
    )


def test_what_is_no_number_is_no_answer_and_turns_run_out(sandbox: Sandbox) -> None:
    env = PythonToolEnv(max_turns=2)
    env.reset(seed=0)
    assert "not one number" in env.step("answer: many")[0]
    _, _, terminated, truncated, info = env.step("hello")
    assert (terminated, truncated, info["valid"]) == (False, True, False)
    env.close()


def test_questions_of_splits_differ() -> None:
    env = PythonToolEnv()
    texts = {}
    for split in ("train", "test"):
        tasks = [env.tasks.task(split, i) for i in range(50)]
        texts[split] = {
            env.tasks.draw(task, random_question, lambda question: question.text).text for task in tasks
        }
    assert not texts["train"] & texts["test"]


def test_a_file_of_questions_is_played(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "One and one?", "answer": "It is\\n#### 2"}\n')
    env = PythonToolEnv(str(path))
    observation, info = env.reset(seed=0)
    assert observation.startswith("One and one?")
    with pytest.raises(UsageError, match="generated questions only"):
        PythonToolExpert(SETUP).choose(observation, info)
    assert env.step("answer: 2")[1] == 1.0
    env.close()


def test_the_right_lines_in_the_right_order_win(snippets: SnippetsEnv) -> None:
    for index in range(20):
        observation, info = snippets.reset(seed=0, options={"task": index, "split": "test"})
        assert observation.startswith(f"goal: {', '.join(info['goal'])}\n1 xs = ")
        _, reward, terminated, _, info = snippets.step(SnippetsExpert(SETUP).choose(observation, info))
        assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_few_answers_win(snippets: SnippetsEnv) -> None:
    options = {"task": 1, "split": "train"}
    _, info = snippets.reset(seed=0, options=options)
    wins = 0
    for action in info["actions"]:
        snippets.reset(seed=0, options=options)
        wins += snippets.step(action)[1]
    assert len(info["actions"]) == 20
    assert 1 <= wins <= 4


def test_a_wrong_attempt_is_told_and_may_be_mended(sandbox: Sandbox) -> None:
    env = SnippetsEnv(attempts=2, steps=3, lines=6)
    observation, info = env.reset(seed=0)
    right = SnippetsExpert(SETUP).choose(observation, info)
    wrong = next(a for a in info["actions"] if not set(a.split()) & set(right.split()))
    observation, reward, terminated, _, _ = env.step(wrong)
    assert "tests passed\ngoal:" in observation
    assert (reward, terminated) == (0.0, False)
    assert env.step(right.replace(" ", ", "))[1] == 1.0
    env.close()


@pytest.mark.parametrize("action", ["", "1", "1 1", "1 9", "1 2 3", "one two", "²  1"])
def test_what_is_no_choice_is_invalid(snippets: SnippetsEnv, action: str) -> None:
    snippets.reset(seed=0)
    _, reward, terminated, _, info = snippets.step(action)
    assert (reward, terminated, info["valid"]) == (0.0, True, False)


def test_lines_may_be_named_instead_of_shown(sandbox: Sandbox) -> None:
    env = SnippetsEnv(steps=3, lines=6, view="names")
    assert "names of 3 lines" in env.instructions
    for index in range(5):
        observation, info = env.reset(seed=0, options={"task": index, "split": "test"})
        assert observation == f"goal: {', '.join(info['goal'])}\nlines: {' '.join(info['lines'])}"
        assert len(info["actions"]) == 120
        right = SnippetsExpert(SETUP).choose(observation, info)
        assert right in info["actions"]
        assert env.step(right.upper())[1] == 1.0
    _, info = env.reset(seed=0)
    unknown = next(name for name in NAMES.values() if name not in info["lines"])
    for wrong in ("1 2 3", f"{unknown} {' '.join(info['lines'][:2])}", f"{info['lines'][0]} " * 3):
        env.reset(seed=0)
        assert env.step(wrong)[4]["valid"] is False
    assert set(env.words) == {*CODE, *NAMES.values()}
    env.close()


def test_lines_are_different_and_the_words_are_told(snippets: SnippetsEnv) -> None:
    assert len(set(CODE.values())) == len(set(NAMES.values())) == len(CODE)
    assert set(snippets.words) == {*CODE, *CODE.values()}


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"steps": 1}, "2 or 3"),
        ({"lines": 3}, "4 to 8"),
        ({"attempts": 0}, "1 or more"),
        ({"view": "name"}, "Did you mean names"),
    ],
)
def test_wrong_arguments_are_explained(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SnippetsEnv(**kwargs)


def test_goals_of_splits_differ() -> None:
    env = SnippetsEnv()
    goals = {
        split: {
            env.tasks.draw(
                env.tasks.task(split, i), env._random_puzzle, lambda puzzle: ", ".join(puzzle.goal)
            ).goal
            for i in range(100)
        }
        for split in ("train", "dev", "test")
    }
    assert all(not goals[a] & goals[b] for a, b in itertools.combinations(goals, 2))
