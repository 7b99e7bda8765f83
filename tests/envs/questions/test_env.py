"""Questions: how answers are read, files, and replies that earn nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.core.seeding import derive_rng
from rollgym.envs.questions.env import QuestionsEnv
from rollgym.envs.questions.expert import QuestionsExpert
from rollgym.envs.questions.facts import Question
from rollgym.envs.questions.files import parse_question

ENV_ID = "rollgym/Questions-v0"
CHOICE = Question(text="Who has the map?", answer="Dana", choices=("Amir", "Bella", "Carlo", "Dana"))
SHORT = Question(text="Which day is it?", answer="Friday")


def posed(monkeypatch: pytest.MonkeyPatch, question: Question, **kwargs: Any) -> QuestionsEnv:
    monkeypatch.setattr(QuestionsEnv, "_pose", lambda self, task: question)
    env = QuestionsEnv(**kwargs)
    env.reset(seed=0)
    return env


def test_gymnasium_accepts_it() -> None:
    check_env(make(ENV_ID).unwrapped)


def test_choices_have_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    env = posed(monkeypatch, CHOICE)
    observation, info = env.reset()
    assert observation == "Who has the map?\nA) Amir\nB) Bella\nC) Carlo\nD) Dana"
    assert info["actions"] == ["Answer: A", "Answer: B", "Answer: C", "Answer: D"]


@pytest.mark.parametrize(
    "reply",
    [
        "Answer: D",
        "D",
        "(D)",
        "D)",
        "D.",
        "**D**",
        "Answer: D) Dana",
        "Dana",
        "I think.\nAnswer: dana",
        "\\boxed{D}",
    ],
)
def test_a_letter_or_its_choice_is_right(reply: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert posed(monkeypatch, CHOICE).step(reply)[1] == 1.0


@pytest.mark.parametrize(
    "reply",
    ["", "Answer:", "\\boxed{}", "A B C D", "A, B, C, D", "A\nB\nC\nD", "D\nD\nD", "DDDD", "D D D D"]
    + [
        "Answer: A\nAnswer: D",
        "\\boxed{A}\\boxed{D}",
        "Answer: any of A, B, C, D",
        "D) Amir",
        "E",
        "all of them",
    ]
    + [
        "Amir Bella Carlo Dana",
        CHOICE.shown,
        CHOICE.shown + "\n" + CHOICE.shown,
        CHOICE.text,
        "answer: A or D",
    ],
)
def test_empty_format_only_repeated_listed_and_echoed_answers_earn_nothing(
    reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, reward, terminated, _, info = posed(monkeypatch, CHOICE).step(reply)
    assert (reward, terminated, info["success"], info["valid"]) == (0.0, True, False, False)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Friday", 1.0),
        ("Answer: friday.", 1.0),
        ("It moves on by three days.\nFriday!", 1.0),
        ("Answer: the Friday", 1.0),
        ("Answer: Thursday", 0.0),
        ("Thursday Friday", 0.0),
        ("Answer: Thursday or Friday", 0.0),
        ("Monday\nTuesday\nWednesday\nThursday\nFriday", 0.0),
        ("Friday\nFriday", 0.0),
        ("Which day is it?", 0.0),
        ("Answer:", 0.0),
        ("", 0.0),
    ],
)
def test_short_answers_are_compared_without_case_and_punctuation(
    reply: str, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert posed(monkeypatch, SHORT).step(reply)[1] == reward


def test_another_attempt_repeats_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    env = posed(monkeypatch, CHOICE, attempts=2)
    observation, reward, terminated, _, info = env.step("A")
    assert (observation, reward, terminated) == (f"Wrong.\n{CHOICE.shown}", 0.0, False)
    assert (info["valid"], info["attempts_left"]) == (True, 1)
    assert env.step("D")[1] == 1.0


@pytest.mark.parametrize("form", ["mixed", "choice", "short"])
@pytest.mark.parametrize("level", [None, 1, 2, 3])
def test_the_expert_answers_every_question(level: int | None, form: str) -> None:
    env = QuestionsEnv(level=level, form=form)
    expert = QuestionsExpert(AgentSetup(env_id=ENV_ID))
    for task in range(50):
        observation, info = env.reset(options={"task": task, "split": "test"})
        assert env.step(expert.choose(observation, info))[4]["success"]


def test_random_choices_are_right_in_a_quarter_of_the_questions() -> None:
    env = QuestionsEnv(form="choice")
    wins = 0
    for task in range(400):
        observation, info = env.reset(options={"task": task, "split": "test"})
        wins += env.step(env.random_action(observation, info, derive_rng("test", task)))[4]["success"]
    assert 70 < wins < 130


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "q", "choices": ["x", "y"], "answer": "B"}, "y"),
        ({"question": "q", "choices": ["x", "y"], "answer": 1}, "y"),
        ({"question": "q", "choices": ["x", "y"], "answer": "y"}, "y"),
        ({"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}, "y"),
        ({"question": "q", "options": ["x", "y"], "answer": "A"}, "x"),
        ({"question": "q", "answer": "y"}, "y"),
        ({"question": "q", "answer": ["y", "yes"]}, "y"),
    ],
)
def test_rows_of_files_are_read(row: dict[str, Any], answer: str) -> None:
    assert parse_question(row).answer == answer


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "q", "choices": ["x", "y"], "answer": "C"}, "not one of its 2 choices"),
        ({"question": "q", "choices": ["x", "y"], "answer": 2}, "not one of its 2 choices"),
        ({"question": "q", "choices": ["x"], "answer": 0}, "a list of 2 to 10"),
        ({"question": "q", "choices": ["x", "X"], "answer": 0}, "are the same"),
        ({"question": "q"}, "no answer"),
        ({"answer": "y"}, "'question'"),
        ({"question": "q", "answer": ""}, "text was expected"),
    ],
)
def test_bad_rows_are_refused_with_a_reason(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_question(row)


def test_an_episode_of_a_file_accepts_every_listed_answer(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": ["two", "2"], "split": "train"}) + "\n")
    env = QuestionsEnv(str(path))
    for reply in ("two", "Answer: 2"):
        observation, info = env.reset(options={"task": 0, "split": "train"})
        assert (observation, info["choices"]) == ("q", [])
        assert env.step(reply)[1] == 1.0


@pytest.mark.parametrize("kwargs", [{"level": 4}, {"form": "long"}, {"attempts": 0}])
def test_bad_options_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        QuestionsEnv(**kwargs)


def test_kinds_restrict_the_questions() -> None:
    env = make("rollgym/Questions-v0", kinds=["largest", "handover"])
    kinds = {env.reset(seed=0, options={"task": task, "split": "dev"})[1]["kind"] for task in range(30)}
    assert kinds == {"largest", "handover"}
    with pytest.raises(UsageError, match="There is no kind of level 2 called 'largest'"):
        make("rollgym/Questions-v0", level=2, kinds=["largest"])
