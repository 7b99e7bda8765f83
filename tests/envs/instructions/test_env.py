"""Instructions: results by constraint, the writer, files, and replies that earn nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.core.seeding import derive_rng
from rollgym.envs.instructions.env import InstructionsEnv
from rollgym.envs.instructions.expert import InstructionsExpert
from rollgym.envs.instructions.generate import ADDED, FRAMES, LEVELS, Instruction, random_instruction
from rollgym.envs.instructions.rules import Constraint

ENV_ID = "rollgym/Instructions-v0"
TASK = Instruction(
    'Write a text that meets every point:\n- It has exactly 6 words.\n- It contains "river".',
    (
        Constraint("length_constraints:number_words", {"num_words": 6, "relation": "exactly"}),
        Constraint("keywords:existence", {"keywords": ["river"]}),
    ),
    1,
)


def posed(monkeypatch: pytest.MonkeyPatch, task: Instruction = TASK, **kwargs: Any) -> InstructionsEnv:
    monkeypatch.setattr(InstructionsEnv, "_pose", lambda self, number: task)
    env = InstructionsEnv(**kwargs)
    env.reset(seed=0)
    return env


def test_gymnasium_accepts_it() -> None:
    check_env(make(ENV_ID).unwrapped)


def test_all_points_earn_1(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reward, terminated, _, info = posed(monkeypatch).step("The river runs past our house.")
    assert (reward, terminated, info["success"], info["held"]) == (1.0, True, True, 2)
    assert [made["holds"] for made in info["constraints"]] == [True, True]


def test_some_points_earn_nothing_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    env = posed(monkeypatch, attempts=2)
    observation, reward, terminated, _, info = env.step("The river runs")
    assert observation.startswith("These points do not hold:\n- It has exactly 6 words.\nWrite a text")
    assert (reward, terminated, info["held"], info["valid"]) == (0.0, False, 1, True)
    assert [made["holds"] for made in info["constraints"]] == [False, True]


def test_the_share_of_points_can_be_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    env = posed(monkeypatch, reward="fraction", attempts=2)
    assert env.step("The river runs")[1] == 0.0
    assert env.step("The river runs")[1] == 0.5


@pytest.mark.parametrize("reward", ["all", "fraction"])
@pytest.mark.parametrize(
    "reply",
    ["", " \n ", "...", "river river river river river river", TASK.prompt, f"{TASK.prompt}\n{TASK.prompt}"]
    + ["It has exactly 6 words. It contains \"river\".", "* \n* \n* ", "{}", "[]", "\"\""],
)  # fmt: skip
def test_empty_format_only_repeated_and_echoed_texts_earn_nothing(
    reply: str, reward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, earned, terminated, _, info = posed(monkeypatch, reward=reward).step(reply)
    assert (earned, terminated, info["success"], info["valid"], info["held"]) == (0.0, True, False, False, 0)


@pytest.mark.parametrize("level", LEVELS)
def test_formats_alone_earn_nothing_at_any_level(level: int) -> None:
    env = InstructionsEnv(level=level)
    for task in range(60):
        prompt, _ = env.reset(options={"task": task, "split": "test"})
        for reply in (
            "",
            "{}",
            "* a\n* b",
            "a\n***\nb",
            '""',
            "<<a>>",
            prompt,
            f'"{prompt}"',
            prompt.upper(),
        ):
            env.reset(options={"task": task, "split": "test"})
            assert env.step(reply)[1] == 0.0, (prompt, reply)


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_the_expert_does_every_task(level: int | None) -> None:
    env = InstructionsEnv(level=level)
    expert = InstructionsExpert(AgentSetup(env_id=ENV_ID))
    for task in range(150):
        observation, info = env.reset(options={"task": task, "split": "test"})
        assert level in (None, info["level"])
        assert len(info["constraints"]) == info["level"] + 1
        assert env.step(expert.choose(observation, info))[4]["success"]


def test_generated_tasks_use_every_kind_of_constraint() -> None:
    made = [random_instruction(np.random.default_rng(seed), 2 + seed % 2) for seed in range(400)]
    names = {constraint.name for task in made for constraint in task.constraints}
    assert names == {*FRAMES, *ADDED}


def test_random_words_hardly_ever_satisfy_all_points() -> None:
    env = InstructionsEnv()
    wins = 0
    for task in range(300):
        observation, info = env.reset(options={"task": task, "split": "test"})
        wins += env.step(env.random_action(observation, info, derive_rng("test", task)))[4]["success"]
    assert wins <= 3


@pytest.mark.parametrize("level", LEVELS)
def test_no_content_is_in_two_splits(level: int) -> None:
    env = InstructionsEnv(level=level)
    seen: dict[str, set[str]] = {}
    for split in ("train", "dev", "test"):
        for task in range(150):
            prompt, _ = env.reset(options={"task": task, "split": split})
            seen.setdefault(split, set()).add(prompt)
    assert not seen["train"] & (seen["dev"] | seen["test"])
    assert not seen["dev"] & seen["test"]
    assert all(len(prompts) > 120 for prompts in seen.values())


def row(**changes: Any) -> dict[str, Any]:
    return {
        "key": 1000,
        "prompt": "Describe a lake without commas, in 3 or more words.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 3, "relation": "at least", "keyword": None}],
        "split": "train",
        **changes,
    }


def write(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_a_file_of_ifeval_is_played(tmp_path: Path) -> None:
    env = InstructionsEnv(write(tmp_path, row()))
    prompt, info = env.reset(options={"task": 0, "split": "train"})
    assert prompt == row()["prompt"]
    assert [made["name"] for made in info["constraints"]] == row()["instruction_id_list"]
    assert env.step("A wide blue lake")[1] == 1.0
    env.reset(options={"task": 0, "split": "train"})
    assert env.step("A wide, blue lake")[1] == 0.0
    env.reset(options={"task": 0, "split": "train"})
    assert env.step("")[1] == 0.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "kn"}]},
            "not supported",
        ),
        ({"kwargs": [{}]}, "2 names in instruction_id_list, but 1 kwargs"),
        ({"kwargs": "none"}, "'kwargs' is not a list"),
        ({"prompt": None}, "'prompt'"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"tasks\.jsonl:2: .*{says}"):
        InstructionsEnv(write(tmp_path, row(), row(**changes)))


@pytest.mark.parametrize("kwargs", [{"level": 5}, {"attempts": 0}, {"reward": "some"}])
def test_bad_options_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        InstructionsEnv(**kwargs)
