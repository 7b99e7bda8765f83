"""Data-v0: rows as tasks, splits that share no prompt, judges, several attempts, and bad data."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rollgym
from rollgym.core.errors import EnvError, UsageError
from rollgym.core.trust import check_recorded_env
from rollgym.envs.data import bounded_match
from rollgym.envs.data.env import DataEnv
from rollgym.envs.data.judges import JUDGES, Question, chosen_letter, last_number

ROWS = [{"question": f"How much is {i} + 1?", "solution": f"It is easy. #### {i + 1}"} for i in range(200)]
COLUMNS = {"prompt": "question", "answer": "solution"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def prompts(env: DataEnv, split: str) -> list[str]:
    size = env.tasks.size(split)
    return [env.reset(options={"task": task, "split": split})[0] for task in range(size)]


def make(tmp_path: Path, **kwargs: Any) -> DataEnv:
    path = write(tmp_path / "rows.jsonl", ROWS)
    return DataEnv(data=path, columns=COLUMNS, answer_pattern="#### (.+)", judge="number", **kwargs)


def test_rows_become_tasks_in_disjoint_seeded_splits(tmp_path: Path) -> None:
    env = make(tmp_path)
    by_split = {split: prompts(env, split) for split in env.tasks.splits}
    assert list(by_split) == ["train", "dev", "test"]
    assert sorted(p for group in by_split.values() for p in group) == sorted(r["question"] for r in ROWS)
    assert len(by_split["train"]) > 120
    again = make(tmp_path)
    assert {split: prompts(again, split) for split in again.tasks.splits} == by_split
    other = make(tmp_path, split_seed=1)
    assert prompts(other, "test") != by_split["test"]
    assert other.tasks.fingerprint("test") != env.tasks.fingerprint("test")


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.sampled_from(["a", "A", " a ", "b", "c", "d", "e", "f", "g.", "g"]), min_size=30),
    seed=st.integers(0, 5),
)
def test_equal_prompts_are_in_one_split(texts: list[str], seed: int) -> None:
    rows = [{"prompt": text, "answer": str(n)} for n, text in enumerate(texts)]
    try:
        env = DataEnv(data=rows, splits={"train": 0.5, "test": 0.5}, split_seed=seed)
    except UsageError:
        assume(False)  # all of the few prompts are in one split

    def keys(split: str) -> set[str]:
        return {text.strip().lower().rstrip(".") for text in prompts(env, split)}

    assert not keys("train") & keys("test")
    assert env.tasks.size("train") + env.tasks.size("test") == len(rows)


def test_rewards_attempts_and_feedback(tmp_path: Path) -> None:
    env = make(tmp_path, attempts=2)
    observation, info = env.reset(options={"task": 3, "split": "test"})
    number = int(observation.split()[3])
    assert "solution" not in info
    observation, reward, terminated, _, info = env.step(f"{number}")
    assert (observation, reward, terminated) == ("That is not right. Attempts left: 1.", 0.0, False)
    _, reward, terminated, _, info = env.step(f"I think {number}, no, {number + 1}.0")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    env.reset(options={"task": 3, "split": "test"})
    assert not env.step("no idea")[4]["valid"]
    assert env.step("7777")[1:3] == (0.0, True)


def test_several_prompts_are_asked_in_turn() -> None:
    row = {"prompt": ["1 + 1?", "2 + 2?", "3 + 3?"], "answer": ["2", ["4", "four"], "6"]}
    env = DataEnv(data=[row, row], splits={"train": 1.0})
    assert env.reset(seed=0)[0] == "1 + 1?"
    assert env.step("2")[0] == "Right.\n2 + 2?"
    assert env.step("Four.")[0] == "Right.\n3 + 3?"
    observation, reward, terminated, _, info = env.step("7")
    assert (observation, reward, terminated, info["success"]) == ("That is not right.", 0.0, True, False)
    env.reset(seed=0)
    total = sum(env.step(answer)[1] for answer in ("2", "4", "6"))
    assert total == pytest.approx(1.0)


def test_messages_are_read() -> None:
    user = {"role": "user", "content": "2 + 2?"}
    system = {"role": "system", "content": "Be brief."}
    rows = [{"prompt": [user], "answer": 4}, {"prompt": [system, user], "answer": 4}]
    env = DataEnv(data=rows, splits={"train": 1.0})
    assert sorted(prompts(env, "train")) == ["2 + 2?", "System: Be brief.\n\nUser: 2 + 2?"]


def test_named_splits_by_files_and_by_column(tmp_path: Path) -> None:
    train, test = write(tmp_path / "a.jsonl", ROWS[:150]), write(tmp_path / "b.jsonl", ROWS[150:])
    env = DataEnv(data={"test": test, "train": train}, columns=COLUMNS)
    assert env.tasks.splits == {"train": 150, "test": 50}
    assert prompts(env, "test") == [row["question"] for row in ROWS[150:]]
    rows = [{**row, "part": "held" if n % 4 else "train"} for n, row in enumerate(ROWS)]
    named = DataEnv(data=write(tmp_path / "c.jsonl", rows), columns={**COLUMNS, "split": "part"})
    assert named.tasks.splits == {"train": 50, "held": 150}
    assert prompts(named, "train") == [row["question"] for row in ROWS[::4]]


def test_prompts_in_two_named_splits_are_refused_or_dropped(tmp_path: Path) -> None:
    files = {"train": write(tmp_path / "a.jsonl", ROWS), "test": write(tmp_path / "b.jsonl", ROWS[10:12])}
    with pytest.raises(UsageError, match=r"2 prompts of the split 'train' .*a\.jsonl:11\).*overlap=drop"):
        DataEnv(data=files, columns=COLUMNS)
    env = DataEnv(data=files, columns=COLUMNS, overlap="drop")
    assert env.tasks.splits == {"train": 198, "test": 2}
    assert not set(prompts(env, "train")) & set(prompts(env, "test"))


def test_the_content_of_the_file_is_in_the_name_of_the_task_set(tmp_path: Path) -> None:
    first = make(tmp_path).tasks
    ROWS.append({"question": "How much is 1000 + 1?", "solution": "#### 1001"})
    try:
        second = make(tmp_path).tasks
    finally:
        ROWS.pop()
    assert first.name != second.name


@pytest.mark.parametrize(
    ("judge", "gold", "right", "wrong"),
    [
        ("exact", "Paris", ["paris", " Paris. "], ["It is Paris", "", "Pari"]),
        ("exact", ["yes", "y"], ["YES", "y"], ["no"]),
        ("number", "1,234.50", ["1234.5", "I say $1,234.50."], ["1234", "1234.5 or 7", "none"]),
        ("contains", "Blue Whale", ["the blue  whale!", "Blue whale"], ["bluewhales", "whale blue"]),
        ("regex", r"[Aa]\d+", ["A12", " a1 "], ["xA12", "A"]),
    ],
)
def test_judges(judge: str, gold: Any, right: list[str], wrong: list[str]) -> None:
    env = DataEnv(data=[{"prompt": "?", "answer": gold}], splits={"train": 1.0}, judge=judge)
    for answers, expected in ((right, 1.0), (wrong, 0.0)):
        for answer in answers:
            env.reset(seed=0)
            assert env.step(answer)[1] == expected, answer


def test_a_pattern_that_would_take_forever_does_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_match, "CPU_SECONDS", 0.2)
    env = DataEnv(data=[{"prompt": "?", "answer": "(a+)+b"}], splits={"train": 1.0}, judge="regex")
    for answer, reward in (("a" * 60, 0.0), ("aab", 1.0)):
        env.reset(seed=0)
        assert env.step(answer)[1] == reward


def test_the_matching_process_is_replaced_when_it_ended() -> None:
    assert bounded_match.matches("a|b", "b")
    helper = bounded_match._helpers[os.getpid()]
    helper.kill()
    helper.wait()
    assert bounded_match.matches("a|b", "b")


@pytest.mark.parametrize("gold", ["B", "b", 1, "1", "two"])
def test_the_choice_judge(gold: Any) -> None:
    row = {"prompt": "Which is even?", "answer": gold, "choices": ["one", "two", "three"]}
    env = DataEnv(data=[row], columns={"choices": "choices"}, splits={"train": 1.0}, judge="choice")
    observation, info = env.reset(seed=0)
    assert observation == "Which is even?\nA. one\nB. two\nC. three"
    assert info["actions"] == ["A", "B", "C"]
    rewards = {}
    for answer in ("B", "(b)", "Answer: B.", "two", "A", "A or B", "A B C", "D", "Because", "I choose B"):
        env.reset(seed=0)
        rewards[answer] = env.step(answer)[1]
    right = {"B", "(b)", "Answer: B.", "two", "I choose B"}  # I is not a choice
    assert {answer for answer, reward in rewards.items() if reward} == right


def test_answers_without_content_earn_nothing() -> None:
    for name, judge in JUDGES.items():
        gold = {"number": "4", "choice": "A"}.get(name, "word")
        question = Question("?", (gold,), ("word", "other") if name == "choice" else ())
        for empty in ("", "<answer></answer>", "\n", "...", "answer"):
            assert judge.score(question, empty) == 0.0, (name, empty)


@given(st.text(max_size=30))
def test_judges_accept_any_text(text: str) -> None:
    last_number(text)
    chosen_letter(text, ("x", "y"))
    for name, judge in JUDGES.items():
        question = Question("?", ({"number": "4", "choice": "A"}.get(name, "word"),), ("x", "y"))
        assert judge.score(question, text) in (0.0, 1.0)


JUDGE = """\
def length(row, answer):
    if answer == "raise":
        raise RuntimeError("broken")
    return 2.0 if answer == "two" else min(len(answer) / row["limit"], 1.0)
"""


def test_a_judge_function_gets_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_judges.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"prompt": "Write ten letters.", "answer": "", "limit": 10}]
    env = DataEnv(data=rows, columns={"limit": "limit"}, splits={"train": 1.0}, judge="my_judges:length")
    for answer, reward in (("abcde", 0.5), ("abcdefghijkl", 1.0)):
        env.reset(seed=0)
        result = env.step(answer)
        assert (result[1], result[4]["success"]) == (reward, reward == 1.0)
    for answer, reason in (("raise", "RuntimeError: broken"), ("two", "expected a number from 0 to 1")):
        env.reset(seed=0)
        with pytest.raises(EnvError, match=reason):
            env.step(answer)
    with pytest.raises(UsageError, match="my_judges"):
        DataEnv(data=rows, judge="my_judges:none")


def test_a_recording_does_not_import_its_judge() -> None:
    with pytest.raises(UsageError, match=r"judge='evil:run'.*--env-module evil"):
        check_recorded_env("rollgym/Data-v0", {"judge": "evil:run"})
    check_recorded_env("rollgym/Data-v0", {"judge": "evil:run"}, modules=("evil",))
    check_recorded_env("rollgym/Data-v0", {"judge": "number"})


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"data": []}, "data must be a file"),
        ({"data": {}}, "data names no file"),
        ({"data": [{"prompt": "?", "answer": {1, 2}}]}, "rows of plain JSON values"),
        ({"data": "none.jsonl"}, "Data file not found: none.jsonl"),
        ({"data": [{"prompt": "?"}]}, r"data\[0\]: there is no column 'answer'; the columns are prompt"),
        ({"data": [{"prompt": 3, "answer": "a"}]}, r"data\[0\]: the prompt is 3; expected text"),
        ({"data": [{"prompt": "?", "answer": None}]}, "the answer is None; expected text, a number"),
        ({"data": [{"prompt": "?", "answer": "x"}], "judge": "number"}, "the answer 'x' has no number"),
        ({"data": [{"prompt": "?", "answer": "("}], "judge": "regex"}, "is not a regular expression"),
        ({"data": [{"prompt": "?", "answer": "Z9"}], "judge": "choice"}, "is not a letter"),
        ({"data": [{"prompt": ["a", "b"], "answer": "x"}]}, "2 prompts need a list of as many answers"),
        ({"judge": "exactly", "data": [{"prompt": "?", "answer": "x"}]}, "Did you mean exact"),
        ({"data": [{"prompt": "?", "answer": "x"}]}, "would be empty: there are only 1 rows"),
        ({"data": [{"prompt": "?", "answer": "x"}], "splits": {"train": 0.5}}, "must add up to 1"),
        ({"data": [{"prompt": "?", "answer": "x"}], "columns": {"propmt": "q"}}, "Did you mean prompt"),
        ({"answer_pattern": "("}, "answer_pattern is not a regular expression"),
        ({"attempts": 0}, "attempts must be a whole number"),
    ],
)
def test_bad_data_is_one_sentence(kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        DataEnv(**kwargs)


def test_it_plays_through_the_command_line(tmp_path: Path, rollgym_command: Any) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    words = [
        "--env-arg",
        f"data={path}",
        "--env-arg",
        f"columns={json.dumps(COLUMNS)}",
        "--env-arg",
        "judge=number",
    ]
    words += ["--env-arg", "answer_pattern=#### (.+)", "--env-arg", "reveal=true", "--episodes", "5"]
    ran = rollgym_command("eval", "rollgym/Data-v0", "--agent", "expert", *words, "--out", "run", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["success_rate"] == 1.0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["task_set"]["name"].startswith("Data-")
    assert rollgym_command("replay", "run").code == 0
    (tmp_path / "rows.jsonl").write_text('{"question": 1')
    ran = rollgym_command("eval", "rollgym/Data-v0", *words)
    assert (ran.code, ran.out) == (2, "")
    assert f"{path}:1: not valid JSON" in ran.err


def test_gymnasium_makes_it() -> None:
    assert rollgym.make("rollgym/Data-v0").reset(seed=1)[0].startswith("How much is ")
